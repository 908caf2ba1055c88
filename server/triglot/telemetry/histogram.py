"""Distributions: histograms with fixed limits, and ranks of sorted values."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

LATENCY_LIMITS = tuple(10 * 1.8**power for power in range(33))
"""Upper limits of the buckets of times, in microseconds (tfs 4.7)."""


class Histogram:
    """How many values fell below each limit, and their sum. By default of times, in microseconds."""

    __slots__ = ("counts", "limits", "sum")

    def __init__(self, limits: Sequence[float] = LATENCY_LIMITS) -> None:
        self.limits = limits
        self.counts = [0] * (len(limits) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """One more value."""
        self.counts[bisect_left(self.limits, value)] += 1
        self.sum += value

    def add_many(self, value: float, count: int) -> None:
        """The same value so many times."""
        self.counts[bisect_left(self.limits, value)] += count
        self.sum += value * count

    def merge(self, other: Histogram) -> None:
        """Take in the values of another one with the same limits."""
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum

    @property
    def count(self) -> int:
        """How many values there are."""
        return sum(self.counts)


def rank(ordered: Sequence[float], share: int) -> float:
    """The smallest of the ascending values that `share` ten-thousandths of them do not exceed; there is one."""
    return ordered[max(0, -(-len(ordered) * share // 10_000) - 1)]
