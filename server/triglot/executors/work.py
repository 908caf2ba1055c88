"""`Work`, one request to a model.

Strategy: a request has one `Work` from its admission to its last response, whether it has one response or many,
and whether its model runs on a thread, on the event loop or in a batch. Threads only set what `run` and its like
set; everything else happens on the loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sized
from contextlib import closing, suppress
from time import perf_counter
from typing import Any, Final, TypeVar

from triglot.core.call import Call
from triglot.core.compiling import mypyc_attr
from triglot.core.current_calls import CURRENT_CALLS, RunningFor
from triglot.core.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    ServingError,
    as_serving_error,
    is_serving_error,
    own_copy,
    without_frames,
)
from triglot.core.response_buffer import NOTHING, ResponseBuffer, StreamEnd
from triglot.core.running import CallCancelled, Defer, Running, Sink, Watcher
from triglot.core.statistics import Duration, Statistics
from triglot.core.tensor import Array
from triglot.core.types import Answer, InferenceRequest
from triglot.model.model import Model, signature_of
from triglot.model.signature import Signature
from triglot.model.tensor_types import by_arguments

log = logging.getLogger(__name__)

Inputs = Mapping[str, Array]
Function = Callable[[Inputs, Call], Any]
"""A model's `infer`."""
LAST_FRAMES: Final = 3
"""Frames of an exception that its error shows with `debug`."""
Explain = Callable[[BaseException], ServingError]
"""Maps an exception that a model raised to the error that the client gets."""
Hook = Callable[[Function, Inputs, Call], Any]
"""Calls a model's `infer`, and handles its result."""


E = TypeVar("E", bound=BaseException)

BEFORE_START: Final = "before the request was started"
WHILE_WAITING: Final = "while the request waited in the queue"
WHILE_RUNNING: Final = "while the model ran"
WHILE_STREAMING: Final = "while the model was streaming"


def is_cancelled(error: BaseException) -> bool:
    """Return whether `error` is the cancellation of the current task, and not raised by its code itself."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def is_cancellation(error: BaseException) -> bool:
    """Return whether the error means that the caller cancelled, and not that the model failed."""
    return isinstance(error, GeneratorExit) or is_cancelled(error)


def seen_late(error: E, call: Call, when: str) -> E | DeadlineExceeded:
    """Return `DeadlineExceeded` for a `ServingError` raised after the call's deadline, else the error itself.

    The model, or a model that it called, may notice the deadline before the server's timer does.
    """
    if call.expired and isinstance(error, ServingError) and not isinstance(error, DeadlineExceeded):
        return call.overdue(when)
    return error


def takes_call(model: Model) -> bool:
    """Return whether the model's `infer` takes the call as its second argument, after the inputs.

    A second parameter with a default does not count, unless it is named `call`. Raise `ValueError` if `infer`
    accepts neither one argument nor two, and its inputs are no arguments of their own.
    """
    infer = model.infer
    signature = signature_of(infer)
    if model.takes_arguments:
        return "call" in signature.parameters
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.parameters.values()):
        return True
    for arguments in (1, 2):
        try:
            signature.bind(*range(arguments))
        except TypeError:
            continue
        return arguments == 2 or list(signature.parameters)[1:2] == ["call"]
    raise ValueError(f"infer: expected infer(self, inputs) or infer(self, inputs, call), got infer{signature}")


def function_of(model: Model) -> Function:
    """Return the model's `infer` as a function of inputs and call, whatever it takes.

    Raise as `takes_call`.
    """
    if model.takes_arguments:
        return by_arguments(model.infer)
    return model.infer if takes_call(model) else _without_call(model.infer)


def _without_call(infer: Callable[[Inputs], Any]) -> Callable[[Inputs, Call], Any]:
    return lambda inputs, _: infer(inputs)


def reason_to_skip(call: Call) -> ServingError | None:
    """Return the error of a call that was cancelled or expired while it was queued; None for any other call."""
    if not call.cancelled:
        return None
    if call.expired:
        return call.overdue(WHILE_WAITING)
    return Cancelled("the request was cancelled while it waited in the queue")


def explained(what: str, error: BaseException, *, debug: bool = False) -> ServingError:
    """Return the error that a client gets for an exception raised by `what`; a copy for this call alone.

    `debug`: with the exception's text and last frames.
    """
    try:
        failure = own_copy(as_serving_error(error, what))
        if debug and not is_serving_error(error):
            lines = traceback.format_exception(type(error), error, error.__traceback__, limit=-LAST_FRAMES)
            failure.message += "\n" + "".join(lines).rstrip()
    except Exception:  # Raised by the exception class's own code; the caller needs a response nevertheless.
        log.exception("%s failed, and its error cannot be converted", what)
        failure = Internal(f"{what} failed; the server's log has the details")
    # Its frames keep the request's data alive and, if they refer to the error, until the garbage collector runs.
    with suppress(Exception):  # A frozen dataclass refuses the assignment.
        error.__traceback__ = error.__context__ = error.__cause__ = None
    return failure


@mypyc_attr(allow_interpreted_subclasses=True)
class WorkOwner:
    """The version of a model that runs work. On the event loop."""

    __slots__ = ()

    @abstractmethod
    def finish(self, work: Work) -> None:
        """Release what ended work holds: its timer, its place at the gate, its lease."""

    @abstractmethod
    def discard(self, work: Work) -> bool:
        """Remove work from the queue; returns False if it is not queued."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Receiver:
    """Takes what a model returns for work, and passes it on to the work's sink. On the event loop."""

    __slots__ = ()

    @abstractmethod
    def respond(self, work: Work, answer: Any) -> bool:
        """Take one of several answers of a model; returns what `Sink.send` returns. Raise `ServingError`."""

    @abstractmethod
    def finish(self, work: Work, error: ServingError | None) -> None:
        """Take the end, with the `result` of work with one answer. Called once."""


