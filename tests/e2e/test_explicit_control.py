"""Unmodified clients load and unload models of a server process: one test per check."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.e2e.client_scripts import ClientScript, Report, ReportOf, script_tests
from tests.e2e.server_process import ServerProcess
from tests.process import run_triglot, write_model
from tests.protocol_clients.rest import Rest

SAYS = """
import triglot

class Says(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [-1])]
    outputs = [triglot.TensorSpec("y", "INT32", [-1])]

    def infer(self, inputs):
        return {{"y": inputs["x"] * 0 + int(self.model_config.parameters.get("says", {version}))}}
"""
BROKEN = SAYS + "\n    def load(self, folder):\n        raise OSError('no disk')\n"
SCRIPTS = [
    *(
        ClientScript("tritonclient", "control_triton.py", (kind,))
        for kind in ("grpc", "grpc.aio", "http", "http.aio")
    ),
    ClientScript("kserve", "control_kserve.py"),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> ReportOf:
    """What a client script found, on a server of its own; it runs when it is first asked for."""
    repository = tmp_path_factory.mktemp("repository")
    for version in (1, 2):
        write_model(repository / "says" / str(version), SAYS.format(version=version))
    write_model(repository / "other" / "1", SAYS.format(version=1))
    write_model(repository / "broken" / "1", BROKEN.format(version=1))

    def run(script: ClientScript) -> Report:
        with ServerProcess(str(repository), "--model-control-mode", "explicit") as server:
            return script.run(server)

    return cache(run)


test_check, test_every_check_is_reported_in_order = script_tests(*SCRIPTS)


def rest_of(server: ServerProcess) -> Rest:
    return Rest(int(server.rest_address.rpartition(":")[2]))


def test_an_empty_repository(tmp_path: Path) -> None:
    """The server is ready; a model that comes later can be loaded."""
    with ServerProcess(str(tmp_path), "--model-control-mode", "explicit") as server:
        rest = rest_of(server)
        assert rest.get("/v2/health/ready") == (200, {"ready": True, "live": True})
        assert rest.post("/v2/repository/index", {}) == (200, [])
        write_model(tmp_path / "a")
        assert rest.post("/v2/repository/models/a/load", {}) == (200, {"name": "a", "load": True})
        status, answer = rest.infer("a")
        assert (status, answer["outputs"][0]["data"]) == (200, [7])


def test_models_of_the_start(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_model(tmp_path / name)
    with ServerProcess(str(tmp_path), "--model-control-mode", "explicit", "--load-model", "b") as server:
        rest = rest_of(server)
        assert rest.get("/v2/models") == (200, {"models": ["b"]})
        ready = {"name": "b", "version": "1", "state": "READY"}
        assert rest.post("/v2/repository/index", {}) == (200, [ready, {"name": "a"}])


def test_the_demo() -> None:
    """Without a path, its models are the repository."""
    with ServerProcess("--model-control-mode", "explicit", "--load-model", "iris") as server:
        rest = rest_of(server)
        _, rows = rest.post("/v2/repository/index", {})
        assert {"name": "storyteller"} in rows
        assert [row["name"] for row in rows if row.get("state") == "READY"] == ["iris"]


def test_missing_model_at_the_start(tmp_path: Path) -> None:
    write_model(tmp_path / "a")
    done = run_triglot("serve", tmp_path, "--model-control-mode", "explicit", "--load-model", "a,b")
    assert done.returncode == 1
    assert f"failed to load 'b', failed to poll from model repository: no model of this name in {tmp_path}" in (
        done.stderr
    )
