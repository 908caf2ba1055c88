"""The Linux control groups (cgroups) of this process, of either version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


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


def _up_from(path: PurePosixPath, shown: PurePosixPath) -> list[PurePosixPath]:
    """Return the process's own group and its parents, relative to a mount of the groups below `shown`."""
    try:
        own = path.relative_to(shown)
    except ValueError:  # A container only sees its own group, and its path may be outside of the mount.
        own = PurePosixPath()
    return [own, *own.parents] if ".." not in own.parts else [PurePosixPath()]
