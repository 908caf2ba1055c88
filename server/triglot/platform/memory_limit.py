"""The memory limit of this process: the machine's memory, or the limits of its Linux control groups (cgroups)."""

from __future__ import annotations

import os
from pathlib import Path

from triglot.platform.cgroups import group_folders

_FILES = ("memory.max", "memory.limit_in_bytes")
"""Of cgroups of version 2, and 1."""


def memory_bound(root: Path = Path("/")) -> int | None:
    """Returns the lowest known limit in bytes; None if none is known. `root` is the folder that contains proc."""
    bounds = []
    for file in [folder / name for folder in group_folders("memory", root) for name in _FILES]:
        try:
            bounds.append(int(file.read_text()))
        except (OSError, ValueError):
            pass  # A group may have no limit, as the root group, or "max".
    try:
        bounds.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):  # Not available on every platform.
        pass
    return min(bounds, default=None)
