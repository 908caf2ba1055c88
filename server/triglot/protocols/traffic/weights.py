"""Divides calls among versions by weight: a pure function of a point, and points that are spread evenly.

Strategy: each version has a part of the numbers below 2**64. Successive multiples of the golden ratio fall into
the parts more evenly than chance does, without a period that a client's calls could share; the hash of a key
always falls into the same part. The lowest version has the first part, so that a change between two versions
moves only the keys that it must.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from hashlib import blake2b
from itertools import accumulate

SPACE = 1 << 64
GOLDEN_STEP = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio."""
SILVER_STEP = 0x6A09E667F3BCC909
"""2**64 times the square root of 2, less 2**64: points that are independent of the others."""


class Weights:
    """The parts of some versions, by weight; at least one is above 0."""

    __slots__ = ("_ends", "percent", "versions")

    def __init__(self, weights: Mapping[int, float]) -> None:
        total = sum(weights.values())
        self.versions = [number for number in sorted(weights) if weights[number]]
        self._ends = [round(end / total * SPACE) for end in accumulate(weights[at] for at in self.versions)]
        self.percent = {number: 100 * weights[number] / total for number in self.versions}

    def at(self, point: int) -> int:
        """Return the version that has this point."""
        return self.versions[min(bisect_right(self._ends, point), len(self.versions) - 1)]


class Points:
    """Points that are spread evenly; `step` is odd."""

    __slots__ = ("_at", "_step")

    def __init__(self, step: int = GOLDEN_STEP) -> None:
        self._at = 0
        self._step = step

    def next(self) -> int:
        """Return the next point."""
        self._at = point = (self._at + self._step) % SPACE
        return point


def point_of(key: object) -> int:
    """Return the point of a key: bytes, or a value that is the same as its text."""
    data = key if isinstance(key, bytes) else str(key).encode(errors="surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8).digest())
