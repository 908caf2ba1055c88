"""`triglot grps`: what becomes of a project's files, and of the flags."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.text_project import SERVER, inference, write_project
from triglot.backends.grps.project import GrpsProject
from triglot.backends.grps.server_settings import ServerSettings
from triglot.backends.grps.settings import ProjectSettings, read_project
from triglot.cli import grps as grps_cli
from triglot.cli.grps import configuration, project_models, version_numbers
from triglot.config.options import Config, ConfigError
from triglot.telemetry.monitor import Monitor

CUSTOM = """
  customized_predict_http:
    path: /v1/chat/completions
    customized_body: true
    streaming_ctrl: {ctrl_mode: body_param, ctrl_key: stream, res_content_type: text/event-stream}
"""


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
    interface = f"interface:\n  framework: http\n  host: 127.0.0.1\n  port: 9997{CUSTOM}"
    options = config(server_settings(tmp_path, re.sub("interface: .*\n", interface, SERVER)))
    assert (options.grps_path, options.grps_customized_body) == ("/v1/chat/completions", True)
    assert (options.grps_streaming_mode, options.grps_streaming_key) == ("body_param", "stream")
    assert options.grps_streaming_content_type == "text/event-stream"


def test_flags_and_variables_win(tmp_path: Path) -> None:
    server = server_settings(tmp_path)
    flags = config(server, "--online", "--http-error-status", "always_200", "--log-level", "debug")
    assert (flags.grps_online, flags.grps_http_errors, flags.log_level) == (True, "always_200", "debug")
    environment = {"TRIGLOT_REST_PORT": "1", "TRIGLOT_HOST": "::", "TRIGLOT_LOG_LEVEL": "error"}
    variables = config(server, environment=environment)
    assert (variables.rest_port, variables.host, variables.log_level) == (1, "::", "error")
    assert config(server, "--log-level", "info", environment=environment).log_level == "info"
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
    files, dag = project_models(GrpsProject(read, Monitor()))
    assert all(file.backend == "grps" and file.make is not None for file in files)
    return [(file.name, file.version, file.label) for file in files], dag


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
        (["9223372036854775807", "9223372036854775808"], [9223372036854775807, 1]),
        (["²", "x"], [2, 1]),
    ],
)
def test_numbers_of_versions(versions: list[str], numbers: list[int]) -> None:
    found = version_numbers(versions)
    assert [found[version] for version in versions] == numbers
