"""TensorFlow Serving's command line: what is said of wrong flags, values and files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process import run_triglot
from tests.tfserving_flags import config_file, parse, wrong
from triglot.cli.tfserving import configuration
from triglot.config.options import ConfigError

NO_MODEL = "expected --model_base_path, --model_config_file, MODEL_NAME or MODEL_BASE_PATH"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], NO_MODEL),
        (["--model_name=m"], NO_MODEL),
        (
            ["--model_base_path=m", "--model_name=n"],
            "Expected model n to have an absolute path or URI; got base_path()=m",
        ),
        (
            ["--model_base_path=/m", "--batching_parameters_file=/b"],
            "--batching_parameters_file: needs --enable_batching",
        ),
        (["--port=65536"], "--port: expected at most 65535, got 65536"),
        (["--rest_api_port=-2"], "--rest_api_port: expected at least -1, got -2"),
        (["--file_system_poll_wait_seconds=-1"], "--file_system_poll_wait_seconds: expected at least 0, got -1.0"),
        (
            ["--model_config_file_poll_wait_seconds=-1"],
            "--model_config_file_poll_wait_seconds: expected at least 0",
        ),
        (
            ["--port=0", "--rest_api_port=0"],
            "--port and --rest_api_port are both 0, and there is no --grpc_socket_path; expected one of them",
        ),
        (["--model_config_file=/no/such/file"], "/no/such/file: No such file or directory"),
    ],
)
def test_wrong_values(arguments: list[str], message: str) -> None:
    assert wrong(*arguments) == message


def test_one_port_for_grpc_and_rest() -> None:
    flags = parse("--rest_api_port=8500", "--model_base_path=/m")
    with pytest.raises(ConfigError) as caught:
        configuration(flags, {"TRIGLOT_GRPC_TRANSPORT": "aio"})
    assert str(caught.value) == (
        "--port and --rest_api_port are both 8500; expected two ports, or TRIGLOT_GRPC_TRANSPORT=h2"
    )
    assert configuration(flags, {"TRIGLOT_GRPC_TRANSPORT": "h2"}).rest_with_grpc


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model_config_list { config { name: 5 } }", "Invalid protobuf file: '{file}': 1:36 : "),
        ("", "{file}: expected a model_config_list"),
        (
            "model_config_list { config { name: 'm' base_path: 'm' model_platform: 'tensorflow' } }",
            "{file}: Expected model m to have an absolute path or URI; got base_path()=m",
        ),
    ],
)
def test_wrong_configuration_files(tmp_path: Path, text: str, message: str) -> None:
    file = config_file(tmp_path, text)
    assert wrong(f"--model_config_file={file}").startswith(message.format(file=file))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--rest_api_prot=1"], "unknown option '--rest_api_prot', did you mean '--rest_api_port'?"),
        (["--rest-api-port=1"], "unknown option '--rest-api-port', did you mean '--rest_api_port'?"),
        (
            ["--enable_model_warm_up"],
            "unknown option '--enable_model_warm_up', did you mean '--enable_model_warmup'?",
        ),
        (["--zzz", "1"], "unknown option '--zzz'\n"),
        (["--model_config", "/m"], "unknown option '--model_config', did you mean '--model_config_file'?"),
        (["/models"], "expected flags only, got '/models'"),
        (["--port=many"], "argument --port: invalid int value: 'many'"),
        (["--port"], "argument --port: expected one argument"),
        (["--enable_batching=yes"], "argument --enable_batching: invalid boolean value: 'yes'"),
    ],
)
def test_a_wrong_command_line(arguments: list[str], text: str) -> None:
    completed = run_triglot("tfserving", *arguments)
    assert completed.returncode == 2
    assert text in completed.stderr
    assert completed.stderr.count("\n") == 1
    assert not completed.stdout


def test_an_error_is_one_line() -> None:
    completed = run_triglot("tfserving", "--model_base_path=/m", "--use_alts_credentials")
    assert completed.returncode == 2
    assert completed.stderr == (
        "triglot: --use_alts_credentials: ALTS is not supported; put the server behind a proxy\n"
    )
