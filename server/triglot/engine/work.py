"""What waits in a servable's queue: one execution, or one stream of answers."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress
from functools import partial
from typing import Any, Protocol

from triglot.core.call import Call
from triglot.core.errors import Cancelled, Internal, ServingError, as_serving_error, own_copy
from triglot.core.tensor import Array
from triglot.engine.deadline import WHILE_STREAMING, WHILE_WAITING
from triglot.engine.parking import Parking
from triglot.engine.timing import ResponseTimes

log = logging.getLogger(__name__)

STREAM_BUFFER = 32
"""Answers of a stream that may wait for a slow reader before the model is held up."""

Inputs = Mapping[str, Array]
Function = Callable[[Inputs, Call], Any]
"""A model's `infer`."""
Explain = Callable[[BaseException], ServingError]
"""What the client is told of an exception of the model's."""
Around = Callable[[Function, Inputs, Call], Any]
"""Calls a model's `infer` and sees to what it answers."""


class Work(Protocol):
    """What an instance runs in one go."""

    @property
    def delivers(self) -> bool:
        """Whether `deliver` has something to do."""

    def run(self, function: Function, explain: Explain) -> None:
        """On the instance's thread. Raises nothing."""

    def deliver(self) -> None:
        """On the loop, after `run`."""


def reason_to_skip(call: Call) -> ServingError | None:
    """Why nobody waits for this call any more, if so."""
    if not call.cancelled:
        return None
    if call.expired:
        return call.overdue(WHILE_WAITING)
    return Cancelled("the caller left while the request waited in the queue")


def explained(what: str, error: BaseException) -> ServingError:
    """What the client of one call is told of an exception of `what`: an error that nobody else has."""
    try:
        told = own_copy(as_serving_error(error, what))
    except Exception:  # Of the code that an exception's class has of its own; the caller waits for an answer.
        log.exception("%s failed, and its error cannot be told", what)
        told = Internal(f"{what} failed; the server's log has the details")
    # Its frames hold the request's data and, where they hold it, too, live until the garbage collector comes by.
    with suppress(Exception):  # A frozen dataclass keeps them.
        error.__traceback__ = error.__context__ = error.__cause__ = None
    return told


class Execution:
    """One call of `infer`. `seconds`: how long it has run by itself; below 0: it has not."""

    __slots__ = ("call", "error", "future", "inputs", "queued", "result", "seconds")
    delivers = True

    def __init__(self, inputs: Inputs, call: Call, future: asyncio.Future[Any]) -> None:
        self.inputs = inputs
        self.call = call
        self.future = future
        self.queued = time.perf_counter()
        self.seconds = -1.0
        self.result: Any = None
        self.error: ServingError | None = None

    def run(self, function: Function, explain: Explain) -> None:
        """On the instance's thread: keep the result or the error."""
        call = self.call
        if call.cancelled:
            self.error = reason_to_skip(call)
            return
        call.started(self.queued)
        try:
            self.result = function(self.inputs, call)
        except BaseException as error:  # A model that calls exit() fails this call, not the server.
            self.error = explain(error)
        self.seconds = call.ended()

    def skip(self) -> bool:
        """On the thread of a batch: whether it is not to run; then it has its error."""
        self.error = reason_to_skip(self.call)
        return self.error is not None

    def start(self, batch_size: int) -> None:
        """On the thread of a batch: it runs, with so many requests in all."""
        self.call.started(self.queued, batch_size)

    def end(self, joining: float = 0.0, splitting: float = 0.0) -> None:
        """On the thread of a batch: it has run; see `Call.ended`."""
        self.call.ended(joining, splitting)

    def deliver(self) -> None:
        """On the loop."""
        if self.seconds >= 0.0 and (statistics := self.call.statistics) is not None:
            statistics.executed_alone(self.call, self.inputs, self.seconds)
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)
            self.result = None  # The thread may hold this for longer than the answer lives.


class InstanceExecution(Execution):
    """One of as many executions as there are instances; each instance runs exactly one of them.

    Strategy: whoever has taken one waits until all are taken, so nobody takes two. `together` counts them, and is
    aborted when they are given up.
    """

    __slots__ = ("_around", "_explain", "_together")

    def __init__(
        self,
        inputs: Inputs,
        future: asyncio.Future[Any],
        together: threading.Barrier,
        around: Around,
        explain: Explain,
    ) -> None:
        super().__init__(inputs, Call(), future)
        self._together = together
        self._around = around
        self._explain = explain

    def run(self, function: Function, explain: Explain) -> None:
        """On the instance's thread."""
        try:
            self._together.wait()
        except threading.BrokenBarrierError:
            self.error = Cancelled("given up before every instance was there")
            return
        super().run(partial(self._around, function), self._explain)


NOTHING = object()
"""Where an answer may come later."""


class StreamEnd:
    """Closes a stream; with the error that ended it, if one did."""

    def __init__(self, error: ServingError | None) -> None:
        self.error = error


