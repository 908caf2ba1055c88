"""`Stream`, a request for a stream of responses that instances run on threads."""

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
"""Responses that are buffered for a slow reader before the model is blocked."""
NOTHING = object()
"""Returned by `Stream.take` if there is no response yet."""


class StreamEnd:
    """Last item of a stream, with the error that ended it, if any."""

    def __init__(self, error: ServingError | None) -> None:
        self.error = error


class Stream:
    """One streaming call, as `Work`: threads put its responses, the event loop takes them.

    It is the call's `Outlet`. The instance's thread puts the responses that a generator yields. A plain function
    sends its responses with `call.respond`, from any thread; its return value is the last response, unless it is
    None. A thread that puts a response blocks while `STREAM_BUFFER` responses are buffered. Once the call is
    cancelled, no more responses are accepted, and a generator is closed. `times` measures the responses; None if
    they are not measured.
    """

    delivers = False

    def __init__(self, inputs: Inputs, call: Call, loop: asyncio.AbstractEventLoop) -> None:
        self.inputs = inputs
        self.call = call
        self.queued = time.perf_counter()
        self.result: Any = None
        self.failure: ServingError | None = None
        self._seconds = -1.0  # See `Execution.seconds`.
        self.times: ResponseTimes | None = None
        self._loop = loop
        self._answers: deque[Any] = deque()
        self._parked = Parking()
        self._reader: asyncio.Future[None] | None = None
        self._woken: asyncio.Future[None] | None = None
        self._closed = False
        call.outlet = self

    def run(self, function: Function, explain: Explain) -> None:
        """Run the model until it has ended. On the instance's thread."""
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
            if self._closed:  # Abandoned or ended early: the loop reads no end after which it would count this.
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
        # Once for each time that the reader waits: waking the loop costs more than a small model does. Two threads
        # that race here may both wake it, which is harmless.
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
        """See `Member`. On the instance's thread. Ends the stream with the error if it is not to run."""
        error = reason_to_skip(self.call)
        if error is not None:
            self._finish(error)
        return error is not None

    def start(self, batch_size: int) -> None:
        """See `Member`. On the instance's thread."""
        self.call.times.started(self.queued, batch_size)

    def end(self, joining: float = 0.0, splitting: float = 0.0) -> None:
        """See `Member`. On the instance's thread. Sends `result`, unless it is None, as the last response."""
        self.call.times.ended(joining, splitting)
        # The frames of the raised error refer to this object, so it must not refer to the error.
        result, self.result = self.result, None
        error, self.failure = self.failure, None
        if error is None and result is not None:
            self.respond(result)
        self._finish(error)

    def refuse(self, error: ServingError) -> None:
        """End the stream with an error: it will not run. On any thread."""
        self._finish(error)

    def expire(self) -> None:
        """End the stream at its deadline; the model is stopped at its next response, even if the reader is slow.

        On the event loop.
        """
        self._finish(self.call.overdue(WHILE_STREAMING if self.call.times.batch_size else WHILE_WAITING))

    def deliver(self) -> None:
        """Do nothing: responses were delivered one by one."""

    def count(self) -> None:
        """Count the execution in the statistics, once, if it has ended. On the event loop."""
        if self._seconds >= 0.0 and (statistics := self.call.statistics) is not None:
            seconds, self._seconds = self._seconds, -1.0
            statistics.executed_alone(self.call.times, self.inputs, seconds)

    async def arrival(self) -> None:
        """Wait until there is something to `take`. On the event loop."""
        while not self._answers:
            reader = self._reader = self._loop.create_future()
            if self._answers:
                return  # It arrived between the check and the creation of the future.
            await reader

    def take(self) -> Any:
        """Returns the next response, a `StreamEnd`, or `NOTHING`. On the event loop."""
        if not self._answers:
            return NOTHING
        answer = self._answers.popleft()
        if self._parked and len(self._answers) <= STREAM_BUFFER // 2:
            self._parked.call_all()
        return answer

    def abandon(self) -> None:
        """Cancel the call: the reader has ended. Unblocks the threads, so that they notice. On the event loop."""
        self.call.cancel()
        self._closed = True
        self._parked.call_all()
        self.count()


def _wake(reader: asyncio.Future[None]) -> None:
    if not reader.done():
        reader.set_result(None)
