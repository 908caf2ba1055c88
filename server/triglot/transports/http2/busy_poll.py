"""Busy polling: keeps the event loop awake for a moment after a response if another request is likely.

A sleeping core takes some 50 µs to wake up, more than a request takes, and the process that wakes it pays for
it, too.
"""

from __future__ import annotations

import asyncio
import os
import time


class BusyPoll:
    """Polls for `seconds` at most, and only if the last request arrived as soon.

    0: never. Shared by all connections.
    """

    __slots__ = ("_loop", "_polling", "_seconds", "_until", "_was_soon", "expected")

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds if hasattr(os, "sched_yield") else 0.0
        self.expected = 0.0
        """End of the time in which the next call is expected, by `time.monotonic`; 0 while calls are open."""
        self._until = 0.0
        self._was_soon = self._polling = False

    def call_begun(self) -> None:
        """Note that a call has arrived while one was `expected`."""
        self._was_soon = time.monotonic() < self.expected
        self.expected = self._until = 0.0

    def idle(self) -> None:
        """Start polling, if enabled: no call is open. Does nothing if no call has begun since the last time."""
        if self.expected or not self._seconds:
            return
        self.expected = time.monotonic() + self._seconds
        if self._was_soon:
            self._until = self.expected
            if not self._polling:
                self._polling = True
                self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        if time.monotonic() < self._until:
            os.sched_yield()  # Let other processes and threads use this core.
            self._loop.call_soon(self._poll)
        else:
            self._polling = False
