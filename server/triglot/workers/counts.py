"""Counters of ended workers are kept, so that sums over all workers never decrease."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triglot.dataplane.control import METRICS, TFSERVING_METRICS
from triglot.telemetry.merging import growing, merged_pages, merged_texts

Snapshots = dict[str, Any]
"""A worker's last reports by name."""


def _pages(past: Any, last: Any) -> Any:
    pages = [(0, growing(page)) for page in (past, last) if page is not None]
    return merged_pages(pages)


def _texts(past: Any, last: Any) -> Any:
    return merged_texts([text for text in (past, last) if text is not None])


KEPT: dict[str, Callable[[Any, Any], Any]] = {METRICS: _pages, TFSERVING_METRICS: _texts}
"""The reports that are kept, with the function that adds one to the sum."""


class Past:
    """The sums of ended workers' reports."""

    def __init__(self) -> None:
        self._sums: Snapshots = {}

    def take(self, last: Snapshots) -> None:
        """Add the last reports of a worker."""
        for name, add in KEPT.items():
            if name in last:
                self._sums[name] = add(self._sums.get(name), last[name])

    def of(self, name: str) -> Any:
        """Returns the sum of a report, or None."""
        return self._sums.get(name)
