"""Two settings of a batcher in turn, and which of them is the better one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt

SETTLE_BATCHES = 2
"""After a change of the setting, for each instance; they are what the one before has left."""
SLOT_BATCHES = 8
"""For each instance."""
FEWEST_PAIRS, MOST_PAIRS = 4, 8
SMALL, LARGE = 0.02, 0.25
"""Of differences, as logarithms: not worth a change; enough to give up early."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How an idle instance waits.

    `wait` is a share of the longest delay that may pay, `company` a share of the rows that are in flight: half of
    them or less are also the most that a batch takes.
    """

    wait: float
    company: float = 1.0

    @property
    def splits(self) -> bool:
        """Whether those in flight are parts that take turns."""
        return self.company <= 0.5


class Lateness:
    """Whether more than one in a hundred requests are later than allowed."""

    __slots__ = ("_batches", "_late", "_limit", "_seen")

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._batches = self._seen = self._late = 0.0

    def add(self, latencies: Sequence[float]) -> None:
        """Count those of a batch."""
        self._batches += 1
        self._seen += len(latencies)
        if max(latencies) > self._limit:
            self._late += sum([latency > self._limit for latency in latencies])
        if self._seen > 4000:  # What is long ago counts less and less.
            self._batches, self._seen, self._late = self._batches / 2, self._seen / 2, self._late / 2

    @property
    def doubtful(self) -> bool:
        """Whether they are, beyond what chance would do to requests that are late one by one."""
        allowed = self._seen / 100
        return self._late > allowed + 2 * sqrt(allowed) + 1

    @property
    def violated(self) -> bool:
        """Whether they are, beyond what chance does: the requests of a batch are late together, and what holds up
        the server holds up a batch that runs and one that waits."""
        if not self._late:
            return False
        allowed, batch = self._seen / 100, self._seen / self._batches
        return self._late > allowed + 2 * sqrt(allowed * batch) + 2 * batch


class _Slot:
    """What one setting gave for a while."""

    __slots__ = ("_batches", "_began", "_last", "_requests", "_rows", "_seconds", "latency", "rate")

    def __init__(self, instances: int) -> None:
        self._batches = -SETTLE_BATCHES * instances
        self._last = SLOT_BATCHES * instances
        self._began = self._seconds = 0.0
        self._rows = self._requests = 0
        self.rate = self.latency = 0.0

    def add(self, now: float, rows: int, latencies: Sequence[float]) -> bool:
        """Count a batch; whether it was the last one."""
        self._batches += 1
        if self._batches <= 0:
            self._began = now
            return False
        self._rows += rows
        self._requests += len(latencies)
        self._seconds += sum(latencies)
        self.rate = self._rows / max(now - self._began, 1e-9)
        self.latency = self._seconds / self._requests
        return self._batches == self._last


class Trial:
    """Compares `other` with the setting in use: slots of both in turn, as A B, B A, A B, …

    Strategy: by Little's law clients that wait for their answers send (their number / latency) requests a second,
    and how many others send is theirs to say. So the setting with the lower mean latency is the one with the
    higher throughput, and latency tells sooner, as chance arrivals are no part of it. The throughput decides where
    it says otherwise: then the clients are held up elsewhere, by what the batches cost the rest of the server.
    Pairs of neighbouring slots are compared, so a load that changes meanwhile touches both.
    """

    def __init__(self, other: Setting, limit: float, instances: int = 1) -> None:
        self.other = other
        self.lateness = Lateness(limit)
        """Of `other`."""
        self.on_other = False
        self._instances = instances
        self._slot = _Slot(instances)
        self._first: _Slot | None = None
        self._slower: list[float] = []
        self._richer: list[float] = []

    def add(self, now: float, rows: int, latencies: Sequence[float]) -> None:
        """Count a batch of the setting whose turn it is."""
        ended = self._slot.add(now, rows, latencies)
        if self.on_other and self._slot.latency:
            self.lateness.add(latencies)
        if not ended:
            return
        done, self._slot = self._slot, _Slot(self._instances)
        if self._first is None:
            self._first, self.on_other = done, not self.on_other
            return
        mine, other = (self._first, done) if self.on_other else (done, self._first)
        self._first = None
        self._slower.append(log(max(other.latency, 1e-9) / max(mine.latency, 1e-9)))
        self._richer.append(log(other.rate / mine.rate))

    @property
    def verdict(self) -> float | None:
        """Above 0: `other` is better; below 0: it is worse; 0: they are alike; None: not known yet."""
        pairs = len(self._slower)
        if pairs < 2 or self._first is not None:
            return None
        if max(self._richer) < -LARGE or (min(self._slower) > LARGE and sum(self._richer) <= LARGE * pairs):
            return -1.0
        if pairs < FEWEST_PAIRS:
            return None
        latency = _sure(self._slower, 3.0)
        if latency < 0 or (latency > 0 and sum(self._richer) <= SMALL * pairs) or pairs >= MOST_PAIRS:
            return _sure(self._richer, 4.0) or -latency
        return None


def _sure(logs: Sequence[float], errors: float) -> float:
    """The mean, where it is not small and so many standard errors away from 0; else 0."""
    mean = sum(logs) / len(logs)
    error = sqrt(sum([(one - mean) ** 2 for one in logs]) / (len(logs) - 1) / len(logs))
    return mean if abs(mean) > max(SMALL, errors * error) else 0.0
