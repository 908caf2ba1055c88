"""In the process: its end of the channel to the server, and the calls that it runs, as the model sees them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from triglot.core.call import Call, ModelCall, ModelTask, Reach, no_models
from triglot.core.errors import Unavailable, error_of
from triglot.core.operation import Permission
from triglot.core.request_scheduling import Scheduling
from triglot.core.types import NO_TENSOR_PARAMETERS
from triglot.executors.remote.channel import Channel, Mailbox, Message, iterate, run_blocking
from triglot.executors.remote.fields import answer_of, fields_of, non_tensor_fields, rows_of, text_of
from triglot.executors.remote.frames import FIRST_QUESTION, Kind
from triglot.executors.remote.logs import Switches
from triglot.executors.remote.shared_memory import Placed
from triglot.executors.remote.values import dumps

log = logging.getLogger(__name__)

_NEW = (Kind.LOAD, Kind.CALL, Kind.START, Kind.END)


def end_at_once() -> None:
    """End the process without cleanup, whatever the model still does: there is no server to respond to."""
    os._exit(1)


class Session:
    """Hands each frame to the call or the question of its number. One per process.

    `serial`: the main thread does not read while a call runs, so the other threads read what they wait for.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.name = ""
        self.own: Reach = no_models
        """Runs the model's calls of other models on behalf of no request."""
        self.check_ready: Callable[[], bool] | None = None
        """The model's readiness check."""
        self.log_switches: Switches = {}
        """The server's log settings; see `ProcessLog`."""
        self.cancelled: set[int] = set()
        """The numbers of cancelled calls, and of cancelled members of calls."""
        self._boxes: dict[int, Mailbox] = {}
        self._questions = itertools.count(FIRST_QUESTION)
        self._new: deque[CallState] = deque()
        self._pid = os.getpid()
        channel.deliver, channel.on_close = self._deliver, end_at_once

    @property
    def serial(self) -> bool:
        """See `Session`."""
        return self.channel.unattended

    @serial.setter
    def serial(self, serial: bool) -> None:
        self.channel.unattended = serial

    def next(self) -> CallState:
        """Return what a frame of the kinds `_NEW` begins, waiting for it. On the main thread."""
        self.channel.wait(self._new.__len__)
        return self._new.popleft()

    def _deliver(self, message: Message) -> None:
        kind, number = message.kind, message.call
        if kind in _NEW:
            state = self._boxes[number] = CallState(self, message)
            self._new.append(state)
        elif kind is Kind.CANCEL:
            self.cancelled.add(number)
        elif kind is Kind.LOG:
            self.log_switches = message.fields
        elif kind is Kind.CHECK:
            threading.Thread(target=self._check, args=(number,), name="ready", daemon=True).start()
        elif (box := self._boxes.get(number)) is not None:
            box.put(message)

    def _check(self, number: int) -> None:
        ready = False
        try:
            ready = self.check_ready is None or bool(self.check_ready())
        except BaseException:  # Includes SystemExit: a model that calls exit() is not ready.
            log.exception("%s: the readiness check failed", self.name)
        finally:
            self.send(Kind.DONE, number, dumps({"result": ready}))

    def send(self, kind: Kind, number: int = 0, text: bytes = b"", placed: Placed | None = None) -> None:
        """Send a frame. On any thread. Raise `FrameError` for one that is too long."""
        if os.getpid() != self._pid:
            end_at_once()  # A fork of the model's: only the original process may use the channel.
        self.channel.send(kind, call=number, text=text, placed=placed)

    def ask(self, number: int, asked: ModelCall | ModelTask | None, member: int | None) -> tuple[int, Mailbox]:
        """Send a question on behalf of the call `number`, or of its member with this index.

        Return the question's number, and its replies. `asked` None: the request's metadata.
        """
        placed = self.channel.place(asked.inputs) if isinstance(asked, ModelCall) else None
        question = next(self._questions)
        box = self._boxes[question] = Mailbox()
        try:
            fields = None if asked is None else fields_of(asked, "inputs")
            text = dumps({"asked": fields, "member": member, "question": question})
            self.send(Kind.QUESTION, number, text, placed)
        except BaseException:
            self.forget(question)
            raise
        return question, box

    def forget(self, number: int) -> None:
        """Drop further frames of a question, or of a call of which only the outcome is still to be sent."""
        self._boxes.pop(number, None)
        if not self._boxes:
            self.cancelled.clear()


