"""The server's side of the calls of one process: sends requests, and routes responses to them.

Strategy: the protocol of a call is written once, as a coroutine. Plain code is called on a thread, which writes
its frames and reads the socket itself until the call has ended, so the coroutine never suspends (`SerialCalls`).
If several threads call one instance, a further thread reads for all of them (`ThreadCalls`). `async def` code is
called on the event loop, which never blocks on the process: one thread reads frames and passes them to the loop,
another one writes (`LoopCalls`). Callbacks, requests of the model's code to the server, are always answered on the
loop.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from triglot.core.call import BatchCall, Call
from triglot.core.errors import Internal, Unavailable
from triglot.executors.process.answers import answer_of, aside, list_of
from triglot.executors.process.arena import Placed, packed
from triglot.executors.process.call_fields import call_fields, members_of
from triglot.executors.process.callbacks import KINDS, CallbackHandler, refuse, refuse_late
from triglot.executors.process.channel import Channel, Gone, Message
from triglot.executors.process.control_block import Control
from triglot.executors.process.failures import error_from, load_error
from triglot.executors.process.frames import OUTCOMES, FrameError, Kind
from triglot.executors.process.values import dumps, loads
from triglot.executors.work import Inputs

STOP_SECONDS = 0.5
"""How long to wait for a cancelled call to end in its process; a call that blocks there is orphaned then."""
Content = Callable[[], tuple[bytes, Placed]]
"""Returns the JSON text and the placed tensors of the frame that begins a call."""


class NotBegun(Exception):
    """The process ended before it began the call, which is safe to send to another one."""


class Lost(Unavailable):
    """The process ended when it may have begun the call, and before it had sent any response."""


class Owner(Protocol):
    """The process that the calls belong to. `lost` is the reason why it takes no more calls; "" while it does."""

    name: str
    lost: str

    @property
    def kind(self) -> str:
        """Word for it in messages: "process" or "actor"."""

    @property
    def channel(self) -> Channel:
        """Connection to the process."""

    @property
    def control(self) -> Control:
        """Control block, which the process polls."""

    def why_gone(self) -> str:
        """Returns the reason why it closed its connection. Blocks."""

    def kill(self, why: str) -> None:
        """Kill it at once, for the reason `why`."""


@dataclass(slots=True, eq=False)
class CallState:
    """The server's side of one call.

    `since` is the `time.monotonic()` instant since which the model computes: of the start or, of a stream, of the
    request for the next response; infinite while a stream waits for its reader. `asks`: the model has sent
    callbacks, which `callbacks` answers on the loop. `sent`: the process may have begun the call. `answered`:
    it has sent a response. `orphaned`: it still runs, but its caller no longer waits. `messages` are received and
    not yet processed; `waiter` is resolved when one arrives. `on_cancel` is called when the call, or one of its
    members, is cancelled.
    """

    number: int
    call: Call
    asks: bool = False
    callbacks: CallbackHandler | None = None
    since: float = field(default_factory=time.monotonic)
    sent: bool = False
    answered: bool = False
    ended: bool = False
    orphaned: bool = False
    messages: deque[Message | Exception] = field(default_factory=deque)
    waiter: asyncio.Future[None] | Future[None] | None = None
    on_cancel: Callable[[], object] | None = None

    def put(self, message: Message | Exception) -> None:
        """Add a received message, or the error that ends the call; wakes the waiting caller."""
        self.messages.append(message)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def mark_cancelled(self, control: Control) -> None:
        """Mark it and its members, whose numbers follow its own, in the control block if they are cancelled."""
        if self.call.cancelled:
            control.cancel(self.number)
        for other, member in enumerate(members_of(self.call) or (), self.number + 1):
            if member.cancelled:
                control.cancel(other)


class Calls(ABC):
    """The calls in flight of one process.

    `loop` returns the server's event loop. `with_call`: the model's code gets the call, so its fields are sent;
    `log_ids`: they are sent because the process's log records carry the call's ids. `confirms`: the process waits
    for RECEIVED after each outcome of plain code.
    """

    def __init__(
        self,
        owner: Owner,
        loop: Callable[[], asyncio.AbstractEventLoop],
        *,
        with_call: bool,
        log_ids: bool = False,
        confirms: bool = False,
    ) -> None:
        self._owner = owner
        self._confirms = confirms
        self._loop = loop
        self._with_call = with_call or log_ids
        self._log_ids = log_ids
        self._states: dict[int, CallState] = {}
        self.orphaned = 0
        """Number of calls that still run though their callers no longer wait for them."""
        self._last = 0
        self._over = False
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._writing = threading.Lock()
        self._closed = False

    # --- calls ---

    async def run(self, inputs: Inputs, call: Call) -> Any:
        """Returns what `infer` returns. Responses that it sends before with `call.respond` are passed to `call`.

        Raises what the model raises, `NotBegun`, and `Unavailable` if the process ends or hangs meanwhile: `Lost`
        if it has sent no response.
        """
        return answer_of(await self._result(partial(self._one, inputs, call), call))

    async def run_list(self, inputs: Sequence[Inputs], call: BatchCall) -> list[Any]:
        """Returns what `infer_batch` returns: outputs, or an exception, for each member. Raises as `run`."""
        return list_of(await self._result(partial(self._list, inputs, call), call), error_from)

    async def start(self, call: Call) -> None:
        """Run the model's `start_instance`. Raises `ModelLoadError`, and as `run`."""
        await self._result(partial(self._fields_only, call), call, Kind.START)

    async def _result(self, content: Content, call: Call, kind: Kind = Kind.CALL) -> Message:
        state = self._begin(kind, content, call)
        del content
        try:
            while (message := await self._next(state)).kind in (Kind.ANSWER, Kind.FINISHED):
                member = _member(call, message)
                if message.kind is Kind.FINISHED:
                    member.finish()
                else:
                    answer = answer_of(message)
                    del message
                    self._go_on(state, wanted=member.respond(answer))
                    del answer
            return _returned(message)
        finally:
            if not state.ended or state.asks:
                await self._end(state)

    async def stream(self, inputs: Inputs, call: Call) -> AsyncGenerator[Any, None]:
        """Yield the responses that `infer` yields. Raises as `run`; closing the generator closes the model's."""
        state = self._begin(Kind.CALL, partial(self._one, inputs, call), call)
        del inputs
        try:
            while (message := await self._next(state)).kind is Kind.ANSWER:
                answer = answer_of(message)
                del message
                state.since = math.inf  # The model waits for the reader.
                yield answer
                del answer
                self._go_on(state)
            _returned(message)
        finally:
            await self._end(state)

    def _go_on(self, state: CallState, *, wanted: bool = True) -> None:
        """Acknowledge a response; the model continues, or is stopped if no more responses are `wanted`."""
        state.since = time.monotonic()
        self._write(partial(self._send, Kind.GO_ON if wanted else Kind.STOP, state.number))

    def _begin(self, kind: Kind, content: Content, call: Call) -> CallState:
        state = self._enter(call)
        self._write(partial(self._hand_over, state, kind, content))
        return state

    def _enter(self, call: Call) -> CallState:
        """Returns a new entry in the table of calls. Raises `NotBegun` if the process has ended."""
        if self._over:
            raise NotBegun(self._owner.lost)
        number = self._last + 1
        self._last = number + len(members_of(call) or ())
        state = self._states[number] = CallState(number, call)
        return state

    async def _end(self, state: CallState) -> None:
        """End the caller's side. If the model still runs, stop it, and wait until it ends or is orphaned."""
        try:
            if not state.ended:
                state.since = time.monotonic()
                self._write(partial(self._send, Kind.STOP, state.number))
                await self._wait_for_end(state)
        finally:
            if not state.ended:
                state.orphaned = True
                self.orphaned += 1
            if state.asks:
                self._on_loop(_close_callbacks, state)

    async def _drain(self, state: CallState) -> None:
        while not state.ended:
            with suppress(Exception):
                await self._next(state)

    # --- for subclasses ---

    @abstractmethod
    async def _next(self, state: CallState) -> Message:
        """Returns the call's next message; waits for it. Raises the error that ended the call."""

    @abstractmethod
    async def _wait_for_end(self, state: CallState) -> None:
        """Wait until a stopped call has ended; its outcome is ignored."""

    @abstractmethod
    def _write(self, work: Callable[[], None]) -> None:
        """Run `work`, which writes a frame, where frames are written."""

    @abstractmethod
    def _hand(self, work: Callable[..., object], *arguments: object) -> None:
        """Run `work` where calls are made, on behalf of the reading or writing thread."""

    # --- receive ---

    def _arrived(self, message: Message) -> None:
        state = self._states.get(message.call)
        if state is None:
            if message.kind in KINDS:
                self._checked(partial(refuse_late, self._post), message)
            else:
                self._owner.kill("sent a response to an unknown call; process killed")
        elif message.kind in KINDS:
            state.asks = True
            self._serve(state, message)
        else:
            if message.kind in OUTCOMES:
                self._ended(state)
            state.answered = True
            if message.kind is Kind.FAILED:
                self._checked(self._end_a_lost_one, message)
            state.put(message)

    def _end_a_lost_one(self, failure: Message) -> None:
        fields = loads(failure.text)
        if "lost" in fields:
            self._owner.kill(fields["lost"])

    def _serve(self, state: CallState, message: Message) -> None:
        if not self._on_loop(self._call_back, state, message):
            self._checked(partial(refuse_late, self._post), message)

    def _call_back(self, state: CallState, message: Message) -> None:
        """Answer a callback. On the event loop."""
        if state.callbacks is None:
            state.callbacks = CallbackHandler(self._post, state.call)
        self._checked(state.callbacks.serve, message)

    def _checked(self, serve: Callable[[Message], object], message: Message) -> None:
        try:
            serve(message)
        except (LookupError, TypeError, ValueError) as error:
            self._owner.kill(f"sent an invalid frame ({error}); process killed")

    def _ended(self, state: CallState) -> None:
        state.ended = True
        self._states.pop(state.number, None)
        self.orphaned -= state.orphaned

    def _failed(self, state: CallState, error: Exception) -> None:
        """End a call that could not be sent."""
        self._ended(state)
        state.put(error)

    def _gone(self) -> None:
        """End all calls, with `NotBegun` those that were not sent: the process has closed its connection."""
        owner = self._owner
        self._over = True
        for state in list(self._states.values()):
            self._ended(state)
            text = f"{owner.name}: the {owner.kind} that ran the request {owner.lost}"
            lost = Unavailable(text) if state.answered else Lost(text)
            state.put(lost if state.sent else NotBegun(owner.lost))

    # --- send ---

    def _hand_over(self, state: CallState, kind: Kind, content: Content) -> None:
        try:
            text, placed = content()
            state.sent = True  # Before sending: if the process ends meanwhile, it may have received the call.
            self._owner.channel.send(kind, call=state.number, text=text, placed=placed)
        except Gone:
            state.sent = False
            raise
        except Exception as error:
            self._hand(self._failed, state, error)

    def _fields_only(self, call: Call) -> tuple[bytes, Placed]:
        return dumps(self._fields(call)), Placed(())

    def _fields(self, call: Call) -> dict[str, Any]:
        return call_fields(call, log_ids=self._log_ids)

    def _one(self, inputs: Inputs, call: Call) -> tuple[bytes, Placed]:
        text = dumps(self._fields(call)) if self._with_call else b""
        return text, self._owner.channel.place(inputs)

    def _list(self, inputs: Sequence[Inputs], call: Call) -> tuple[bytes, Placed]:
        rows = [packed(one) for one in inputs]
        text = dumps({**self._fields(call), "counts": [len(one) for one in rows]})
        return text, self._owner.channel.place_all(itertools.chain.from_iterable(rows))

    def _post(self, kind: Kind, number: int, text: bytes = b"", answer: Any = None) -> None:
        """Queue a frame that begins no call for the writer. On any thread."""
        self._order(partial(self._send, kind, number, text, answer))

    def _send(self, kind: Kind, number: int, text: bytes = b"", answer: Any = None) -> None:
        channel = self._owner.channel
        try:
            text = text or _beside(answer)
            placed = channel.place(answer) if isinstance(answer, Mapping) else None
            channel.send(kind, call=number, text=text, placed=placed)
        except Gone:
            raise
        except FrameError as error:
            refuse(self._post, number, Internal(f"the response cannot be sent to the process: {error}"))
        except Exception as error:
            refuse(self._post, number, error)

    def _order(self, work: Callable[[], None]) -> None:
        with self._writing:
            if self._writer is None and not self._closed:
                name = f"{self._owner.name} writes"
                self._writer = threading.Thread(target=self._write_all, name=name, daemon=True)
                self._writer.start()
        self._orders.put(work)

    def _write_all(self) -> None:
        while (order := self._orders.get()) is not None:
            with suppress(Gone):  # The reader detects and reports the loss.
                order()
            del order

    def _on_loop(self, work: Callable[..., object], *arguments: object) -> bool:
        try:
            self._loop().call_soon_threadsafe(work, *arguments)
        except RuntimeError:  # The loop is closed: the server has stopped.
            return False
        return True

    def close(self) -> None:
        """End the threads of a process that has ended. Blocks."""
        with self._writing:
            self._closed = True
            writer, self._writer = self._writer, None  # It refers to this object.
        if writer is not None:
            self._orders.put(None)
            writer.join()

    # --- state, on any thread ---

    @property
    def count(self) -> int:
        """Number of calls in flight."""
        return len(self._states)

    @property
    def run_seconds(self) -> float:
        """Seconds that the oldest call has run, of a stream since its last response was taken; 0 without calls."""
        now = time.monotonic()
        return max([0.0, *(now - state.since for state in list(self._states.values()))])

    def mark_cancelled(self) -> None:
        """Mark the cancelled calls in the control block, for the model to see."""
        for state in list(self._states.values()):
            state.mark_cancelled(self._owner.control)


