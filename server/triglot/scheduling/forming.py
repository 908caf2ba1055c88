"""Which of the requests that wait are executed next, and why: decided in plain code (spec 5.1).

Strategy: `form` looks at the requests in the order in which they are due, and gathers those that can share a
batch with the first one. As in Triton, a batch waits to grow only as long as nothing else waits: a request that
cannot share it closes it. Where all can share it, the look ends with the batch, however many wait. It changes
nothing; whoever asks acts on the answer. Nothing here knows of threads, of loops, or of arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import Any, Literal

Reason = Literal["full", "preferred", "delay", "no_delay", "deadline", "drained", "alone"]
"""Why a batch was closed:

- full: no further request fits, or none can come, since one that cannot share the batch waits;
- preferred: it has a preferred size, or uses as many slots of sequences as are waited for;
- delay: its oldest request has waited for as long as it may;
- no_delay: an instance is idle, and nothing is to be waited for;
- deadline: to wait on would leave a request too little time until its deadline;
- drained: the model is being unloaded;
- alone: a request that shares no batch.
"""


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits.

    Requests with equal `key`s can share a batch, one with the key None runs alone. The instants are those of one
    clock: at `expires` it has waited longer than its policy allows; after `hurry` nobody waits for its company any
    more. `gone`: it is not there any more, for whatever reason.
    """

    work: Any
    rows: int
    key: object
    arrived: float
    expires: float = inf
    hurry: float = inf
    gone: bool = False


def hurry_of(deadline: float | None, now: float) -> float:
    """When a request that comes now is not kept for company any more: what is left has to be enough to run."""
    return inf if deadline is None else now + (deadline - now) / 2


@dataclass(slots=True, eq=False)
class Lane:
    """The requests of one priority level, in the order in which they came.

    `delays`: those that have expired run after the others, from `late`; otherwise they are refused.
    """

    level: int = 0
    delays: bool = False
    waiting: Sequence[Waiting] = ()
    late: Sequence[Waiting] = ()


@dataclass(frozen=True, slots=True)
class Rules:
    """Of how many rows a batch may be, which sizes are `preferred` (ascending), and how long it waits to grow."""

    max_rows: int
    preferred: Sequence[int] = ()
    delay: float = 0.0

    @property
    def largest(self) -> int:
        """Rows beyond which a batch does not grow while it is younger than the delay."""
        return self.preferred[-1] if self.preferred else self.max_rows

    def worth_waiting_for(self, rows: int) -> int:
        """The next size at which a batch of so many rows is executed at once."""
        return next((size for size in self.preferred if size > rows), self.max_rows)


@dataclass(frozen=True, slots=True)
class Run:
    """Execute these together."""

    members: Sequence[Waiting]
    reason: Reason


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again at `until`, or as soon as there is a request with another `key`, one that expires before that, or
    the `rows` that are there have become `target`."""

    until: float
    key: object
    rows: int
    target: int


@dataclass(slots=True)
class Decision:
    """What to do: `then`, or nothing when there is nothing that could run.

    Before that, the `refused` have waited longer than their policy allows, and the `late` go behind the others of
    their level; the latter may be members of a batch at the same time. `mixed`: not all of what waits can share a
    batch.
    """

    then: Run | Wait | None = None
    refused: list[Waiting] = field(default_factory=list)
    late: list[tuple[Lane, Waiting]] = field(default_factory=list)
    mixed: bool = False


def form(lanes: Sequence[Lane], now: float, rules: Rules, *, draining: bool = False) -> Decision:
    """What an instance that is idle does next; `lanes` in the order of their levels.

    `draining`: nothing will come any more.
    """
    decision = Decision()
    batch: _Pending | None = None
    for one in _in_order(lanes, now, decision):
        if batch is None:
            batch = _Pending(rules, one.key)
        if one.key != batch.key:
            decision.mixed = True
        elif not batch.take(one):
            break
    if batch is not None:
        decision.then = batch.close(now, draining, decision.mixed)
    return decision


def _in_order(lanes: Sequence[Lane], now: float, decision: Decision) -> Iterator[Waiting]:
    for lane in lanes:
        moved: list[Waiting] = []
        for one in lane.waiting:
            if one.gone:
                continue
            if one.expires > now:
                yield one
            elif lane.delays:
                moved.append(one)
            else:
                decision.refused.append(one)
        # Where the walk ends before this, they are found again by the next one.
        decision.late += [(lane, one) for one in moved]
        for one in chain(lane.late, moved):
            if not one.gone:
                yield one


class _Pending:
    """A batch that grows, request by request; all have the `key`."""

    __slots__ = ("_best", "_largest", "_reason", "_rows", "_rules", "key", "members")

    def __init__(self, rules: Rules, key: object) -> None:
        self.key = key
        self.members: list[Waiting] = []
        self._rules = rules
        self._largest = rules.largest
        self._rows = 0
        self._best = 0  # Members up to the largest preferred size.
        self._reason: Reason | None = None

    def take(self, one: Waiting) -> bool:
        """Whether there may be more, with this one or without it."""
        members, rules = self.members, self._rules
        rows = self._rows + one.rows
        if members:
            # So is what to run when no preferred size can be reached exactly.
            if rows > self._largest and not self._best:
                self._best = len(members)
            if rows > rules.max_rows:
                self._reason = "full"
                return False
        members.append(one)
        self._rows = rows
        if rows in rules.preferred:
            self._best = len(members)
        if one.key is None:
            self._reason = "alone"
        elif rows >= rules.max_rows:
            self._reason = "full"
        return self._reason is None

    def close(self, now: float, draining: bool, mixed: bool) -> Run | Wait:
        members, rules = self.members, self._rules
        if not rules.delay and not self._best:  # Nothing is waited for, whatever the times are.
            return Run(members, self._reason or self._why_now(draining, False, False) or "no_delay")
        due = min([one.arrived for one in members]) + rules.delay
        too_old = rules.delay > 0 and now >= due
        if self._best and not (too_old or draining or self._reason == "alone"):
            return self._run_best()
        hurry = min([one.hurry for one in members])
        reason = self._reason or self._why_now(draining, too_old, now >= hurry)
        if reason is None and mixed:
            reason = "full"
        if reason is not None:
            return Run(members, reason)
        expires = min([one.expires for one in members if one.expires > now], default=inf)
        return Wait(min(due, hurry, expires), members[0].key, self._rows, rules.worth_waiting_for(self._rows))

    def _why_now(self, draining: bool, too_old: bool, hurried: bool) -> Reason | None:
        """Why a batch that could grow is executed as it is, if so."""
        rules, rows = self._rules, self._rows
        if draining:
            return "drained"
        if too_old:
            return "delay"
        if rows >= self._largest:
            return "preferred"
        if not rules.delay:
            return "no_delay"
        return "deadline" if hurried else None

    def _run_best(self) -> Run:
        best = self.members[: self._best]
        rows = sum([one.rows for one in best])
        if rows in self._rules.preferred and rows < self._rules.max_rows:
            return Run(best, "preferred")
        return Run(best, self._reason or "full")
