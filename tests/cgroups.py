"""Files that look like those of a process in control groups (cgroups) of either version, and a real group."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.process import clean_environment
from triglot.platform.cpus import usable_cpus

V1 = "5:cpu,cpuacct:{path}\n4:memory,hugetlb:{path}\n3:cpuset:/elsewhere\n0::/\n"
V2 = "0::{path}\n"
_MOUNTS = {
    V1: "20 1 0:5 / /proc rw - proc proc rw\n"
    "29 25 0:28 {shown} /sys/cpuset rw shared:1 - cgroup cgroup rw,cpuset\n"
    "30 25 0:29 {shown} /sys/cpu rw shared:1 - cgroup cgroup rw,cpu,cpuacct\n"
    "31 25 0:30 {shown} /sys/memory rw,nosuid - cgroup cgroup rw,memory,hugetlb\n",
    V2: "31 25 0:30 {shown} /sys/unified rw,nosuid shared:4 master:1 - cgroup2 cgroup rw,nsdelegate\n",
}


def cgroup_files(
    root: Path, version: str, path: str, shown: str, controller: str, files: Mapping[str, Mapping[str, str]]
) -> Path:
    """Write the files of a process in the group `path`, where a mount shows the groups below `shown`.

    `files` has the name and the text of each file by group. Return `root`.
    """
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(version.format(path=path))
    (root / "proc/self/mountinfo").write_text(_MOUNTS[version].format(shown=shown))
    mount = root / "sys" / (controller if version == V1 else "unified")
    for group, texts in files.items():
        (mount / group).mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (mount / group / name).write_text(text + "\n")
    return root


def output_on_one_cpu(python: str | Path, code: str) -> str:
    """Return what the code prints, run by `python` in a real group that may use the time of one CPU.

    Skips the test where no group can be made, or where affinity leaves one CPU anyway.
    """
    if len(usable_cpus()) < 2:
        pytest.skip("needs two CPUs")
    with _group_of_one_cpu() as group:
        enter = f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
        done = subprocess.run(
            [python, "-c", f"{enter}\n{code}"],
            env=clean_environment(),
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    return done.stdout


@contextlib.contextmanager
def _group_of_one_cpu() -> Iterator[Path]:
    group = Path(f"/sys/fs/cgroup/cpu/triglot-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a control group: {error}")
    try:
        (group / "cpu.cfs_quota_us").write_text((group / "cpu.cfs_period_us").read_text())
        yield group
    finally:
        group.rmdir()
