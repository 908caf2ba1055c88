"""`triglot grps` as its user starts it: what is served, what is logged, and the exit status."""

from __future__ import annotations

import json
import re
import tarfile
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.process import SECONDS, Triglot, run_triglot, unused_ports
from tests.protocol_clients.rest import Rest
from tests.text_project import SERVER, inference, write_project
from tests.waiting import wait_until

ANY_PORTS = {"TRIGLOT_REST_PORT": "0", "TRIGLOT_GRPC_PORT": "0", "TRIGLOT_DRAIN_DELAY": "0"}


def predict(server: Triglot, text: str) -> Any:
    """The answer's JSON."""
    url = f"http://127.0.0.1:{server.ports()[1]}/grps/v1/infer/predict"
    body, headers = json.dumps({"str_data": text}).encode(), {"Content-Type": "application/json"}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, body, headers), timeout=SECONDS) as response:
        return json.load(response)


def test_a_project_as_it_is(tmp_path: Path) -> None:
    write_project(tmp_path)
    with Triglot(tmp_path, command="grps", environment=ANY_PORTS) as server:
        ok = {"code": 200, "msg": "OK", "status": "SUCCESS"}
        assert predict(server, "!") == {"status": ok, "str_data": "text!"}
        rest = Rest(server.ports()[1])
        assert rest.get("/grps/v1/health/ready")[0] == 503
        assert rest.get("/v2/models/your_dag/ready")[0] == 200
        logs = tmp_path / "logs"
        metrics = logs / "grps_monitor.log"
        wait_until(lambda: metrics.exists() and "*qps : " in metrics.read_text())
        server.stop()
    server_log = (logs / "grps_server.log").read_text()
    assert re.search(r"^\d{8} \d\d:\d\d:\d\d\.\d{3} .* INFO\] read 4 characters$", server_log, re.MULTILINE)
    assert re.search(r" MainThread server\.py:\d+ INFO\] 2 versions loaded in ", server_log)
    assert (logs / "grps_usr.log").read_text().endswith("INFO] asked for !\n")


def test_the_current_folder_and_being_ready_at_once(tmp_path: Path) -> None:
    write_project(tmp_path)
    before = f"import os; os.chdir({str(tmp_path)!r})"
    with Triglot("--online", command="grps", environment=ANY_PORTS, before=before) as server:
        assert Rest(server.ports()[1]).get("/grps/v1/health/ready")[0] == 200


def test_an_archive(tmp_path: Path) -> None:
    write_project(tmp_path / "project")
    # An archive brings the framework that it was made for.
    framework = tmp_path / "project" / "grps_framework" / "__init__.py"
    framework.parent.mkdir()
    framework.write_text("raise ImportError('needs flask, gunicorn and mpi4py')")
    with tarfile.open(tmp_path / "server.mar", "w:gz") as archive:
        archive.add(tmp_path / "project", ".")
    here = tmp_path / "here"
    here.mkdir()
    environment, before = ANY_PORTS | {"TMPDIR": str(tmp_path)}, f"import os; os.chdir({str(here)!r})"
    with Triglot(tmp_path / "server.mar", command="grps", environment=environment, before=before) as server:
        assert predict(server, "?")["str_data"] == "text?"
        (unpacked,) = tmp_path.glob("triglot-*")
        server.stop()
    assert not unpacked.exists()
    assert "asked for ?" in (here / "logs" / "grps_usr.log").read_text()
    (tmp_path / "wrong.mar").write_bytes(b"PK")
    completed = run_triglot("grps", tmp_path / "wrong.mar")
    assert completed.returncode == 1
    assert completed.stderr.startswith(
        f"triglot: {tmp_path}/wrong.mar: expected a project's folder, or a gzipped tar of it: "
    )


def test_the_ports_of_another_file(tmp_path: Path) -> None:
    write_project(tmp_path / "project")
    http, rpc = unused_ports()
    file = tmp_path / "server.yml"
    file.write_text(SERVER.replace("7080,7081", f"{http},{rpc}"))
    with Triglot(tmp_path / "project", "--server_conf", file, command="grps") as server:
        assert server.ports() == (rpc, http)


def test_errors_are_logged_and_set_the_status(tmp_path: Path) -> None:
    project = write_project(tmp_path)
    log = tmp_path / "logs" / "grps_server.log"
    (project / "data" / "text.txt").unlink()
    completed = run_triglot("grps", project, environment=ANY_PORTS)
    assert completed.returncode == 1
    assert re.search(r" C .*No such file or directory: './data/text\.txt'$", completed.stderr, re.MULTILINE)
    assert re.search(
        r" CRITICAL\] .*No such file or directory: './data/text\.txt'$", log.read_text(), re.MULTILINE
    )
    log.unlink()
    write_project(tmp_path, models=inference(("reader", "1.0.0")).replace("customized", "onnx"))
    completed = run_triglot("grps", project)
    assert completed.returncode == 1
    assert completed.stderr.startswith(
        f"triglot: {tmp_path}/conf/inference.yml: models[0].inferer_type: expected torch, "
    )
    assert re.search(r" CRITICAL\] .*: models\[0\]\.inferer_type: expected torch, ", log.read_text())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--onlin"], "unknown option '--onlin', did you mean '--online'?"),
        (["--server_cnf=x"], "unknown option '--server_cnf', did you mean '--server_conf'?"),
        (["--http-error-status", "500"], "argument --http-error-status: invalid choice: '500'"),
        (["one", "two"], "triglot: expected one project, got one and two\n"),
    ],
)
def test_wrong_flags(arguments: list[str], text: str) -> None:
    completed = run_triglot("grps", *arguments)
    assert completed.returncode == 2
    assert text in completed.stderr
    assert "Traceback" not in completed.stderr


def test_a_folder_that_is_no_project(tmp_path: Path) -> None:
    completed = run_triglot("grps", tmp_path)
    assert (completed.returncode, completed.stdout) == (1, "")
    assert completed.stderr == (
        f"triglot: {tmp_path}/conf/server.yml: No such file or directory; "
        "a grps project has conf/server.yml and conf/inference.yml\n"
    )
    completed = run_triglot("grps", "--online", tmp_path / "none")
    assert completed.returncode == 1
    assert completed.stderr == f"triglot: {tmp_path}/none: expected the folder of a grps project, found none\n"


def test_probable_misspellings_are_warned_of(tmp_path: Path) -> None:
    write_project(tmp_path, SERVER + "gpus: {devices: [0]}\n")
    with Triglot(tmp_path, command="grps", environment=ANY_PORTS) as server:
        server.ports()
        server.stop()
    assert (
        "W " + f"{tmp_path}/conf/server.yml: gpus: unknown key, ignored; did you mean 'gpu'?"
        in server.stderr.text()
    )


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ([], 0, "OK"),
        (["test.MyTestCase.test_wrong"], 1, "on purpose"),
        (["test.MyTestCase.test_none"], 1, "test_none"),
    ],
)
def test_the_projects_own_test(tmp_path: Path, arguments: list[str], status: int, text: str) -> None:
    write_project(tmp_path)
    completed = run_triglot("grps", tmp_path, "--unittest", *arguments)
    assert completed.returncode == status, completed.stderr
    assert text in completed.stderr


def test_help_lists_the_options() -> None:
    completed = run_triglot("grps", "--help")
    assert completed.returncode == 0
    for flag in ("--server-conf FILE", "--inference_conf", "--online", "--unittest", "{mirror,always_200}"):
        assert flag in completed.stdout
