"""The CPUs of this machine."""

from __future__ import annotations

import os


def usable_cpus(process: int = 0) -> set[int]:
    """The numbers of those that a process, by default this one, may use; none where the system does not tell."""
    return os.sched_getaffinity(process) if hasattr(os, "sched_getaffinity") else set()
