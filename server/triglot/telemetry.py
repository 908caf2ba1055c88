"""What happened, in numbers. Kept on the event loop, read by whoever prints it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from triglot.core.errors import Code

MAX_MODEL_NAMES, LONGEST_NAME = 1000, 128
"""Names that clients make up are told apart up to this number, and to this length in characters."""
LATENCY_LIMITS = tuple(10 * 1.8**power for power in range(33))
"""Upper limits of the buckets of latency, in microseconds (tfs 4.7)."""


class Histogram:
    """How many values fell below each limit, and their sum."""

    __slots__ = ("counts", "limits", "sum")

    def __init__(self, limits: Sequence[float]) -> None:
        self.limits = limits
        self.counts = [0] * (len(limits) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """One more value."""
        self.counts[bisect_left(self.limits, value)] += 1
        self.sum += value


class CallKind(NamedTuple):
    """What calls are told apart by: the door ("GRPC" or "REST"), what was called, the model, the outcome."""

    door: str
    api: str
    model: str
    code: Code


class Telemetry:
    """The calls since the start, by kind; latency in microseconds."""

    def __init__(self) -> None:
        self._calls: dict[CallKind, Histogram] = {}
        self._models: set[str] = set()

    def record(self, door: str, api: str, model: str, code: Code, seconds: float) -> None:
        """One call has ended."""
        kind = CallKind(door, api, model, code)
        latency = self._calls.get(kind)
        if latency is None:
            full = model not in self._models and len(self._models) >= MAX_MODEL_NAMES
            if full or len(model) > LONGEST_NAME:
                kind = kind._replace(model="")
            self._models.add(kind.model)
            latency = self._calls.setdefault(kind, Histogram(LATENCY_LIMITS))
        latency.add(seconds * 1e6)

    def calls(self) -> Iterator[tuple[CallKind, Histogram]]:
        """The latencies of each kind of call."""
        yield from self._calls.items()
