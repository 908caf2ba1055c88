"""In the process: its end of the channel to the server, and the state of each call that it runs."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from functools import partial
from typing import Any

from triglot.core.call import ModelCall, ModelTask, Reach, no_models
from triglot.core.errors import Unavailable
from triglot.executors.process.answers import answer_of, aside, rows_of, text_of
from triglot.executors.process.arena import Placed
from triglot.executors.process.blocking import iterate, run_blocking
from triglot.executors.process.call_fields import asked_fields, inputs_of, streams
from triglot.executors.process.channel import Channel, Gone, Message
from triglot.executors.process.control_block import Control
from triglot.executors.process.failures import error_of
from triglot.executors.process.frames import OUTCOMES, Kind
from triglot.executors.process.values import dumps, loads

_FIRST_QUESTION = 2**63
"""First number of the process's questions, which are numbered apart from the server's calls."""
_NEW = (Kind.LOAD, Kind.CALL, Kind.START, Kind.END)


class Reply:
    """An expected frame. `wake` is called when it arrives, under the session's lock."""

    __slots__ = ("message", "wake")

    def __init__(self) -> None:
        self.message: Message | None = None
        self.wake: Callable[[], object] | None = None

    def done(self) -> bool:
        """Returns whether the frame has arrived."""
        return self.message is not None


class Session:
    """Reads frames and delivers each to the `Reply` or the call of its number. One per process.

    Strategy: there is no reader thread. Of the threads that wait for a frame one at a time reads, for all of them.
    So the main thread can run a call itself, and a reply that the call waits for is read on the thread that waits.
    `serial`: the main thread does not read while a call runs. `confirmed`: the server confirms the outcomes of
    calls (RECEIVED).
    """

    def __init__(self, channel: Channel, control: Control) -> None:
        self.channel = channel
        self.control = control
        self.name = ""
        self.own: Reach = no_models
        """Runs the model's calls of other models on behalf of no request."""
        self.serial = False
        self.confirmed = False
        self._unconfirmed = 0
        self._calls: dict[int, CallState] = {}
        self._replies: dict[int, Reply] = {}
        self._questions = itertools.count(_FIRST_QUESTION)
        self._new: deque[Message] = deque()
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)
        self._waiting = 0
        self._reading = False
        self._pid = os.getpid()

    # --- receiving ---

    def next(self) -> Message:
        """Returns the next frame of the kinds `_NEW`, waiting for it. On the main thread."""
        self.wait(self._new.__len__)
        return self._new.popleft()

    def wait(self, done: Callable[[], object]) -> None:
        """Read frames, or wait for the thread that reads, until `done` returns true. On any thread.

        `done` is called under the lock.
        """
        with self._lock:
            while not done():
                if self._reading:
                    self._waiting += 1
                    self._turn.wait()
                    self._waiting -= 1
                    continue
                self._reading = True
                self._lock.release()
                try:
                    message = self._receive()
                finally:
                    self._lock.acquire()
                    self._reading = False
                self._dispatch(message)
                del message
                if self._waiting:
                    self._turn.notify_all()

    def _receive(self) -> Message:
        try:
            return self.channel.receive()
        except Gone:
            os._exit(1)  # Whatever the model still does: there is no server to respond to.

    def _dispatch(self, message: Message) -> None:
        if message.kind in _NEW:
            self._new.append(message)
            return
        if message.kind is Kind.RECEIVED:
            self._unconfirmed -= 1
            return
        if message.kind is Kind.STOP and (call := self._calls.get(message.call)) is not None:
            call.stop()
        if (reply := self._replies.pop(message.call, None)) is not None:
            reply.message = message
            if reply.wake is not None:
                reply.wake()

    def wait_confirmed(self) -> None:
        """Block until the outcomes of all earlier calls have arrived at the server, if it confirms them.

        So if this process is lost, the server knows that of the calls without an outcome only the first had begun.
        """
        if self.confirmed:
            self.wait(lambda: self._unconfirmed <= 0)

    def arrived(self, reply: Reply) -> Message:
        """Returns the frame, blocking until it has arrived. On any thread."""
        self.wait(reply.done)
        assert reply.message is not None
        return reply.message

    async def arrival(self, reply: Reply) -> Message:
        """As `arrived`, but on an event loop it awaits the frame instead of blocking."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return self.arrived(reply)
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if reply.message is None:
                reply.wake = partial(loop.call_soon_threadsafe, _wake, future)
            else:
                future.set_result(None)
        if self.serial:  # The main thread, which would read otherwise, may be the one that runs this loop.
            loop.run_in_executor(None, self.wait, reply.done)
        await future
        assert reply.message is not None
        return reply.message

    # --- sending ---

    def send(self, kind: Kind, number: int = 0, text: bytes = b"", placed: Placed | None = None) -> None:
        """Send a frame; end the process if the server is gone. On any thread.

        Raises `FrameError` for one that is too long.
        """
        if os.getpid() != self._pid:
            os._exit(1)  # A fork of the model's: only the original process may use the channel.
        try:
            self.channel.send(kind, call=number, text=text, placed=placed)
        except Gone:
            os._exit(1)
        if kind in OUTCOMES:
            with self._lock:
                self._unconfirmed += 1

    def ask(
        self, number: int, kind: Kind, fields: Mapping[str, Any], tensors: Mapping[str, Any] | None
    ) -> tuple[int, Reply]:
        """Send a question on behalf of the call `number`; returns the question's number and expected reply."""
        placed = None if tensors is None else self.channel.place(tensors)
        question = next(self._questions)
        reply = self.expect(question)
        try:
            self.send(kind, number, dumps({**fields, "question": question}), placed)
        except BaseException:
            del self._replies[question]
            raise
        return question, reply

    def expect(self, number: int) -> Reply:
        """Returns the `Reply` for the next frame with this number, that of a call or of a question."""
        reply = self._replies[number] = Reply()
        return reply

    # --- calls ---

    def begin(self, number: int, on_stop: Callable[[], object] | None = None) -> CallState:
        """Returns the state of a new call; `on_stop` is called, on any thread, when the server stops it."""
        call = self._calls[number] = CallState(self, number, on_stop)
        return call

    def end(self, call: CallState) -> None:
        """Forget a call, of which only the outcome is still to be sent."""
        call.end()
        self._calls.pop(call.number, None)
        self._replies.pop(call.number, None)


