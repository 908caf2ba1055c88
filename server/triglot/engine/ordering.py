"""Answers that leave in the order in which their requests came (spec 5.1, preserve_ordering)."""

from __future__ import annotations

from collections import deque

from triglot.engine.work import Execution


class ArrivalOrder:
    """On the loop. A request that is `done` is delivered when all that came before it are."""

    def __init__(self) -> None:
        self._came: deque[Execution] = deque()
        self._done: dict[Execution, bool] = {}

    def __len__(self) -> int:
        return len(self._came)

    def came(self, work: Execution) -> None:
        """It has its place from now on."""
        self._came.append(work)
        self._done[work] = False

    def done(self, work: Execution) -> None:
        """It has its outcome, or nobody waits for it any more."""
        if work not in self._done:
            return  # It was given up before, and an instance ran it still.
        self._done[work] = True
        while self._came and self._done[self._came[0]]:
            first = self._came.popleft()
            del self._done[first]
            first.deliver()
