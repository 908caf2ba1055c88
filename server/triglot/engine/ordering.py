"""Answers that leave in the order in which their requests came (spec 5.1, preserve_ordering)."""

from __future__ import annotations

from collections import deque

from triglot.engine.work import Execution


class ArrivalOrder:
    """On the loop. A request that is `done` is delivered when all that came before it are, or were given up."""

    def __init__(self) -> None:
        self._came: deque[Execution] = deque()
        self._waiting: set[Execution] = set()
        """Those that are not done."""
        self._there: set[Execution] = set()
        """Those that are to be delivered."""

    def __len__(self) -> int:
        return len(self._there)

    def came(self, work: Execution) -> None:
        """It has its place from now on."""
        self._came.append(work)
        self._waiting.add(work)
        self._there.add(work)

    def done(self, work: Execution) -> None:
        """It has its outcome."""
        self._waiting.discard(work)
        self._deliver()

    def give_up(self, work: Execution) -> None:
        """Nobody waits for it any more; whatever its outcome is, it is not delivered."""
        self._there.discard(work)
        self._waiting.discard(work)
        self._deliver()

    def _deliver(self) -> None:
        while self._came and self._came[0] not in self._waiting:
            first = self._came.popleft()
            if first in self._there:
                self._there.remove(first)
                first.deliver()