class ResponseTimes:
    """Times of the responses of one call of a decoupled model, one after the other.

    `asked` and `computed` are called where the model runs, a thread or the event loop, all else on the event loop.
    """

    __slots__ = ("_call", "_computed", "_final", "_index", "_over", "_since", "_statistics")

    def __init__(self, call: Call) -> None:
        self._call = call
        # Those of a call that is not counted are discarded.
        self._statistics = call.statistics or Statistics()
        self._computed: deque[float] = deque()
        self._since = 0.0
        self._index = 0
        self._final = self._over = False

    def asked(self) -> None:
        """Note that the model starts to compute its next response."""
        self._since = perf_counter()

    def computed(self) -> None:
        """Note that the model has computed its next response, or has ended."""
        self._computed.append(perf_counter() - self._since)

    def convert(self, convert: Callable[[Any], Any], answer: Any) -> Any:
        """Return `convert(answer)`, and count the response. Raise as `convert`."""
        began = perf_counter()
        self._final = isinstance(answer, Answer) and answer.final
        empty = self._final and not answer
        if not empty and not self._call.responded:
            self._call.responded = began
        try:
            converted = convert(answer)
        except BaseException:
            self.count_end(failed=True)
            raise
        output = perf_counter() - began
        self._call.output_seconds += output
        infer = self._seconds()
        responses = self._statistics.response(self._index)
        if empty:
            responses.empty_response.add(infer)
        else:
            responses.infer.add(infer)
            responses.output.add(output)
            responses.success.add(infer + output)
        self._index += 1
        return converted

    def count_end(self, *, failed: bool = False) -> None:
        """Count the end of the stream: no response follows, or an error in its place."""
        self._end("fail" if failed else "empty_response")

    def left(self) -> None:
        """Count a cancelled response if the stream has not ended: the reader has stopped."""
        self._end("cancel")

    def _end(self, what: str) -> None:
        # Nothing to count for a stream that never ran, nor after a response that was marked as the last one.
        if self._since and not self._over and (not self._final or what == "fail"):
            duration: Duration = getattr(self._statistics.response(self._index), what)
            duration.add(self._seconds())
        self._over = True

    def _seconds(self) -> float:
        return self._computed.popleft() if self._computed else perf_counter() - self._since


