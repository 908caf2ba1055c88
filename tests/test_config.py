"""Options: where they come from, which source wins, and what is said of a wrong one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from triglot.config.option_fields import option_type, value_name
from triglot.config.options import OPTIONS, Config, ConfigError
from triglot.config.sources import load_config, vertex_model


def toml(folder: Path, text: str) -> Path:
    file = folder / "triglot.toml"
    file.write_text(text)
    return file


def wrong(file: Path | None = None, environment: Mapping[str, str] | None = None, **flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, environment or {}, flags)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nothing_given_is_the_defaults() -> None:
    assert load_config(None, {}, {}) == Config()


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Config().grpc_port = 1  # type: ignore[misc]  # What must fail.


def test_every_option_says_what_it_is_for() -> None:
    for option in OPTIONS.values():
        assert option.metadata["help"]
        assert type(option.default) is option_type(option)
        assert bool(value_name(option)) is (option_type(option) is not bool)


# For each type: the option, and a value for every source but the defaults.
SOURCES: list[tuple[str, list[Any]]] = [
    ("rest_port", [1, 2, 3]),
    ("grace", [1.5, 2.5, 3.5]),
    ("server_name", ["file", "environment", "flag"]),
    ("exit_on_load_error", [False, True, False]),
    ("exit_on_load_error", [True, False, True]),
]


@pytest.mark.parametrize(("name", "values"), SOURCES)
def test_the_later_source_wins(tmp_path: Path, name: str, values: list[Any]) -> None:
    in_file, in_environment, in_flags = values
    written = repr(in_file).lower()
    file = toml(tmp_path, f"{name} = {written}\ndrain_delay = 9.5")
    environment = {f"TRIGLOT_{name.upper()}": str(in_environment), "PATH": "/bin"}
    for sources, expected in [
        ((None, {}, {}), OPTIONS[name].default),
        ((file, {}, {}), in_file),
        ((file, environment, {}), in_environment),
        ((file, environment, {name: in_flags}), in_flags),
        ((None, environment, {}), in_environment),
        ((None, {}, {name: in_flags}), in_flags),
        ((file, {}, {name: in_flags}), in_flags),
    ]:
        config = load_config(*sources)
        value = getattr(config, name)
        assert (value, type(value)) == (expected, type(expected))
        assert config.drain_delay == (5 if sources[0] is None else 9.5)


def test_toml_may_write_a_whole_number_for_a_float(tmp_path: Path) -> None:
    assert load_config(toml(tmp_path, "grace = 3"), {}, {}).grace == 3


@pytest.mark.parametrize(("text", "value"), [("true", True), ("TRUE", True), ("false", False), ("False", False)])
def test_booleans_of_the_environment(text: str, value: bool) -> None:
    assert load_config(None, {"TRIGLOT_EXIT_ON_LOAD_ERROR": text}, {}).exit_on_load_error is value


# --- wrong ones ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grpc_prot = 1", "unknown option 'grpc_prot', did you mean 'grpc_port'?"),
        ("zzz = 1", "unknown option 'zzz'"),
        ("[server]\ngrpc_port = 1", "unknown option 'server', did you mean 'server_name'?"),
        ('grpc_port = "1"', "grpc_port: expected int, got '1'"),
        ("grpc_port = 1.0", "grpc_port: expected int, got 1.0"),
        ("grpc_port = true", "grpc_port: expected int, got True"),
        ("grace = true", "grace: expected float, got True"),
        ('grace = "1"', "grace: expected float, got '1'"),
        ("exit_on_load_error = 1", "exit_on_load_error: expected bool, got 1"),
        ("host = 1", "host: expected str, got 1"),
        ("host = ['a']", "host: expected str, got ['a']"),
        ("grpc_port =", "Invalid value (at end of document)"),
        ("grpc_port = -2", "grpc_port: expected at least -1, got -2"),
        ('log_level = "loud"', "log_level: expected debug, info, warning or error, got 'loud'"),
    ],
)
def test_a_wrong_toml_file(tmp_path: Path, text: str, message: str) -> None:
    file = toml(tmp_path, text)
    assert wrong(file) == f"{file}: {message}"


def test_a_toml_file_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    assert wrong(missing).startswith(f"{missing}: ")
    assert wrong(tmp_path).startswith(f"{tmp_path}: ")
    no_text = tmp_path / "latin.toml"
    no_text.write_bytes(b'server_name = "\xe9"')
    assert wrong(no_text).startswith(f"{no_text}: ")


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("GRPC_PROT", "1", "unknown option 'TRIGLOT_GRPC_PROT', did you mean 'TRIGLOT_GRPC_PORT'?"),
        ("grpc_port", "1", "unknown option 'TRIGLOT_grpc_port'"),
        ("GRPC_PORT", "many", "TRIGLOT_GRPC_PORT: expected int, got 'many'"),
        ("GRPC_PORT", "", "TRIGLOT_GRPC_PORT: expected int, got ''"),
        ("GRPC_PORT", "1.5", "TRIGLOT_GRPC_PORT: expected int, got '1.5'"),
        ("GRACE", "long", "TRIGLOT_GRACE: expected float, got 'long'"),
        ("EXIT_ON_LOAD_ERROR", "1", "TRIGLOT_EXIT_ON_LOAD_ERROR: expected true or false, got '1'"),
        ("GRPC_PORT", "-2", "TRIGLOT_GRPC_PORT: expected at least -1, got -2"),
        ("MAX_QUEUE_SIZE", "0", "TRIGLOT_MAX_QUEUE_SIZE: expected at least 1, got 0"),
    ],
)
def test_a_wrong_variable(variable: str, text: str, message: str) -> None:
    assert message in wrong(environment={"TRIGLOT_" + variable: text})


def test_a_wrong_value_names_the_source_that_it_came_from(tmp_path: Path) -> None:
    """The others are right, or overruled."""
    file = toml(tmp_path, "max_queue_size = 5\ngrace = 1")
    assert "--max-queue-size" in wrong(file, max_queue_size=0)
    assert "TRIGLOT_MAX_QUEUE_SIZE" in wrong(file, {"TRIGLOT_MAX_QUEUE_SIZE": "0"})
    assert str(file) in wrong(toml(tmp_path, "max_queue_size = 0"), {"TRIGLOT_GRACE": "1"}, grace=2.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("grpc_port", -2),
        ("rest_port", -2),
        ("grpc_port", 65536),
        ("rest_port", 65536),
        ("max_message_size", 0),
        ("max_queue_size", 0),
        ("drain_delay", -0.1),
        ("grace", -0.1),
        ("drain_delay", float("nan")),
        ("grace", float("nan")),
        ("rest_timeout", -1),
        ("poll_interval", -1),
        ("predict_route", "predict"),
        ("health_route", "health"),
        ("log_level", "INFO"),
    ],
)
def test_values_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected "):
        Config(**{name: value})


def test_the_ends_of_the_ranges() -> None:
    config = Config(grpc_port=65535, rest_port=0, max_message_size=1, max_queue_size=1, drain_delay=0, grace=0)
    assert (config.grpc_port, config.rest_port, config.grace) == (65535, 0, 0)


def test_a_server_without_a_port_is_rejected() -> None:
    with pytest.raises(ConfigError, match="grpc_port and rest_port are both -1, and there is no grpc_socket"):
        Config(grpc_port=-1, rest_port=-1)
    assert Config(grpc_port=-1, rest_port=-1, grpc_socket="/run/triglot").grpc_socket == "/run/triglot"
    assert Config(grpc_port=-1).rest_port == 8000
    assert Config(rest_port=-1).grpc_port == 8001


def test_one_port_for_both_protocols() -> None:
    with pytest.raises(
        ConfigError, match="grpc_port and rest_port are both 9000; expected two ports, or grpc_transport h2"
    ):
        Config(grpc_port=9000, rest_port=9000, grpc_transport="aio")
    Config(grpc_port=9000, rest_port=9000, grpc_transport="h2")
    Config(grpc_port=0, rest_port=0)


@pytest.mark.parametrize(
    ("text", "names"),
    [("kserve", {"kserve"}), ("tfserving", {"tfserving"}), ("tfserving, kserve", {"kserve", "tfserving"})],
)
def test_protocols(text: str, names: set[str]) -> None:
    assert Config(protocols=text).protocol_names == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "tfservin",
            "protocols: unknown protocol 'tfservin', did you mean 'tfserving'?; there are kserve, tfserving, "
            "grps, mlflow",
        ),
        ("kserve,", "protocols: unknown protocol ''; there are kserve, tfserving, grps, mlflow"),
        ("", "protocols: unknown protocol ''; there are kserve, tfserving, grps, mlflow"),
    ],
)
def test_a_protocol_that_does_not_exist(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(protocols=text)
    assert str(caught.value) == message


def test_defaults_of_another_command_lie_below_every_source(tmp_path: Path) -> None:
    defaults = {"grpc_port": 8500, "grace": 1.0, "server_name": "x", "rest_port": -1}
    file = toml(tmp_path, "grace = 2")
    config = load_config(file, {"TRIGLOT_SERVER_NAME": "y"}, {"rest_port": 5}, defaults)
    assert (config.grpc_port, config.grace, config.server_name, config.rest_port) == (8500, 2, "y", 5)


# --- Vertex AI ---

VERTEX = {
    "AIP_HTTP_PORT": "8080",
    "AIP_PREDICT_ROUTE": "/v1/endpoints/1/deployedModels/2:predict",
    "AIP_HEALTH_ROUTE": "/v1/endpoints/1/deployedModels/2",
}


def test_vertex_ai_says_where_it_asks() -> None:
    config = load_config(None, VERTEX, {})
    assert (config.host, config.rest_port) == ("0.0.0.0", 8080)
    assert (config.predict_route, config.health_route) == (
        VERTEX["AIP_PREDICT_ROUTE"],
        VERTEX["AIP_HEALTH_ROUTE"],
    )
    assert config.grpc_port == Config().grpc_port


def test_what_vertex_ai_says_lies_between_the_file_and_our_variables(tmp_path: Path) -> None:
    file = toml(tmp_path, 'rest_port = 1\nhost = "10.0.0.1"\npredict_route = "/file"')
    assert load_config(file, VERTEX, {}) == load_config(None, VERTEX, {})
    ours = {"TRIGLOT_REST_PORT": "2", "TRIGLOT_HOST": "127.0.0.1", "TRIGLOT_HEALTH_ROUTE": "/ours"}
    config = load_config(file, VERTEX | ours, {"predict_route": "/flag"})
    assert (config.rest_port, config.host, config.predict_route, config.health_route) == (
        2,
        "127.0.0.1",
        "/flag",
        "/ours",
    )


@pytest.mark.parametrize(
    "environment", [{}, dict.fromkeys(VERTEX, ""), {"AIP_STORAGE_URI": "/m", "AIP_MODE": "x"}]
)
def test_without_vertex_ai_nothing_changes(environment: dict[str, str]) -> None:
    assert load_config(None, environment, {}) == Config()


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("AIP_HTTP_PORT", "http", "AIP_HTTP_PORT: expected int, got 'http'"),
        ("AIP_HTTP_PORT", "65536", "AIP_HTTP_PORT: expected at most 65535, got 65536"),
        ("AIP_HEALTH_ROUTE", "health", "AIP_HEALTH_ROUTE: expected a text that begins with '/', got 'health'"),
    ],
)
def test_a_wrong_variable_of_vertex_ai(variable: str, text: str, message: str) -> None:
    assert wrong(environment={variable: text}) == message


def test_the_model_of_vertex_ai(tmp_path: Path) -> None:
    folder = {"AIP_STORAGE_URI": str(tmp_path)}
    assert vertex_model(VERTEX | folder) == tmp_path
    assert vertex_model({"AIP_HEALTH_ROUTE": "/h"} | folder) == tmp_path
    assert vertex_model(folder) is None
    assert vertex_model(VERTEX) is None
    assert vertex_model(VERTEX | {"AIP_STORAGE_URI": ""}) is None


@pytest.mark.parametrize("uri", ["gs://bucket/model", "/no/such/folder"])
def test_vertex_ai_model_in_a_bucket(uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        vertex_model(VERTEX | {"AIP_STORAGE_URI": uri})
    assert str(caught.value) == (
        f"AIP_STORAGE_URI: expected a local folder, got '{uri}': copy the model to a local folder, "
        "and pass that as PATH"
    )


# --- KServe ---

KSERVE = {"KSERVE_TLS_CERT_FILE": "/certs/tls.crt", "KSERVE_TLS_KEY_FILE": "/certs/tls.key"}


def test_kserve_says_where_its_certificate_is(tmp_path: Path) -> None:
    config = load_config(toml(tmp_path, 'tls_certificate = "mine.crt"\ntls_key = "mine.key"'), KSERVE, {})
    assert (config.tls_certificate, config.tls_key) == tuple(KSERVE.values())
    assert config.host == Config().host
    ours = {"TRIGLOT_TLS_KEY": "ours.key"}
    assert load_config(None, KSERVE | ours, {"tls_certificate": "flag.crt"}).tls_key == "ours.key"
    assert load_config(None, dict.fromkeys(KSERVE, ""), {}) == Config()


# --- Kubernetes ---


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("TRIGLOT_PORT", "tcp://10.0.0.1:8001"),
        ("TRIGLOT_GRPC_PORT", "tcp://10.0.0.1:8001"),
        ("TRIGLOT_SERVICE_HOST", "10.0.0.1"),
        ("TRIGLOT_SERVICE_PORT", "8001"),
        ("TRIGLOT_GRPC_SERVICE_PORT_HTTP", "8001"),
        ("TRIGLOT_PORT_8001_TCP_ADDR", "10.0.0.1"),
    ],
)
def test_what_kubernetes_sets_for_a_service_of_this_name_is_no_option(variable: str, text: str) -> None:
    assert load_config(None, {variable: text}, {}) == Config()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"poll_interval": 2.0}, "poll_interval: only with model_control_mode poll, and that is none"),
        (
            {"poll_interval": 2.0, "model_control_mode": "explicit"},
            "poll_interval: only with model_control_mode poll, and that is explicit",
        ),
        ({"load_model": "*"}, "load_model: only with model_control_mode explicit, and that is none"),
        ({"model_control_mode": "often"}, "model_control_mode: expected none, poll or explicit, got 'often'"),
    ],
)
def test_options_of_another_control_mode(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**options)
    assert str(caught.value) == text


def test_the_models_to_load_at_the_start() -> None:
    assert Config().models_to_load == ()
    config = Config(model_control_mode="explicit", load_model=" half_plus_two, resnet ,")
    assert config.models_to_load == ("half_plus_two", "resnet")
