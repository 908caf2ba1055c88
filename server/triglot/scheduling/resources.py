"""What a servable has: the instances that run its model, the queue before them, and what bounds it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from triglot.core.call import Call
from triglot.core.errors import QueueFull
from triglot.core.readings import Reading
from triglot.core.running import Defer
from triglot.core.statistics import Statistics
from triglot.core.timer_wheel import TimerWheel
from triglot.executors.deadline import is_cancelled
from triglot.executors.declarations import check_declarations, looks_at_call
from triglot.executors.hosted import HostedModel
from triglot.executors.instances import Instances
from triglot.executors.loop_guard import guard_of, guarded_function
from triglot.executors.schedule import Schedule
from triglot.executors.unloading import unload
from triglot.executors.work import Explain, Hook, Inputs, Work, explained
from triglot.model.declared_signatures import signatures_of
from triglot.model.ensemble import Ensemble
from triglot.model.model import Model, is_async, is_decoupled
from triglot.model.signature import default_of
from triglot.scheduling.admission import Admission, Gate, refusals
from triglot.scheduling.leases import Leases
from triglot.scheduling.loop_batcher import LoopBatcher
from triglot.scheduling.queue import queue_full
from triglot.scheduling.response_cache import ModelCache, ResponseCache
from triglot.scheduling.schedules import schedule_for
from triglot.scheduling.sequences import SequenceSchedule

log = logging.getLogger(__name__)


def is_left(error: BaseException) -> bool:
    """Whether it says that the caller left."""
    return isinstance(error, GeneratorExit) or is_cancelled(error)


class Resources(Leases):
    """Of one loaded model, for who runs it."""

    def __init__(self, name: str, version: int, model: Model, *, max_queue_size: int) -> None:
        super().__init__()
        check_declarations(model)
        self.name = name
        self.version = version
        self.model = model
        self._hosted = model if isinstance(model, HostedModel) else None
        self.platform = model.platform
        self.signatures = signatures_of(model)
        self.default_signature = default_of(self.signatures)
        self.signature = self.signatures[self.default_signature]
        self.guard = guard_of(model, f"{name} version {version}")
        self.function = guarded_function(model, self.guard)
        self.on_loop = is_async(model.infer)
        self.decoupled = is_decoupled(model.infer)
        self._limit = max_queue_size if model.max_queue_size is None else model.max_queue_size
        self._loop = asyncio.get_running_loop()
        joins = model.dynamic_batching is not None and not self.decoupled
        self.direct = self.on_loop and not joins
        """Whether a request is a coroutine that runs at once, for itself."""
        self._joins_streams = joins and (self.on_loop or not looks_at_call(model))
        """Whether a stream of one answer is a request like others, since the model cannot send more."""
        self._timers = TimerWheel(self._loop)
        self._calls_on_loop = 0
        """How many calls of code on the loop run."""
        # Not a method: the threads would keep this.
        self._explain: Explain = partial(explained, str(self))
        self._instances = Instances(f"{name}/{version}", model.instances, self.function, self._explain, self._loop)
        self._schedule: Schedule = (
            LoopBatcher(model, self._limit, self._loop, self.function, self._explain, self.guard)
            if self.on_loop and joins
            else schedule_for(model, self._limit, self._loop.call_soon, self._instances.add)
        )
        self.sequences = self._schedule if isinstance(self._schedule, SequenceSchedule) else None
        if self.sequences is not None:
            self.sequences.lease = self
        if not self.on_loop:
            self._instances.start(self._schedule)
        batching = model.dynamic_batching
        self.statistics = Statistics(
            batched=bool(model.max_batch_size or (batching is not None and batching.max_batch_size)),
            composed=isinstance(model, Ensemble),
        )
        """What is counted from its load on."""
        self.load_seconds = 0.0
        self._gate: Gate | None = None
        self.answers: ModelCache | None = None
        self.labels: Mapping[str, Sequence[bytes]] = {}
        """The names of classes, of each output that has some."""
        self._queue_full = 0

    def __str__(self) -> str:
        return f"{self.name} version {self.version}"

    @property
    def alive(self) -> bool:
        """Whether an instance is there to run the next request."""
        if self._hosted is not None and not self._hosted.alive:
            return False
        return self.on_loop or self._instances.alive

    @property
    def queue_depth(self) -> int:
        """Requests in the queue."""
        return len(self._schedule)

    def readings(self) -> Iterator[Reading]:
        """What its schedule counts, and what was refused."""
        yield from self._schedule.readings()
        for name, counts in self.model.own_batches.items():
            yield from counts.readings({"dag_model": name})
        yield refusals("max_queue_size", self._queue_full)
        if self._hosted is not None:
            yield from self._hosted.readings()
        if self._gate is not None:
            yield from self._gate.readings()
        if self.answers is not None:
            yield from self.answers.readings()
        yield from self.guard.readings()

    def bound(self, admission: Admission) -> None:
        """Count the requests that come from now on, and refuse those that are too many."""
        self._gate = Gate(admission)

    def enable_response_cache(self, cache: ResponseCache) -> None:
        """From now on; equal requests get them. Nothing of a stream, or of a sequence, is kept."""
        if self.decoupled or self.model.sequence_batching is not None:
            log.warning("%s: response_cache: no effect on a decoupled model, or on sequences", self)
        else:
            self.answers = cache.for_model(ordered=self.model.any_tensors)

    async def on_every_instance(self, inputs: Inputs, hook: Hook, explain: Explain) -> None:
        """Have `hook` call blocking code once on each instance: see `Instances.run_on_every`."""
        await self._instances.run_on_every(inputs, hook, explain)

    def _enter(self, call: Call) -> Gate | None:
        if self._gate is not None:
            self._gate.enter(call.size)
        return self._gate

    def _put(self, work: Work, call: Call, defer: Defer | None = None) -> None:
        try:
            self._schedule.put(work, defer)
            call.queued = True
        except QueueFull as error:
            self._queue_full += 1
            error.message += ", as many as max_queue_size allows"
            raise

    def _check_room_on_loop(self) -> None:
        """Raises `QueueFull`: calls of code on the loop do not wait; the bound is on how many run."""
        running = self._calls_on_loop
        if self._hosted is not None:
            running += self._hosted.orphaned  # A process goes on with these though their callers left.
        if running >= self._limit:
            self._queue_full += 1
            raise queue_full(f"{self._limit} requests run, as many as max_queue_size allows")

    def _outcome(self, error: BaseException, call: Call) -> BaseException:
        """What leaves a call on the loop: its own cancellation as it is, everything else explained.

        A model that raises `CancelledError` or `SystemExit` by itself has failed like any other.
        """
        if is_left(error):
            call.cancel()
            return error
        return self._explain(error)

    async def close(self, *, at_once: bool = False) -> None:
        """End the instances and close the model; the transports let no call through any more.

        A model that still runs is not waited for, see `unload`. `at_once`: nor is code on the loop; nobody runs
        that any more.
        """
        self._schedule.close()
        if self.answers is not None:
            self.answers.close()
        self.end_leases(at_once=at_once)
        await unload(self.model, str(self), self._at_rest)

    def _at_rest(self) -> None:
        """Block until nothing runs any more."""
        self._instances.join()
        if self.on_loop:
            self.wait_idle()
