"""`triglot mlserver`: what becomes of MLServer's settings and variables, and of its folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from triglot.cli.mlserver import start
from triglot.config.options import ConfigError
from triglot.repository.scan.source import Found, MLServerFolder, find_models
from triglot.run import Start

SKLEARN = "mlserver_sklearn.SKLearnModel"


def started(folder: Path, environment: Mapping[str, str] | None = None, **settings: Any) -> Start:
    if settings:
        (folder / "settings.json").write_text(json.dumps(settings))
    return start({"folder": str(folder)}, [], environment or {})


def write(folder: Path, **settings: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "model-settings.json").write_text(json.dumps({"implementation": SKLEARN} | settings))
    return folder


def found(folder: Path, **defaults: Any) -> Found:
    return find_models([MLServerFolder(folder, defaults)])


def served(models: Found) -> dict[str, dict[int, str]]:
    """The folder's name of each version of each model."""
    return {
        name: {files.version: (files.folder or files.file).name for files in versions}
        for name, versions in models.models.items()
    }


# --- settings of the server ---


def test_its_defaults(tmp_path: Path) -> None:
    config = started(tmp_path).config
    assert (config.host, config.rest_port, config.grpc_port, config.metrics_port) == ("0.0.0.0", 8080, 8081, 8082)
    assert (config.server_name, config.typed_contents, config.models_to_load) == ("mlserver", True, ("*",))
    assert config.model_control_mode == "explicit"


def test_the_file_wins_over_variables_and_triglots_variables_over_both(tmp_path: Path) -> None:
    variables = {
        "MLSERVER_HTTP_PORT": "1",
        "MLSERVER_GRPC_PORT": "9000",
        "MLSERVER_PARALLEL_WORKERS": "0",
        "MLSERVER_CORS_SETTINGS": '{"allow_origins": ["https://app.example"]}',
        "TRIGLOT_HOST": "127.0.0.1",
    }
    config = started(tmp_path, variables, http_port=8090, host="::", load_models_at_startup=False).config
    assert (config.host, config.rest_port, config.grpc_port) == ("127.0.0.1", 8090, 9000)
    assert (config.workers, config.allowed_origins, config.models_to_load) == (1, "https://app.example", ())


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"parallel_workers": 3}, {"workers": 3}),
        ({"metrics_endpoint": None}, {"metrics_port": -1, "mlserver_metrics": False}),
        ({"grpc_max_message_length": 4096}, {"max_message_size": 4096}),
        ({"debug": True}, {"log_level": "debug", "access_log": True}),
        ({"debug": "true", "http_port": "8090"}, {"log_level": "debug", "rest_port": 8090}),
        ({"use_structured_logging": True}, {"log_format": "json"}),
        ({"cache_enabled": True}, {"response_cache_bytes": 64 * 2**20}),
        ({"parallel_workers_timeout": 7}, {"grace": 7.0}),
        ({"kafka_enabled": False, "gzip_enabled": True, "root_path": ""}, {}),
    ],
)
def test_counterparts(settings: Any, options: Any, tmp_path: Path) -> None:
    begun = started(tmp_path, **settings)
    assert {name: getattr(begun.config, name) for name in options} == options
    assert begun.warnings == []


def test_what_has_no_counterpart_is_named(tmp_path: Path) -> None:
    variables = {"MLSERVER_TRACING_SERVER": "otel:4317", "MLSERVER_MODEL_PARALLEL_WORKERS": "2", "MLSERVER_X": "1"}
    assert started(tmp_path, variables, cache_size=5).warnings == [
        "MLSERVER_X: not a setting of MLServer, ignored",
        "MLSERVER_MODEL_PARALLEL_WORKERS: not supported, ignored",
        "MLSERVER_TRACING_SERVER: not supported, ignored: OTEL_EXPORTER_OTLP_ENDPOINT",
        f"{tmp_path}/settings.json: cache_size: not supported, ignored: TRIGLOT_RESPONSE_CACHE_BYTES",
    ]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"kafka_enabled": True}, "settings.json: kafka_enabled: there is no Kafka front"),
        ({"model_repository_implementation": "a.B"}, "repositories are folders"),
        ({"http_port": "8o8o"}, "settings.json: http_port: expected int, got '8o8o'"),
        ({"http_port": 70000}, "settings.json: http_port: expected at most 65535"),
        ({"metrics_endpoint": "/prometheus"}, "expected /metrics or null, got '/prometheus'"),
        ({"cors_settings": {"allow_origins": ["*"]}}, "expected origins by name"),
        ({"metrics_port": 8080}, "metrics_port: expected a port of its own, got 8080"),
    ],
)
def test_wrong_settings(settings: Any, error: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=error):
        started(tmp_path, **settings)
    with pytest.raises(ConfigError, match="MLSERVER_GRPC_PORT: expected int, got 'x'"):
        started(tmp_path, {"MLSERVER_GRPC_PORT": "x"})


