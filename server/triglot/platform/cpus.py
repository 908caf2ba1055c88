"""The CPUs that this process may use, and how much processes use them."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from pathlib import Path

from triglot.platform.cgroups import group_folders


def usable_cpus(process: int = 0) -> set[int]:
    """Return the CPUs that a process, by default this one, may use; empty if the system does not tell."""
    return os.sched_getaffinity(process) if hasattr(os, "sched_getaffinity") else set()


def cpu_count(root: Path = Path("/")) -> int:
    """Return how many threads of this process can compute at once; at least 1.

    A cgroup's limit on CPU time, such as a container's, is rounded up to whole CPUs. `root` is the folder that
    contains proc.
    """
    return thread_limit(root) or _countable()


def thread_limit(root: Path = Path("/")) -> int:
    """Return the whole CPUs that a cgroup allows if these are fewer than the usable ones, else 0.

    For libraries that count usable CPUs, but know no cgroups: to them, 0 means as many as they count.
    """
    quotas = [_quota(folder) for folder in group_folders("cpu", root)]
    least = min((max(1, math.ceil(quota)) for quota in quotas if quota is not None), default=_countable())
    return least if least < _countable() else 0


def _countable() -> int:
    return len(usable_cpus()) or os.cpu_count() or 1


def _quota(folder: Path) -> float | None:
    """Return a group's limit in CPUs: its time on CPUs in each period, divided by the period; None without one."""
    try:
        if (both := folder / "cpu.max").exists():  # Version 2.
            quota, period = map(int, both.read_text().split())
        else:
            quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    except (OSError, ValueError):  # The root group has no such file, and one without a limit has "max".
        return None
    return quota / period if quota > 0 else None


_RUNS = b"RD"
"""States (proc(5)) of a thread that is active: running or runnable, or waiting for a disk."""


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
