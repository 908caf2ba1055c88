"""`triglot grps`: what becomes of a project's files and of the flags, and a project as its user starts it."""

from __future__ import annotations

import argparse
import re
import signal
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from process import Rest, Triglot, run_triglot, unused_ports, wait_until
from triglot import grps_cli
from triglot.backends.grps.server_settings import ServerSettings
from triglot.backends.grps.settings import ProjectSettings, read_project
from triglot.config import Config, ConfigError
from triglot.core.monitor import Monitor
from triglot.grps_cli import configuration, project_models, version_numbers

SERVER = """
interface: {framework: http+grpc, host: 127.0.0.1, port: "7080,7081"}
max_connections: 100
max_concurrency: 4
log: {log_dir: ./logs}
"""
CUSTOM = """
  customized_predict_http:
    path: /v1/chat/completions
    customized_body: true
    streaming_ctrl: {ctrl_mode: body_param, ctrl_key: stream, res_content_type: text/event-stream}
"""
MODEL = (
    "{name: %s, version: %s, device: cpu, inferer_type: customized, inferer_name: reader, converter_type: none}"
)
INFERER = '''
from grps_framework.apis.grps_pb2 import GrpsMessage
from grps_framework.logger.logger import clogger, logger
from grps_framework.model_infer.inferer import ModelInferer, inferer_register

class Reader(ModelInferer):
    """Answers with a file that lies beside the project's code."""

    def load(self):
        with open("./data/text.txt") as file:
            self._text = file.read()
        logger.info("read %d characters", len(self._text))
        return True

    def infer(self, inp, context):
        clogger.info("asked for %s", inp.str_data)
        return GrpsMessage(str_data=self._text + inp.str_data)

inferer_register.register("reader", Reader())
'''
TEST = """
import unittest
from grps_framework.apis.grps_pb2 import GrpsMessage
from grps_framework.context.context import GrpsContext
from grps_framework.test import GrpsTest

class MyTestCase(GrpsTest):
    def test_infer(self):
        self.test_init()
        answer = self.executor.infer(GrpsMessage(str_data="!"), GrpsContext())
        self.assertEqual(answer.str_data, "text!")

    def test_wrong(self):
        self.fail("on purpose")
"""
ANY_PORTS = {"TRIGLOT_REST_PORT": "0", "TRIGLOT_GRPC_PORT": "0", "TRIGLOT_DRAIN_DELAY": "0"}


def inference(*models: tuple[str, str], dag: str = "your_dag") -> str:
    """inference.yml of models by name and version; the DAG runs the last."""
    listed = "".join(f"- {MODEL % model}\n" for model in models)
    nodes = f"[{{name: n, type: model, model: {models[-1][0]}-{models[-1][1]}}}]"
    return f"models:\n{listed}dag: {{type: sequential, name: {dag}, nodes: {nodes}}}\n"