# --- models ---


def test_every_settings_file_below_is_a_model(tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "deep" / "er", name="b", parameters={"version": "v2"})
    write(tmp_path / "deep" / "er" / "still", name="b", parameters={"version": "v10"})
    write(tmp_path / "c" / "3", name="c", parameters={"version": "3"})
    write(tmp_path / "c" / "latest", name="c")
    models = found(tmp_path)
    assert served(models) == {"a": {1: "a"}, "b": {1: "still", 2: "er"}, "c": {3: "3", 4: "latest"}}
    assert models.names["b"].numbers == {"v10": 1, "v2": 2}
    assert not models.problems


def test_variables_complete_settings_or_are_the_only_ones(tmp_path: Path) -> None:
    variables = {
        "MLSERVER_MODEL_NAME": "named",
        "MLSERVER_MODEL_IMPLEMENTATION": SKLEARN,
        "MLSERVER_MODEL_URI": str(tmp_path),
        "MLSERVER_MODEL_EXTRA": '{"predict_fn": "predict_proba"}',
        "MLSERVER_MODEL_MAX_BATCH_SIZE": "8",
        "MLSERVER_MODEL_MAX_BATCH_TIME": "0.5",
        "MLSERVER_MODEL_ENVIRONMENT_TARBALL": "env.tar.gz",
    }
    (root,) = started(tmp_path, variables).paths
    assert isinstance(root, MLServerFolder)
    assert root.defaults == {
        "name": "named",
        "implementation": SKLEARN,
        "max_batch_size": 8,
        "max_batch_time": 0.5,
        "parameters": {
            "uri": str(tmp_path),
            "extra": {"predict_fn": "predict_proba"},
            "environment_tarball": "env.tar.gz",
        },
    }
    ((only,),) = find_models([root]).models.values()
    assert (only.name, only.file, only.backend) == ("named", tmp_path, "mlserver")
    assert only.config.environment == tmp_path / "env.tar.gz"
    write(tmp_path / "a", name="own")
    write(tmp_path / "b")
    assert served(find_models([root])) == {"own": {1: "a"}, "named": {1: "b"}}


def test_environment_of_the_image_is_that_of_models(tmp_path: Path) -> None:
    """`MLSERVER_ENV_TARBALL` is read by the entry point of MLServer's image."""
    write(tmp_path / "a", parameters={"environment_tarball": "own.tar.gz"})
    write(tmp_path / "b")
    start = started(tmp_path, {"MLSERVER_ENV_TARBALL": "/mnt/env.tar.gz"})
    assert start.warnings == []
    (a,), (b,) = find_models(start.paths).models.values()
    assert (a.config.environment, b.config.environment) == (tmp_path / "a" / "own.tar.gz", Path("/mnt/env.tar.gz"))


def test_serve_reads_the_same_folders(tmp_path: Path) -> None:
    """As repositories, in which folders name models; and by the settings, where there is a settings.json."""
    write(tmp_path / "a", name="own")
    write(tmp_path / "deep" / "b")
    assert served(find_models([tmp_path])) == {"a": {1: "a"}, "b": {1: "b"}}
    (tmp_path / "settings.json").write_text("{}")
    assert served(find_models([tmp_path])) == {"own": {1: "a"}, "b": {1: "b"}}


def test_problems_of_one_model_leave_the_others(tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b", name="a")
    write(tmp_path / "c", parameters=[1])
    write(tmp_path / "d", parameters={"version": "v 1"})
    write(tmp_path / "e", name="../e")
    models = found(tmp_path)
    assert "a" in models.models
    errors = {Path(key).name: str(error) for key, error in models.problems.items()}
    assert "model 'a' with no version is also in" in errors["b"]
    assert "an object 'parameters' if any, got others" in errors["c"]
    assert "parameters.version: 'v 1': expected" in errors["d"]
    assert "'../e' is not a valid model name" in errors["e"]
    assert str(found(tmp_path / "nothing").problems[str(tmp_path / "nothing")]).endswith("found none")
