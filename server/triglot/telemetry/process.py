"""CPU and memory usage of this process and of the machine, as Linux counts it in /proc."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_TICK_FIELDS = 8
"""Times in a line of /proc/stat until guest time, which user time includes: proc_stat(5)."""
_IDLE = slice(3, 5)
"""Among them, idle time and time spent waiting for disks."""


class _ProcFile:
    """A file in /proc. When the process can open no more files, it has the text of the last time."""

    def __init__(self, name: str) -> None:
        self._path = _PROC / name
        self._text = ""
        with suppress(OSError):  # Systems without /proc.
            self.read()

    def read(self) -> str:
        """Return its text. Raise `OSError` if it could never be read."""
        try:
            self._text = self._path.read_text()
        except OSError:
            if not self._text:
                raise
        return self._text


class ProcessUsage:
    """CPU and memory usage of this process."""

    def __init__(self) -> None:
        self._statm = _ProcFile("self/statm")
        self._times = time.perf_counter(), time.process_time()

    def cpu_percent(self) -> float:
        """CPU usage since the last call in percent; 100 is one core."""
        (began, used_before), self._times = self._times, (time.perf_counter(), time.process_time())
        now, used = self._times
        return 100 * (used - used_before) / (now - began)

    def memory_percent(self) -> float:
        """Resident memory in percent of the machine's memory."""
        resident_pages = int(self._statm.read().split()[1])
        return 100 * resident_pages / os.sysconf("SC_PHYS_PAGES")


class MachineUsage:
    """CPU and memory usage of the machine. Usable on any thread."""

    def __init__(self) -> None:
        self._stat, self._meminfo = _ProcFile("stat"), _ProcFile("meminfo")
        self._times = self._cpu_times()

    def cpu_share(self) -> float:
        """Share of busy CPU time since the last call, from 0 to 1."""
        before, self._times = self._times, self._cpu_times()
        passed = [now - then for then, now in zip(before, self._times, strict=True)]
        total = sum(passed)
        return min(1.0, max(0.0, 1 - sum(passed[_IDLE]) / total)) if total > 0 else 0.0

    def memory_bytes(self) -> tuple[int, int]:
        """Bytes of memory that are used, and in total."""
        lines = (line.split() for line in self._meminfo.read().splitlines())
        kibibytes = {name: int(count) for name, count, *_ in lines}
        total = kibibytes["MemTotal:"] * 1024
        return total - kibibytes["MemAvailable:"] * 1024, total

    def _cpu_times(self) -> list[int]:
        """Return the CPU times of the machine, of all CPUs together, in ticks."""
        return [int(ticks) for ticks in self._stat.read().partition("\n")[0].split()[1:][:_TICK_FIELDS]]
