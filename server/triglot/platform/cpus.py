"""The CPUs of this machine."""

from __future__ import annotations

import os


def usable_cpus(process: int = 0) -> set[int]:
    """Returns the CPUs that a process, by default this one, may use; empty if the system does not tell."""
    return os.sched_getaffinity(process) if hasattr(os, "sched_getaffinity") else set()
