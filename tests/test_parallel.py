"""How tests are given out to workers, and when an environment is made anew."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpc_transport import NOT_OVER_AIO, OVER_AIO, runs_over_both

import environments
import parallel
from parallel import LONGEST, TOGETHER, group_of


def test_a_file_is_a_group_unless_it_shares_a_server() -> None:
    assert group_of("tests/test_cli.py::test_help[a::b]") == "tests/test_cli.py"
    assert {file: group_of(f"{file}::test_it") for file in TOGETHER} == TOGETHER


def test_a_file_is_another_group_over_other_transports() -> None:
    file = "tests/e2e/test_released_requests.py"
    for test in ("test_it[over_aio-x]", "test_it[x-over_aio-y]", "test_it[over_aio]"):
        assert group_of(f"{file}::{test}") == f"{file} over aio"
    assert group_of(f"{file}::test_it[x]") == file


@pytest.mark.parametrize(
    ("node_id", "expected"),
    [
        ("tests/cases/test_grps_cases.py::test_it", True),
        ("tests/cases/test_tfserving_cases.py::test_saved_models", False),
        ("tests/transports/test_tls.py::test_it", True),
        ("tests/transports/test_h2_frames.py::test_it", False),
        ("tests/transports/test_storms.py::test_it", False),
        ("tests/e2e/test_released_requests.py::test_it", True),
        ("tests/e2e/test_monitor_page.py::test_it", False),
    ],
)
def test_tests_over_both_transports(node_id: str, expected: bool) -> None:
    assert runs_over_both(node_id) is expected


@pytest.mark.parametrize("pattern", [*OVER_AIO, *NOT_OVER_AIO])
def test_named_tests_exist(pattern: str) -> None:
    file, _, test = pattern.partition("::")
    found = list(Path(parallel.__file__).parents[1].glob(file))
    assert any(f"def {test}" in path.read_text() for path in found if path.is_file())


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
def test_added_lines_are_installed_with_the_others(change: dict[str, object], grown: bool) -> None:
    assert environments.has_grown(BEFORE, BEFORE | change) is grown


def test_settings_of_tools_make_no_environment_anew() -> None:
    made_of = environments.made_of(environments.REQUIREMENTS / "dev.txt")
    assert set(made_of["project"]) == {"packages", "project", "version"}
