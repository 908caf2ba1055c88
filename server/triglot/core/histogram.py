"""Distributions: histograms with fixed bucket limits and exemplars, and ranks of sorted values."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from triglot.core.trace_context import Span

LATENCY_LIMITS = tuple(10 * 1.8**power for power in range(33))
"""Upper limits of the buckets for durations, in microseconds (tfs 4.7)."""


Exemplar = tuple[float, float, Span]
"""When a value came, in seconds since the epoch; the value; the span of its call."""


class Histogram:
    """Counts of values by bucket, and their sum. The default limits are for times in microseconds.

    `exemplars` holds the latest value of a sampled call for each bucket, or None. It is None until the first one.
    """

    __slots__ = ("counts", "exemplars", "limits", "sum")

    def __init__(self, limits: Sequence[float] = LATENCY_LIMITS) -> None:
        self.limits = limits
        self.counts = [0] * (len(limits) + 1)
        self.sum = 0.0
        self.exemplars: list[Exemplar | None] | None = None

    def add(self, value: float, span: Span | None = None, now: float = 0.0) -> None:
        """Add one value. With the `span` of its call it becomes the bucket's exemplar, of the time `now`."""
        bucket = bisect_left(self.limits, value)
        self.counts[bucket] += 1
        self.sum += value
        if span is not None:
            if self.exemplars is None:
                self.exemplars = [None] * len(self.counts)
            self.exemplars[bucket] = (now, value, span)

    def add_many(self, value: float, count: int) -> None:
        """Add the same value `count` times."""
        self.counts[bisect_left(self.limits, value)] += count
        self.sum += value * count

    def merge(self, other: Histogram) -> None:
        """Add the values of another histogram with the same limits."""
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum
        if other.exemplars is not None:
            mine = self.exemplars or [None] * len(self.counts)
            self.exemplars = [latest(pair) for pair in zip(mine, other.exemplars, strict=True)]

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)


def latest(exemplars: Iterable[Exemplar | None]) -> Exemplar | None:
    """Return the latest exemplar, or None if there is none."""
    return max((one for one in exemplars if one is not None), key=lambda one: one[0], default=None)


def rank(ordered: Sequence[float], share: int) -> float:
    """Return the quantile `share`, in ten-thousandths, of ascending values, of which there is at least one."""
    return ordered[max(0, -(-len(ordered) * share // 10_000) - 1)]
