"""What waits in a servable's queue: a stream of answers."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Generator
from contextlib import closing, suppress
from typing import Any

from triglot.core.call import Call
from triglot.core.current_calls import RunningFor
from triglot.core.errors import ServingError
from triglot.executors.deadline import WHILE_STREAMING, WHILE_WAITING
from triglot.executors.parking import Parking
from triglot.executors.timing import ResponseTimes
from triglot.executors.work import Explain, Function, Inputs, reason_to_skip

STREAM_BUFFER = 32
"""Answers of a stream that may wait for a slow reader before the model is held up."""
NOTHING = object()
"""Where an answer may come later."""


class StreamEnd:
    """Closes a stream; with the error that ended it, if one did."""

    def __init__(self, error: ServingError | None) -> None:
        self.error = error


class Stream:
    """One call whose answers come one by one: threads put them, the loop takes them. The call's `Outlet`.

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
        self.failure: ServingError | None = None
        self._seconds = -1.0  # As of an `Execution`.
        self.times: ResponseTimes | None = None
        self._loop = loop
        self._answers: deque[Any] = deque()
        self._parked = Parking()
        self._reader: asyncio.Future[None] | None = None
        self._woken: asyncio.Future[None] | None = None
        self._closed = False
        call.outlet = self

    def run(self, function: Function, explain: Explain) -> None:
        """On the instance's thread: run the model to its end."""
        error = reason_to_skip(self.call)
        if error is None:
            self.call.times.started(self.queued)
            if self.times is not None:
                self.times.asked()
            with RunningFor((self.call,)):
                try:
                    self._take(function(self.inputs, self.call))
                except BaseException as failure:
                    error = explain(failure)
            if self.times is not None:
                self.times.computed()
            self._seconds = self.call.times.ended()
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
                    if not self.respond(answer):
                        break
        elif result is not None:
            self.respond(result)

    def respond(self, answer: Any) -> bool:
        """See `Outlet`."""
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

    def finish(self) -> None:
        """See `Outlet`."""
        self._finish()

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
        self.call.times.started(self.queued, batch_size)

    def end(self, joining: float = 0.0, splitting: float = 0.0) -> None:
        """On the thread of a batch: it has run; `result`, if there is one, is its last answer."""
        self.call.times.ended(joining, splitting)
        # The frames that raise the error have this: it must not have the error.
        result, self.result = self.result, None
        error, self.failure = self.failure, None
        if error is None and result is not None:
            self.respond(result)
        self._finish(error)

    def refuse(self, error: ServingError) -> None:
        """On the loop: it is not going to run."""
        self._finish(error)

    def expire(self) -> None:
        """On the loop: the deadline passed; the model ends with its next answer, however slow the reader is."""
        self._finish(self.call.overdue(WHILE_STREAMING if self.call.times.batch_size else WHILE_WAITING))

    def deliver(self) -> None:
        """Nothing: each answer was handed over when it came."""

    def count(self) -> None:
        """On the loop: the execution, once it has ended."""
        if self._seconds >= 0.0 and (statistics := self.call.statistics) is not None:
            seconds, self._seconds = self._seconds, -1.0
            statistics.executed_alone(self.call.times, self.inputs, seconds)

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
