"""The queue of the dynamic batcher: which requests are admitted, and which are taken for a batch (spec 5.1).

Strategy: each request is queued in the lane of its priority level, and is found in a dict. A cancelled one
leaves the dict at once; its entry in the lane is removed when a batch is formed.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from triglot.core.errors import RETRY_AFTER_SECONDS, ServingError, Unavailable, queue_full
from triglot.core.statistics import BatchCounts, Reading
from triglot.executors.work import Work
from triglot.model.model import Model
from triglot.model.scheduling import DynamicBatching, QueuePolicy
from triglot.scheduling.batch_keys import BatchKeys
from triglot.scheduling.forming import Decision, Lane, Rules, Run, Wait, Waiting, form, latest_start_of

MAX_EMPTY_LANES = 16
"""Empty lanes that are kept; there may be as many priority levels as requests can name."""
MAX_STALE_ENTRIES = 64
"""Entries of cancelled requests, beside as many as there are queued requests, that are kept until a sweep."""


@dataclass(slots=True, eq=False)
class Level(Lane):
    """A lane with its policy, and the number of its queued requests."""

    policy: QueuePolicy = field(default_factory=QueuePolicy)
    waiting: deque[Waiting] = field(default_factory=deque)
    late: deque[Waiting] = field(default_factory=deque)
    count: int = 0


@dataclass(slots=True)
class NextWork:
    """What an idle executor is to do: reject `refused` requests, run a batch of `works`, or wait.

    All three empty: nothing is queued. `joinable`: the works have the same layout. `batched`: they run as a batch,
    which may have only one member, and not as work of their own.
    """

    refused: list[Work] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    joinable: bool = False
    batched: bool = False
    wait: Wait | None = None


class BatchQueue:
    """The queued requests of a `Batcher`. On the event loop."""

    def __init__(self, model: Model, batching: DynamicBatching, limit: int) -> None:
        self.limit = limit
        self.closed = False
        self.keys = BatchKeys(model, batching)
        self._batching = batching
        max_rows = max(1, self.keys.max_rows)
        preferred = tuple(size for size in batching.preferred_sizes if size <= max_rows)
        self._rules = Rules(max_rows, preferred, batching.max_queue_delay)
        self._levels: dict[int, Level] = {}
        self._lanes: list[Level] = []
        self._queued: dict[Work, tuple[Level, Waiting]] = {}
        self._stale_entries = 0
        self._rows = 0
        self._counts = BatchCounts()
        self._timeouts = 0

    def __len__(self) -> int:
        return len(self._queued)

    @property
    def batches(self) -> int:
        """Number of batches if all requests that can be batched had the same key."""
        return -(-self._rows // self._rules.max_rows)

    def put(self, pieces: Sequence[tuple[Work, int]], key: object) -> list[Waiting]:
        """Queue the pieces of one request, each with its rows; requests with equal `key` can share a batch.

        Raise `QueueFull`, and `Unavailable`, also once closed.
        """
        if self.closed:
            raise Unavailable("the model was unloaded")
        if len(self._queued) >= self.limit:
            raise queue_full(f"{self.limit} requests are queued")
        now = time.monotonic()
        work = pieces[0][0]
        rows = pieces[0][1] if len(pieces) == 1 else sum([rows for _, rows in pieces])
        level, expires, latest_start = self._apply_policy(work, rows, now)
        added = [Waiting(piece, rows, key, now, expires, latest_start) for piece, rows in pieces]
        for waiting in added:
            level.count += 1
            self._rows += self._rows_of(waiting)
            self._queued[waiting.work] = (level, waiting)
            level.waiting.append(waiting)
        return added

    def _rows_of(self, waiting: Waiting) -> int:
        # A request that runs alone fills a batch.
        return self._rules.max_rows if waiting.key is None else waiting.rows

    def _apply_policy(self, work: Work, rows: int, now: float) -> tuple[Level, float, float]:
        """Return a request's level, when it expires, and when it must start.

        Raise `QueueFull`, `Unavailable`.
        """
        call = work.call
        level = self._level(self._batching.level(call.scheduling.priority))
        self._check_room(level, rows)
        timeout = _timeout(level.policy, call.scheduling.timeout)
        expires = now + timeout if timeout else inf
        return level, expires, latest_start_of(call.deadline, now)

    def _level(self, number: int) -> Level:
        level = self._levels.get(number)
        if level is None:
            policy = self._batching.policy_of(number)
            level = self._levels[number] = Level(number, policy.delay_expired, policy=policy)
            insort(self._lanes, level, key=lambda lane: lane.level)
        return level

    def _check_room(self, level: Level, rows: int) -> None:
        limit = level.policy.max_queue_size
        if limit and level.count >= limit:
            of = f" of priority level {level.level}" if level.level else ""
            raise queue_full(f"{limit} requests{of} are queued")
        limit = self._batching.max_waiting_batches
        if limit and self._queued and self._rows + rows > limit * self._rules.max_rows:
            raise Unavailable(
                "The batch scheduling queue to which this task was submitted is full; currently "
                f"{self.batches} batches enqueued and max_enqueued_batches is {limit}",
                retry_after=RETRY_AFTER_SECONDS,
            )

    def discard(self, work: Work) -> bool:
        """Remove a request; returns False if it is not queued."""
        if (found := self._queued.get(work)) is None:
            return False
        self._remove(*found)
        self._stale_entries += 1
        if self._stale_entries > MAX_STALE_ENTRIES + len(self._queued):
            self._sweep()
        return True

    def _remove(self, level: Level, waiting: Waiting) -> Work:
        work: Work = waiting.work
        del self._queued[work]
        waiting.is_removed = True
        waiting.work = None  # Its entry in the lane remains, but not its data.
        level.count -= 1
        self._rows -= self._rows_of(waiting)
        return work

    def expired(self) -> tuple[list[Work], float]:
        """Remove the requests that have expired; returns them, and when the next one expires."""
        now, nearest = time.monotonic(), inf
        refused: list[Work] = []
        for level, waiting in list(self._queued.values()):
            work = waiting.work
            if level.delays or waiting.expires > now:
                nearest = nearest if level.delays else min(nearest, waiting.expires)
            elif self.discard(work):
                refused.append(work)
        self._timeouts += len(refused)
        return refused, nearest

    def take(self) -> NextWork:
        """Return what is to be executed now."""
        if not self._queued:
            return NextWork()
        while True:
            decision = form(self._lanes, time.monotonic(), self._rules, draining=self.closed)
            taken = self._carry_out(decision)
            if taken.refused or taken.works or taken.wait is not None or decision.then is None:
                return taken

    def _sweep(self) -> None:
        """Remove the entries of cancelled requests from all lanes."""
        self._stale_entries = 0
        for lane in self._lanes:
            lane.waiting = deque([waiting for waiting in lane.waiting if not waiting.is_removed])
            lane.late = deque([waiting for waiting in lane.late if not waiting.is_removed])

    def _carry_out(self, decision: Decision) -> NextWork:
        taken = NextWork()
        for lane, waiting in decision.late:
            assert isinstance(lane, Level)
            lane.waiting.remove(waiting)
            lane.late.append(waiting)
        for waiting in decision.refused:
            taken.refused.append(self._claim(waiting))
        self._timeouts += len(taken.refused)
        then = decision.then
        if isinstance(then, Wait):
            taken.wait = then
        elif isinstance(then, Run) and not taken.refused:
            self._run(then, taken)
        for lane in self._lanes:
            _drop_stale(lane)
        if len(self._lanes) > MAX_EMPTY_LANES:
            self._lanes = [lane for lane in self._lanes if lane.waiting or lane.late]
            self._levels = {lane.level: lane for lane in self._lanes}
        if isinstance(then, Run) and decision.mixed:
            self._sweep()  # Requests that were not taken come before those that were.
        return taken

    def _run(self, run: Run, taken: NextWork) -> None:
        taken.joinable = run.members[0].key is not None
        taken.works = [self._claim(waiting) for waiting in run.members]
        taken.batched = taken.joinable or taken.works[0].buffer is None
        self._counts.add(run.reason, len(taken.works), sum([waiting.rows for waiting in run.members]))

    def _claim(self, waiting: Waiting) -> Work:
        return self._remove(*self._queued[waiting.work])

    def readings(self) -> Iterator[Reading]:
        """Yield the metrics of executed batches, by the reason why they were closed, and of timeouts."""
        yield from self._counts.readings()
        yield Reading(
            "queue_timeouts",
            "Requests that exceeded the timeout of their queue policy.",
            self._timeouts,
            counter=True,
        )


def _drop_stale(lane: Level) -> None:
    for places in (lane.waiting, lane.late):
        while places and places[0].is_removed:
            places.popleft()


def _timeout(policy: QueuePolicy, own: float) -> float:
    """Return the seconds for which a request may be queued.

    Its own timeout can only shorten the policy's (spec 5.1).
    """
    if policy.allow_timeout_override and 0 < own < policy.timeout:
        return own
    return policy.timeout


def expired() -> ServingError:
    """Return the error of a request that was queued for too long."""
    return Unavailable("Request timeout expired", retry_after=RETRY_AFTER_SECONDS)
