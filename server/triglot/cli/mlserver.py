"""`triglot mlserver`: serves a folder of MLServer's, by its settings.json and its variables.

One table has each of MLServer's settings with its effect: options, none (with a warning that says what to use), or
an error if a server without it would be wrong. As in MLServer, settings.json overrides its variables; `TRIGLOT_*`
variables override both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triglot.config.options import ANY_HOST, NO_PORT, Config, ConfigError, check_option
from triglot.config.sources import load_config
from triglot.repository.scan.mlserver_folders import SERVER_SETTINGS
from triglot.repository.scan.source import MLServerFolder
from triglot.run import Start

PREFIX, MODEL_PREFIX, CLIENT_PREFIX = "MLSERVER_", "MLSERVER_MODEL_", "MLSERVER_INFER_"
REPOSITORY_PREFIX = "MLSERVER_MODEL_REPOSITORY_"
ENVIRONMENT = "MLSERVER_ENV_TARBALL"
"""Variable of MLServer's image: the environment in which the server runs there, and each model here."""
DEFAULTS = {
    "host": ANY_HOST,
    "rest_port": 8080,
    "grpc_port": 8081,
    "metrics_port": 8082,
    "mlserver_metrics": True,
    "protocols": "kserve,tfserving,mlflow",
    "server_name": "mlserver",
    "typed_contents": True,
    "model_control_mode": "explicit",
    "load_model": "*",
}
"""MLServer's defaults, where they differ from Triglot's."""
CACHE_BYTES = 64 * 2**20
Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting: its kind, and the options that a value of it sets."""

    kind: type
    options: Callable[[Any], Options]


@dataclass(frozen=True, slots=True)
class Ignored:
    """A setting that has no effect unless its value is in `harmless`; `instead` says what to use."""

    instead: str
    harmless: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """A setting that is an error, unless its value is in `harmless`."""

    reason: str
    harmless: tuple[Any, ...] = (None, False)


def _metrics_path(path: str | None) -> Options:
    if path not in (None, "/metrics"):
        raise ConfigError(f"expected /metrics or null, got {path!r}")
    return {} if path else {"metrics_port": NO_PORT, "mlserver_metrics": False}


def _origins(cors: Mapping[str, Any]) -> Options:
    origins = cors.get("allow_origins") or []
    if not isinstance(origins, list) or not all(isinstance(origin, str) for origin in origins):
        raise ConfigError(f"allow_origins: expected a list of origins, got {origins!r}")
    if "*" in origins or cors.get("allow_origin_regex"):
        raise ConfigError("expected origins by name in allow_origins, as a page of any other could use the models")
    return {"allowed_origins": ",".join(origins)}


SETTINGS: Mapping[str, Setting | Ignored | Refused] = {
    "host": Setting(str, lambda host: {"host": host}),
    "http_port": Setting(int, lambda port: {"rest_port": port}),
    "grpc_port": Setting(int, lambda port: {"grpc_port": port}),
    "metrics_port": Setting(int, lambda port: {"metrics_port": port}),
    "metrics_endpoint": Setting(str, _metrics_path),
    "server_name": Setting(str, lambda name: {"server_name": name}),
    "grpc_max_message_length": Setting(int, lambda size: {"max_message_size": size}),
    "load_models_at_startup": Setting(bool, lambda load: {} if load else {"load_model": ""}),
    "parallel_workers": Setting(int, lambda count: {"workers": max(1, count)}),
    "parallel_workers_timeout": Setting(int, lambda seconds: {"grace": float(seconds)}),
    "debug": Setting(bool, lambda debug: {"log_level": "debug", "access_log": True} if debug else {}),
    "use_structured_logging": Setting(bool, lambda json_lines: {"log_format": "json"} if json_lines else {}),
    "cache_enabled": Setting(bool, lambda cache: {"response_cache_bytes": CACHE_BYTES} if cache else {}),
    "cors_settings": Setting(dict, _origins),
    "model_repository_root": Ignored("the folder is the argument", (".",)),
    "server_version": Ignored("the version is Triglot's"),
    "extensions": Ignored("the extensions are Triglot's", ([],)),
    "root_path": Ignored("have the proxy remove the prefix", ("",)),
    "logging_settings": Ignored("TRIGLOT_LOG_LEVEL, TRIGLOT_LOG_FORMAT and TRIGLOT_LOG_FILE"),
    "tracing_server": Ignored("OTEL_EXPORTER_OTLP_ENDPOINT"),
    "cache_size": Ignored("TRIGLOT_RESPONSE_CACHE_BYTES"),
    "gzip_enabled": Ignored("responses are compressed for clients that accept it", (True,)),
    "metrics_rest_server_prefix": Ignored("the prefix is rest_server", ("rest_server",)),
    "metrics_dir": Ignored("workers need no folder"),
    "environments_dir": Ignored("models have no environments of their own"),
    "kafka_servers": Ignored("there is no Kafka front"),
    "kafka_topic_input": Ignored("there is no Kafka front"),
    "kafka_topic_output": Ignored("there is no Kafka front"),
    "kafka_enabled": Refused("there is no Kafka front; a consumer of the topic can call the server"),
    "model_repository_implementation": Refused("repositories are folders, or URLs of them"),
    "model_repository_implementation_args": Refused("repositories are folders, or URLs of them", ({}, None)),
}
"""By name, as in settings.json; the variables have these names in upper case, after `MLSERVER_`."""
MODEL_SETTINGS = (
    "implementation",
    "name",
    "platform",
    "inputs",
    "outputs",
    "cache_enabled",
    "max_batch_size",
    "max_batch_time",
)
MODEL_PARAMETERS = ("uri", "version", "format", "content_type", "extra", "environment_path", "environment_tarball")
"""Settings of models that `MLSERVER_MODEL_*` variables set, where a `model-settings.json` does not."""
MODEL_JSON = ("inputs", "outputs", "extra", "cache_enabled", "max_batch_size", "max_batch_time")
"""Those whose variables are JSON, not texts."""
MODEL_IGNORED = (
    "versions",
    "parallel_workers",
    "warm_workers",
    "inference_pool_gid",
    "autogenerate_inference_pool_gid",
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its folder."""
    parser = commands.add_parser(
        "mlserver",
        help="serve a folder of MLServer's",
        description="Serves the model of each model-settings.json in the folder and below, as `mlserver start` "
        "does, by its settings.json and MLServer's variables. TRIGLOT_* variables set the options of "
        "`triglot serve`, and win.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder", nargs="?", metavar="FOLDER", help="the folder, or its URL (default: the current one)"
    )


