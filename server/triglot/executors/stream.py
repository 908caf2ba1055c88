"""`Stream`, a request for a stream of responses that instances run on threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Generator, Sized
from contextlib import closing, suppress
from typing import Any

from triglot.core.call import Call
from triglot.core.current_calls import RunningFor
from triglot.core.errors import ServingError
from triglot.core.response_buffer import ResponseBuffer
from triglot.executors.deadline import WHILE_STREAMING, WHILE_WAITING
from triglot.executors.timing import ResponseTimes
from triglot.executors.work import Explain, Function, Inputs, reason_to_skip


class Stream:
    """One streaming call, as `Work`: threads put its responses, the event loop takes them.

    It is the call's `Outlet`. The instance's thread puts the responses that a generator yields. A plain function
    sends its responses with `call.respond`, from any thread; its return value is the last response, unless it is
    None. The thread that runs this call alone waits for a slow reader while `queue`, the model's, is empty;
    otherwise up to `limit` bytes are kept (see `ResponseBuffer`). Once the call is cancelled, no more responses
    are accepted, and a generator is closed. `times` measures the responses; None if they are not measured.
    """

    delivers = False

    def __init__(
        self, inputs: Inputs, call: Call, loop: asyncio.AbstractEventLoop, queue: Sized, limit: int
    ) -> None:
        self.inputs = inputs
        self.call = call
        self.queued = time.perf_counter()
        self.result: Any = None
        self.failure: ServingError | None = None
        self._seconds = -1.0  # See `Execution.seconds`.
        self.times: ResponseTimes | None = None
        self._loop = loop
        self._queue = queue
        self._thread = 0
        """The thread that runs this call alone; 0: none."""
        self._buffer = ResponseBuffer(call, limit, loop)
        self.take, self.arrival = self._buffer.take, self._buffer.arrival
        call.outlet = self

    def run(self, function: Function, explain: Explain) -> None:
        """Run the model until it has ended. On the instance's thread."""
        error = reason_to_skip(self.call)
        if error is None:
            self._thread = threading.get_ident()
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
            if self._buffer.closed:  # Abandoned or ended early: the loop reads no end after which it counts this.
                with suppress(RuntimeError):  # The loop is closed: the server has stopped.
                    self._loop.call_soon_threadsafe(self.count)
        if error is None and self.call.expired:
            error = self.call.overdue(WHILE_STREAMING)
        self._buffer.end(error)

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
        wanted = self._buffer.put(answer, self._waits)
        if times is not None and wanted:
            times.asked()
        return wanted

    def _waits(self) -> bool:
        """Whether the current thread may wait for a slow reader: nobody else needs it."""
        return self._thread == threading.get_ident() and not self._queue

    def finish(self) -> None:
        """See `Outlet`."""
        self._buffer.end()

    def skip(self) -> bool:
        """See `Member`. On the instance's thread. Ends the stream with the error if it is not to run."""
        error = reason_to_skip(self.call)
        if error is not None:
            self._buffer.end(error)
        return error is not None

    def start(self, batch_size: int) -> None:
        """See `Member`. On the instance's thread."""
        self._thread = threading.get_ident() if batch_size == 1 else 0
        self.call.times.started(self.queued, batch_size)

    def end(self, joining: float = 0.0, splitting: float = 0.0) -> None:
        """See `Member`. On the instance's thread. Sends `result`, unless it is None, as the last response."""
        self.call.times.ended(joining, splitting)
        # The frames of the raised error refer to this object, so it must not refer to the error.
        result, self.result = self.result, None
        error, self.failure = self.failure, None
        if error is None and result is not None:
            self.respond(result)
        self._buffer.end(error)

    def refuse(self, error: ServingError) -> None:
        """End the stream with an error: it will not run. On any thread."""
        self._buffer.end(error)

    def expire(self) -> None:
        """End the stream at its deadline; the model is stopped at its next response, even if the reader is slow.

        On the event loop.
        """
        self._buffer.end(self.call.overdue(WHILE_STREAMING if self.call.times.batch_size else WHILE_WAITING))

    def deliver(self) -> None:
        """Do nothing: responses were delivered one by one."""

    def count(self) -> None:
        """Count the execution in the statistics, once, if it has ended. On the event loop."""
        if self._seconds >= 0.0 and (statistics := self.call.statistics) is not None:
            seconds, self._seconds = self._seconds, -1.0
            statistics.executed_alone(self.call.times, self.inputs, seconds)

    def abandon(self) -> None:
        """Cancel the call: the reader has ended. Unblocks the threads, so that they notice. On the event loop."""
        self.call.cancel()
        self._buffer.abandon()
        self.count()
