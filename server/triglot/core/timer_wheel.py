"""Deadlines of many calls, most of which end before theirs: the loop has one timer for all of them."""

from __future__ import annotations

import asyncio
import logging
from heapq import heapify, heappop, heappush
from time import monotonic
from typing import Protocol

log = logging.getLogger(__name__)

TICKS = 256
"""Of a second."""
LEAST_SECONDS = 0.001
"""What the loop's timers are good for."""
STALE_TICKS = 1024
"""As many ticks may wait, besides twice those that have entries, for which there is nothing to do any more."""


class Expiring(Protocol):
    """What has a deadline. Equal to nothing but itself."""

    def expire(self) -> object:
        """The deadline has passed."""


class TimerWheel:
    """Calls `expire` of each entry that is not discarded, at its deadline or up to a tick later. On the loop.

    Strategy: a timer of the loop's own, made and cancelled, costs as much as a small model. Here, an entry is
    added to the set of its tick, and discarded from it.
    """

    __slots__ = ("_armed", "_due", "_loop", "_slots")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._slots: dict[int, set[Expiring]] = {}
        """The entries of each tick; no set is empty."""
        self._due: list[int] = []
        """A heap of the ticks that have, or had, entries."""
        self._armed = 0
        """The tick that the loop's timer waits for; 0: none."""

    def __len__(self) -> int:
        return sum(map(len, self._slots.values()))

    def add(self, entry: Expiring, deadline: float) -> int:
        """Have it expire at `deadline`, of `time.monotonic`; the tick, for `discard`."""
        tick = int(deadline * TICKS) + 1
        slot = self._slots.get(tick)
        if slot is None:
            self._slots[tick] = {entry}
            heappush(self._due, tick)
            if not self._armed or tick < self._armed:
                self._arm(tick)
        else:
            slot.add(entry)
        return tick

    def discard(self, entry: Expiring, tick: int) -> None:
        """It has ended, or it expires just now."""
        slot = self._slots.get(tick)
        if slot is None:
            return
        slot.discard(entry)
        if not slot:
            del self._slots[tick]
            if len(self._due) > 2 * len(self._slots) + STALE_TICKS:
                self._due = list(self._slots)
                heapify(self._due)

    def _arm(self, tick: int) -> None:
        self._armed = tick
        self._loop.call_later(max(LEAST_SECONDS, tick / TICKS - monotonic()), self._ring, tick)

    def _ring(self, tick: int) -> None:
        if tick != self._armed:
            return  # An earlier one came meanwhile, and looks at all that is due.
        self._armed = 0
        due, slots = self._due, self._slots
        now = int(monotonic() * TICKS)
        try:
            while due and due[0] <= now:
                for entry in slots.pop(heappop(due), ()):
                    try:
                        entry.expire()
                    except Exception:  # The others are due, too.
                        log.exception("the handler of a deadline failed")
        finally:
            while due and due[0] not in slots:
                heappop(due)
            if due:
                self._arm(due[0])