def start(flags: Mapping[str, Any], others: Iterable[str], environment: Mapping[str, str]) -> Start:
    """Return the start of `triglot mlserver`. Raise `ConfigError`."""
    folders = [*([flags["folder"]] if flags["folder"] else []), *others]
    if folders[:1] == ["start"]:  # As in `mlserver start FOLDER`.
        del folders[0]
    if len(folders) > 1:
        raise ConfigError(f"expected one folder, got {' and '.join(folders)}")
    folder = Path(folders[0] if folders else environment.get(f"{PREFIX}MODEL_REPOSITORY_ROOT") or ".")
    warnings: list[str] = []
    settings = server_settings(folder, environment, warnings)
    defaults = model_defaults(environment, warnings)
    config = load_config(None, environment, {}, DEFAULTS | options(settings, warnings), Config)
    return Start(config, [MLServerFolder(folder, defaults)], warnings=warnings)


def server_settings(
    folder: Path, environment: Mapping[str, str], warnings: list[str]
) -> dict[str, tuple[str, Any]]:
    """Return the settings by name, each with its source and its value. Raise `ConfigError`."""
    found: dict[str, tuple[str, Any]] = {}
    for variable, text in environment.items():
        of_models = variable.startswith(MODEL_PREFIX) and not variable.startswith(REPOSITORY_PREFIX)
        if not variable.startswith(PREFIX) or of_models or variable.startswith((CLIENT_PREFIX, ENVIRONMENT)):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name in SETTINGS:
            found[name] = variable, _value(variable, text, SETTINGS[name])
        else:
            warnings.append(f"{variable}: not a setting of MLServer, ignored")
    file = folder / SERVER_SETTINGS
    if file.is_file():
        try:
            values = json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file}: expected JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{file}: expected an object, got {type(values).__name__}")
        for name, value in values.items():
            if name in SETTINGS:
                source = f"{file}: {name}"
                found[name] = source, _value(source, value, SETTINGS[name]) if isinstance(value, str) else value
            else:
                warnings.append(f"{file}: {name}: not a setting of MLServer, ignored")
    return found


def _value(source: str, text: str, setting: Setting | Ignored | Refused) -> Any:
    """Return the value of a text: lists, objects and booleans are JSON, all else is text. Raise `ConfigError`."""
    kind = setting.kind if isinstance(setting, Setting) else str
    if kind is bool and text.lower() in ("1", "0", "true", "false", "yes", "no", "on", "off", "t", "f", "y", "n"):
        return text.lower() in ("1", "true", "yes", "on", "t", "y")
    if kind is int and text.lstrip("-").isdecimal():
        return int(text)
    if kind is not str or text.lstrip().startswith(("{", "[")) or text in ("true", "false"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{source}: expected {kind.__name__}, got {text!r}: {error}") from None
    return text


def options(settings: Mapping[str, tuple[str, Any]], warnings: list[str]) -> dict[str, Any]:
    """Return the options that the settings set. Raise `ConfigError`, which names the setting."""
    found: dict[str, Any] = {}
    for name, (source, value) in settings.items():
        match SETTINGS[name]:
            case Refused(reason, harmless) if value not in harmless:
                raise ConfigError(f"{source}: {reason}")
            case Ignored(instead, harmless) if value is not None and value not in harmless:
                warnings.append(f"{source}: not supported, ignored: {instead}")
            case Setting(kind, convert) if value is not None or name == "metrics_endpoint":
                if value is not None and type(value) is not kind:
                    raise ConfigError(f"{source}: expected {kind.__name__}, got {value!r:.60}")
                try:
                    own = convert(value)
                except ConfigError as error:
                    raise ConfigError(f"{source}: {error}") from None
                for option, option_value in own.items():
                    check_option(option, option_value, source)
                found |= own
    return found


def model_defaults(environment: Mapping[str, str], warnings: list[str]) -> dict[str, Any]:
    """Return what `MLSERVER_MODEL_*` variables set for models whose settings leave it out. Raise `ConfigError`."""
    defaults: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    if environment.get(ENVIRONMENT):
        parameters["environment_tarball"] = environment[ENVIRONMENT]
    for variable, text in environment.items():
        name = variable.removeprefix(MODEL_PREFIX).lower()
        if not variable.startswith(MODEL_PREFIX) or variable.startswith(REPOSITORY_PREFIX) or not text:
            continue
        if name not in (*MODEL_SETTINGS, *MODEL_PARAMETERS):
            why = "not supported" if name in MODEL_IGNORED else "not a setting of MLServer"
            warnings.append(f"{variable}: {why}, ignored")
            continue
        value: Any = text
        if name in MODEL_JSON:
            try:
                value = json.loads(text.lower() if name == "cache_enabled" else text)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{variable}: expected JSON: {error}") from None
        (parameters if name in MODEL_PARAMETERS else defaults)[name] = value
    return {**defaults, "parameters": parameters} if parameters else defaults