@mypyc_attr(allow_interpreted_subclasses=True)
class Work(Running):
    """One request to a model, as its executor, its servable and the data plane see it.

    For its executor: `inputs` and `call`; `result` is the model's one answer (`NOTHING`: none) or `failure` its
    error. `queued` is the `time.perf_counter()` instant at which it was queued, or else created. `seconds`: how
    long it ran outside of a batch; negative if it did not, or once it was counted. `skip`, `start` and `end` are
    called where its batch runs: on the instance's thread or on the event loop.

    For its servable: the `owner`, and what it holds from `WorkOwner.submit` until it is `over`: a lease, unless
    `leased`, its place at the gate, its timer (`expires`: its tick, 0 without one). `streams`: its caller takes
    any number of responses; `buffer` keeps those of a thread until the sink takes them, and `times` measures the
    responses of a decoupled model. `task` runs the model on the event loop.

    For the data plane: the `request` (None if the model takes a protocol's messages), its `signature`, the
    `cache_key` of its response, None if it is not cached, its `watchers`, and the `sink`.
    """

    __slots__ = (
        "_thread_id",
        "buffer",
        "cache_key",
        "call",
        "defer",
        "expires",
        "failure",
        "holds_gate",
        "holds_lease",
        "inputs",
        "is_late",
        "iterates",
        "leased",
        "owner",
        "paused",
        "queue",
        "queued",
        "receiver",
        "request",
        "result",
        "room",
        "seconds",
        "signature",
        "sink",
        "streams",
        "times",
        "watchers",
    )
    signature: Signature

    def __init__(
        self, inputs: Inputs, call: Call, sink: Sink, receiver: Receiver, *, streams: bool = False
    ) -> None:
        self.inputs = inputs
        self.call = call
        self.sink = sink
        self.receiver = receiver
        self.streams = streams
        self.queued = perf_counter()
        self.seconds = -1.0
        self.result: Any = NOTHING
        self.failure: ServingError | None = None
        self.owner: WorkOwner | None = None
        self.defer: Defer | None = None
        """See `Schedule.put`."""
        self.leased = False
        """True if its submitter holds a lease until it is over."""
        self.holds_gate = self.holds_lease = False
        self.expires = 0
        self.task: asyncio.Task[None] | None = None
        self.is_late = False
        """True once its task was cancelled at the deadline."""
        self.over = False
        """True once it has ended: nothing further is reported."""
        self.iterates = False
        """Whether the model's answer, on the event loop, is iterated over."""
        self.paused = False
        """True while the sink takes no response."""
        self.buffer: ResponseBuffer | None = None
        self.queue: Sized = ()
        """The model's queue: a thread waits for a slow reader while it is empty."""
        self.times: ResponseTimes | None = None
        self._thread_id = 0
        """The thread that runs this call alone; 0: none."""
        self.room: asyncio.Future[None] | None = None
        self.request: InferenceRequest | None = None
        self.cache_key: tuple[int, bytes] | None = None
        self.watchers: list[Watcher] | None = None

    @property
    def answers_once(self) -> bool:
        """Whether the `result` is the model's one answer. A thread may set that of a stream after its end."""
        return self.buffer is None and not self.iterates

    # --- on the instance's thread ---

    def run(self, function: Function, explain: Explain) -> None:
        """See `Runnable`: keeps the result or the error, or sends the responses that a generator yields."""
        call = self.call
        if call.cancelled:
            self.refuse_to_run()
            return
        call.execution_started(self.queued)
        if self.buffer is not None:
            self._thread_id = threading.get_ident()
            if self.times is not None:
                self.times.asked()
        # Does the same as `RunningFor`, at a third of its cost.
        current = [call]
        token = CURRENT_CALLS.set(current)
        try:
            if self.buffer is None:
                self.result = function(self.inputs, call)
            else:
                self._respond_each(function(self.inputs, call))
        except BaseException as error:  # A model that calls exit() fails this call, not the server.
            self.failure = explain(error)
        finally:
            current.clear()
            CURRENT_CALLS.reset(token)
        if self.buffer is None:
            self.seconds = call.execution_ended()
            return
        if self.times is not None:
            self.times.computed()
        self.seconds = call.execution_ended()
        if self.failure is None and call.expired:
            self.failure = call.overdue(WHILE_STREAMING)
        self._end_buffer()

    def _respond_each(self, result: Any) -> None:
        if isinstance(result, Generator):
            with closing(result) as answers:
                for answer in answers:
                    if not self.respond(answer):
                        break
        elif result is not None:
            self.respond(result)

    def _end_buffer(self) -> None:
        # The frames of the raised error refer to this object, so it must not refer to the error.
        error, self.failure = self.failure, None
        assert self.buffer is not None
        self.buffer.end(error)

    def skip(self) -> bool:
        """Return True if it is not to run in its batch; then `failure` is set, or its stream has ended."""
        if reason_to_skip(self.call) is None:
            return False
        self.refuse_to_run()
        return True

    def refuse_to_run(self) -> None:
        """Fail, as the call was cancelled or expired while it was queued."""
        self.failure = reason_to_skip(self.call)
        if self.buffer is not None:
            self._end_buffer()

    def start(self, batch_size: int) -> None:
        """Note that it starts, in a batch of `batch_size` requests."""
        if self.buffer is not None:
            self._thread_id = threading.get_ident() if batch_size == 1 else 0
        self.call.execution_started(self.queued, batch_size)

    def end(self, joining: float = 0.0, splitting: float = 0.0) -> None:
        """Note that it has ended in its batch; see `ResponseTimes`. Sends the `result` of a stream."""
        self.call.execution_ended(joining, splitting)
        if self.buffer is not None:
            result, self.result = self.result, NOTHING
            if self.failure is None and result is not None and result is not NOTHING:
                self.respond(result)
            self._end_buffer()

    # --- on any thread ---

    def respond(self, answer: Any) -> bool:
        """See `Outlet`."""
        times, buffer = self.times, self.buffer
        assert buffer is not None
        if times is not None:
            times.computed()
        wanted = buffer.put(answer, self._waits)
        if times is not None and wanted:
            times.asked()
        return wanted

    def _waits(self) -> bool:
        """Whether the current thread may wait for a slow reader: no other work needs it."""
        return self._thread_id == threading.get_ident() and not self.queue

    def finish(self) -> None:
        """See `Outlet`."""
        assert self.buffer is not None
        self.buffer.end()

    def refuse(self, error: ServingError) -> None:
        """Set the error of work that will not run; `deliver` reports it, or its stream has ended with it."""
        self.failure = error
        if self.buffer is not None:
            self._end_buffer()

    # --- on the event loop ---

    @property
    def running_text(self) -> str:
        """What it was doing, for the error of a call that is late."""
        return WHILE_STREAMING if self.iterates else WHILE_RUNNING

    def deliver(self) -> None:
        """See `Runnable`: counts the execution in the statistics, and reports the outcome."""
        self._count()
        if self.buffer is None:
            self.settle()

    def _count(self) -> None:
        if self.seconds >= 0.0:
            seconds, self.seconds = self.seconds, -1.0
            if (statistics := self.call.statistics) is not None:
                statistics.executed_unbatched(self.call, self.inputs, seconds)

    def settle(self) -> None:
        """Report the outcome, unless it is over already."""
        if self.over:
            return
        task = self.task
        if task is not None and task.done():
            self.drop()  # It was cancelled; otherwise its coroutine has returned and its task is not done yet.
            return
        failure, self.failure = self.failure, None  # The traceback may refer to this object.
        self._end(failure and seen_late(failure, self.call, self.running_text))

    def pump(self) -> None:
        """Pass on what threads have put into the buffer, as far as the sink takes it."""
        buffer = self.buffer
        assert buffer is not None
        while not (self.paused or self.over):
            item = buffer.take()
            if item is NOTHING:
                return
            if isinstance(item, StreamEnd):
                error = item.error
                self._end(error and seen_late(error, self.call, WHILE_STREAMING))
                return
            try:
                self.paused = not self.receiver.respond(self, item)
            except ServingError as error:
                self._end(without_frames(error))

    def resume(self) -> None:
        """See `Running`."""
        if self.buffer is not None:
            if self.paused:
                self.paused = False
                self.pump()
        elif self.room is not None and not self.room.done():
            self.room.set_result(None)

    def fail(self, error: ServingError) -> None:
        """End it with an error, even if the model still runs."""
        if not self.over:
            self._end(error)

    def _end(self, error: ServingError | None) -> None:
        self.over = True
        if self.times is not None:
            self.times.count_end(failed=error is not None)
        self._release()
        self.receiver.finish(self, error)
        self.result = NOTHING  # The thread may keep this object for longer than the response lives.

    def _release(self) -> None:
        if self.buffer is not None:
            self._count()
            self.call.cancel()  # The model is stopped at its next response.
            self.buffer.abandon()
        elif self.iterates:
            self.call.cancel()
        if self.owner is not None:
            if self.buffer is not None:
                self.owner.discard(self)
            self.owner.finish(self)

    def expire(self) -> None:
        """End it at its deadline, queued or running; its code on the event loop is cancelled and awaited."""
        if self.over:
            return
        call = self.call
        if self.buffer is not None:  # After the responses that are there.
            self.buffer.end(call.overdue(WHILE_STREAMING if call.batch_size else WHILE_WAITING))
        elif self.task is not None:
            self.is_late = True
            self.task.cancel()
        else:
            assert self.owner is not None
            waits = self.owner.discard(self)
            self.fail(call.overdue(WHILE_WAITING if waits else WHILE_RUNNING))

    def drop(self) -> None:
        """End it without an outcome."""
        if not self.over:
            self.over = True
            self.call.cancel()
            if self.times is not None:
                self.times.left()
            self._release()
            self.result = NOTHING
            self.receiver.finish(self, CallCancelled("the call was cancelled"))

    def cancel(self) -> None:
        """Cancel it; it ends once its code on the event loop has ended, but does not wait for code on a thread."""
        if self.over:
            return
        if self.task is not None:
            self.task.cancel()
            return
        if self.owner is not None and self.buffer is None:
            self.owner.discard(self)
        self.drop()


