"""Distributions as a few weighted points, which can be sent to another process and merged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

Points = list[tuple[float, int]]
SHARES = (0.0, 0.5, 0.9, 0.99, 1.0)
POINTS_EACH = 8
"""Points between two of the shares, chosen so that the percentiles 50, 90 and 99 are accurate."""


def points_of(ordered: Sequence[float]) -> Points:
    """Return the ascending values, or 32 of them, each the largest of those that it represents."""
    count = len(ordered)
    if count <= (len(SHARES) - 1) * POINTS_EACH:
        return [(value, 1) for value in ordered]
    ends = [0]
    for low, high in pairwise(SHARES):
        start, size = round(low * count), round(high * count) - round(low * count)
        ends += [start + size * part // POINTS_EACH for part in range(1, POINTS_EACH + 1)]
    return [(ordered[end - 1], end - start) for start, end in pairwise(ends) if end > start]


def together(parts: Iterable[Iterable[Sequence[float]]]) -> Points:
    """Merge the points of several distributions."""
    return sorted((value, int(weight)) for part in parts for value, weight in part)


def point(points: Points, share: int) -> float | None:
    """Return a percentile, `share` being in ten-thousandths; None without points."""
    needed = -(-sum(weight for _, weight in points) * share // 10_000)
    for value, weight in points:
        needed -= weight
        if needed <= 0:
            return value
    return None
