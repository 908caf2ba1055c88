"""`triglot serve --watch` and `--reload`: what changes on disk changes what is served."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.server_process import ServerProcess
from tests.process import FREE_PORTS, run_triglot, write_atomically
from tests.protocol_clients.rest import Rest
from tests.waiting import wait_until

DOUBLES = """
import triglot


class Model(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs):
        return {"y": inputs["x"] * 2}
"""
TRIPLES = DOUBLES.replace("* 2", "* 3")
WATCH = ("--watch", "--poll-interval", "0.1")


def answers(rest: Rest, model: str, y: float, version: str = "1") -> Callable[[], bool]:
    """Whether 1.0 is answered with `y`."""

    def ask() -> bool:
        status, body = rest.post(
            f"/v2/models/{model}/infer",
            {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}]},
        )
        return status == 200 and (body["outputs"][0]["data"], body["model_version"]) == ([y], version)

    return ask


def test_watched_models_come_change_and_go(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a" / "1" / "model.py", DOUBLES)
    with ServerProcess(str(tmp_path), *WATCH) as server:
        rest = Rest(server.ports()[1])
        assert answers(rest, "a", 2.0)()
        write_atomically(tmp_path / "b" / "model.py", DOUBLES)
        wait_until(answers(rest, "b", 2.0))
        write_atomically(tmp_path / "a" / "2" / "model.py", TRIPLES)
        wait_until(answers(rest, "a", 3.0, "2"))
        write_atomically(tmp_path / "b" / "model.py", TRIPLES)
        wait_until(answers(rest, "b", 3.0))
        shutil.rmtree(tmp_path / "b")
        wait_until(lambda: rest.get("/v2/models/b")[0] == 404)
        assert answers(rest, "a", 3.0, "2")()


def test_an_empty_repository_may_be_watched(tmp_path: Path) -> None:
    with ServerProcess(str(tmp_path), *WATCH) as server:
        rest = Rest(server.ports()[1])
        assert rest.get("/v2/health/ready")[0] == 503
        write_atomically(tmp_path / "a" / "model.py", DOUBLES)
        wait_until(answers(rest, "a", 2.0))
        wait_until(lambda: rest.get("/v2/health/ready")[0] == 200)


def test_without_watching_nothing_changes(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a" / "model.py", DOUBLES)
    with ServerProcess(str(tmp_path)) as server:
        rest = Rest(server.ports()[1])
        write_atomically(tmp_path / "a" / "model.py", TRIPLES)
        status, body = rest.post("/v2/repository/models/a/load", {})
        assert status == 503
        assert body["error"].startswith("explicit model load / unload is not allowed if polling is enabled")
        assert answers(rest, "a", 2.0)()


def test_reload_restarts_the_changed_model_alone(tmp_path: Path) -> None:
    """A module's import is counted by a file that it appends to, outside of its folder."""
    counting = f"\nopen({str(tmp_path / 'imports')!r}, 'a').write('NAME ')\n"
    for name in ("a", "b"):
        write_atomically(tmp_path / "models" / name / "model.py", DOUBLES + counting.replace("NAME", name))
    with ServerProcess(str(tmp_path / "models"), "--reload") as server:
        rest = Rest(server.ports()[1])
        file = write_atomically(tmp_path / "models" / "a" / "model.py", TRIPLES + counting.replace("NAME", "a"))
        wait_until(answers(rest, "a", 3.0))
        assert (tmp_path / "imports").read_text().split() == ["a", "b", "a"]

        write_atomically(file, TRIPLES.replace("def infer(self, inputs):", "def infer(self inputs):"))
        server.stderr.wait_for(rf"{file}:9: SyntaxError: .*'def infer\(self inputs\):'")
        assert answers(rest, "a", 3.0)()
        assert answers(rest, "b", 2.0)()
        assert rest.get("/v2/health/ready")[0] == 200

        write_atomically(file, DOUBLES)
        wait_until(answers(rest, "a", 2.0))


def test_reload_sees_a_helper_module(tmp_path: Path) -> None:
    helper = write_atomically(tmp_path / "a" / "factor.py", "FACTOR = 2\n")
    importing = DOUBLES.replace("import triglot\n", "import triglot\n\nfrom .factor import FACTOR\n", 1)
    write_atomically(tmp_path / "a" / "model.py", importing.replace("* 2", "* FACTOR"))
    with ServerProcess(str(tmp_path / "a"), "--reload") as server:
        rest = Rest(server.ports()[1])
        assert answers(rest, "a", 2.0)()
        write_atomically(helper, "FACTOR = 5\n")
        wait_until(answers(rest, "a", 5.0))


@pytest.mark.parametrize("flag", ["--watch", "--reload"])
def test_flags_that_contradict_each_other(tmp_path: Path, flag: str) -> None:
    write_atomically(tmp_path / "model.py", DOUBLES)
    completed = run_triglot("serve", tmp_path, *FREE_PORTS, flag, "--model-control-mode", "explicit")
    assert completed.returncode == 2
    assert completed.stderr == f"triglot: {flag}: needs --model-control-mode poll, got explicit\n"


def test_missing_model_to_load(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a" / "model.py", DOUBLES)
    completed = run_triglot(
        "serve", tmp_path, *FREE_PORTS, "--model-control-mode", "explicit", "--load-model", "a,c"
    )
    assert completed.returncode == 1
    assert "failed to load 'c', failed to poll from model repository" in completed.stderr
