"""Keeps the event loop awake for a moment after the last answer, where the next request is likely to come in it.

A core that sleeps takes some 50 µs to wake, more than the request itself, and who wakes it pays for that, too.
"""

from __future__ import annotations

import asyncio
import os
import time


class BusyPoll:
    """Of a server's connections: for `seconds` at most, and only if the last request came as soon; 0: never."""

    __slots__ = ("_loop", "_seconds", "_soon", "_turning", "_until", "expected")

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds if hasattr(os, "sched_yield") else 0.0
        self.expected = 0.0
        """Until when the next call is expected, by `time.monotonic`; 0: calls are open."""
        self._until = 0.0
        self._soon = self._turning = False

    def begun(self) -> None:
        """A call has come, as was `expected`."""
        self._soon = time.monotonic() < self.expected
        self.expected = self._until = 0.0

    def rest(self) -> None:
        """No call is open. What comes without one changes nothing."""
        if self.expected or not self._seconds:
            return
        self.expected = time.monotonic() + self._seconds
        if self._soon:
            self._until = self.expected
            if not self._turning:
                self._turning = True
                self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if time.monotonic() < self._until:
            os.sched_yield()  # It gives way to whoever has something to do on this core.
            self._loop.call_soon(self._turn)
        else:
            self._turning = False