class InstanceRun:
    """One of a set of runs of a hook, of which each instance runs exactly one.

    Strategy: a thread that has taken one waits until all are taken, so none takes two. `together` is the barrier
    of the set; it is aborted when the set is cancelled.
    """

    __slots__ = ("_explain", "_failure", "_future", "_hook", "_inputs", "_result", "_together", "call")

    def __init__(
        self,
        inputs: Inputs,
        future: asyncio.Future[Any],
        together: threading.Barrier,
        hook: Hook,
        explain: Explain,
    ) -> None:
        self.call = Call()
        self._inputs = inputs
        self._future = future
        self._together = together
        self._hook = hook
        self._explain = explain
        self._result: Any = None
        self._failure: ServingError | None = None

    def run(self, function: Function, _: Explain) -> None:
        """Run `hook` once every thread has taken its run. On the instance's thread."""
        try:
            self._together.wait()
        except threading.BrokenBarrierError:
            self._failure = Cancelled("cancelled before all instances had started")
            return
        if self.call.cancelled:
            self._failure = reason_to_skip(self.call)
            return
        self.call.execution_started(perf_counter())
        with RunningFor((self.call,)):
            try:
                self._result = self._hook(function, self._inputs, self.call)
            except BaseException as error:  # A model that calls exit() fails its start, not the server.
                self._failure = self._explain(error)
        self.call.execution_ended()

    def deliver(self) -> None:
        """Resolve the future."""
        if self._future.done():
            return
        if self._failure is not None:
            self._future.set_exception(self._failure)
        else:
            self._future.set_result(self._result)
