"""The Linux control groups (cgroups) of this process, of either version, and their limit on memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_MEMORY_FILES = ("memory.max", "memory.limit_in_bytes")
"""Of cgroups of version 2, and 1."""


def group_folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the folders of the process's group and of its parents, the group first.

    Args:
        controller: Name of the controller ("memory", "cpu"), by which version 1 has a tree for each.
        root: The folder that contains proc.
    """
    try:
        own = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    paths = {}
    for line in own:
        _, controllers, path = line.split(":", 2)
        paths["cgroup2" if not controllers else "cgroup" if controller in controllers.split(",") else ""] = path
    for line in mounts:
        # ID, parent, device, root, mount point, options, ... - type, source, more: proc_pid_mountinfo(5).
        left, _, right = line.partition(" - ")
        (kind, _, more), (shown, at) = right.split(" ", 2), left.split(" ")[3:5]
        if kind in paths and (kind == "cgroup2" or controller in more.split(",")):
            for group in _up_from(PurePosixPath(paths[kind]), PurePosixPath(shown)):
                yield root / at.lstrip("/") / group


def memory_bound(root: Path = Path("/")) -> int | None:
    """Return the lowest known limit on memory in bytes, the machine's included; None if none is known.

    `root` is the folder that contains proc.
    """
    bounds = []
    for file in [folder / name for folder in group_folders("memory", root) for name in _MEMORY_FILES]:
        try:
            bounds.append(int(file.read_text()))
        except (OSError, ValueError):
            pass  # A group may have no limit, as the root group, or "max".
    try:
        bounds.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):  # Not available on every platform.
        pass
    return min(bounds, default=None)


def _up_from(path: PurePosixPath, shown: PurePosixPath) -> list[PurePosixPath]:
    """Return the process's own group and its parents, relative to a mount of the groups below `shown`."""
    try:
        own = path.relative_to(shown)
    except ValueError:  # A container only sees its own group, and its path may be outside of the mount.
        own = PurePosixPath()
    return [own, *own.parents] if ".." not in own.parts else [PurePosixPath()]
