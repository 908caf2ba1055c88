"""Distributions as few points, each with the number of values that it stands for: to be sent, and put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

Points = list[tuple[float, int]]
SHARES = (0.0, 0.5, 0.9, 0.99, 1.0)
POINTS_EACH = 8
"""Between two of the shares: what is asked for are the values at 50, 90 and 99 %."""


def points_of(ordered: Sequence[float]) -> Points:
    """The ascending values, or 32 of them, each the largest of those that it stands for."""
    count = len(ordered)
    if count <= (len(SHARES) - 1) * POINTS_EACH:
        return [(value, 1) for value in ordered]
    ends = [0]
    for low, high in pairwise(SHARES):
        start, size = round(low * count), round(high * count) - round(low * count)
        ends += [start + size * part // POINTS_EACH for part in range(1, POINTS_EACH + 1)]
    return [(ordered[end - 1], end - start) for start, end in pairwise(ends) if end > start]


def together(parts: Iterable[Iterable[Sequence[float]]]) -> Points:
    """The points of several distributions as those of one."""
    return sorted((value, int(weight)) for part in parts for value, weight in part)


def point(points: Points, share: int) -> float | None:
    """The smallest value that `share` ten-thousandths do not exceed; None when there are none."""
    needed = -(-sum(weight for _, weight in points) * share // 10_000)
    for value, weight in points:
        needed -= weight
        if needed <= 0:
            return value
    return None
