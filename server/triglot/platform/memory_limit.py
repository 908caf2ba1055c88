"""How much memory this process may have: the machine's, or what a control group (cgroup) of Linux leaves of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_FILES = {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"}


def memory_bound(root: Path = Path("/")) -> int | None:
    """The least of the bounds that there are, in bytes; None: nothing is known. `root` is where /proc is."""
    bounds = list(_cgroup_bounds(root))
    try:
        bounds.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):  # Not every platform says so.
        pass
    return min(bounds, default=None)


def _cgroup_bounds(root: Path) -> Iterator[int]:
    """Those of the group, and of the groups that it is in, for either version of cgroups."""
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
                    pass  # A group has none, as the outermost one, or says "max".


def _up_from(path: PurePosixPath, shown: PurePosixPath) -> list[PurePosixPath]:
    """The process's own group and those around it, seen from a mount that shows what is below `shown`."""
    try:
        own = path.relative_to(shown)
    except ValueError:  # A container sees only its own, and may be told a path that is not there.
        own = PurePosixPath()
    return [own, *own.parents] if ".." not in own.parts else [PurePosixPath()]
