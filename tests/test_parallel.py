"""How tests are given out to workers, and when an environment is made anew."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import environments
import parallel
from parallel import LONGEST, TOGETHER, LoadLock, group_of

WORKERS, TURNS = 4, 50


def test_who_is_alone_is_alone_and_the_others_are_not(tmp_path: Path) -> None:
    together = threading.Barrier(WORKERS)
    inside: list[bool] = []

    def work(number: int) -> None:
        turns = LoadLock(tmp_path)
        try:
            with turns.turn(alone=False):
                together.wait(30)  # All of them are in at the same time.
            for count in range(TURNS):
                alone = count % WORKERS == number
                with turns.turn(alone=alone):
                    inside.append(alone)
                    assert inside == [True] if alone else True not in inside
                    inside.remove(alone)
        finally:
            turns.close()

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(work, range(WORKERS)))


def test_a_file_is_a_group_unless_it_shares_a_server() -> None:
    assert group_of("tests/test_cli.py::test_help[a::b]") == "tests/test_cli.py"
    assert {group_of(f"{file}::test_it") for file in TOGETHER} == {"tensorflow"}


def test_the_files_that_are_named_exist() -> None:
    root = Path(parallel.__file__).parents[1]
    named = {*TOGETHER, *LONGEST} - set(TOGETHER.values())
    assert [file for file in sorted(named) if not (root / file).is_file()] == []


BEFORE = {"python": "3.11", "root": "/a", "requirements": ["x==1", "y==2"], "project": {"name": "triglot"}}


@pytest.mark.parametrize(
    ("change", "grown"),
    [
        ({"requirements": ["w==1", "x==1", "y==2"]}, True),
        ({"requirements": ["x==1"]}, False),
        ({"requirements": ["x==1", "y==3"]}, False),
        ({"requirements": ["w==1", "x==1", "y==2"], "python": "3.12"}, False),
        ({"requirements": ["w==1", "x==1", "y==2"], "project": {}}, False),
    ],
)
def test_lines_that_only_came_are_installed_beside_the_others(change: dict[str, object], grown: bool) -> None:
    assert environments.has_grown(BEFORE, BEFORE | change) is grown


def test_settings_of_tools_make_no_environment_anew() -> None:
    made_of = environments.made_of(environments.REQUIREMENTS / "dev.txt")
    assert set(made_of["project"]) == {"build-system", "project", "hatch"}
