"""The schedule of a model of sequences."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial

from triglot.core.batch_counts import BatchCounts
from triglot.core.errors import InvalidArgument, Unavailable
from triglot.core.readings import Reading
from triglot.core.request_scheduling import Scheduling
from triglot.core.running import Defer
from triglot.executors.declarations import looks_at_call
from triglot.executors.hosted import HostedModel
from triglot.executors.joining import buffers_for, layout_of
from triglot.executors.stream import Stream
from triglot.executors.work import Execution, InstanceExecution, Work
from triglot.model.model import Model
from triglot.model.scheduling import OldestStrategy
from triglot.scheduling.kinds import said_besides
from triglot.scheduling.queue import Grow, Later, Timer, no_growth, queue_full
from triglot.scheduling.sequences.batch import SequenceBatch, Tensors
from triglot.scheduling.sequences.request import SequenceRequest, SequenceWork
from triglot.scheduling.sequences.strategies import Chosen, Rows, strategy_of
from triglot.scheduling.sequences.table import REASONS, Dropped, SequenceTable

log = logging.getLogger(__name__)

_LARGEST_NUMBER = 2**31 - 1
"""A sequence's made-up number fits whatever integers the model takes."""


class SequenceSchedule:
    """Requests with the same sequence id reach the same instance, in their order. A `Schedule`.

    `lease` is entered once for each sequence that lives, and left when it is over. Raises `ValueError` for what
    the model cannot have.

    Strategy: one lock, which nobody holds for longer than it takes to choose a batch. Threads wait each on a
    condition of its own, since what waits is for one of them. The loop calls them a little later, so that what one
    turn of it puts is taken together.
    """

    def __init__(
        self,
        model: Model,
        limit: int,
        defer: Defer,
        grow: Grow,
        later: Later,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        batching = model.sequence_batching
        if batching is None:
            raise ValueError("sequence_batching: expected a SequenceBatching, got None")
        self.limit = limit
        self.lease: AbstractContextManager[object] = nullcontext()
        self.binding = asyncio.Lock()
        """Held while a request's inputs are looked at: requests come here in the order in which they came in."""
        self.empty = asyncio.Event()
        """Set while no sequence lives."""
        self.empty.set()
        self._tensors = Tensors.of(model)
        alone = self._tensors.decoupled or not self._tensors.batched
        self._strategy = strategy_of(model, self._tensors.key, alone=alone)
        self._table = SequenceTable(
            instances=model.instances, rows=self._strategy.rows, max_idle=batching.max_idle
        )
        self._defer = defer
        self._grow = grow
        self._later = later
        self._clock = clock
        # In a list each request has its own.
        looks = model.takes_parameters or looks_at_call(model)
        self._by_parameters = looks and model.infer_batch is None
        self._iterative = batching.iterative
        self._numbers = itertools.count(1)
        self._in_order = isinstance(batching.strategy, OldestStrategy) and batching.strategy.preserve_ordering
        self._taken: deque[SequenceBatch] = deque()
        """Batches whose answers leave in the order in which they began, if they are to. What waits for a slot has
        no place among them: it may wait for one of theirs."""
        self._buffers = [buffers_for(model) for _ in range(model.instances)]
        self._counts = BatchCounts()
        self._requests: dict[Work, SequenceRequest] = {}
        self._each: deque[InstanceExecution] = deque()
        self._lock = threading.Lock()
        self._conditions = [threading.Condition(self._lock) for _ in range(model.instances)]
        self._instances = 1
        self._calling = False
        self._closed = False
        self._leases = 0
        self._timer: Timer | None = None
        self._timer_at = math.inf
        self._runs_on: Callable[[int], object] = lambda _: None
        if isinstance(model, HostedModel):
            self._runs_on = model.runs_on
            model.on_lost = partial(self._lose, asyncio.get_running_loop().call_soon_threadsafe)

    def __len__(self) -> int:
        return self._table.waiting + len(self._each)

    def holds(self, sequence_id: int | str) -> bool:
        """Whether a request with this id, and without START, continues a sequence."""
        return self._table.holds(sequence_id)

    # --- on the loop ---

    def put(self, work: Work, _: Defer | None = None) -> None:
        """See `Schedule`. `InvalidArgument`: not a single request of a sequence that has been started."""
        if self._closed:
            raise Unavailable("the model was unloaded")
        if len(self) >= self.limit:
            raise queue_full(f"{self.limit} requests wait")
        if isinstance(work, InstanceExecution):
            self._each.append(self._tensors.completed(work))
            self._call_soon()
        elif isinstance(work, Execution | Stream):
            self._put(work)
        else:
            raise TypeError(f"expected an execution or a stream, got {work!r}")

    def _put(self, work: SequenceWork) -> None:
        call, inputs = work.call, work.inputs
        if self._iterative:
            call.scheduling = self._as_a_sequence(call.scheduling)
        scheduling = call.scheduling
        if not scheduling.sequence_id:
            raise InvalidArgument(
                f"inference request to model '{call.model_name}' must specify a non-zero or non-empty "
                "correlation ID"
            )
        self._tensors.check(inputs, scheduling.sequence_id, call.model_name)
        shapes = layout_of(inputs)
        if self._by_parameters and (call.parameters or call.input_parameters):
            shapes = (shapes, said_besides(call))
        with self._lock:
            request = self._table.add(work, scheduling, inputs, shapes, self._clock())
            self._requests[work] = request
        slot = request.run.slot
        if slot is not None and slot.instance >= self._instances:
            self._grow(slot.instance + 1 - self._instances)
            self._instances = slot.instance + 1
        self._call_soon()
        self._keep_up()

    def _as_a_sequence(self, said: Scheduling) -> Scheduling:
        sequence_id = said.sequence_id
        while not sequence_id:
            number = next(self._numbers) % _LARGEST_NUMBER + 1
            sequence_id = str(number) if self._tensors.controls.takes_texts else number
            if sequence_id in self._table.live:
                sequence_id = 0
        return replace(said, sequence_id=sequence_id, sequence_start=True, sequence_end=True)

    def discard(self, work: Work) -> bool:
        """See `Schedule`. What follows a START that nobody waits for is refused."""
        if isinstance(work, InstanceExecution):
            try:
                self._each.remove(work)
            except ValueError:
                return False
            return True
        with self._lock:
            request = self._requests.pop(work, None)
            if request is None:
                return False
            dropped = self._table.drop(request, self._clock())
        self._fail(dropped)
        return True

    def end(self, sequence_id: int | str) -> None:
        """The sequence, if there is one, begins anew in another version; what waits of it here is its last."""
        with self._lock:
            self._table.end(sequence_id, self._clock())
        self._keep_up()

    def close(self) -> None:
        """See `Schedule`. A sequence is over when nothing of it waits or runs."""
        self._closed = True
        with self._lock:
            self._table.close()
            for condition in self._conditions:
                condition.notify_all()
        self._keep_up()
        # Whom they belong to would live as long as this.
        self._grow = no_growth

    def _fail(self, dropped: Sequence[Dropped]) -> None:
        for request, error in dropped:
            self._requests.pop(request.work, None)
            request.fail(error)
        self._call_soon()
        self._keep_up()

    def _call_soon(self) -> None:
        if not self._calling and (self._table.woken or self._each or self._closed):
            self._calling = True
            self._defer(self._call)

    def _call(self) -> None:
        self._calling = False
        with self._lock:
            # Once closed, each ends when it finds that nothing waits any more.
            everybody = bool(self._each) or self._closed
            woken = range(len(self._conditions)) if everybody else list(self._table.woken)
            self._table.woken.clear()
            for instance in woken:
                self._conditions[instance].notify()

    def _keep_up(self) -> None:
        """Hold as many leases as there are sequences, and be there when one of them expires."""
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
            self.lease = nullcontext()  # As in `close`.
        with self._lock:
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
        with self._lock:
            dropped = self._table.expire(self._clock())
        self._fail(dropped)

    # --- on the threads ---

    def take(self, instance: int) -> Work | None:
        """See `Schedule`."""
        condition = self._conditions[instance]
        with condition:
            while True:
                work = self._next(instance)
                if not isinstance(work, float):
                    return work
                condition.wait(work if work < math.inf else None)

    def take_nowait(self, instance: int) -> Work | None:
        """What the instance runs next, if there is something now."""
        with self._lock:
            work = self._next(instance)
        return None if isinstance(work, float) else work

    def _next(self, instance: int) -> Work | float | None:
        """What the instance runs next; how long to wait for it; None once there will be no more."""
        self._runs_on(instance)  # Before it is known what: that is of sequences which have not been lost by now.
        if self._each:
            return self._each.popleft()
        heads, dropped = self._table.heads(instance, self._clock())
        chosen: Chosen | float = math.inf
        if heads:
            chosen = self._strategy.choose(heads, math.inf if self._closed else self._clock())
        rows: Rows = ()
        members = []
        if not isinstance(chosen, float):
            rows = chosen.rows
            members = [row for row in rows if row is not None]
            self._counts.add(chosen.reason, len(members), len(members))
        elif not dropped:
            return None if self._closed and not self._table.waiting else chosen
        self._table.take(members)
        for request in [*members, *(one for one, _ in dropped)]:
            self._requests.pop(request.work, None)
        batch = SequenceBatch(self._tensors, rows, self._buffers[instance], dropped, self._finished, self._ended)
        if self._in_order:
            self._taken.append(batch)
        return batch

    def _lose(self, defer: Callable[..., object], instance: int, name: str) -> None:
        """On any thread: the instance knows nothing any more of the sequences it had."""
        with self._lock:
            before = self._table.over["lost"]
            dropped = self._table.lose(instance, self._clock())
            count = self._table.over["lost"] - before
            for request, _ in dropped:
                self._requests.pop(request.work, None)
        if count:
            log.warning("%s was lost, and %d sequence%s ended with it", name, count, "s" if count > 1 else "")
            with suppress(RuntimeError):  # The loop has ended.
                defer(self._fail, dropped)

    def _finished(self, batch: SequenceBatch) -> None:
        with self._lock:
            dropped = self._table.finish(batch.members, self._clock())
            for request, _ in dropped:
                self._requests.pop(request.work, None)
            batch.dropped += dropped
            if self._closed and not self._table.waiting:
                for condition in self._conditions:
                    condition.notify_all()

    def _ended(self, batch: SequenceBatch) -> None:
        """On the loop."""
        if not self._in_order:
            batch.report()
        while self._taken and self._taken[0].over:
            self._taken.popleft().report()
        self._call_soon()
        self._keep_up()

    def readings(self) -> Iterator[Reading]:
        """The sequences that live and those that were, the slots, and why batches were closed."""
        yield from self._counts.readings()
        table = self._table
        yield Reading("sequences", "Sequences that live.", len(table.live))
        yield Reading("sequence_backlog", "Sequences that wait for a slot.", len(table.backlog))
        yield Reading("sequence_slots", "Sequences that the instances have room for.", table.slots)
        yield Reading("sequence_slots_used", "Slots that have a sequence.", table.used_slots)
        yield Reading("sequences_started", "Sequences that began.", table.started, counter=True)
        for reason in REASONS:
            text = "Sequences that are over, and why."
            yield Reading("sequences_ended", text, table.over[reason], {"reason": reason}, counter=True)
