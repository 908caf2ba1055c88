"""Distributions: histograms with fixed limits and examples of their values, and ranks of sorted values."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from triglot.core.trace_context import Span

LATENCY_LIMITS = tuple(10 * 1.8**power for power in range(33))
"""Upper limits of the buckets of times, in microseconds (tfs 4.7)."""


class Exemplar(NamedTuple):
    """A value of a histogram, when it came in seconds since the epoch, and the span of its call."""

    time: float
    value: float
    span: Span


class Histogram:
    """How many values fell below each limit, and their sum. By default of times, in microseconds.

    `exemplars`: of each bucket the latest value of a call that was traced; None where none was.
    """

    __slots__ = ("counts", "exemplars", "limits", "sum")

    def __init__(self, limits: Sequence[float] = LATENCY_LIMITS) -> None:
        self.limits = limits
        self.counts = [0] * (len(limits) + 1)
        self.sum = 0.0
        self.exemplars: list[Exemplar | None] | None = None

    def add(self, value: float) -> None:
        """One more value."""
        self.counts[bisect_left(self.limits, value)] += 1
        self.sum += value

    def add_many(self, value: float, count: int) -> None:
        """The same value so many times."""
        self.counts[bisect_left(self.limits, value)] += count
        self.sum += value * count

    def add_exemplar(self, exemplar: Exemplar) -> None:
        """Keep it as the latest of its bucket; its value has been added."""
        if self.exemplars is None:
            self.exemplars = [None] * len(self.counts)
        self.exemplars[bisect_left(self.limits, exemplar.value)] = exemplar

    def merge(self, other: Histogram) -> None:
        """Take in the values of another one with the same limits."""
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum
        if other.exemplars is not None:
            mine = self.exemplars or [None] * len(self.counts)
            self.exemplars = [latest(pair) for pair in zip(mine, other.exemplars, strict=True)]

    @property
    def count(self) -> int:
        """How many values there are."""
        return sum(self.counts)


def latest(exemplars: Iterable[Exemplar | None]) -> Exemplar | None:
    """The latest one; None where there is none."""
    return max((one for one in exemplars if one is not None), key=lambda one: one.time, default=None)


def rank(ordered: Sequence[float], share: int) -> float:
    """The smallest of the ascending values that `share` ten-thousandths of them do not exceed; there is one."""
    return ordered[max(0, -(-len(ordered) * share // 10_000) - 1)]
