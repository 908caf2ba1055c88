"""Delivers responses in the order in which the requests arrived (spec 5.1, preserve_ordering)."""

from __future__ import annotations

from collections import OrderedDict

from triglot.executors.work import Work


class ArrivalOrder:
    """Delivers a request that is `done` once all that arrived before it are delivered or removed.

    On the event loop.
    """

    def __init__(self) -> None:
        self._pending: OrderedDict[Work, bool] = OrderedDict()
        """Requests to deliver, in order of arrival, and whether each is done."""

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, work: Work) -> None:
        """Add an arriving request."""
        self._pending[work] = False

    def done(self, work: Work) -> None:
        """Mark a request as done, and deliver those whose turn has come."""
        if work in self._pending:
            self._pending[work] = True
            self._deliver()

    def remove(self, work: Work) -> None:
        """Remove a cancelled request; its outcome is not delivered."""
        self._pending.pop(work, None)
        self._deliver()

    def _deliver(self) -> None:
        while self._pending and self._pending[first := next(iter(self._pending))]:
            del self._pending[first]
            first.deliver()
