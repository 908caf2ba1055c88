"""Options: where they come from, which source wins, and what is said of a wrong one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from triglot.config import OPTIONS, Config, ConfigError, load_config, option_type


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
        assert type(option.default) is option_type(option.name)


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
        ("grpc_port = -1", "grpc_port: expected at least 0, got -1"),
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
        ("GRPC_PORT", "-1", "TRIGLOT_GRPC_PORT: expected at least 0, got -1"),
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
        ("grpc_port", -1),
        ("rest_port", -1),
        ("grpc_port", 65536),
        ("rest_port", 65536),
        ("max_message_size", 0),
        ("max_queue_size", 0),
        ("drain_delay", -0.1),
        ("grace", -0.1),
        ("drain_delay", float("nan")),
        ("grace", float("nan")),
        ("log_level", "INFO"),
    ],
)
def test_values_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected "):
        Config(**{name: value})


def test_the_ends_of_the_ranges() -> None:
    config = Config(grpc_port=65535, rest_port=0, max_message_size=1, max_queue_size=1, drain_delay=0, grace=0)
    assert (config.grpc_port, config.rest_port, config.grace) == (65535, 0, 0)


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
