"""Decides which queued requests are executed next, and why: plain functions (spec 5.1).

Strategy: `form` walks over the requests in the order in which they are due, and gathers those that can share a
batch with the first one. As in Triton, a batch waits to grow only as long as nothing else is queued: a request
that cannot share it closes it. Where all can share it, the walk ends with the batch, however many are queued.
It changes nothing; the caller carries out the decision. Nothing here knows threads, event loops or arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import Any, Literal

Reason = Literal["full", "preferred", "delay", "no_delay", "deadline", "drained", "alone"]
"""Why a batch was closed:

- full: no further request fits, or none can be added, since a request that cannot share the batch is queued;
- preferred: it has a preferred size, or the minimum slot utilization of sequences is reached;
- delay: its oldest request has been queued for the maximum queue delay;
- no_delay: an instance is idle, and no delay is configured;
- deadline: further waiting would leave a request too little time until its deadline;
- drained: the model is being unloaded;
- alone: a request that shares no batch.
"""


@dataclass(slots=True, eq=False)
class Waiting:
    """A queued request.

    Requests with equal `key`s can share a batch; one with the key None runs alone. Instants are in seconds of
    one clock: at `expires` it has been queued longer than its policy allows; after `latest_start` it is no longer
    delayed for a batch to grow. `is_removed`: it is no longer queued, for whatever reason.
    """

    work: Any
    rows: int
    key: object
    arrived: float
    expires: float = inf
    latest_start: float = inf
    is_removed: bool = False


def latest_start_of(deadline: float | None, now: float) -> float:
    """Return when a request arriving now may no longer be delayed: half-way to its deadline."""
    return inf if deadline is None else now + (deadline - now) / 2


@dataclass(slots=True, eq=False)
class Lane:
    """The queued requests of one priority level, in order of arrival.

    `delays`: expired requests are moved to `late`, and run after the others; otherwise they are rejected.
    """

    level: int = 0
    delays: bool = False
    waiting: Sequence[Waiting] = ()
    late: Sequence[Waiting] = ()


@dataclass(frozen=True, slots=True)
class Rules:
    """Largest batch in rows, `preferred` sizes (ascending), and the seconds that a batch waits to grow."""

    max_rows: int
    preferred: Sequence[int] = ()
    delay: float = 0.0

    @property
    def largest(self) -> int:
        """Rows beyond which a batch does not grow while it is younger than the delay."""
        return self.preferred[-1] if self.preferred else self.max_rows

    def next_size(self, rows: int) -> int:
        """Return the next size at which a batch that has `rows` now is executed at once."""
        return next((size for size in self.preferred if size > rows), self.max_rows)


@dataclass(frozen=True, slots=True)
class Run:
    """Execute these together."""

    members: Sequence[Waiting]
    reason: Reason


@dataclass(frozen=True, slots=True)
class Wait:
    """Decide again at `until`, or earlier if a request arrives that ends the wait.

    That is one with another `key`, one that expires before `until`, or one that makes the `rows` reach `target`.
    """

    until: float
    key: object
    rows: int
    target: int


@dataclass(slots=True)
class Decision:
    """What to do: `then`, or nothing if nothing can run.

    Before that, reject `refused`, which have been queued longer than their policy allows, and move `late`
    behind the others of their level; a late request may be a member of the batch at the same time. `mixed`: not
    all queued requests can share a batch.
    """

    then: Run | Wait | None = None
    refused: list[Waiting] = field(default_factory=list)
    late: list[tuple[Lane, Waiting]] = field(default_factory=list)
    mixed: bool = False


def form(lanes: Sequence[Lane], now: float, rules: Rules, *, draining: bool = False) -> Decision:
    """Return what an idle instance does next; `lanes` in order of priority.

    `draining`: no more requests will arrive.
    """
    decision = Decision()
    batch: _Pending | None = None
    for waiting in _in_order(lanes, now, decision):
        if batch is None:
            batch = _Pending(rules, waiting.key)
        if waiting.key != batch.key:
            decision.mixed = True
        elif not batch.take(waiting):
            break
    if batch is not None:
        decision.then = batch.close(now, draining, decision.mixed)
    return decision


def _in_order(lanes: Sequence[Lane], now: float, decision: Decision) -> Iterator[Waiting]:
    for lane in lanes:
        moved: list[Waiting] = []
        for waiting in lane.waiting:
            if waiting.is_removed:
                continue
            if waiting.expires > now:
                yield waiting
            elif lane.delays:
                moved.append(waiting)
            else:
                decision.refused.append(waiting)
        # If the walk ends before this line, the next walk finds them again.
        decision.late += [(lane, waiting) for waiting in moved]
        for waiting in chain(lane.late, moved):
            if not waiting.is_removed:
                yield waiting


class _Pending:
    """A batch being formed, request by request; all have the same `key`."""

    __slots__ = ("_best", "_largest", "_reason", "_rows", "_rules", "key", "members")

    def __init__(self, rules: Rules, key: object) -> None:
        self.key = key
        self.members: list[Waiting] = []
        self._rules = rules
        self._largest = rules.largest
        self._rows = 0
        self._best = 0  # Members up to the largest preferred size.
        self._reason: Reason | None = None

    def take(self, waiting: Waiting) -> bool:
        """Add a request if it fits; returns whether the batch may grow further."""
        members, rules = self.members, self._rules
        rows = self._rows + waiting.rows
        if members:
            # Run this many when no preferred size can be reached exactly.
            if rows > self._largest and not self._best:
                self._best = len(members)
            if rows > rules.max_rows:
                self._reason = "full"
                return False
        members.append(waiting)
        self._rows = rows
        if rows in rules.preferred:
            self._best = len(members)
        if waiting.key is None:
            self._reason = "alone"
        elif rows >= rules.max_rows:
            self._reason = "full"
        return self._reason is None

    def close(self, now: float, draining: bool, mixed: bool) -> Run | Wait:
        members, rules = self.members, self._rules
        if not rules.delay and not self._best:  # No delay: the instants do not matter.
            return Run(members, self._reason or self._reason_to_run(draining, False, False) or "no_delay")
        due = min([waiting.arrived for waiting in members]) + rules.delay
        too_old = rules.delay > 0 and now >= due
        if self._best and not (too_old or draining or self._reason == "alone"):
            return self._run_best()
        latest_start = min([waiting.latest_start for waiting in members])
        reason = self._reason or self._reason_to_run(draining, too_old, now >= latest_start)
        if reason is None and mixed:
            reason = "full"
        if reason is not None:
            return Run(members, reason)
        expires = min([waiting.expires for waiting in members if waiting.expires > now], default=inf)
        return Wait(min(due, latest_start, expires), members[0].key, self._rows, rules.next_size(self._rows))

    def _reason_to_run(self, draining: bool, too_old: bool, is_last_moment: bool) -> Reason | None:
        """Return why a batch that could grow is executed now, or None."""
        rules, rows = self._rules, self._rows
        if draining:
            return "drained"
        if too_old:
            return "delay"
        if rows >= self._largest:
            return "preferred"
        if not rules.delay:
            return "no_delay"
        return "deadline" if is_last_moment else None

    def _run_best(self) -> Run:
        best = self.members[: self._best]
        rows = sum([waiting.rows for waiting in best])
        if rows in self._rules.preferred and rows < self._rules.max_rows:
            return Run(best, "preferred")
        return Run(best, self._reason or "full")
