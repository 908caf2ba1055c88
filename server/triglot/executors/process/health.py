"""Whether a process lives: as its heart beats, as it computes, or as it waits for a processor or a disk."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from triglot.executors.process.control_block import Control

BEAT_SECONDS = 0.1
"""Between two beats, and between two looks."""
_COMPUTING = 0.05
"""Of one processor: less than that are threads that wait for the interpreter's lock, which look around often."""
_RUNS = b"RD"
"""States of a thread that has something to do (proc(5)): it runs or would, or it waits for a disk."""


class Heartbeat:
    """Of a process, to be checked again and again.

    Its heart beats on a thread of its interpreter, so it stops with that: when the process is stopped, when it is
    dead-locked, and while the model's code holds the interpreter's lock. The latter computes, most of the time.
    """

    def __init__(self, control: Control, pid: int | None) -> None:
        self._control = control
        self._pid = pid
        """None: of a process of another machine, of which nothing but its beats can be seen."""
        self._beats = 0
        self._computed = 0.0 if pid is None else cpu_seconds(pid)
        self._looked = time.monotonic()
        self.silence = 0.0
        """Seconds for which there was no sign of life, as far as somebody looked."""

    def check(self) -> None:
        """Once more."""
        now = time.monotonic()
        # When nobody looked, the machine may have been as good as off.
        elapsed = min(now - self._looked, 2 * BEAT_SECONDS)
        self._looked = now
        beats = self._control.beats
        if beats != self._beats:
            self._beats, self.silence = beats, 0.0
        elif self._works(elapsed):
            self.silence = 0.0
        else:
            self.silence += elapsed

    def _works(self, elapsed: float) -> bool:
        if self._pid is None:
            return False
        before, self._computed = self._computed, cpu_seconds(self._pid)
        return self._computed - before > _COMPUTING * elapsed or has_something_to_do(self._pid)


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used; 0 where the system does not say."""
    # The clock of another process, as clock_getcpuclockid() names it on Linux.
    with suppress(OSError, AttributeError):
        return time.clock_gettime((~pid << 3) | 2)
    return 0.0


def has_something_to_do(pid: int) -> bool:
    """Whether one of its threads runs, would run, or waits for a disk."""
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            # It may end in this moment.
            with suppress(OSError):
                state = (thread / "stat").read_bytes().rpartition(b") ")[2][:1]
                if state and state in _RUNS:
                    return True
    return False
