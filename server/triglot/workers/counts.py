"""Counters of ended workers are kept, so that sums over all workers never decrease."""

from __future__ import annotations

from typing import Any

from triglot.dataplane.control import METRICS, TFSERVING_METRICS
from triglot.telemetry.merging import Page, growing, merged_pages

Snapshots = dict[str, Any]
"""A worker's last reports by name."""
KEPT = (METRICS, TFSERVING_METRICS)
"""The reports that are kept."""


class RetiredCounters:
    """The sums of ended workers' reports."""

    def __init__(self) -> None:
        self._sums: dict[str, Page] = {}

    def add(self, last: Snapshots) -> None:
        """Add the last reports of a worker."""
        for name in KEPT:
            if name in last:
                pages = [*([self._sums[name]] if name in self._sums else []), last[name]]
                self._sums[name] = merged_pages([(0, growing(page)) for page in pages])

    def total(self, name: str) -> Page | None:
        """Return the sum of a report."""
        return self._sums.get(name)