def write_project(folder: Path, server: str = SERVER, models: str = inference(("reader", "1.0.0"))) -> Path:
    """A project that serves one text."""
    files = {
        "conf/server.yml": server,
        "conf/inference.yml": models,
        "src/__init__.py": "",
        "src/customized_converter.py": "",
        "src/customized_inferer.py": INFERER,
        "data/text.txt": "text",
        "test.py": TEST,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def settings(folder: Path, *models: tuple[str, str], dag: str = "your_dag") -> ProjectSettings:
    return read_project(write_project(folder, models=inference(*models, dag=dag)))


def server_settings(folder: Path, server: str = SERVER) -> ServerSettings:
    return read_project(write_project(folder, server)).server


def parse(*arguments: str) -> dict[str, Any]:
    """The flags as the command hands them on."""
    parser = argparse.ArgumentParser()
    grps_cli.add_parser(parser.add_subparsers())
    return vars(parser.parse_args(["grps", *arguments]))


def config(server: ServerSettings, *arguments: str, environment: Mapping[str, str] | None = None) -> Config:
    return configuration(server, "your_dag", parse(*arguments), environment or {})


# --- options ---


def test_the_options_of_a_project(tmp_path: Path) -> None:
    assert config(server_settings(tmp_path)) == Config(
        host="127.0.0.1",
        rest_port=7080,
        grpc_port=7081,
        protocols="grps,kserve,tfserving",
        max_message_size=2**30,
        max_connections=100,
        default_model="your_dag",
    )


def test_http_alone(tmp_path: Path) -> None:
    http = config(server_settings(tmp_path, SERVER.replace("http+grpc", "http").replace('"7080,7081"', "9997")))
    assert (http.rest_port, http.grpc_port) == (9997, -1)


def test_custom_http(tmp_path: Path) -> None:
    custom = SERVER.replace('{framework: http+grpc, host: 127.0.0.1, port: "7080,7081"}', CUSTOM).replace(
        CUSTOM, f"\n  framework: http\n  host: 127.0.0.1\n  port: 9997{CUSTOM}"
    )
    options = config(server_settings(tmp_path, custom))
    assert (options.grps_path, options.grps_customized_body) == ("/v1/chat/completions", True)
    assert (options.grps_streaming_mode, options.grps_streaming_key) == ("body_param", "stream")
    assert options.grps_streaming_content_type == "text/event-stream"


def test_flags_and_variables_win(tmp_path: Path) -> None:
    server = server_settings(tmp_path)
    flags = config(server, "--online", "--http-error-status", "always_200", "--log-level", "debug")
    assert (flags.grps_online, flags.grps_http_errors, flags.log_level) == (True, "always_200", "debug")
    variables = config(
        server, environment={"TRIGLOT_REST_PORT": "1", "TRIGLOT_HOST": "::", "TRIGLOT_LOG_LEVEL": "error"}
    )
    assert (variables.rest_port, variables.host, variables.log_level) == (1, "::", "error")
    assert config(server, "--log-level", "info", environment={"TRIGLOT_LOG_LEVEL": "error"}).log_level == "info"
    with pytest.raises(ConfigError, match="unknown option 'TRIGLOT_REST_PROT', did you mean 'TRIGLOT_REST_PORT'"):
        config(server, environment={"TRIGLOT_REST_PROT": "1"})


def test_both_spellings_of_the_files(tmp_path: Path) -> None:
    for flag in ("--server_conf", "--server-conf"):
        assert parse(flag, "s.yml")["server_conf"] == Path("s.yml")
    for flag in ("--inference_conf", "--inference-conf"):
        assert parse(flag, "i.yml")["inference_conf"] == Path("i.yml")
    assert parse("--unittest")["unittest"] == "test.MyTestCase.test_infer"
    assert parse("--unittest", "test.Other")["unittest"] == "test.Other"


# --- models ---


def models(read: ProjectSettings) -> tuple[list[tuple[str, int, str]], str]:
    files, dag = project_models(read, Monitor())
    assert all(one.backend == "grps" and one.make is not None for one in files)
    return [(one.name, one.version, one.label) for one in files], dag


def test_models_and_the_dag(tmp_path: Path) -> None:
    read = settings(tmp_path, ("a", "1.0.0"), ("b", "3"), ("a", "1.10.0"), ("a", "1.9.0"))
    assert models(read) == (
        [("a", 1, "1.0.0"), ("b", 3, "3"), ("a", 3, "1.10.0"), ("a", 2, "1.9.0"), ("your_dag", 1, "")],
        "your_dag",
    )


@pytest.mark.parametrize(
    ("dag", "names", "name"),
    [
        ("your_dag", ["m"], "your_dag"),
        ("m", ["m"], "m-dag"),
        ("m", ["m", "m-dag"], "m-dag2"),
        ("my dag", ["m"], "my_dag-dag"),
        ("模型", ["m"], "__-dag"),
        (".hidden", ["m"], "hidden-dag"),
        ("x" * 200, ["m"], "x" * 100 + "-dag"),
    ],
)
def test_the_name_of_the_dag(tmp_path: Path, dag: str, names: list[str], name: str) -> None:
    listed, default = models(settings(tmp_path, *((model, "1") for model in names), dag=f"'{dag}'"))
    assert (listed[-1], default) == ((name, 1, ""), name)


@pytest.mark.parametrize(
    ("versions", "numbers"),
    [
        (["1.0.0"], [1]),
        (["7"], [7]),
        (["1", "2", "10"], [1, 2, 10]),
        (["1.10", "1.9", "1.0"], [3, 2, 1]),
        (["1.0.0", "2"], [1, 2]),
        (["7", "8.1"], [7, 8]),
        (["1", "2.0"], [1, 2]),
        (["1.0", "1.1", "2"], [1, 3, 2]),
        (["v1.2", "v1.10", "beta"], [2, 3, 1]),
        (["1.0.0-beta", "1.0.0"], [2, 1]),
        (["0", "01", "1"], [2, 3, 1]),
        (["9223372036854775807", "9223372036854775808"], [9223372036854775807, 9223372036854775808]),
        (["²", "x"], [2, 1]),
    ],
)
def test_numbers_of_versions(versions: list[str], numbers: list[int]) -> None:
    found = version_numbers(versions)
    assert [found[version] for version in versions] == numbers


# --- the process ---


def predict(server: Triglot, text: str) -> tuple[int, Any]:
    return Rest(server.ports()[1]).post("/grps/v1/infer/predict", {"str_data": text})


def test_a_project_as_it_is(tmp_path: Path) -> None:
    write_project(tmp_path)
    with Triglot(tmp_path, command="grps", environment=ANY_PORTS) as server:
        assert predict(server, "!") == (
            200,
            {"status": {"code": 200, "msg": "OK", "status": "SUCCESS"}, "str_data": "text!"},
        )
        rest = Rest(server.ports()[1])
        assert rest.get("/grps/v1/health/ready")[0] == 503
        assert rest.get("/v2/models/your_dag/ready")[0] == 200
        logs = tmp_path / "logs"
        wait_until(
            lambda: (logs / "grps_monitor.log").exists() and "*qps : " in (logs / "grps_monitor.log").read_text()
        )
        server.stop()
    server_log = (logs / "grps_server.log").read_text()
    assert re.search(r"^\d{8} \d\d:\d\d:\d\d\.\d{3} .* INFO\] read 4 characters$", server_log, re.MULTILINE)
    assert re.search(r" MainThread app\.py:\d+ INFO\] all models loaded in ", server_log)
    assert (logs / "grps_usr.log").read_text().endswith("INFO] asked for !\n")


def test_the_current_folder_and_being_ready_at_once(tmp_path: Path) -> None:
    write_project(tmp_path)
    before = f"import os; os.chdir({str(tmp_path)!r})"
    with Triglot("--online", command="grps", environment=ANY_PORTS, before=before) as server:
        assert Rest(server.ports()[1]).get("/grps/v1/health/ready")[0] == 200


def test_an_archive(tmp_path: Path) -> None:
    write_project(tmp_path / "project")
    with tarfile.open(tmp_path / "server.mar", "w:gz") as archive:
        archive.add(tmp_path / "project", ".")
    with Triglot(
        tmp_path / "server.mar", command="grps", environment=ANY_PORTS | {"TMPDIR": str(tmp_path)}
    ) as server:
        assert predict(server, "?")[1]["str_data"] == "text?"
        (unpacked,) = tmp_path.glob("triglot-*")
        server.stop()
    assert not unpacked.exists()
    (tmp_path / "wrong.mar").write_bytes(b"PK")
    ended = run_triglot("grps", tmp_path / "wrong.mar")
    assert ended.returncode == 1
    assert ended.stderr.startswith(
        f"triglot: {tmp_path}/wrong.mar: expected a project's folder, or a gzipped tar of it: "
    )


def test_the_ports_of_another_file(tmp_path: Path) -> None:
    write_project(tmp_path / "project")
    http, rpc = unused_ports()
    file = tmp_path / "server.yml"
    file.write_text(SERVER.replace("7080,7081", f"{http},{rpc}"))
    with Triglot(tmp_path / "project", "--server_conf", file, command="grps") as server:
        assert server.ports() == (rpc, http)


def test_what_is_wrong_goes_to_the_log_and_to_the_status(tmp_path: Path) -> None:
    project = write_project(tmp_path)
    log = tmp_path / "logs" / "grps_server.log"
    (project / "data" / "text.txt").unlink()
    ended = run_triglot("grps", project, environment=ANY_PORTS)
    assert ended.returncode == 1
    assert re.search(r" C .*No such file or directory: './data/text\.txt'$", ended.stderr, re.MULTILINE)
    assert re.search(
        r" CRITICAL\] .*No such file or directory: './data/text\.txt'$", log.read_text(), re.MULTILINE
    )
    log.unlink()
    write_project(tmp_path, models=inference(("reader", "1.0.0")).replace("customized", "onnx"))
    ended = run_triglot("grps", project)
    assert ended.returncode == 1
    assert ended.stderr.startswith(
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
    ended = run_triglot("grps", *arguments)
    assert ended.returncode == 2
    assert text in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_folder_that_is_no_project(tmp_path: Path) -> None:
    ended = run_triglot("grps", tmp_path)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"triglot: {tmp_path}/conf/server.yml: No such file or directory\n"
    ended = run_triglot("grps", "--online", tmp_path / "none")
    assert ended.returncode == 1
    assert ended.stderr == f"triglot: {tmp_path}/none: expected the folder of a grps project, found none\n"


def test_probable_misspellings_are_told(tmp_path: Path) -> None:
    write_project(tmp_path, SERVER + "gpus: {devices: [0]}\n")
    with Triglot(tmp_path, command="grps", environment=ANY_PORTS) as server:
        server.ports()
        server.signal(signal.SIGTERM)
        server.wait()
    assert (
        "W " + f"{tmp_path}/conf/server.yml: gpus: unknown, left out; is it meant to be 'gpu'?"
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
    ended = run_triglot("grps", tmp_path, "--unittest", *arguments)
    assert ended.returncode == status, ended.stderr
    assert text in ended.stderr


def test_help_says_what_there_is() -> None:
    ended = run_triglot("grps", "--help")
    assert ended.returncode == 0
    for flag in grps_cli.flag_names():
        assert flag in ended.stdout
    assert re.search(r"^ +grps +\S", run_triglot("--help").stdout, re.MULTILINE)
