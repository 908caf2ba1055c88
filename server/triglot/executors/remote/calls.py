"""The server's side of the calls of one process: sends requests, and routes responses to them.

Strategy: the protocol of a call is written once, as a coroutine. `async def` code is called on the event loop, for
which a thread of the process reads; plain code is called on a thread, which reads itself until its call has ended,
so that there the coroutine never suspends (`Channel.take`). The questions of the model's code, for metadata or
other models, are always answered on the loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from triglot.core.call import BatchCall, Call, ModelCall, ModelTask
from triglot.core.errors import Cancelled, Internal, ServingError, Unavailable, error_fields, is_serving_error
from triglot.executors.remote.channel import Channel, Mailbox, Message
from triglot.executors.remote.failures import description, error_from, load_error
from triglot.executors.remote.fields import (
    answer_of,
    call_fields,
    list_of,
    members_of,
    non_tensor_fields,
)
from triglot.executors.remote.frames import FIRST_QUESTION, OUTCOMES, FrameError, Kind
from triglot.executors.remote.place import Program
from triglot.executors.remote.shared_memory import Placed, packed
from triglot.executors.remote.values import dumps
from triglot.executors.work import Inputs

log = logging.getLogger(__name__)

STOP_SECONDS = 0.5
"""How long to wait for a cancelled call to end in its process; a call that blocks there is orphaned then."""
Question = ModelCall | ModelTask | None
"""What the model's code asks for; None: the request's metadata."""
Content = Callable[[], tuple[bytes, Placed | None]]
"""Return the JSON text and the placed tensors of the frame that begins a call."""


class NotBegun(Exception):
    """The process ended before it began the call, which is safe to send to another one."""


class Lost(Unavailable):
    """The process ended when it may have begun the call, and before it had sent any response."""


class CallState(Mailbox):
    """The server's side of one call.

    `since` is the `time.monotonic()` instant since which the model computes: of the start or, of a stream, of the
    request for the next response; infinite while a stream waits for its reader. `tasks` answer the model's
    questions. `answered`: it has sent a response. `orphaned`: it still runs, but its caller no longer waits.
    `cancelled`: the numbers of the call and its members of whose cancellation the process knows.
    """

    __slots__ = ("answered", "call", "cancelled", "has_ended", "number", "orphaned", "since", "tasks")

    def __init__(self, number: int, call: Call) -> None:
        super().__init__()
        self.number = number
        self.call = call
        self.since = time.monotonic()
        self.answered = self.has_ended = self.orphaned = False
        self.cancelled: set[int] = set()
        self.tasks: set[asyncio.Task[None]] = set()


class Calls:
    """The calls in flight of one process. Each runs on a thread without an event loop, or on the server's loop.

    `kill` ends the process for a reason, and `why_lost` returns why it has closed its connection, and blocks.
    `loop` returns the server's event loop. `take_metrics` gets the changes of the model's metrics. Once the model
    is loaded: `on_loop`: it is `async def` code; `with_call`: its code gets the call, so its fields are sent;
    `log_ids`: they are sent because the process's log records carry the call's ids.
    """

    def __init__(
        self,
        program: Program,
        channel: Channel,
        kill: Callable[[str], object],
        why_lost: Callable[[], str],
        take_metrics: Callable[[Any], object],
    ) -> None:
        self._program = program
        self._channel = channel
        self._kill = kill
        self._why_lost = why_lost
        self._take_metrics = take_metrics
        self.loop: Callable[[], asyncio.AbstractEventLoop | None] = lambda: None
        self.on_loop = self.with_call = self.log_ids = False
        self._states: dict[int, CallState] = {}
        self._questions: dict[int, tuple[Mailbox, asyncio.Task[None]]] = {}
        self._own: CallState | None = None
        """For what `async def` code asks outside of any call."""
        self.orphaned = 0
        """Number of calls that still run though their callers no longer wait for them."""
        self._last = 0
        self._lost = ""
        """Why the process has closed its connection; "" before."""
        channel.deliver, channel.on_close = self._deliver, self._on_close

    # --- calls ---

    async def load(self, setup: Mapping[str, Any]) -> Any:
        """Load the model; returns what it declares. Raise `ModelLoadError`, `NotBegun` and `Unavailable`."""
        return (await self._result(lambda: (dumps(setup), None), Call(), Kind.LOAD)).fields

    async def run(self, inputs: Inputs, call: Call) -> Any:
        """Return what `infer` returns. Responses that it sends before with `call.respond` are passed to `call`.

        Raise what the model raises, `NotBegun`, and `Unavailable` if the process ends or hangs meanwhile: `Lost`
        if it has sent no response.
        """
        return answer_of(await self._result(partial(self._send_call, inputs, call), call))

    async def run_list(self, inputs: Sequence[Inputs], call: BatchCall) -> list[Any]:
        """Return what `infer_batch` returns: outputs, or an exception, for each member. Raise as `run`."""
        return list_of(await self._result(partial(self._list, inputs, call), call), error_from)

    async def check_ready(self) -> bool:
        """Return whether the model's readiness check passes. Raise `NotBegun` and `Unavailable`."""
        return bool(answer_of(await self._result(lambda: (b"", None), Call(), Kind.CHECK)))

    async def start(self, call: Call) -> None:
        """Run the model's `start_instance`. Raise `ModelLoadError`, and as `run`."""
        await self._result(lambda: (dumps(self._fields(call)), None), call, Kind.START)

    async def _result(self, content: Content, call: Call, kind: Kind = Kind.CALL) -> Message:
        state = self._begin(kind, content, call)
        del content
        try:
            while (message := await self._channel.take(state)).kind in (Kind.ANSWER, Kind.FINISHED):
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
            if not state.has_ended:
                await self._end(state)

    async def stream(self, inputs: Inputs, call: Call) -> AsyncGenerator[Any, None]:
        """Yield the responses that `infer` yields. Raise as `run`; closing the generator closes the model's."""
        state = self._begin(Kind.CALL, partial(self._send_call, inputs, call), call)
        del inputs
        try:
            while (message := await self._channel.take(state)).kind is Kind.ANSWER:
                answer = answer_of(message)
                del message
                state.since = math.inf  # The model waits for the reader.
                yield answer
                del answer
                self._go_on(state)
            _returned(message)
        finally:
            if not state.has_ended:
                await self._end(state)

    def _begin(self, kind: Kind, content: Content, call: Call) -> CallState:
        """Send a call. Raise `NotBegun` if the process has ended, and what `content` raises."""
        text, placed = content()
        with self._channel.lock:
            if self._own is None and self.on_loop:
                self._own = CallState(0, call.detached())
            state = CallState(self._last + 1, call)
            if kind is Kind.CHECK:
                state.since = math.inf  # It may take as long as it likes.
            self._last = state.number + len(members_of(call) or ())
            if not (lost := self._lost):
                self._states[state.number] = state
        if lost:
            self._channel.drop(placed)
            raise NotBegun(lost)
        try:
            self._channel.send(kind, call=state.number, text=text, placed=placed, box=state)
        except FrameError:
            with self._channel.lock:
                self._on_end(state)
            raise
        return state

    def _go_on(self, state: CallState, *, wanted: bool = True) -> None:
        """Acknowledge a response; the model continues, or is stopped if no more responses are `wanted`."""
        state.since = time.monotonic()
        self._channel.send(Kind.GO_ON if wanted else Kind.STOP, call=state.number)

    async def _end(self, state: CallState) -> None:
        """Stop a cancelled call, and wait until it ends or, on the loop, is orphaned."""
        state.since = time.monotonic()
        self._channel.send(Kind.STOP, call=state.number)
        try:
            if self.on_loop:
                with suppress(TimeoutError):
                    async with asyncio.timeout(STOP_SECONDS):
                        await self._drain(state)
            else:
                await self._drain(state)
        finally:
            with self._channel.lock:
                if not state.has_ended:
                    state.orphaned = True
                    self.orphaned += 1

    async def _drain(self, state: CallState) -> None:
        while not state.has_ended or state.messages:
            with suppress(Exception):
                await self._channel.take(state)

    def _fields(self, call: Call) -> dict[str, Any]:
        return call_fields(call, log_ids=self.log_ids)

    def _send_call(self, inputs: Inputs, call: Call) -> tuple[bytes, Placed]:
        text = dumps(self._fields(call)) if self.with_call or self.log_ids else b""
        return text, self._channel.place(inputs)

    def _list(self, inputs: Sequence[Inputs], call: Call) -> tuple[bytes, Placed]:
        rows = [packed(tensor) for tensor in inputs]
        text = dumps({**self._fields(call), "counts": [len(row) for row in rows]})
        return text, self._channel.place_all(itertools.chain.from_iterable(rows))

    # --- received, under the channel's lock ---

    def _deliver(self, message: Message) -> None:
        try:
            self._handle(message)
        except (LookupError, TypeError, ValueError) as error:
            self._kill(f"sent an invalid frame ({error}); process killed")

    def _handle(self, message: Message) -> None:
        kind, number = message.kind, message.call
        state = self._states.get(number)
        if kind is Kind.QUESTION:
            self._ask(self._own if number == 0 else state, message)
        elif state is not None:
            if kind in OUTCOMES:
                self._on_end(state)
                if kind is Kind.FAILED and "lost" in message.fields:
                    self._kill(message.fields["lost"])
            state.answered = True
            state.put(message)
        elif kind is Kind.METRICS:
            try:
                self._take_metrics(message.fields)
            except (LookupError, TypeError, ValueError) as error:
                log.error("%s: cannot count what its model has reported: %s", self._program.name, error)
        elif number >= FIRST_QUESTION:
            self._on_loop(self._go_on_or_stop, kind, number)
        elif kind is not Kind.BEAT:  # Which is heard by having arrived.
            self._kill("sent a response to an unknown call; process killed")

    def _on_end(self, state: CallState) -> None:
        state.has_ended = True
        self._states.pop(state.number, None)
        self.orphaned -= state.orphaned
        if state.tasks:
            self._on_loop(_cancel_all, state.tasks)

    def _on_close(self) -> None:
        """End all calls, with `NotBegun` those that were not sent: the process has closed its connection."""
        why, program = self._why_lost(), self._program
        with self._channel.lock:
            self._lost = why
            for state in [*self._states.values(), *([self._own] if self._own else [])]:
                self._on_end(state)
                text = f"{program.name}: the {program.kind} that ran the request {why}"
                lost = Unavailable(text) if state.answered else Lost(text)
                state.put(lost if state.sent else NotBegun(why))

    # --- the model's questions ---

    def _ask(self, state: CallState | None, message: Message) -> None:
        """Have a question answered on the loop, if its call still runs."""
        fields = message.fields
        question, asked, member = fields["question"], fields["asked"], fields["member"]
        if asked is not None:
            task = "action" in asked
            asked = ModelTask(**asked) if task else ModelCall(**asked, inputs=message.tensors or {})
        if state is None or not self._on_loop(self._answer_soon, state, question, asked, member):
            self._refuse(question, Unavailable("the call has ended: it can no longer call other models"))

    def _answer_soon(self, state: CallState, question: int, asked: Question, member: int | None) -> None:
        """Start to answer a question. On the event loop."""
        box = Mailbox()
        task = asyncio.get_running_loop().create_task(self._answer(state.call, question, asked, member, box))
        self._questions[question] = box, task
        state.tasks.add(task)
        task.add_done_callback(partial(self._answered, state, question))
        if state.has_ended:
            task.cancel()

    def _go_on_or_stop(self, kind: Kind, question: int) -> None:
        """Continue with the stream of a question, or cancel the question. On the event loop."""
        box, task = self._questions.get(question, (None, None))
        if kind is Kind.STOP:
            if task is not None:
                task.cancel()
        elif box is None:
            self._refuse(question, Cancelled("the call was cancelled"))
        else:
            box.put(None)

    async def _answer(self, call: Call, question: int, asked: Question, member: int | None, box: Mailbox) -> None:
        try:
            if member is not None:
                call = call.members[member]
            if asked is None:
                self._reply_with(Kind.DONE, question, list(call.metadata.items()))
                return
            stream = isinstance(asked, ModelCall) and asked.stream
            answer = call.reach(call, asked)
            del asked
            if stream:
                async with aclosing(answer) as answers:
                    async for answer in answers:
                        self._reply_with(Kind.ANSWER, question, answer)
                        del answer
                        await self._channel.take(box)
                answer = None
            else:
                answer = await answer
            self._reply_with(Kind.DONE, question, answer)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # The process needs a reply in any case.
            self._refuse(question, error)

    def _answered(self, state: CallState, question: int, task: asyncio.Task[None]) -> None:
        self._questions.pop(question, None)
        state.tasks.discard(task)
        if task.cancelled():
            # Perhaps before its first step. A thread of the model's may wait for the reply even after the call.
            self._refuse(question, Cancelled("the call was cancelled"))

    def _reply_with(self, kind: Kind, question: int, answer: Any) -> None:
        """Send an answer: tensors with other fields, another result, or None."""
        tensors = isinstance(answer, Mapping)
        fields = non_tensor_fields(answer) if tensors or answer is None else {"result": answer}
        placed = self._channel.place(answer) if tensors else None
        try:
            self._channel.send(kind, call=question, text=dumps(fields) if fields else b"", placed=placed)
        except FrameError as error:
            raise Internal(f"the response cannot be sent to the process: {error}") from None

    def _refuse(self, question: int, error: BaseException) -> None:
        self._channel.send(Kind.FAILED, call=question, text=dumps(error_fields(_readable(error))))

    def _on_loop(self, work: Callable[..., object], *arguments: object) -> bool:
        """Have the loop run `work` soon; returns False without a loop that runs."""
        if (loop := self.loop()) is not None:
            with suppress(RuntimeError):  # The loop is closed: the server has stopped.
                loop.call_soon_threadsafe(work, *arguments)
                return True
        return False

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

    def report_cancelled(self) -> None:
        """Report the calls, and members of calls, that were cancelled to the process."""
        for state in list(self._states.values()):
            calls = [state.call, *(members_of(state.call) or ())]
            cancelled = {number for number, call in enumerate(calls, state.number) if call.cancelled}
            for number in cancelled - state.cancelled:
                stops = self.on_loop and number == state.number
                self._channel.send(Kind.STOP if stops else Kind.CANCEL, call=number)
            state.cancelled |= cancelled


def _cancel_all(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()


def _returned(message: Message) -> Message:
    """Return the message with what the model's code returned. Raise what that raised."""
    if message.kind is Kind.FAILED:
        fields = message.fields
        raise load_error(fields) if "missing" in fields else error_from(fields)
    return message


def _member(call: Call, message: Message) -> Call:
    """Return the member of the call that a response is for; without members, the call."""
    fields = message.fields if message.text else None
    return call if fields is None or "member" not in fields else call.members[fields["member"]]


def _readable(error: BaseException) -> ServingError:
    """Return an error of another model as the asking model sees it."""
    return error if is_serving_error(error) else Internal(f"{type(error).__name__}: {description(error)}")
