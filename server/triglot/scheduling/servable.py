"""A servable: one loaded version of a model, as it is called."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import without_frames
from triglot.core.running import cancel
from triglot.executors.deadline import (
    BEFORE_START,
    WHILE_RUNNING,
    WHILE_STREAMING,
    EachInTime,
    in_time,
    seen_late,
)
from triglot.executors.stream import NOTHING, Stream, StreamEnd
from triglot.executors.timing import ResponseTimes
from triglot.executors.work import Inputs
from triglot.scheduling.resources import Resources, is_left
from triglot.scheduling.submission import AwaitedSubmission, Submission


def _identity(answer: Any) -> Any:
    return answer


class Servable(Resources):
    """Runs one model. Made, used and closed on the event loop; the model is loaded already.

    Blocking code runs on the threads of the instances, `async def` code on the loop, which `on_loop` says. Work
    that nobody waits for any more is never started.
    """

    async def infer(self, inputs: Inputs, call: Call) -> Any:
        """What the model answers.

        Raises `QueueFull`, `DeadlineExceeded`, the model's own `ServingError`, or `Internal`. At its deadline a
        call ends whatever the model does, but for code on the loop: it is cancelled then, and waited for.
        """
        execution = AwaitedSubmission(self, inputs, call, self._loop.create_future())
        self.submit(execution)
        try:
            return await execution.future
        except asyncio.CancelledError:
            await cancel(execution)
            raise
        finally:
            del execution  # It has the error, whose traceback has this frame.

    def submit(self, execution: Submission) -> None:
        """As `infer`: `execution` is settled, or dropped when it was cancelled, before this returns or later."""
        call = execution.call
        if not execution.leased:
            self._leases += 1
        if self.direct:
            task = execution.task = self._loop.create_task(self._settle_on_loop(execution))
            task.add_done_callback(execution.task_ended)
            return
        try:
            if call.size and (gate := self._gate) is not None:
                gate.enter(call.size)
                execution.gate = gate
            deadline = call.deadline
            if deadline is not None and time.monotonic() >= deadline:
                raise call.overdue(BEFORE_START)
            self._put(execution, call, execution.defer)
            if deadline is not None:
                execution.expires = self._timers.add(execution, deadline)
        except BaseException as error:
            execution.fail(self._explain(error))

    def finish(self, execution: Submission) -> None:
        """It is over: release what it holds."""
        if execution.expires:
            self._timers.discard(execution, execution.expires)
        if execution.gate is not None:
            execution.gate.leave(execution.call.size)
        if not execution.leased:
            self._leases -= 1
            if self._drained is not None:
                self._tell_idle()

    def discard(self, execution: Submission) -> bool:
        """Take it out of the queue; False where it is not there."""
        return self._schedule.discard(execution)

    async def _settle_on_loop(self, execution: Submission) -> None:
        call = execution.call
        try:
            if call.size:
                execution.gate = self._enter(call)
            if call.deadline is not None:
                if call.expired:
                    raise call.overdue(BEFORE_START)
                execution.expires = self._timers.add(execution, call.deadline)
            self._check_room_on_loop()
            execution.result = await self._run_on_loop(execution.inputs, call)
            if execution.is_late:  # It went on in spite of its cancellation.
                raise call.overdue(WHILE_RUNNING)
        except BaseException as error:
            if execution.is_late and isinstance(error, asyncio.CancelledError):
                execution.failure = call.overdue(WHILE_RUNNING)
            elif is_left(error):
                return
            else:
                # A model that raises `CancelledError` or `SystemExit` by itself has failed like any other. Its
                # frames hold the execution, which is to have the error.
                execution.failure = without_frames(self._explain(error))
        execution.settle()

    async def _run_on_loop(self, inputs: Inputs, call: Call) -> Any:
        self._calls_on_loop += 1
        call.started(time.perf_counter())
        try:
            return await self.function(inputs, call)
        finally:
            self._calls_on_loop -= 1
            self._ended(inputs, call)

    def _ended(self, inputs: Inputs, call: Call) -> None:
        seconds = call.ended()
        if call.statistics is not None:
            call.statistics.executed_alone(call, inputs, seconds)

    def stream(
        self, inputs: Inputs, call: Call, convert: Callable[[Any], Any] = _identity
    ) -> AsyncGenerator[Any, None]:
        """The answers of a decoupled model as it yields them, or the one answer of another model, converted.

        A plain function may also send answers by `call.respond`. Closing the generator stops the model at its
        next answer; so does its deadline. Raises as `infer`.
        """
        if self._joins_streams:
            return self._stream_of_one(inputs, call, convert)
        stream = self._stream_on_loop if self.on_loop else self._stream_from_thread
        return stream(inputs, call, convert)

    async def _stream_of_one(
        self, inputs: Inputs, call: Call, convert: Callable[[Any], Any]
    ) -> AsyncGenerator[Any, None]:
        try:
            yield convert(await self.infer(inputs, call))
        finally:
            call.cancel()

    async def _stream_on_loop(
        self, inputs: Inputs, call: Call, convert: Callable[[Any], Any]
    ) -> AsyncGenerator[Any, None]:
        self._check_room_on_loop()
        if call.expired:
            raise call.overdue(BEFORE_START)
        gate = self._enter(call) if call.size else None
        self._calls_on_loop += 1
        call.started(time.perf_counter())
        times = ResponseTimes(call)
        try:
            if self.decoupled:
                times.asked()
                async with aclosing(self.function(inputs, call)) as answers:
                    async for answer in answers if call.deadline is None else EachInTime(call, answers):
                        times.computed()
                        yield times.convert(convert, answer)
                        times.asked()
                times.ended()
            else:
                yield convert(await in_time(call, self.function(inputs, call), WHILE_RUNNING))
        except BaseException as error:
            if not is_left(error):
                times.ended(failed=True)
            raise seen_late(self._outcome(error, call), call, WHILE_STREAMING) from None
        finally:
            times.left()
            self._ended(inputs, call)
            self._calls_on_loop -= 1
            call.cancel()
            if gate is not None:
                gate.leave(call.size)

    async def _stream_from_thread(
        self, inputs: Inputs, call: Call, convert: Callable[[Any], Any]
    ) -> AsyncGenerator[Any, None]:
        gate = self._enter(call) if call.size else None
        stream = Stream(inputs, call, self._loop)
        times = stream.times = ResponseTimes(call) if self.decoupled else None
        expires = 0 if call.deadline is None else self._timers.add(stream, call.deadline)
        try:
            self._put(stream, call)
            while True:
                while (item := stream.take()) is NOTHING:
                    await stream.arrival()
                if isinstance(item, StreamEnd):
                    break
                yield convert(item) if times is None else times.convert(convert, item)
            if times is not None:
                times.ended(failed=item.error is not None)
            if item.error is not None:
                try:
                    raise seen_late(item.error, call, WHILE_STREAMING)
                finally:
                    del item  # It has the error, whose traceback has this frame.
        finally:
            if expires:
                self._timers.discard(stream, expires)
            stream.abandon()
            if times is not None:
                times.left()
            self._schedule.discard(stream)
            if gate is not None:
                gate.leave(call.size)