class Stream:
    """One call whose answers come one by one: threads put them, the loop takes them.

    A generator's answers are put by the instance's thread. A plain function puts its own, by `call.respond`, from
    any thread; what it returns is the last one, unless it is None. Whoever puts is held up while `STREAM_BUFFER`
    answers wait; once the call is cancelled nothing is taken any more, and a generator is closed. `times`: what is
    told of its answers.
    """

    delivers = False

    def __init__(self, inputs: Inputs, call: Call, loop: asyncio.AbstractEventLoop) -> None:
        self.inputs = inputs
        self.call = call
        self.queued = time.perf_counter()
        self.result: Any = None
        self.error: ServingError | None = None
        self._seconds = -1.0  # As of an `Execution`.
        self.times: ResponseTimes | None = None
        self._loop = loop
        self._answers: deque[Any] = deque()
        self._parked = Parking()
        self._reader: asyncio.Future[None] | None = None
        self._woken: asyncio.Future[None] | None = None
        self._closed = False
        call.respond = self._put
        call.finish = self._finish

    def run(self, function: Function, explain: Explain) -> None:
        """On the instance's thread: run the model to its end."""
        error = reason_to_skip(self.call)
        if error is None:
            self.call.started(self.queued)
            if self.times is not None:
                self.times.asked()
            try:
                self._take(function(self.inputs, self.call))
            except BaseException as failure:
                error = explain(failure)
            if self.times is not None:
                self.times.computed()
            self._seconds = self.call.ended()
            if self._closed:  # The loop does not see its end.
                with suppress(RuntimeError):  # As in `_append`.
                    self._loop.call_soon_threadsafe(self.count)
        if error is None and self.call.expired:
            error = self.call.overdue(WHILE_STREAMING)
        self._finish(error)

    def _take(self, result: Any) -> None:
        if isinstance(result, Generator):
            with closing(result) as answers:
                for answer in answers:
                    if not self._put(answer):
                        break
        elif result is not None:
            self._put(result)

    def _put(self, answer: Any) -> bool:
        times = self.times
        if times is not None:
            times.computed()
        while len(self._answers) >= STREAM_BUFFER and not self._closed:
            self._parked.wait(unless=lambda: self._closed or len(self._answers) <= STREAM_BUFFER // 2)
        if self._closed or self.call.cancelled:
            return False
        self._append(answer)
        if times is not None:
            times.asked()
        return True

    def _append(self, answer: Any) -> None:
        self._answers.append(answer)
        # Once for each time that it waits: to wake the loop costs more than a small model does. Threads may mix up
        # who is the one to do it, and then two do.
        reader = self._reader
        if reader is not None and reader is not self._woken:
            self._woken = reader
            try:
                self._loop.call_soon_threadsafe(_wake, reader)
            except RuntimeError:
                pass  # The loop is closed: the server has stopped without waiting for this call.

    def _finish(self, error: ServingError | None = None) -> None:
        if not self._closed:
            self._closed = True
            self._append(StreamEnd(error))
            self._parked.call_all()

    def skip(self) -> bool:
        """On the thread of a batch: whether it is not to run; then it has its error."""
        error = reason_to_skip(self.call)
        if error is not None:
            self._finish(error)
        return error is not None

    def start(self, batch_size: int) -> None:
        """On the thread of a batch: it runs, with so many requests in all."""
        self.call.started(self.queued, batch_size)

    def end(self, joining: float = 0.0, splitting: float = 0.0) -> None:
        """On the thread of a batch: it has run; `result`, if there is one, is its last answer."""
        self.call.ended(joining, splitting)
        # The frames that raise the error have this: it must not have the error.
        result, self.result = self.result, None
        error, self.error = self.error, None
        if error is None and result is not None:
            self._put(result)
        self._finish(error)

    def refuse(self, error: ServingError) -> None:
        """On the loop: it is not going to run."""
        self._finish(error)

    def expire(self) -> None:
        """On the loop: the deadline passed; the model ends with its next answer, however slow the reader is."""
        self._finish(self.call.overdue(WHILE_STREAMING if self.call.batch_size else WHILE_WAITING))

    def deliver(self) -> None:
        """Nothing: each answer was handed over when it came."""

    def count(self) -> None:
        """On the loop: the execution, once it has ended."""
        if self._seconds >= 0.0 and (statistics := self.call.statistics) is not None:
            seconds, self._seconds = self._seconds, -1.0
            statistics.executed_alone(self.call, self.inputs, seconds)

    async def arrival(self) -> None:
        """On the loop: wait until there is something to `take`."""
        while not self._answers:
            reader = self._reader = self._loop.create_future()
            if self._answers:
                return  # It came between the look and the waiting.
            await reader

    def take(self) -> Any:
        """On the loop: the next answer, a `StreamEnd`, or `NOTHING`."""
        if not self._answers:
            return NOTHING
        answer = self._answers.popleft()
        if self._parked and len(self._answers) <= STREAM_BUFFER // 2:
            self._parked.call_all()
        return answer

    def abandon(self) -> None:
        """On the loop: the reader is gone; let the threads go on to notice it."""
        self.call.cancel()
        self._closed = True
        self._parked.call_all()
        self.count()


def _wake(reader: asyncio.Future[None]) -> None:
    if not reader.done():
        reader.set_result(None)