class CallState:
    """One call in the process; any of the model's threads may use it.

    Strategy: the model computes the next response of a stream while the server passes the last one on. Only before
    the next one is sent does it wait for the server's reply to the last one.
    """

    def __init__(self, session: Session, number: int, on_stop: Callable[[], object] | None = None) -> None:
        self._session = session
        self.number = number
        self._on_stop = on_stop
        self._lock = threading.RLock()
        self._owed: Reply | None = None
        self.stopped = False
        self._over = False

    @property
    def own(self) -> Reach:
        """See `Session`."""
        return self._session.own

    def stop(self) -> None:
        """Note that the server no longer needs its responses."""
        if not self.stopped:
            self.stopped = True
            if self._on_stop is not None:
                self._on_stop()

    def end(self) -> None:
        """Note that it has ended: from now on it cannot call other models, and its responses are dropped."""
        with self._lock:
            self._over = True

    @property
    def clock_offset(self) -> float:
        """Seconds by which `time.monotonic` is ahead of the server's."""
        return self._session.control.clock_offset

    def is_cancelled(self, number: int) -> bool:
        """Returns whether the server has cancelled this call, or that with this number, which may be a member."""
        return self.stopped or self._session.control.is_cancelled(number)

    # --- responses ---

    def respond(self, answer: object, *, at_once: bool = False, member: int | None = None) -> bool:
        """Send one response of a stream; returns False once the stream is known to be closed.

        `at_once`: wait for the server's reply to this response, so that the result is current. `member`: index of
        the member that it is for; None: the call itself.
        """
        if not self._session.serial:
            return False  # The server does not read responses that `async def` code pushes.
        with self._lock:
            self._settle()
            if self._over or self.is_cancelled(self.number):
                return False
            self._send(answer, {} if member is None else {"member": member})
            del answer
            if at_once:
                self._settle()
            return not self.stopped

    def finish(self, member: int | None = None) -> None:
        """Send the end of the stream, of the call or of a member; nothing for `async def` code, which yields."""
        with self._lock:
            self._settle()
            if self._session.serial and not self._over:
                text = b"" if member is None else dumps({"member": member})
                self._session.send(Kind.FINISHED, self.number, text)

    def _settle(self) -> None:
        if (owed := self._owed) is not None:
            self._session.arrived(owed)
            self._owed = None

    async def send(self, answer: object) -> None:
        """Send one response of a stream, once the server has taken the last one. On the loop."""
        if self._owed is not None:
            await self._session.arrival(self._owed)
        self._send(answer, {})

    def _send(self, answer: object, fields: dict[str, Any]) -> None:
        session = self._session
        rows, text = rows_of(answer, session.name), text_of({**aside(answer), **fields}, session.name)
        placed = session.channel.place_all(rows)
        del answer, rows
        self._owed = session.expect(self.number)
        session.send(Kind.ANSWER, self.number, text, placed)

    # --- questions to the server ---

    def metadata(self, member: int | None) -> Iterable[tuple[str, str | bytes]]:
        """Returns the metadata of the request; empty once the call has ended."""
        try:
            _, reply = self._ask(Kind.METADATA, {"member": member})
        except Unavailable:
            return []
        message = self._session.arrived(reply)
        return [(name, value) for name, value in loads(message.text)] if message.kind is Kind.REPLY else []

    def model(self, asked: ModelCall | ModelTask, member: int | None) -> Any:
        """Run a `ModelCall` or a `ModelTask` in the server; see `Reach`.

        On a thread without an event loop it blocks, and returns the response, or a generator of a stream's. On a
        loop it returns a task, or an async generator.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return (
                iterate(self._stream(asked, member)) if streams(asked) else run_blocking(self._one(asked, member))
            )
        if streams(asked):
            return self._stream(asked, member)
        task = loop.create_task(self._one(asked, member))
        task.add_done_callback(_retrieve)
        return task

    async def _one(self, asked: ModelCall | ModelTask, member: int | None) -> Any:
        question, reply = self._ask(Kind.MODEL, asked_fields(asked, member), inputs_of(asked))
        try:
            return await self._answer(reply)
        except asyncio.CancelledError:
            self._say(Kind.STOP, question)
            raise

    async def _stream(self, asked: ModelCall | ModelTask, member: int | None) -> AsyncGenerator[Any, None]:
        """Yields the responses one by one; closing the generator stops the call."""
        question, reply = self._ask(Kind.MODEL, {**asked_fields(asked, member), "stream": True}, inputs_of(asked))
        try:
            while (answer := await self._answer(reply)) is not None:
                yield answer
                del answer
                reply = self._session.expect(question)
                if not self._say(Kind.GO_ON, question):
                    raise _ended()
        finally:
            self._say(Kind.STOP, question)

    def _ask(
        self, kind: Kind, fields: Mapping[str, Any], tensors: Mapping[str, Any] | None = None
    ) -> tuple[int, Reply]:
        with self._lock:  # The server may read its questions only while the call runs.
            if self._over:
                raise _ended()
            return self._session.ask(self.number, kind, fields, tensors)

    async def _answer(self, reply: Reply) -> Any:
        """Returns the response once it has arrived; blocks on a thread without a loop. Raises `ServingError`."""
        message = await self._session.arrival(reply)
        if message.kind is Kind.REFUSAL:
            raise error_of(message.fields)
        return answer_of(message)

    def _say(self, kind: Kind, question: int) -> bool:
        """Ask for the next response (GO_ON), or for no more (STOP); returns False if the call has ended."""
        with self._lock:
            if not self._over:
                self._session.send(kind, self.number, dumps({"question": question}))
            return not self._over


def _ended() -> Unavailable:
    return Unavailable("the call has ended: it can no longer call other models")


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Read the exception of a task that may never be awaited, lest asyncio logs it."""
    if not task.cancelled():
        task.exception()
