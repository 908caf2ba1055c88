"""Timer wheel for the deadlines of many calls, most of which end early: one timer of the loop serves them all."""

from __future__ import annotations

import asyncio
import logging
from heapq import heapify, heappop, heappush
from time import monotonic
from typing import Protocol

log = logging.getLogger(__name__)

TICKS = 256
"""Ticks per second."""
MIN_SECONDS = 0.001
"""Shortest delay of the loop's timers, in seconds: their resolution."""
STALE_TICKS = 1024
"""Stale ticks that the heap may hold, besides twice the number of ticks with entries, before it is rebuilt."""


class Expiring(Protocol):
    """An entry with a deadline; compared by identity."""

    def expire(self) -> object:
        """Handle the passed deadline."""


class TimerWheel:
    """Calls `expire` of entries that were not discarded, at their deadline or up to a tick later. On the loop.

    Strategy: creating and cancelling a timer of the loop costs as much as running a small model. Here an entry is
    added to the set of its tick, and discarded from it.
    """

    __slots__ = ("_armed", "_due", "_loop", "_slots")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._slots: dict[int, set[Expiring]] = {}
        """Entries by tick; no set is empty."""
        self._due: list[int] = []
        """Heap of the ticks that have, or had, entries."""
        self._armed = 0
        """Tick that the loop's timer is set to; 0: none."""

    def __len__(self) -> int:
        return sum(map(len, self._slots.values()))

    def add(self, entry: Expiring, deadline: float) -> int:
        """Schedule `entry.expire` for `deadline`, a `time.monotonic` instant; returns the tick for `discard`."""
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
        """Remove an entry that has ended; does nothing if it is expiring just now."""
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
        self._loop.call_later(max(MIN_SECONDS, tick / TICKS - monotonic()), self._fire, tick)

    def _fire(self, tick: int) -> None:
        if tick != self._armed:
            return  # An earlier timer was set meanwhile, and handles all that is due.
        self._armed = 0
        due, slots = self._due, self._slots
        now = int(monotonic() * TICKS)
        try:
            while due and due[0] <= now:
                for entry in slots.pop(heappop(due), ()):
                    try:
                        entry.expire()
                    except Exception:  # The other entries are due, too.
                        log.exception("the handler of a deadline failed")
        finally:
            while due and due[0] not in slots:
                heappop(due)
            if due:
                self._arm(due[0])
