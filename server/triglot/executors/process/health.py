"""`Heartbeat`, which detects hung processes: no heartbeat, no CPU time used, no thread that is ready to run."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from triglot.executors.process.channel import Channel

BEAT_SECONDS = 0.1
"""Seconds between two heartbeats, and between two checks of a process."""
_COMPUTING = 0.05
"""Share of one CPU above which a process computes; threads that wait for the GIL, and poll it, use less."""
_RUNS = b"RD"
"""States (proc(5)) of a thread that is active: running or runnable, or waiting for a disk."""


class Heartbeat:
    """The server's view of one process's heartbeat; `check` is called periodically. Any frame counts as one.

    A thread of the process's interpreter beats, so the heartbeat stops with the interpreter: when the process is
    stopped, when it is deadlocked, and while the model's code holds the GIL. Code that does so mostly computes.
    """

    def __init__(self, channel: Channel, pid: int | None) -> None:
        self._channel = channel
        self._pid = pid
        """Process id; None for a process on another machine, of which only the heartbeats can be observed."""
        self._heard = 0
        self._computed = 0.0 if pid is None else cpu_seconds(pid)
        self._looked = time.monotonic()
        self.silence = 0.0
        """Seconds without a heartbeat or other activity, as far as checks were made."""

    def check(self) -> None:
        """Update `silence`."""
        now = time.monotonic()
        # A long time between checks does not count in full: the whole machine may have been stopped.
        elapsed = min(now - self._looked, 2 * BEAT_SECONDS)
        self._looked = now
        heard = self._channel.heard
        if heard != self._heard:
            self._heard, self.silence = heard, 0.0
        elif self._channel.has_unread() or self._works(elapsed):
            self.silence = 0.0
        else:
            self.silence += elapsed

    def _works(self, elapsed: float) -> bool:
        if self._pid is None:
            return False
        before, self._computed = self._computed, cpu_seconds(self._pid)
        return self._computed - before > _COMPUTING * elapsed or has_something_to_do(self._pid)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time in seconds that a process has used; 0 if the system does not provide it."""
    # The id of another process's CPU clock, as clock_getcpuclockid() computes it on Linux.
    with suppress(OSError, AttributeError):
        return time.clock_gettime((~pid << 3) | 2)
    return 0.0


def has_something_to_do(pid: int) -> bool:
    """Return whether one of the process's threads runs, is runnable, or waits for a disk."""
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            # The thread may end at this moment.
            with suppress(OSError):
                state = (thread / "stat").read_bytes().rpartition(b") ")[2][:1]
                if state and state in _RUNS:
                    return True
    return False
