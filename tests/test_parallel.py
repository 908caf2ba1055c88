"""How tests are given out to workers, and when an environment is made anew."""

from __future__ import annotations

import fcntl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from grpc_transport import NOT_OVER_AIO, OVER_AIO, goes_over_both

import environments
import parallel
from parallel import LONGEST, TOGETHER, LoadLock, Worker, group_of

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


def is_free(folder: Path) -> bool:
    """Whether others may run."""
    with (folder / "room").open() as room:
        try:
            fcntl.flock(room, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_a_worker_keeps_the_lock_for_the_next_test_that_runs_alone(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    item = request.node
    worker = Worker(tmp_path)
    try:
        free = []
        for marked, next_item in ((False, item), (True, item), (True, item), (True, None), (False, None)):
            if marked:
                item.add_marker(pytest.mark.alone)
            running = worker.pytest_runtest_protocol(item, next_item)
            next(running)
            during = is_free(tmp_path)
            with pytest.raises(StopIteration):
                next(running)
            free.append((during, is_free(tmp_path)))
            item.own_markers[:] = [one for one in item.own_markers if one.name != "alone"]
        assert free == [(True, True), (False, False), (False, False), (False, True), (True, True)]
    finally:
        worker.pytest_unconfigure()


def test_a_file_is_a_group_unless_it_shares_a_server() -> None:
    assert group_of("tests/test_cli.py::test_help[a::b]") == "tests/test_cli.py"
    assert {group_of(f"{file}::test_it") for file in TOGETHER} == {"alone", "tensorflow"}


def test_a_file_is_another_group_over_other_transports() -> None:
    assert group_of("tests/e2e/test_let_go.py::test_it[over_aio-x]") == "tests/e2e/test_let_go.py over aio"
    assert group_of("tests/e2e/test_let_go.py::test_it[x-over_aio-y]") == "tests/e2e/test_let_go.py over aio"
    assert group_of("tests/e2e/test_let_go.py::test_it[over_aio]") == "tests/e2e/test_let_go.py over aio"
    assert group_of("tests/e2e/test_let_go.py::test_it[x]") == "tests/e2e/test_let_go.py"


@pytest.mark.parametrize(
    ("node_id", "expected"),
    [
        ("tests/cases/test_grps_cases.py::test_it", True),
        ("tests/cases/test_tfserving_cases.py::test_saved_models", False),
        ("tests/transports/test_tls.py::test_it", True),
        ("tests/transports/test_h2_frames.py::test_it", False),
        ("tests/transports/test_storms.py::test_it", False),
        ("tests/e2e/test_let_go.py::test_it", True),
        ("tests/e2e/test_monitor_page.py::test_it", False),
    ],
)
def test_what_goes_over_both_transports(node_id: str, expected: bool) -> None:
    assert goes_over_both(node_id) is expected


@pytest.mark.parametrize("pattern", [*OVER_AIO, *NOT_OVER_AIO])
def test_what_is_named_there_exists(pattern: str) -> None:
    file, _, test = pattern.partition("::")
    found = list(Path(parallel.__file__).parents[1].glob(file))
    assert any(f"def {test}" in one.read_text() for one in found if one.is_file())


def test_all_files_with_tests_that_run_alone_are_in_their_group() -> None:
    root = Path(parallel.__file__).parents[1]
    marked = {
        str(file.relative_to(root))
        for folder in ("tests", "bench")
        for file in (root / folder).rglob("test_*.py")
        if "pytest.mark.alone" in file.read_text() and file != Path(__file__)
    }
    *files, last = (file for file, group in TOGETHER.items() if group == "alone")
    assert marked == set(files)
    assert last == "tests/executors/test_ray_missing.py"
    assert LONGEST[0] == "alone"


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
