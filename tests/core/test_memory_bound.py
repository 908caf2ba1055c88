"""What control groups leave of the machine's memory, as their files say it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cgroups import V1, V2, cgroup_files
from triglot.config.options import GIB, LARGEST_TOTAL, Config
from triglot.platform.cgroups import memory_bound

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MIB = 2**20
FILES = {V1: "memory.limit_in_bytes", V2: "memory.max"}
UNLIMITED = {V1: str(2**63 - 4096), V2: "max"}

versions = pytest.mark.parametrize("version", [V1, V2], ids=["v1", "v2"])


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
    files = {group: {FILES[version]: limit or UNLIMITED[version]} for group, limit in limits.items()}
    root = cgroup_files(tmp_path, version, path, shown, "memory", files)
    assert memory_bound(root) == (expected or MACHINE)


def test_without_cgroups_it_is_the_machine(tmp_path: Path) -> None:
    assert memory_bound(tmp_path) == MACHINE


def test_the_default_total_is_a_quarter_for_all_workers() -> None:
    assert Config().total_queue_bytes(64 * GIB) == LARGEST_TOTAL
    assert Config().total_queue_bytes(2 * GIB) == GIB // 2
    assert Config(workers=2).total_queue_bytes(2 * GIB) == GIB // 4
    assert Config().total_queue_bytes(None) == LARGEST_TOTAL
    assert Config(max_total_queue_bytes=7).total_queue_bytes(2 * GIB) == 7
    assert Config(max_total_queue_bytes=0).total_queue_bytes(2 * GIB) == 0
