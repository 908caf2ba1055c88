"""How many CPUs control groups (cgroups) and affinity leave to this process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cgroups import V1, V2, cgroup_files, output_on_one_cpu
from triglot.platform.cpus import cpu_count, thread_limit, usable_cpus

CPUS = set(range(100, 108))
"""Usable CPUs in tests of quotas: more than test machines have, so that smaller quotas are below them."""
PRINT_COUNTS = "from triglot.platform.cpus import *; print(cpu_count(), thread_limit())"


def files(version: str, quota: str, period: int = 100_000) -> dict[str, str]:
    """The files of a group with a quota in microseconds, or "" for none."""
    if version == V2:
        return {"cpu.max": f"{quota or 'max'} {period}"}
    return {"cpu.cfs_quota_us": quota or "-1", "cpu.cfs_period_us": str(period)}


@pytest.mark.parametrize("version", [V1, V2], ids=["v1", "v2"])
@pytest.mark.parametrize(
    ("path", "shown", "quotas", "expected"),
    [
        ("/", "/", {}, 0),
        ("/a", "/", {".": "", "a": ""}, 0),
        ("/a", "/", {"a": "200000"}, 2),
        ("/a", "/", {"a": "150000"}, 2),
        ("/a", "/", {"a": "20000"}, 1),
        ("/a", "/", {"a": "800000"}, 0),
        ("/a", "/", {"a": "6400000"}, 0),
        ("/a/b", "/", {"a": "300000", "a/b": "400000"}, 3),
        ("/a/b", "/", {"a": "400000", "a/b": "300000"}, 3),
        ("/a/b", "/", {".": "", "a": "300000", "a/b": ""}, 3),
        ("/pods/c", "/pods/c", {".": "500000"}, 5),
        ("/../../pods/c", "/", {".": "500000"}, 5),
    ],
)
def test_smallest_quota_up_the_tree_limits_threads(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    path: str,
    shown: str,
    quotas: dict[str, str],
    expected: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: CPUS)
    groups = {group: files(version, quota) for group, quota in quotas.items()}
    root = cgroup_files(tmp_path, version, path, shown, "cpu", groups)
    assert thread_limit(root) == expected
    assert cpu_count(root) == (expected or len(CPUS))


def test_quota_is_relative_to_its_period(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: CPUS)
    groups = {"a": files(V2, "100000", period=50_000)}
    assert cpu_count(cgroup_files(tmp_path, V2, "/a", "/", "cpu", groups)) == 2


def test_without_cgroups_affinity_counts(tmp_path: Path) -> None:
    assert (cpu_count(tmp_path), thread_limit(tmp_path)) == (len(usable_cpus()), 0)


def test_a_process_on_one_cpu_counts_one() -> None:
    def pin_to_cpu() -> None:
        os.sched_setaffinity(0, {min(usable_cpus())})

    done = subprocess.run(
        [sys.executable, "-c", PRINT_COUNTS], preexec_fn=pin_to_cpu, check=True, capture_output=True, text=True
    )
    assert done.stdout == "1 0\n"


def test_a_process_in_a_real_group_counts_its_quota() -> None:
    assert output_on_one_cpu(sys.executable, PRINT_COUNTS) == "1 1\n"
