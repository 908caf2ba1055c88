"""Answers that leave in the order in which their requests came (spec 5.1, preserve_ordering)."""

from __future__ import annotations

from collections import OrderedDict

from triglot.executors.work import Execution


class ArrivalOrder:
    """On the loop. A request that is `done` is delivered when all that came before it are, or were given up."""

    def __init__(self) -> None:
        self._came: OrderedDict[Execution, bool] = OrderedDict()
        """Those that are to be delivered, and whether each is done."""

    def __len__(self) -> int:
        return len(self._came)

    def came(self, work: Execution) -> None:
        """It has its place from now on."""
        self._came[work] = False

    def done(self, work: Execution) -> None:
        """It has its outcome."""
        if work in self._came:
            self._came[work] = True
            self._deliver()

    def give_up(self, work: Execution) -> None:
        """Nobody waits for it any more; whatever its outcome is, it is not delivered."""
        self._came.pop(work, None)
        self._deliver()

    def _deliver(self) -> None:
        while self._came and self._came[first := next(iter(self._came))]:
            del self._came[first]
            first.deliver()
