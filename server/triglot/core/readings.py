"""`Reading`, one value of a metric that a part of the server reports: counters and gauges, read on demand.

`BatchCounts` has the readings that all schedules with batches report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

NO_LABELS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Reading:
    """One value of one metric of one version of a model.

    `name` is without the server's prefix and, for a `counter` (it only grows), without `_total`; in base units.
    """

    name: str
    help: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
    counter: bool = False


class BatchCounts:
    """Counts of the batches that a schedule forms. Written by one thread at a time, readable on any."""

    def __init__(self) -> None:
        self._closed: dict[str, int] = {}
        self._requests = 0
        self._rows = 0

    def add(self, reason: str, requests: int, rows: int) -> None:
        """Count a batch that was closed for this reason."""
        self._closed[reason] = self._closed.get(reason, 0) + 1
        self._requests += requests
        self._rows += rows

    def readings(self, labels: Mapping[str, str] = NO_LABELS) -> Iterator[Reading]:
        """Yield the counts of batches by the reason for closing them, and of requests, with these labels."""
        for reason, count in list(self._closed.items()):
            text = "Batches, by the reason why they were closed."
            yield Reading("batches_closed", text, count, {**labels, "reason": reason}, counter=True)
        text = "Requests executed in batches."
        yield Reading("batched_requests", text, self._requests, labels, counter=True)
        yield Reading("batched_rows", "Rows executed in batches.", self._rows, labels, counter=True)
