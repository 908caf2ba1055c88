"""TensorFlow Serving's command line: what becomes of its flags, and what is said of wrong ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import triglot
from tests.process import run_triglot
from tests.tfserving_flags import config, config_file, parse, wrong
from triglot.cli import tfserving as tfserving_cli
from triglot.cli.tfserving import (
    FLAGS,
    REFUSED,
    TUNING,
    TfservingConfig,
    batching,
    configuration,
    models,
    warnings,
    with_variables,
)
from triglot.config.options import Config, ConfigError
from triglot.model.config import ALL
from triglot.repository.config.settings import ModelSettings
from triglot.version import build

# The flags of tensorflow_model_server, as its users write them.
ALL_FLAGS = re.findall(
    r"\w+",
    """
    port grpc_socket_path rest_api_port rest_api_num_threads rest_api_timeout_in_ms rest_api_enable_cors_support
    model_name model_base_path model_config_file model_config_file_poll_wait_seconds file_system_poll_wait_seconds
    enable_batching batching_parameters_file enable_per_model_batching_parameters
    allow_version_labels_for_unavailable_models num_load_threads num_unload_threads max_num_load_retries
    load_retry_interval_micros flush_filesystem_caches tensorflow_session_parallelism
    tensorflow_intra_op_parallelism tensorflow_inter_op_parallelism tensorflow_session_config_file
    platform_config_file per_process_gpu_memory_fraction saved_model_tags grpc_channel_arguments grpc_max_threads
    enable_model_warmup num_request_iterations_for_warmup monitoring_config_file ssl_config_file
    use_alts_credentials remove_unused_fields_from_bundle_metagraph prefer_tflite_model num_tflite_pools
    num_tflite_interpreters_per_pool enable_signature_method_name_check enable_profiler
    thread_pool_factory_config_file mixed_precision skip_initialize_tpu enable_grpc_healthcheck_service
    enable_serialization_as_tensor_content xla_cpu_compilation_enabled xla_gpu_compilation_enabled
    """,
)


# --- options ---


def test_the_defaults_are_tensorflow_servings() -> None:
    assert config() == TfservingConfig(
        host="0.0.0.0",
        grpc_port=8500,
        rest_port=-1,
        rest_timeout=30.0,
        model_control_mode="poll",
        poll_interval=1.0,
        protocols="tfserving",
        wait_for_models=True,
        load_retries=5,
        load_retry_interval=60.0,
    )


@pytest.mark.parametrize(
    ("environment", "name", "path"),
    [
        ({"MODEL_NAME": "half"}, "half", "/models/half"),
        ({"MODEL_BASE_PATH": "/data"}, "model", "/data/model"),
        ({"MODEL_NAME": "half", "MODEL_BASE_PATH": "/data/"}, "half", "/data/half"),
    ],
)
def test_the_variables_of_the_container_image(environment: dict[str, str], name: str, path: str) -> None:
    (model,) = models(with_variables(parse(), environment))
    assert (model.name, str(model.base_path)) == (name, path)
    assert configuration({}, environment).rest_port == 8501
    assert configuration({}, environment | {"TRIGLOT_REST_PORT": "9000"}).rest_port == 9000
    (model,) = models(with_variables(parse("--model_base_path=/m"), environment))
    assert (model.name, str(model.base_path)) == (name, "/m")


def test_without_variables_of_the_image_nothing_is_assumed() -> None:
    assert with_variables(parse(), {"MODEL_NAME": "", "HOME": "/"}) == parse()


@pytest.mark.parametrize(
    ("flag", "option", "value"),
    [
        ("--port=9000", "grpc_port", 9000),
        ("--rest_api_port=8501", "rest_port", 8501),
        ("--rest_api_port=0", "rest_port", -1),
        ("--grpc_socket_path=/run/tfs", "grpc_socket", "/run/tfs"),
        ("--rest_api_timeout_in_ms=1500", "rest_timeout", 1.5),
        ("--rest_api_enable_cors_support", "cors", True),
        ("--file_system_poll_wait_seconds=0", "poll_interval", 0),
        ("--file_system_poll_wait_seconds=30", "poll_interval", 30),
        ("--enable_serialization_as_tensor_content=true", "tensor_content", True),
        ("--allow_version_labels_for_unavailable_models", "labels_before_load", True),
        ("--enable_model_warmup=false", "warm_up", False),
        ("--max_num_load_retries=0", "load_retries", 0),
        ("--load_retry_interval_micros=500000", "load_retry_interval", 0.5),
        ("--load_retry_interval_micros=-1", "load_retry_interval", 0.0),
    ],
)
def test_a_flag_sets_an_option(flag: str, option: str, value: Any) -> None:
    set_by_flag = config(flag)
    assert getattr(set_by_flag, option) == value
    assert config(*flag.split("=")) == set_by_flag
    changed = {name for name in Config.__slots__ if getattr(set_by_flag, name) != getattr(config(), name)}
    assert changed <= {option}


def test_port_0_opens_no_grpc_port() -> None:
    assert config("--port=0", "--rest_api_port=8501").grpc_port == -1
    assert config("--port=0", "--grpc_socket_path=/run/tfs").grpc_port == -1
    assert "expected one of them" in wrong("--port=0", "--model_base_path=/m")


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["--enable_model_warmup"], True),
        (["--enable_model_warmup=true"], True),
        (["--enable_model_warmup=True"], True),
        (["--enable_model_warmup", "--port=1"], True),
        (["--enable_model_warmup=false"], False),
        (["--enable_model_warmup=FALSE"], False),
        (["--enable_model_warmup", "false"], False),
        (["--enable_model_warmup=true", "--enable_model_warmup=false"], False),
    ],
)
def test_booleans(arguments: list[str], value: bool) -> None:
    assert parse(*arguments)["enable_model_warmup"] is value


def test_our_variables_lie_between_the_defaults_and_the_flags() -> None:
    environment = {
        "TRIGLOT_GRPC_PORT": "1",
        "TRIGLOT_REST_PORT": "2",
        "TRIGLOT_PROTOCOLS": "kserve,tfserving",
        "TRIGLOT_LOG_LEVEL": "warning",
    }
    made = config("--port=3", environment=environment)
    assert (made.grpc_port, made.rest_port, made.protocols, made.log_level) == (
        3,
        2,
        "kserve,tfserving",
        "warning",
    )
    with pytest.raises(ConfigError, match="TRIGLOT_GRPC_PROT"):
        config(environment={"TRIGLOT_GRPC_PROT": "1"})


# --- models ---


def test_one_model() -> None:
    assert models(parse("--model_base_path=/models/m")) == [ModelSettings("default", Path("/models/m"))]
    assert models(parse("--model_base_path=/models/m", "--model_name=m")) == [
        ModelSettings("m", Path("/models/m"))
    ]


def test_the_configuration_file_wins(tmp_path: Path) -> None:
    file = config_file(tmp_path)
    flags = parse(f"--model_config_file={file}", "--model_name=other", "--model_base_path=/other")
    assert models(flags) == [ModelSettings("m", Path("/models/m"), ALL)]
    assert models(parse("--model_config_file=", "--model_base_path=/m")) == [ModelSettings("default", Path("/m"))]


# --- flags that do something else here ---


def test_every_flag_is_known() -> None:
    assert sorted([*FLAGS, *TUNING, *REFUSED]) == sorted(
        [*ALL_FLAGS, "allowed_model_roots", "tensorflow_op_libraries"]
    )


def test_flags_without_effect_are_named_in_one_warning() -> None:
    arguments = [f"--{name}" if kind is tfserving_cli.boolean else f"--{name}=1" for name, kind in TUNING.items()]
    flags = parse(*arguments)
    assert warnings(flags) == [f"not supported, ignored: {', '.join(f'--{name}' for name in TUNING)}"]
    assert configuration(flags, {}) == config()
    assert warnings(parse()) == []


# --- batching ---


def test_models_are_batched_where_a_flag_says_so() -> None:
    assert batching(parse("--enable_batching")) is not None
    assert batching(parse("--enable_batching=false")) is None
    assert batching(parse()) is None


def test_per_model_batching_does_nothing_without_batching() -> None:
    flags = parse("--enable_per_model_batching_parameters")
    assert batching(flags) is None
    assert configuration(flags, {}) == config()
    assert warnings(flags) == ["--enable_per_model_batching_parameters: ignored without --enable_batching"]
    assert warnings(parse("--enable_batching", "--enable_per_model_batching_parameters")) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "{}: No such file or directory"),
        ("max_batch_size: 8", "Invalid protobuf file: '{}': 1:17 : "),
        ("max_batch_size { value: 0 }", "{}: max_batch_size: expected 1 to 2147483647, got 0"),
    ],
)
def test_wrong_batching_parameters(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "batching.config"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        batching(parse("--enable_batching", f"--batching_parameters_file={file}"))
    assert str(caught.value).startswith(message.format(file))


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("--ssl_config_file=/ssl.config", ["TRIGLOT_TLS_CERTIFICATE", "TRIGLOT_TLS_KEY", "TRIGLOT_TLS_CLIENT_CA"]),
        ("--use_alts_credentials", ["proxy"]),
        ("--platform_config_file=/platform.config", ["--batching_parameters_file", "--saved_model_tags"]),
    ],
)
def test_flags_that_cannot_be_kept_are_errors(flag: str, instead: list[str]) -> None:
    name = flag.split("=", maxsplit=1)[0]
    text = wrong(flag, "--model_base_path=/m")
    assert text.startswith(f"{name}: ")
    assert all(text_part in text for text_part in instead)


@pytest.mark.parametrize("flag", ["--ssl_config_file=", "--use_alts_credentials=false", "--platform_config_file="])
def test_a_flag_that_says_what_is_so_is_no_error(flag: str) -> None:
    assert config(flag) == config()


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("", ""),
        ("prometheus_config {}", ""),
        ("prometheus_config { enable: true }", "/monitoring/prometheus/metrics"),
        ("prometheus_config: { enable: true, path: '/numbers' }  # ours", "/numbers"),
    ],
)
def test_the_monitoring_file_opens_the_metrics_page(tmp_path: Path, text: str, path: str) -> None:
    file = tmp_path / "monitoring.config"
    file.write_text(text)
    assert config(f"--monitoring_config_file={file}").monitoring_path == path


def test_a_monitoring_file_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "monitoring.config"
    assert (
        wrong(f"--monitoring_config_file={file}", "--model_base_path=/m") == f"{file}: No such file or directory"
    )
    file.write_text("prometheus_config { on: true }")
    assert wrong(f"--monitoring_config_file={file}", "--model_base_path=/m").startswith(
        f"Invalid protobuf file: '{file}': 1:21"
    )


def test_help_and_version() -> None:
    completed = run_triglot("tfserving", "--help", environment={"COLUMNS": "1000"})
    assert completed.returncode == 0
    for name in FLAGS:
        assert re.search(rf"^ +--{name} \S+\s+\S.*$", completed.stdout, re.MULTILINE), name
    for name in (*TUNING, *REFUSED):
        assert re.search(rf"\b{name}\b", completed.stdout), name
    assert re.search(r"^network:\n  --port PORT\s", completed.stdout, re.MULTILINE)
    assert re.search(r"^scheduling:\n  --enable_batching \[true\|false\]\s", completed.stdout, re.MULTILINE)
    completed = run_triglot("tfserving", "--version")
    assert (completed.returncode, completed.stdout) == (0, f"triglot {triglot.__version__} ({build()})\n")