class CallState(Mailbox):
    """One call in the process, begun by `message`; any of the model's threads may use it.

    Strategy: the model computes the next response of a stream while the server passes the last one on. Only before
    the next one is sent does it wait for the server's reply to the last one.
    """

    __slots__ = ("_lock", "_over", "_owed", "_session", "kind", "message", "number", "on_stop", "since", "stopped")

    def __init__(self, session: Session, message: Message) -> None:
        super().__init__()
        self._session = session
        self.message: Message | None = message
        self.kind, self.number = message.kind, message.call
        self.since = time.monotonic()
        self.on_stop: Callable[[], object] | None = None
        """Called, on any thread, when the server stops the call."""
        self._lock = threading.RLock()
        self._owed = False
        self.stopped = False
        """Whether the server no longer needs its responses."""
        self._over = False

    @property
    def own(self) -> Reach:
        """See `Session`."""
        return self._session.own

    def put(self, message: Any) -> None:
        """See `Mailbox`."""
        if message.kind is Kind.STOP and not self.stopped:
            self.stopped = True
            if self.on_stop is not None:
                self.on_stop()
        super().put(message)

    def end(self) -> None:
        """Note that it has ended: from now on it cannot call other models, and its responses are dropped."""
        with self._lock:
            self._over = True
        self._session.forget(self.number)

    def is_cancelled(self, number: int) -> bool:
        """Return whether the server has cancelled this call, or that with this number, which may be a member."""
        return self.stopped or number in self._session.cancelled

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
        if self._owed:
            self._session.channel.wait(self.messages.__len__)
            self.messages.popleft()
            self._owed = False

    async def send(self, answer: object) -> None:
        """Send one response of a stream, once the server has taken the last one. On the loop."""
        if self._owed:
            await self._session.channel.take(self)
        self._send(answer, {})

    def _send(self, answer: object, fields: dict[str, Any]) -> None:
        session = self._session
        rows, text = rows_of(answer, session.name), text_of({**non_tensor_fields(answer), **fields}, session.name)
        placed = session.channel.place_all(rows)
        del answer, rows
        session.send(Kind.ANSWER, self.number, text, placed)
        self._owed = True

    # --- questions to the server ---

    def metadata(self, member: int | None) -> Iterable[tuple[str, str | bytes]]:
        """Return the metadata of the request; empty once the call has ended."""
        try:
            question, box = self._ask(None, member)
        except Unavailable:
            return []
        self._session.channel.wait(box.messages.__len__)
        self._session.forget(question)
        message = box.messages.popleft()
        return [(name, value) for name, value in message.fields["result"]] if message.kind is Kind.DONE else []

    def model(self, asked: ModelCall | ModelTask, member: int | None) -> Any:
        """Run a `ModelCall` or a `ModelTask` in the server; see `Reach`.

        On a thread without an event loop it blocks, and returns the response, or a generator of a stream's. On a
        loop it returns a task, or an async generator.
        """
        streams = isinstance(asked, ModelCall) and asked.stream
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return (
                iterate(self._stream(asked, member))
                if streams
                else run_blocking(self._respond_once(asked, member))
            )
        if streams:
            return self._stream(asked, member)
        task = loop.create_task(self._respond_once(asked, member))
        task.add_done_callback(_retrieve)
        return task

    async def _respond_once(self, asked: ModelCall | ModelTask, member: int | None) -> Any:
        question, box = self._ask(asked, member)
        try:
            return await self._answer(box)
        except asyncio.CancelledError:
            self._follow_up(Kind.STOP, question)
            raise
        finally:
            self._session.forget(question)

    async def _stream(self, asked: ModelCall | ModelTask, member: int | None) -> AsyncGenerator[Any, None]:
        """Yield the responses one by one; closing the generator stops the call."""
        question, box = self._ask(asked, member)
        try:
            while (answer := await self._answer(box)) is not None:
                yield answer
                del answer
                if not self._follow_up(Kind.GO_ON, question):
                    raise _call_over()
        finally:
            self._follow_up(Kind.STOP, question)
            self._session.forget(question)

    def _ask(self, asked: ModelCall | ModelTask | None, member: int | None) -> tuple[int, Mailbox]:
        with self._lock:  # The server may read its questions only while the call runs.
            if self._over:
                raise _call_over()
            return self._session.ask(self.number, asked, member)

    async def _answer(self, box: Mailbox) -> Any:
        """Return the response once it has arrived; blocks on a thread without a loop. Raise `ServingError`."""
        message = await self._session.channel.take(box)
        if message.kind is Kind.FAILED:
            raise error_of(message.fields)
        return answer_of(message)

    def _follow_up(self, kind: Kind, question: int) -> bool:
        """Ask for the next response (GO_ON), or for no more (STOP); returns False if the call has ended."""
        with self._lock:
            if not self._over:
                self._session.send(kind, question)
            return not self._over


