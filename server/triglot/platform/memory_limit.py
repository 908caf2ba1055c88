"""The memory limit of this process: the machine's memory, or the limits of its Linux control groups (cgroups)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_FILES = {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"}


def memory_bound(root: Path = Path("/")) -> int | None:
    """Returns the lowest known limit in bytes; None if none is known. `root` is the folder that contains proc."""
    bounds = list(_cgroup_bounds(root))
    try:
        bounds.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):  # Not available on every platform.
        pass
    return min(bounds, default=None)


def _cgroup_bounds(root: Path) -> Iterator[int]:
    """Yields the limits of the process's group and its parents, for either version of cgroups."""
    try:
        own = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    paths = {}
    for line in own:
        _, controllers, path = line.split(":", 2)
        paths["cgroup2" if not controllers else "cgroup" if "memory" in controllers.split(",") else ""] = path
    for line in mounts:
        # ID, parent, device, root, mount point, options, ... - type, source, more: proc_pid_mountinfo(5).
        left, _, right = line.partition(" - ")
        (kind, _, more), (shown, at) = right.split(" ", 2), left.split(" ")[3:5]
        if kind in paths and (kind == "cgroup2" or "memory" in more.split(",")):
            for group in _up_from(PurePosixPath(paths[kind]), PurePosixPath(shown)):
                try:
                    yield int((root / at.lstrip("/") / group / _FILES[kind]).read_text())
                except (OSError, ValueError):
                    pass  # A group may have no limit, as the root group, or "max".


def _up_from(path: PurePosixPath, shown: PurePosixPath) -> list[PurePosixPath]:
    """Returns the process's own group and its parents, relative to a mount of the groups below `shown`."""
    try:
        own = path.relative_to(shown)
    except ValueError:  # A container only sees its own group, and its path may be outside of the mount.
        own = PurePosixPath()
    return [own, *own.parents] if ".." not in own.parts else [PurePosixPath()]