class SerialCalls(Calls):
    """Calls of plain code, one at a time; the calling thread runs the coroutines with `run_blocking`."""

    async def _next(self, state: CallState) -> Message:
        while not state.messages:
            self._read()
        return _taken(state.messages.popleft())

    def _read(self) -> None:
        owner = self._owner
        try:
            message = owner.channel.receive()
        except Gone:
            owner.lost = owner.lost or owner.why_gone()
            self._gone()
        else:
            self._arrived(message)

    async def _wait_for_end(self, state: CallState) -> None:
        await self._drain(state)

    def _write(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Gone:
            pass  # The next read detects it.

    def _hand(self, work: Callable[..., object], *arguments: object) -> None:
        work(*arguments)


class ThreadCalls(SerialCalls):
    """Calls of plain code by several threads; one more thread reads for all of them.

    While one call runs, others wait in the process, which begins them in the order in which they were sent. If it
    waits for confirmations, it begins none before it knows that the last outcome has arrived here: if it is lost,
    only the first of those without an outcome has begun.
    """

    def __init__(self, owner: Owner, loop: Callable[[], asyncio.AbstractEventLoop], **options: bool) -> None:
        super().__init__(owner, loop, **options)
        self._table = threading.Lock()
        self._sending = threading.Lock()
        self._sent: dict[int, CallState] = {}
        """Calls that were sent and have no outcome, by number, in the order in which they were sent."""
        self._reader = threading.Thread(target=self._read, name=f"{owner.name} reads", daemon=True)
        self._reader.start()

    def _enter(self, call: Call) -> CallState:
        with self._table:
            return super()._enter(call)

    async def _next(self, state: CallState) -> Message:
        while not state.messages:
            waiter = state.waiter = Future[None]()
            if not state.messages:
                waiter.result()
        return _taken(state.messages.popleft())

    def _read(self) -> None:
        owner = self._owner
        with suppress(Gone):
            while True:
                self._arrived(owner.channel.receive())
        # First make sending impossible: calls that are not sent by then never are, and may run in another process.
        owner.kill(owner.why_gone())
        with self._sending:
            for state in list(self._sent.values())[1:] if self._confirms else ():
                state.sent = False
        with self._table:
            self._gone()

    def _hand_over(self, state: CallState, kind: Kind, content: Content) -> None:
        with self._sending:
            self._sent[state.number] = state
            super()._hand_over(state, kind, content)

    def _arrived(self, message: Message) -> None:
        if self._confirms and message.kind in OUTCOMES:
            with suppress(Gone):  # The next `receive` detects it.
                self._owner.channel.send(Kind.RECEIVED, call=message.call)
        super()._arrived(message)

    def _ended(self, state: CallState) -> None:
        self._sent.pop(state.number, None)
        super()._ended(state)

    def _write(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Gone:
            self._owner.kill("closed its connection")  # So that the reader detects it, too.

    def close(self) -> None:
        """See `Calls`."""
        self._reader.join()
        super().close()


class LoopCalls(Calls):
    """Calls of `async def` code, any number at a time, on the event loop. May be created on any thread."""

    def __init__(self, owner: Owner, loop: Callable[[], asyncio.AbstractEventLoop], **options: bool) -> None:
        super().__init__(owner, loop, **options)
        self._own: CallbackHandler | None = None
        self._reader: threading.Thread | None = None

    def _begin(self, kind: Kind, content: Content, call: Call) -> CallState:
        if self._reader is None and not self._over:
            self._own = CallbackHandler(self._post, call.apart())
            self._reader = threading.Thread(target=self._read, name=f"{self._owner.name} reads", daemon=True)
            self._reader.start()
        state = super()._begin(kind, content, call)
        state.on_cancel = partial(self._cancelled, state)
        call.follow(state.on_cancel)
        return state

    def _cancelled(self, state: CallState) -> None:
        """Notify the process that the call, or one of its members, was cancelled."""
        state.mark_cancelled(self._owner.control)
        if state.call.cancelled:
            self._post(Kind.STOP, state.number)

    async def _end(self, state: CallState) -> None:
        self._unfollow(state)
        await super()._end(state)

    def _ended(self, state: CallState) -> None:
        self._unfollow(state)
        super()._ended(state)

    def _unfollow(self, state: CallState) -> None:
        if state.on_cancel is not None:
            state.call.unfollow(state.on_cancel)
            state.on_cancel = None

    async def _next(self, state: CallState) -> Message:
        while not state.messages:
            state.waiter = asyncio.get_running_loop().create_future()
            await state.waiter
        return _taken(state.messages.popleft())

    async def _wait_for_end(self, state: CallState) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await self._drain(state)

    def _arrived(self, message: Message) -> None:
        if message.call or self._own is None:
            super()._arrived(message)
        else:
            self._checked(self._own.serve, message)

    def _gone(self) -> None:
        super()._gone()
        if self._own is not None:
            self._own.close()

    def _serve(self, state: CallState, message: Message) -> None:
        self._call_back(state, message)

    # --- threads ---

    def _hand(self, work: Callable[..., object], *arguments: object) -> None:
        self._on_loop(work, *arguments)

    def _read(self) -> None:
        owner = self._owner
        with suppress(Gone):
            while True:
                message = owner.channel.receive()
                self._hand(self._arrived, message)
                del message
        owner.lost = owner.lost or owner.why_gone()
        # Queued behind the frame being sent: a call that the process received must not fail with `NotBegun`.
        self._orders.put(partial(self._hand, self._gone))

    def _write(self, work: Callable[[], None]) -> None:
        self._order(work)

    def close(self) -> None:
        """See `Calls`."""
        if self._reader is not None:
            self._reader.join()  # First: it ends with an order to the writer.
            self._reader = None
        super().close()


def _close_callbacks(state: CallState) -> None:
    if state.callbacks is not None:
        state.callbacks.close()


def _taken(message: Message | Exception) -> Message:
    if isinstance(message, Exception):
        raise message
    return message


def _returned(message: Message) -> Message:
    """Returns the message with what the model's code returned. Raises what that raised."""
    if message.kind is Kind.DONE:
        return message
    fields = loads(message.text)
    raise load_error(fields) if message.kind is Kind.UNLOADABLE else error_from(fields)


def _member(call: Call, message: Message) -> Call:
    """Returns the member of the call that a response is for; without members, the call."""
    fields = message.fields if message.text else None
    return call if fields is None or "member" not in fields else call.members[fields["member"]]


def _beside(answer: object) -> bytes:
    """Returns the JSON of a reply besides its tensors; the reply to a `ModelTask`, a bool, has no tensors."""
    fields = {"said": answer} if isinstance(answer, bool) else aside(answer)
    return dumps(fields) if fields else b""
