"""The sequences of a model, and the slots that they use: plain decisions, without waiting or locking.

Strategy: a sequence has a slot from its first request to its end, or waits for one in the backlog, in order. A
slot is a row of one instance, so all requests of a sequence reach the same instance, one after the other. It is
made when it is first used, as a model may have any number of them. Several sequences with the same id follow each
other in one `SequenceRun`; while others wait for a slot, the next one queues up again.

A request that is removed before the model has received it ends its sequence, as in Triton: requests after it
are cancelled, and in the backlog those queued before it, too. A client that continues has to start a new
sequence.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from triglot.core.errors import Cancelled, InvalidArgument, ServingError, Unavailable
from triglot.core.request_scheduling import Scheduling
from triglot.executors.work import Inputs, Work, reason_to_skip
from triglot.scheduling.sequences.request import SequenceRequest, SequenceRun, Slot

log = logging.getLogger(__name__)

TIMEOUT = "timeout of the corresponding sequence has been expired"
REASONS = ("cancelled", "end", "idle", "lost", "replaced", "timeout", "unloaded")
"""Why sequences ended."""
MAX_ID_BYTES = 128
"""Longest id of a sequence that is a string, as in Triton (STRING_CORRELATION_ID_MAX_LENGTH_BYTES of its core)."""
Dropped = tuple[SequenceRequest, ServingError]
"""A request that will not be executed, and its error."""


class SequenceTable:
    """The sequences of one model, with `rows` slots on each of its instances.

    `now` arguments are the caller's clock.
    """

    def __init__(self, *, instances: int, rows: int, max_idle: float) -> None:
        self._max_idle = max_idle
        self._rows = rows
        self._free: list[Slot] = []
        """A heap of the free slots, as far as they have been made."""
        self._made: list[int] = []
        """How many slots of each instance have been made; until it has all, the last one is free."""
        self._used: list[int] = []
        """How many slots of each instance are in use."""
        self._idle_since: dict[SequenceRun, float] = {}
        self._ready: list[dict[SequenceRun, None]] = []
        self._retiring: set[int] = set()
        self._closed = False
        self.slots = 0
        self.live: dict[int | str, SequenceRun] = {}
        self.backlog: dict[SequenceRun, None] = {}
        self.woken: set[int] = set()
        """Instances with new work; the caller that starts it clears this."""
        self.waiting = 0
        """Number of queued requests."""
        self.started = 0
        self.end_counts: Counter[str] = Counter()
        """Number of ended sequences by reason, since the model was loaded."""
        for _ in range(instances):
            self.add_instance()

    # --- instances ---

    def add_instance(self) -> int:
        """Add an instance; returns its number."""
        number = len(self._ready)
        self._ready.append({})
        self._made.append(0)
        self._used.append(0)
        self.slots += self._rows
        self._make_slot(number)
        while self.backlog and self._free:
            self._place_first(self._take_slot())
        return number

    def retire(self) -> int:
        """Give no more sequences to the instance that has the fewest; returns its number."""
        number = min(
            set(range(len(self._ready))) - self._retiring, key=lambda number: (self._used[number], -number)
        )
        self._retiring.add(number)
        self.slots -= self._rows - self._used[number]
        self._free = [slot for slot in self._free if slot.instance != number]
        heapq.heapify(self._free)
        return number

    def is_drained(self, instance: int) -> bool:
        """Return whether no sequence has a slot on this instance."""
        return not any(run.slot is not None and run.slot.instance == instance for run in self.live.values())

    def holds(self, sequence_id: int | str) -> bool:
        """Return whether a request with this id would continue a sequence."""
        run = self.live.get(sequence_id)
        return run is not None and run.open

    @property
    def used_slots(self) -> int:
        """Slots in use."""
        return sum(self._used)

    # --- arriving requests ---

    def add(
        self, work: Work, scheduling: Scheduling, inputs: Inputs, shapes: object, now: float
    ) -> SequenceRequest:
        """Add a request to its sequence.

        Raise `InvalidArgument`, and changes nothing, if it was not started, or its id is too long.
        """
        sequence_id, start = scheduling.sequence_id, scheduling.sequence_start
        if isinstance(sequence_id, str) and (size := len(sequence_id.encode())) > MAX_ID_BYTES:
            raise InvalidArgument(f"sequence_id: expected at most {MAX_ID_BYTES} bytes, got {size}")
        run = self.live.get(sequence_id)
        if not start and (run is None or not run.open):
            raise _not_started(work, sequence_id)
        if run is None:
            run = self.live[sequence_id] = SequenceRun(sequence_id)
        if start:
            self._count_start(run, work.call.model_name)
        request = SequenceRequest(work, run, scheduling, now, inputs, shapes)
        run.open = not request.end
        run.pending.append(request)
        self.waiting += 1
        self._idle_since.pop(run, None)
        if run in self.backlog:
            _limit(run, [request])
        elif run.slot is None:
            self._queue_up(run)
        self._update(run, now)
        return request

    def _count_start(self, run: SequenceRun, model: str) -> None:
        self.started += 1
        if run.open and (run.begun or run.pending):
            log.warning(
                "sequence %r of model '%s' was restarted before it ended; the previous one was dropped",
                run.id,
                model,
            )
            self.end_counts["replaced"] += 1

    # --- slots and the backlog ---

    def _queue_up(self, run: SequenceRun) -> None:
        if self._free and not self.backlog:
            self._place(run, self._take_slot())
        else:
            self.backlog[run] = None
            _limit(run, run.pending)

    def _place(self, run: SequenceRun, slot: Slot) -> None:
        run.slot, run.expires = slot, math.inf
        self._make_ready(run, slot)

    def _make_ready(self, run: SequenceRun, slot: Slot) -> None:
        self._ready[slot.instance][run] = None
        self.woken.add(slot.instance)

    def _leave_slot(self, run: SequenceRun) -> None:
        slot, run.slot = run.slot, None
        if slot is None:
            return
        self._ready[slot.instance].pop(run, None)
        if slot.instance in self._retiring:
            self.slots -= 1
            self._used[slot.instance] -= 1
        elif self.backlog:
            self._place_first(slot)
        else:
            self._used[slot.instance] -= 1
            heapq.heappush(self._free, slot)

    def _make_slot(self, instance: int) -> None:
        """Make the next slot of an instance, unless it has all of them."""
        row = self._made[instance]
        if row < self._rows:
            self._made[instance] += 1
            heapq.heappush(self._free, Slot(row, instance))

    def _take_slot(self) -> Slot:
        """Return a free slot of the lowest row."""
        slot = heapq.heappop(self._free)
        self._used[slot.instance] += 1
        if slot.row + 1 == self._made[slot.instance]:
            self._make_slot(slot.instance)
        return slot

    def _place_first(self, slot: Slot) -> None:
        """Give a slot, which counts as used, to the first sequence in the backlog."""
        first = next(iter(self.backlog))
        del self.backlog[first]
        self._place(first, slot)

    def _update(self, run: SequenceRun, now: float) -> None:
        """Update a sequence after a change: start its next one, mark it ready or idle, or remove it."""
        if run.running is not None:
            return
        if run.begun and run.pending and run.pending[0].start:
            run.begun, run.states = False, {}
            if self.backlog:
                self._leave_slot(run)
                self._queue_up(run)
        if not run.pending:
            if run.slot is not None:
                self._ready[run.slot.instance].pop(run, None)
            if run.open and not self._closed:
                self._idle_since[run] = now
            else:
                self._remove(run, "unloaded")
        elif run.slot is not None:
            self._make_ready(run, run.slot)

    def _remove(self, run: SequenceRun, reason: str) -> None:
        """Remove a sequence with all of its queued requests."""
        ends = sum(request.end for request in run.pending)
        if count := ends + run.open:
            self.end_counts[reason] += count
        self.waiting -= len(run.pending)
        run.pending.clear()
        del self.live[run.id]
        self.backlog.pop(run, None)
        self._idle_since.pop(run, None)
        self._leave_slot(run)

    # --- execution ---

    def heads(self, instance: int, now: float) -> tuple[list[SequenceRequest], list[Dropped]]:
        """Return the requests that the instance may execute now, oldest first, and those dropped on the way.

        Cancelled requests are dropped, with the others of their sequences.
        """
        ready = self._ready[instance]
        dropped: list[Dropped] = []
        while dead := [run for run in ready if reason_to_skip(run.pending[0].work.call)]:
            for run in dead:
                # Dropping a request may give the slot to another sequence.
                if run in ready and (reason := reason_to_skip(run.pending[0].work.call)):
                    request = run.pending[0]
                    dropped += [(request, reason), *self.drop(request, now)]
        return sorted((run.pending[0] for run in ready), key=lambda request: request.arrived), dropped

    def take(self, requests: Iterable[SequenceRequest]) -> None:
        """Mark requests as running; each is the first of its sequence, which is not ready until `finish`."""
        for request in requests:
            run = request.run
            assert run.slot is not None
            run.running = run.pending.popleft()
            run.begun = True
            self.waiting -= 1
            del self._ready[run.slot.instance][run]

    def finish(self, requests: Iterable[SequenceRequest], now: float) -> list[Dropped]:
        """Note that taken requests were executed, or cancelled; returns requests that are cancelled with these."""
        dropped: list[Dropped] = []
        for request in requests:
            run = request.run
            run.running = None
            if request.executed:
                self.end_counts["end"] += request.end
            else:
                run.begun = run.begun and not request.start
                dropped += self._cancel_rest(request, [], 0)
            self._update(run, now)
        return dropped

    # --- removal ---

    def drop(self, request: SequenceRequest, now: float) -> list[Dropped]:
        """Remove a queued request; returns the requests that are cancelled with it."""
        run = request.run
        at = run.pending.index(request)
        del run.pending[at]
        self.waiting -= 1
        first = at
        if run in self.backlog and not request.start:  # Else the model receives those before it.
            first = max(before for before in range(at) if run.pending[before].start)
        dropped = self._cancel_rest(request, self._remove_range(run, first, at), first)
        self._update(run, now)
        return dropped

    def _cancel_rest(self, request: SequenceRequest, others: list[SequenceRequest], at: int) -> list[Dropped]:
        """Cancel a request's whole sequence: these `others`, and those `pending` from `at` on.

        Return their errors.
        """
        run = request.run
        others += self._followers(run, at)
        has_ended = request.end or any(other.end for other in others)
        if at == len(run.pending):
            has_ended, run.open = has_ended or run.open, False
        if has_ended:  # Otherwise it was counted when another one replaced it.
            self.end_counts["cancelled"] += 1
        text = f"sequence {run.id} was cancelled with another queued request of the same sequence"
        return [(other, Cancelled(text)) for other in others]

    def _followers(self, run: SequenceRun, at: int) -> list[SequenceRequest]:
        """Remove and return the requests from `at` on that belong to the same sequence as the one before `at`."""
        starts = (number for number in range(at, len(run.pending)) if run.pending[number].start)
        return self._remove_range(run, at, next(starts, len(run.pending)))

    def _remove_range(self, run: SequenceRun, first: int, end: int) -> list[SequenceRequest]:
        pending = list(run.pending)
        run.pending.clear()
        run.pending.extend(pending[:first] + pending[end:])
        self.waiting -= end - first
        return pending[first:end]

    def end(self, sequence_id: int | str, now: float) -> None:
        """Close a sequence that continues in another version: requests queued here are its last."""
        run = self.live.get(sequence_id)
        if run is not None and run.open:
            self.end_counts["replaced"] += 1
            run.open = False
            self._update(run, now)

    def lose(self, instance: int, now: float) -> list[Dropped]:
        """End all sequences that an instance has begun, since it lost their state; returns the cancelled requests.

        A sequence whose last request is running ends with that.
        """
        dropped: list[Dropped] = []
        for run in list(self.live.values()):
            running = run.running
            if run.slot is None or run.slot.instance != instance or not run.begun:
                continue
            if running is not None and (running.end or running.lost):
                continue
            if running is not None:
                running.lost = True
            dropped += [(follower, _not_started(follower.work, run.id)) for follower in self._followers(run, 0)]
            self.end_counts["lost"] += 1
            run.open = run.open and bool(run.pending)
            self._update(run, now)
        return dropped

    def next_due(self) -> float:
        """Return the next instant at which `expire` has something to do."""
        idle = next(iter(self._idle_since.values()), math.inf) + self._max_idle
        return min([idle, *(run.expires for run in self.backlog)])

    def expire(self, now: float) -> list[Dropped]:
        """End sequences that were idle for too long, and those that waited too long for a slot."""
        for run, since in list(self._idle_since.items()):
            if since + self._max_idle > now:
                break
            self._remove(run, "idle")
        dropped: list[Dropped] = []
        for run in [run for run in self.backlog if run.expires <= now]:
            dropped += [(request, Unavailable(TIMEOUT)) for request in run.pending]
            self._remove(run, "timeout")
        return dropped

    def close(self) -> None:
        """Have each sequence end once none of its requests is queued or running."""
        self._closed = True
        for run in list(self._idle_since):
            self._remove(run, "unloaded")


def _not_started(work: Work, sequence_id: int | str) -> InvalidArgument:
    return InvalidArgument(
        f"inference request for sequence {sequence_id} to model '{work.call.model_name}' must specify the START "
        "flag on the first request of the sequence"
    )


def _limit(run: SequenceRun, requests: Sequence[SequenceRequest] | deque[SequenceRequest]) -> None:
    """Apply the timeouts of queued requests to a sequence in the backlog: the first to expire ends all of it."""
    for request in requests:
        if request.scheduling.timeout:
            run.expires = min(run.expires, request.arrived + request.scheduling.timeout)
