"""What workers have counted, of which some are gone: sums do not become smaller with that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triglot.dataplane.control import METRICS, TFSERVING_METRICS
from triglot.telemetry.merging import growing, merged_pages, merged_texts

Snapshots = dict[str, Any]
"""What a worker has said last, by the name of the report."""


def _pages(past: Any, last: Any) -> Any:
    pages = [(0, growing(page)) for page in (past, last) if page is not None]
    return merged_pages(pages)


def _texts(past: Any, last: Any) -> Any:
    return merged_texts([text for text in (past, last) if text is not None])


KEPT: dict[str, Callable[[Any, Any], Any]] = {METRICS: _pages, TFSERVING_METRICS: _texts}
"""The reports of which something remains, and what adds one to what remains of others."""


class Past:
    """What remains of workers that are gone."""

    def __init__(self) -> None:
        self._sums: Snapshots = {}

    def take(self, last: Snapshots) -> None:
        """The last reports of a worker."""
        for name, add in KEPT.items():
            if name in last:
                self._sums[name] = add(self._sums.get(name), last[name])

    def of(self, name: str) -> Any:
        """The sum for a report; None where there is none."""
        return self._sums.get(name)
