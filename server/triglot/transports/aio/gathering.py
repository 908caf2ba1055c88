"""Collects unary calls that arrive close together, and lets them run in one turn of the event loop.

grpc.aio delivers calls one at a time, with switches between its threads for each; a call that runs alone in
between finds cold caches, and wakes the model's thread for itself. So the first call waits a moment for others, as
network cards do with packets, while others come.
"""

from __future__ import annotations

import asyncio

MAX_CALLS = 32
"""Calls of a burst."""
WAIT_SECONDS = 0.002
"""Longest wait of a call."""
MIN_CALLS = 3
"""Fewer calls have waited in vain."""
MAX_SKIPPED = 1023
"""Calls that do not wait after others have waited in vain: 1, 3, 7, and so on up to this number."""
PROBE_INTERVAL = 16
"""One in so many bursts does not end with as many calls as those before it: there may be more callers by now."""


class Gathering:
    """The calls that wait. On the event loop."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._expected = MIN_CALLS
        """Calls in recent bursts: clients that wait for their responses send no more."""
        self._bursts = 0
        self._skips = 0
        self._skipped = 0

    def join(self) -> asyncio.Future[None] | None:
        """Return what a call waits for before it runs, None if it need not wait."""
        loop, waiting = asyncio.get_running_loop(), self._waiting
        if not waiting:
            if self._skipped < self._skips:
                self._skipped += 1
                return None
            self._timer = loop.call_later(WAIT_SECONDS, self._waited)
        turn = loop.create_future()
        waiting.append(turn)
        expected = self._expected if self._bursts % PROBE_INTERVAL else MAX_CALLS
        if len(waiting) >= expected:
            self._run()
        return turn

    def _waited(self) -> None:
        # It shrinks by one each time: a burst that was cut in two does not shorten all others.
        self._expected = max(len(self._waiting), self._expected - 1, MIN_CALLS)
        self._run()

    def _run(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self._timer is not None:
            self._timer.cancel()
        self._bursts += 1
        self._skips = 0 if len(waiting) >= MIN_CALLS else min(2 * self._skips + 1, MAX_SKIPPED)
        self._skipped = 0
        for turn in waiting:
            if not turn.done():  # A call may have been cancelled.
                turn.set_result(None)
