"""What control groups leave of the machine's memory, as their files say it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from triglot.config.options import GIB, LARGEST_TOTAL, Config
from triglot.platform.memory_limit import memory_bound

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MIB = 2**20
V1 = "5:cpu:/elsewhere\n4:memory,hugetlb:{path}\n0::/\n"
V2 = "0::{path}\n"
MOUNTS = {
    V1: "20 1 0:5 / /proc rw - proc proc rw\n"
    "30 25 0:29 {shown} /sys/cpu rw shared:1 - cgroup cgroup rw,cpu\n"
    "31 25 0:30 {shown} /sys/memory rw,nosuid - cgroup cgroup rw,memory,hugetlb\n",
    V2: "31 25 0:30 {shown} /sys/memory rw,nosuid shared:4 master:1 - cgroup2 cgroup rw,nsdelegate\n",
}
FILES = {V1: "memory.limit_in_bytes", V2: "memory.max"}
UNLIMITED = {V1: str(2**63 - 4096), V2: "max"}

versions = pytest.mark.parametrize("version", [V1, V2], ids=["v1", "v2"])


def tree(root: Path, version: str, path: str, shown: str, limits: dict[str, str]) -> Path:
    """A file system where the process is in the group `path`, and a mount shows those below `shown`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(version.format(path=path))
    (root / "proc/self/mountinfo").write_text(MOUNTS[version].format(shown=shown))
    for group, limit in limits.items():
        folder = root / "sys/memory" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILES[version]).write_text(limit + "\n")
    return root


@versions
@pytest.mark.parametrize(
    ("path", "shown", "limits", "expected"),
    [
        ("/", "/", {".": ""}, None),
        ("/a/b", "/", {"a/b": str(300 * MIB)}, 300 * MIB),
        ("/a/b", "/", {"a": str(200 * MIB), "a/b": str(300 * MIB)}, 200 * MIB),
        ("/a/b", "/", {".": str(100 * MIB), "a": str(200 * MIB), "a/b": ""}, 100 * MIB),
        ("/a/b", "/", {".": "", "a": "", "a/b": ""}, None),
        ("/pods/c", "/pods/c", {".": str(64 * MIB)}, 64 * MIB),
        ("/pods/c/d", "/pods/c", {"d": str(32 * MIB), ".": str(64 * MIB)}, 32 * MIB),
        ("/pods/c", "/other", {".": str(64 * MIB)}, 64 * MIB),
        ("/../../pods/c", "/", {".": str(64 * MIB)}, 64 * MIB),
        ("/a", "/", {"a": str(2**60)}, None),
    ],
)
def test_the_least_bound_up_the_tree(
    tmp_path: Path, version: str, path: str, shown: str, limits: dict[str, str], expected: int | None
) -> None:
    said = {group: limit or UNLIMITED[version] for group, limit in limits.items()}
    assert memory_bound(tree(tmp_path, version, path, shown, said)) == (expected or MACHINE)


def test_without_cgroups_it_is_the_machine(tmp_path: Path) -> None:
    assert memory_bound(tmp_path) == MACHINE


def test_the_default_total_is_a_quarter_for_all_workers() -> None:
    assert Config().total_queue_bytes(64 * GIB) == LARGEST_TOTAL
    assert Config().total_queue_bytes(2 * GIB) == GIB // 2
    assert Config(workers=2).total_queue_bytes(2 * GIB) == GIB // 4
    assert Config().total_queue_bytes(None) == LARGEST_TOTAL
    assert Config(max_total_queue_bytes=7).total_queue_bytes(2 * GIB) == 7
    assert Config(max_total_queue_bytes=0).total_queue_bytes(2 * GIB) == 0
