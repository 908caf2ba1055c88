"""A servable: one loaded version of a model, its instances and its queue."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from typing import Any, NoReturn

from triglot.core.call import Call
from triglot.core.errors import QueueFull
from triglot.core.model import Model, is_async, is_decoupled
from triglot.core.readings import Reading
from triglot.core.signature import default_of, signatures_of
from triglot.engine.admission import Admission, Gate, refusals
from triglot.engine.deadline import BEFORE_START, WHILE_RUNNING, WHILE_WAITING, EachInTime, in_time, is_cancelled
from triglot.engine.declarations import check_declarations, function_of, looks_at_call
from triglot.engine.hosted import HostedModel
from triglot.engine.instances import Instances
from triglot.engine.loop_batcher import LoopBatcher
from triglot.engine.queue import queue_full
from triglot.engine.response_cache import ResponseCache, Shelf
from triglot.engine.schedule import Schedule, schedule_for
from triglot.engine.sequences import SequenceSchedule
from triglot.engine.work import (
    NOTHING,
    Around,
    Execution,
    Explain,
    Inputs,
    Stream,
    StreamEnd,
    Work,
    explained,
)

log = logging.getLogger(__name__)

UNLOAD_PATIENCE_SECONDS = 2.0


def _as_it_is(answer: Any) -> Any:
    return answer


class Servable:
    """Runs one model. Made, used and closed on the event loop; the model is loaded already.

    Blocking code runs on the threads of the instances, `async def` code on the loop, which `on_loop` says. Work
    that nobody waits for any more is never started.
    """

    def __init__(self, name: str, version: int, model: Model, *, max_queue_size: int) -> None:
        check_declarations(model)
        self.name = name
        self.version = version
        self.model = model
        self.platform = model.platform
        self.signatures = signatures_of(model)
        self.default_signature = default_of(self.signatures)
        self.signature = self.signatures[self.default_signature]
        infer = model.infer
        self.function = function_of(model)
        self.on_loop = is_async(infer)
        self.decoupled = is_decoupled(infer)
        self._limit = max_queue_size if model.max_queue_size is None else model.max_queue_size
        self._loop = asyncio.get_running_loop()
        joins = model.dynamic_batching is not None and not self.decoupled
        self.direct = self.on_loop and not joins
        """Whether a request is a coroutine that runs at once, for itself."""
        self._joins_streams = joins and (self.on_loop or not looks_at_call(model))
        """Whether a stream of one answer is a request like others, since the model cannot send more."""
        # Not a method: the threads would keep this.
        self._explain: Explain = partial(explained, str(self))
        self._instances = Instances(f"{name}/{version}", model.instances, self.function, self._explain, self._loop)
        self._schedule: Schedule = (
            LoopBatcher(model, self._limit, self._loop, self.function, self._explain)
            if self.on_loop and joins
            else schedule_for(model, self._limit, self._loop.call_soon, self._instances.add)
        )
        self.sequences = self._schedule if isinstance(self._schedule, SequenceSchedule) else None
        if self.sequences is not None:
            self.sequences.lease = self
        if not self.on_loop:
            self._instances.start(self._schedule)
        self._gate: Gate | None = None
        self.answers: Shelf | None = None
        self._queue_full = 0
        self._leases = 0
        self._drained: asyncio.Event | None = None
        self._idle = threading.Event()

    def __str__(self) -> str:
        return f"{self.name} version {self.version}"

    @property
    def alive(self) -> bool:
        """Whether an instance is there to run the next request."""
        if isinstance(self.model, HostedModel) and not self.model.alive:
            return False
        return self.on_loop or self._instances.alive

    @property
    def queue_depth(self) -> int:
        """Requests in the queue."""
        return len(self._schedule)

    def readings(self) -> Iterator[Reading]:
        """What its schedule counts, and what was refused."""
        yield from self._schedule.readings()
        yield refusals("max_queue_size", self._queue_full)
        if isinstance(self.model, HostedModel):
            yield from self.model.readings()
        if self._gate is not None:
            yield from self._gate.readings()
        if self.answers is not None:
            yield from self.answers.readings()

    def bound(self, admission: Admission) -> None:
        """Count the requests that come from now on, and refuse those that are too many."""
        self._gate = Gate(admission)

    def keep_answers(self, cache: ResponseCache) -> None:
        """From now on; equal requests get them. Nothing of a stream, or of a sequence, is kept."""
        if self.decoupled or self.model.sequence_batching is not None:
            log.warning("%s: response_cache: no effect on a decoupled model, or on sequences", self)
        else:
            self.answers = cache.shelf(ordered=self.model.any_tensors)

    @property
    def leases(self) -> int:
        """Calls that hold this version at the moment."""
        return self._leases

    def __enter__(self) -> Servable:
        """Take a lease: one more call holds this version."""
        self._leases += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._leases -= 1
        if self._drained is not None and not self._leases:
            self._drained.set()
            self._idle.set()

    async def drained(self) -> None:
        """Wait until no call holds this version; nobody takes a lease any more."""
        self._drained = asyncio.Event()
        if self._leases:
            await self._drained.wait()

    async def infer(self, inputs: Inputs, call: Call) -> Any:
        """What the model answers.

        Raises `QueueFull`, `DeadlineExceeded`, the model's own `ServingError`, or `Internal`. At its deadline a
        call ends whatever the model does, but for code on the loop: it is cancelled then, and waited for.
        """
        gate = self._enter(call) if call.size else None
        try:
            if call.deadline is not None and call.expired:
                raise call.overdue(BEFORE_START)
            if self.direct:
                if self._leases > self._limit:
                    self._refuse_on_loop()
                if call.deadline is None:
                    return await self._run_on_loop(inputs, call)
                return await in_time(call, self._run_on_loop(inputs, call), WHILE_RUNNING)
            execution = Execution(inputs, call, self._loop.create_future())
            self._put(execution)
            timer = None if call.deadline is None else self._expire_later(call, execution)
            try:
                return await execution.future
            except asyncio.CancelledError:
                self._schedule.discard(execution)
                raise
            finally:
                if timer is not None:
                    timer.cancel()
                del execution  # It has the error, whose traceback has this frame.
        except BaseException as error:
            raise self._outcome(error, call) from None
        finally:
            if gate is not None:
                gate.leave(call.size)

    def _enter(self, call: Call) -> Gate | None:
        if self._gate is not None:
            self._gate.enter(call.size)
        return self._gate

    def _put(self, work: Work) -> None:
        try:
            self._schedule.put(work)
        except QueueFull as error:
            self._queue_full += 1
            error.message += ", as many as max_queue_size allows"
            raise

    def _expire_later(self, call: Call, execution: Execution) -> asyncio.TimerHandle:
        """End the call at its deadline, wherever it is then."""
        return self._loop.call_later(call.remaining or 0, self._expire, call, execution)

    def _expire(self, call: Call, execution: Execution) -> None:
        if not execution.future.done():
            waits = self._schedule.discard(execution)
            execution.future.set_exception(call.overdue(WHILE_WAITING if waits else WHILE_RUNNING))

    async def _run_on_loop(self, inputs: Inputs, call: Call) -> Any:
        call.started(time.perf_counter())
        try:
            return await self.function(inputs, call)
        finally:
            call.ended()

    def _refuse_on_loop(self) -> NoReturn:
        # Calls of `async def` code do not wait; the bound is on how many run.
        self._queue_full += 1
        raise queue_full(f"{self._limit} requests run, as many as max_queue_size allows")

    def stream(
        self, inputs: Inputs, call: Call, convert: Callable[[Any], Any] = _as_it_is
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
        if self._leases > self._limit:
            self._refuse_on_loop()
        if call.expired:
            raise call.overdue(BEFORE_START)
        gate = self._enter(call) if call.size else None
        call.started(time.perf_counter())
        try:
            if self.decoupled:
                async with aclosing(self.function(inputs, call)) as answers:
                    async for answer in answers if call.deadline is None else EachInTime(call, answers):
                        yield convert(answer)
            else:
                yield convert(await in_time(call, self.function(inputs, call), WHILE_RUNNING))
        except BaseException as error:
            raise self._outcome(error, call) from None
        finally:
            call.ended()
            call.cancel()
            if gate is not None:
                gate.leave(call.size)

    async def _stream_from_thread(
        self, inputs: Inputs, call: Call, convert: Callable[[Any], Any]
    ) -> AsyncGenerator[Any, None]:
        gate = self._enter(call) if call.size else None
        stream = Stream(inputs, call, self._loop)
        timer = None if call.deadline is None else self._loop.call_later(call.remaining or 0, stream.expire)
        try:
            self._put(stream)
            while True:
                while (item := stream.take()) is NOTHING:
                    await stream.arrival()
                if isinstance(item, StreamEnd):
                    break
                yield convert(item)
            if item.error is not None:
                try:
                    raise item.error
                finally:
                    del item  # It has the error, whose traceback has this frame.
        finally:
            if timer is not None:
                timer.cancel()
            stream.abandon()
            self._schedule.discard(stream)
            if gate is not None:
                gate.leave(call.size)

    async def on_every_instance(self, inputs: Inputs, around: Around, explain: Explain) -> None:
        """Have `around` call blocking code once on each instance: see `Instances.run_on_every`."""
        await self._instances.run_on_every(inputs, around, explain)

    def _outcome(self, error: BaseException, call: Call) -> BaseException:
        """What leaves a call on the loop: its own cancellation as it is, everything else explained.

        A model that raises `CancelledError` or `SystemExit` by itself has failed like any other.
        """
        if isinstance(error, GeneratorExit) or is_cancelled(error):
            call.cancel()
            return error
        return self._explain(error)

    async def close(self, *, at_once: bool = False) -> None:
        """End the instances and close the model; the transports let no call through any more.

        A model that still runs is given `UNLOAD_PATIENCE_SECONDS`, and then left alone: it is closed when its last
        call has ended. `at_once`: code on the loop is not waited for; nobody runs that any more.
        """
        self._schedule.close()
        if self.answers is not None:
            self.answers.close()
        self._drained = self._drained or asyncio.Event()
        if at_once or not self._leases:
            self._idle.set()
        unloaded: Future[None] = Future()

        def unload() -> None:
            self._unload()
            # Of a future that nobody waits for any more there is nothing to tell.
            if unloaded.set_running_or_notify_cancel():
                unloaded.set_result(None)

        # A daemon, like the instances: a model that never returns must not keep a stopped server alive.
        threading.Thread(target=unload, daemon=True).start()
        waiting = asyncio.wrap_future(unloaded)
        await asyncio.wait([waiting], timeout=UNLOAD_PATIENCE_SECONDS)
        if not waiting.done() and isinstance(self.model, HostedModel):
            self.model.abandon()
            await asyncio.wait([waiting], timeout=UNLOAD_PATIENCE_SECONDS)
        if not waiting.done():
            waiting.cancel()
            log.warning("%s still runs; the server does not wait for it", self)

    def _unload(self) -> None:
        self._instances.join()
        if self.on_loop:
            self._idle.wait()
        try:
            self.model.close()
        except BaseException:  # A model that calls exit() would seem to run still.
            log.exception("%s failed to close", self)
