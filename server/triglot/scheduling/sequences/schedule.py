"""The schedule of models with sequence batching."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial

from triglot.core.errors import InvalidArgument, Unavailable, queue_full
from triglot.core.request_scheduling import Scheduling
from triglot.core.running import Defer
from triglot.core.statistics import BatchCounts, Reading
from triglot.executors.declarations import looks_at_call
from triglot.executors.executor import Executor
from triglot.executors.hosted import HostedModel
from triglot.executors.joining import layout_of
from triglot.executors.work import Inputs, Work
from triglot.model.model import Model
from triglot.model.scheduling import OldestStrategy
from triglot.scheduling.batch_keys import has_parameters, parameters_key
from triglot.scheduling.schedule import Later, Timer
from triglot.scheduling.sequences.batch import SequenceBatch, SequenceTensors
from triglot.scheduling.sequences.request import SequenceRequest
from triglot.scheduling.sequences.strategies import strategy_of
from triglot.scheduling.sequences.table import REASONS, Dropped, SequenceTable

log = logging.getLogger(__name__)

_MAX_GENERATED_ID = 2**31 - 1
"""Largest generated sequence id; fits every integer type of a CORRID input."""


class Instance:
    """One instance of the model. `runs`: it executes a batch. `timer`: set while its next batch waits to grow.

    `losses`: how often its process was lost (`HostedModel.on_lost`). `drained`: set if it is being removed; the
    event is set once it has no sequence any longer.
    """

    __slots__ = ("drained", "executor", "losses", "number", "runs", "timer")

    def __init__(self, number: int, executor: Executor) -> None:
        self.number = number
        self.executor = executor
        self.runs = False
        self.losses = 0
        self.timer: Timer | None = None
        self.drained: asyncio.Event | None = None


class SequenceSchedule:
    """A `Schedule`: requests with the same sequence id reach the same instance, in order of arrival.

    Each instance has an executor of its own. `lease` is entered once per open sequence, and exited when that ends.
    It may be made on any thread, and is used on the `loop`, by default the running one.
    Raise `ValueError` for options that the model cannot have.
    """

    def __init__(
        self,
        model: Model,
        limit: int,
        executors: Sequence[Executor],
        defer: Defer,
        later: Later,
        clock: Callable[[], float] = time.perf_counter,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        batching = model.sequence_batching
        if batching is None:
            raise ValueError("sequence_batching: expected a SequenceBatching, got None")
        self.lease: AbstractContextManager[object] = nullcontext()
        self.binding = asyncio.Lock()
        """Held while a request's inputs are bound, so that requests are put in order of arrival."""
        self.empty = asyncio.Event()
        """Set while no sequence is open."""
        self.empty.set()
        self._limit = limit
        self._tensors = SequenceTensors.of(model)
        unbatched = self._tensors.decoupled or not self._tensors.batched
        self._strategy = strategy_of(model, self._tensors.key, unbatched=unbatched)
        self._table = SequenceTable(instances=len(executors), rows=self._strategy.rows, max_idle=batching.max_idle)
        self._instances = [Instance(at, closing) for at, closing in enumerate(executors)]
        self._defer = defer
        self._later = later
        self._clock = clock
        # In a list, each request has parameters of its own.
        looks = model.takes_parameters or looks_at_call(model)
        self._by_parameters = looks and model.infer_batch is None
        self._iterative = batching.iterative
        self._numbers = itertools.count(1)
        self._in_order = isinstance(batching.strategy, OldestStrategy) and batching.strategy.preserve_ordering
        self._begun: deque[SequenceBatch] = deque()
        """Started batches, if responses are to be sent in the order in which the batches were started.

        A request that waits for a slot is not among them: it may wait for a slot of one of their sequences.
        """
        self._counts = BatchCounts()
        self._requests: dict[Work, SequenceRequest] = {}
        self._deferred = False
        self._closed = False
        self._leases = 0
        self._timer: Timer | None = None
        self._timer_at = math.inf
        self._runs_on: Callable[[int, int], object] | None = None
        if isinstance(model, HostedModel):
            self._runs_on = model.runs_on
            model.on_lost = partial(_on_loop, loop or asyncio.get_running_loop(), self._lose)

    def __len__(self) -> int:
        return self._table.waiting

    def holds(self, sequence_id: int | str) -> bool:
        """Return whether a request with this id, and without START, would continue a sequence."""
        return self._table.holds(sequence_id)

    def completed(self, inputs: Inputs) -> Inputs:
        """Return the inputs of a warm-up, completed for sequences of one request each.

        Raise `InvalidArgument`.
        """
        return self._tensors.completed(inputs)

    @property
    def own_names(self) -> Collection[str]:
        """Names of the inputs that the server adds: controls and states."""
        return self._tensors.own_names

    # --- arriving and leaving requests ---

    def put(self, work: Work, _: Defer | None = None) -> None:
        """See `Schedule`. Raise `InvalidArgument` for a request that does not belong to a started sequence."""
        if self._closed:
            raise Unavailable("the model was unloaded")
        if len(self) >= self._limit:
            raise queue_full(f"{self._limit} requests are queued")
        call, inputs = work.call, work.inputs
        if self._iterative:
            call.scheduling = self._single_request_sequence(call.scheduling)
        scheduling = call.scheduling
        if not scheduling.sequence_id:
            raise InvalidArgument(
                f"inference request to model '{call.model_name}' must specify a non-zero or non-empty "
                "correlation ID"
            )
        self._tensors.check(inputs, scheduling.sequence_id, call.model_name)
        shapes = layout_of(inputs)
        if self._by_parameters and has_parameters(call):
            shapes = (shapes, parameters_key(call))
        self._requests[work] = self._table.add(work, scheduling, inputs, shapes, self._clock())
        self._update()

    def _single_request_sequence(self, scheduling: Scheduling) -> Scheduling:
        sequence_id = scheduling.sequence_id
        while not sequence_id:
            number = next(self._numbers) % _MAX_GENERATED_ID + 1
            sequence_id = str(number) if self._tensors.controls.takes_texts else number
            if sequence_id in self._table.live:
                sequence_id = 0
        return replace(scheduling, sequence_id=sequence_id, sequence_start=True, sequence_end=True)

    def discard(self, work: Work) -> bool:
        """See `Schedule`. Also rejects requests that belong to the same sequence."""
        request = self._requests.pop(work, None)
        if request is None:
            return False
        self._fail(self._table.drop(request, self._clock()))
        return True

    def end(self, sequence_id: int | str) -> None:
        """Close a sequence that starts again in another version: requests queued here are its last."""
        self._table.end(sequence_id, self._clock())
        self._update()

    def resized(self) -> None:
        """See `Schedule`. Nothing to do: `add` and `remove` change the instances."""

    def add(self, executor: Executor) -> None:
        """Add an instance."""
        self._instances.append(Instance(self._table.add_instance(), executor))
        self._update()

    async def remove(self) -> Executor:
        """Remove an instance once its sequences have ended; returns its executor."""
        instance = self._instances[self._table.retire()]
        instance.drained = asyncio.Event()
        self._release_drained()
        await instance.drained.wait()
        return instance.executor

    def _release_drained(self) -> None:
        for closing in self._instances:
            if closing.drained is not None and not closing.runs and self._table.is_drained(closing.number):
                closing.drained.set()

    def close(self) -> None:
        """See `Schedule`. Each sequence ends once none of its requests is queued or running."""
        self._closed = True
        self._table.close()
        self._table.woken.update(range(len(self._instances)))  # Batches no longer wait to grow.
        self._update()

    def _fail(self, dropped: Sequence[Dropped]) -> None:
        for request, error in dropped:
            self._requests.pop(request.work, None)
            request.fail(error)
        self._update()

    def _update(self) -> None:
        """Act on changes: form batches, hold one lease per sequence, and set the timer for expiring sequences."""
        if not self._deferred and self._table.woken:
            self._deferred = True
            self._defer(self._form_deferred)
        live = len(self._table.live)
        while self._leases < live:
            self.lease.__enter__()
            self._leases += 1
        while self._leases > live:
            self._leases -= 1
            self.lease.__exit__(None, None, None)
        if not live:
            self.empty.set()
        elif self.empty.is_set():
            self.empty.clear()
        if self._closed and not live:
            self.lease = nullcontext()  # The lease's owner would live as long as this object.
        self._release_drained()
        due = self._table.next_due()
        if due < self._timer_at or (self._timer is not None and not live):
            self._set_timer(due)

    def _set_timer(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, due
        if due < math.inf:
            self._timer = self._later(max(0.0, due - self._clock()), self._expire)

    def _expire(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self._fail(self._table.expire(self._clock()))

    # --- batches ---

    def _form_deferred(self) -> None:
        self._deferred = False
        woken = sorted(self._table.woken)
        self._table.woken.clear()
        for number in woken:
            self._form(self._instances[number])

    def _form(self, instance: Instance) -> None:
        """Start the instance's next batch, if it is idle and there is one."""
        if instance.timer is not None:
            instance.timer.cancel()
            instance.timer = None
        dropped: list[Dropped] = []
        if not instance.runs:
            self._table.woken.discard(instance.number)
            heads, dropped = self._table.heads(instance.number, self._clock())
            if heads:
                self._choose(instance, heads)
        if self._closed and not self._table.waiting:
            for closing in self._instances:
                closing.executor.close()
        if dropped:
            self._fail(dropped)

    def _choose(self, instance: Instance, heads: Sequence[SequenceRequest]) -> None:
        chosen = self._strategy.choose(heads, math.inf if self._closed else self._clock())
        if not isinstance(chosen, float):
            batch = SequenceBatch(self._tensors, chosen.rows, partial(self._on_end, instance))
            if self._runs_on is not None:
                batch.bind = partial(self._runs_on, instance.number, instance.losses)
            self._counts.add(chosen.reason, len(batch.members), len(batch.members))
            self._table.take(batch.members)
            for request in batch.members:
                del self._requests[request.work]
            if self._in_order:
                self._begun.append(batch)
            instance.runs = True
            instance.executor.start(batch)
        elif chosen < math.inf:
            instance.timer = self._later(chosen, partial(self._form, instance))

    def _on_end(self, instance: Instance, batch: SequenceBatch) -> None:
        instance.runs = False
        dropped = self._table.finish(batch.members, self._clock())
        try:
            self._form(instance)  # First: the instance runs while outcomes are delivered.
        finally:
            if not self._in_order:
                batch.report()
            while self._begun and self._begun[0].over:
                self._begun.popleft().report()
            self._fail(dropped)

    def _lose(self, number: int, losses: int, name: str) -> None:
        """End the sequences of an instance that has lost their state."""
        self._instances[number].losses = losses
        before = self._table.end_counts["lost"]
        dropped = self._table.lose(number, self._clock())
        if count := self._table.end_counts["lost"] - before:
            log.warning("%s was lost, which ended %d sequence%s", name, count, "s" if count > 1 else "")
        self._fail(dropped)

    def readings(self) -> Iterator[Reading]:
        """Yield the metrics of batches, sequences and slots."""
        yield from self._counts.readings()
        table = self._table
        yield Reading("sequences", "Open sequences.", len(table.live))
        yield Reading("sequence_backlog", "Sequences in the backlog, without a slot.", len(table.backlog))
        yield Reading("sequence_slots", "Sequence slots of all instances.", table.slots)
        yield Reading("sequence_slots_used", "Sequence slots in use.", table.used_slots)
        yield Reading("sequences_started", "Started sequences.", table.started, counter=True)
        for reason in REASONS:
            text = "Ended sequences, by reason."
            yield Reading("sequences_ended", text, table.end_counts[reason], {"reason": reason}, counter=True)


def _on_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> None:
    """Have the event loop call a function. On any thread."""
    with suppress(RuntimeError):  # The loop is closed.
        loop.call_soon_threadsafe(function, *arguments)