def _call_over() -> Unavailable:
    return Unavailable("the call has ended: it can no longer call other models")


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Read the exception of a task that may never be awaited, lest asyncio logs it."""
    if not task.cancelled():
        task.exception()


class RemoteCall(Call):
    """A call in the model's process. `fields` are those of `call_fields`, for the `member` with this index if any.

    Metadata and calls of other models are requested from the server on demand.
    """

    __slots__ = ("_fields", "_member", "_members", "_number", "_state")

    def __init__(self, state: CallState, fields: Mapping[str, Any], member: int | None = None) -> None:
        remaining = fields.get("remaining")
        super().__init__(None if remaining is None else state.since + remaining, partial(state.metadata, member))
        self._state = state
        self._fields = fields
        self._member = member
        self._number = state.number if member is None else state.number + 1 + member
        self.request_id = fields.get("id", "")
        self.signature_name = fields.get("signature", "")
        self.parameters = fields.get("parameters", {})
        self.input_parameters = fields.get("input_parameters", NO_TENSOR_PARAMETERS)
        self.output_parameters = fields.get("output_parameters", NO_TENSOR_PARAMETERS)
        self.model_name, self.model_version = fields.get("model", ""), fields.get("version", 0)
        self.batch_size = fields.get("batch", 1)
        self.size = fields.get("size", 0)
        self.requested_outputs = fields.get("outputs", ())
        if context := fields.get("context"):
            self.context = context[0], context[1]
        if scheduling := fields.get("scheduling"):
            self.scheduling = Scheduling(**scheduling)
        if client := fields.get("client"):
            self.permission = Permission(client)
        self.outlet = _Outlet(state, member)
        self.reach = partial(_reach, state, member)  # Does not refer to this object.
        self._members = tuple(
            RemoteCall(state, member, index) for index, member in enumerate(fields.get("members", ()))
        )

    @property
    def log_ids(self) -> tuple[str, str]:
        """See `Call.log_ids`."""
        fields = self._fields
        return (fields.get("log_id", ""), self.traceparent) if "context" in fields else super().log_ids

    @property
    def cancelled(self) -> bool:
        """Whether the result is no longer needed; see `Call.cancelled`."""
        return self._state.is_cancelled(self._number) or super().cancelled

    @property
    def members(self) -> Sequence[Call]:
        """The calls that are executed together."""
        return self._members or (self,)

    def detached(self) -> Call:
        """See `Call.detached`."""
        call = Call()
        call.reach = self._state.own
        call.model_name, call.model_version = self.model_name, self.model_version
        return call

    def child(self) -> Call:
        """See `Call.child`."""
        child = RemoteCall(self._state, self._fields, self._member)
        child.deadline = self.deadline
        return child


class _Outlet:
    """Sends the responses of the call, or of one of its members, to the server."""

    def __init__(self, state: CallState, member: int | None) -> None:
        self._state = state
        self._member = member

    def respond(self, answer: Any) -> bool:
        return self._state.respond(answer, at_once=True, member=self._member)

    def finish(self) -> None:
        self._state.finish(self._member)


def _reach(state: CallState, member: int | None, _: Call, asked: ModelCall | ModelTask) -> Any:
    return state.model(asked, member)
