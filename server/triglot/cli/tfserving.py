"""`triglot tfserving`: converts TensorFlow Serving's command line to options and models (tfs 6.2, 6.4).

One table has each of TensorFlow Serving's flags with its effect: an option, a part of the models, none (with a
warning), or an error if a server without it would be wrong or insecure. The defaults are TensorFlow Serving's;
`TRIGLOT_*` variables override them, and flags override these.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from triglot import backends
from triglot.config.options import (
    ANY_HOST,
    MODELS,
    NO_PORT,
    OPTIONS,
    SCHEDULING,
    Config,
    ConfigError,
    check_option,
)
from triglot.config.sources import load_config
from triglot.core.errors import Code, FailedPrecondition, InvalidArgument, ModelLoadError, ServingError
from triglot.model.config import ModelConfig
from triglot.model.model import Model
from triglot.pb.tfserving import model_server_config_pb2 as pb
from triglot.pb.tfserving import option_files_pb2
from triglot.pb.tfserving.option_files_pb2 import BatchingParameters
from triglot.protocols.tfserving.batching import PER_MODEL_FILE, Parameters, batch, parameters_of
from triglot.protocols.tfserving.model_config import TENSORFLOW, model_settings
from triglot.repository.config.model_config import parse_text
from triglot.repository.config.settings import ModelSettings
from triglot.repository.manager.loader import Load
from triglot.repository.scan.source import ModelFiles
from triglot.run import Apply, Start
from triglot.version import __version__, build

log = logging.getLogger(__name__)

DEFAULTS = {
    "host": ANY_HOST,
    "grpc_port": 8500,
    "rest_port": NO_PORT,
    "rest_timeout": 30.0,
    "model_control_mode": "poll",
    "poll_interval": 1.0,
    "protocols": "tfserving",
    "wait_for_models": True,
    "load_retries": 5,
    "load_retry_interval": 60.0,
}
"""TensorFlow Serving's defaults, where they differ from Triglot's."""
NAME_VARIABLE, PATH_VARIABLE, CONTAINER_REST_PORT = "MODEL_NAME", "MODEL_BASE_PATH", 8501
"""Variables and REST port of its container image."""
GRAPH_TAG, SERVE = "TF_GRAPH_TAG", "serve"
"""The TensorFlow backend's parameter for tags, and its default."""
MONITORING_PATH = "/monitoring/prometheus/metrics"


def read_parameters(file: Path) -> Parameters:
    """Return the parameters in a file. Raise `InvalidArgument`, which names the file, and `OSError`."""
    message = parse_text(file.read_bytes(), str(file), BatchingParameters)
    if message.HasField("thread_pool_name"):
        log.warning("%s: thread_pool_name: not supported, ignored", file)
    return parameters_of(message, str(file))


class Batching:
    """Configures a model's batching with the `common` parameters, before it serves. An `Adapt` of the loader.

    `per_model`: uses those in the version's own folder, with the common number of threads; a version without any
    is not batched.
    """

    def __init__(self, common: Parameters, *, per_model: bool) -> None:
        self._common = common
        self._per_model = per_model

    def __call__(self, model: Model, files: ModelFiles) -> None:
        """Configure a model. Raise `ModelLoadError` for invalid parameters of its own."""
        folder = files.folder or files.file.parent
        parameters = self._own(folder / PER_MODEL_FILE) if self._per_model else self._common
        if parameters is not None:
            for note in batch(model, parameters):
                log.warning("%s: requests run one by one: %s", files, note)

    def _own(self, file: Path) -> Parameters | None:
        try:
            return replace(read_parameters(file), threads=self._common.threads)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ModelLoadError(f"{file}: {error.strerror}") from None
        except InvalidArgument as error:
            raise ModelLoadError(error.message, Code.INVALID_ARGUMENT) from None


class TfservingConfig(Config):
    """The options, in whose texts TensorFlow Serving's flags stand."""

    @property
    def rest_timeout_source(self) -> str:
        """What errors call `rest_timeout`."""
        return f"the server's --rest_api_timeout_in_ms of {self.rest_timeout * 1000:g}"


def boolean(text: str) -> bool:
    """Return a boolean. Raise `ValueError`."""
    if text.lower() not in ("true", "false"):
        raise ValueError(f"expected true or false, got {text!r}")
    return text.lower() == "true"


Kind = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Flag:
    """A supported flag; `option` is the option that `convert` of its value is assigned to.

    `value`: name of its value in help, if its kind is not clear enough. `about`: the group of a flag that sets no
    option.
    """

    kind: Kind
    help: str
    option: str = ""
    convert: Callable[[Any], Any] = lambda value: value
    value: str = ""
    about: str = MODELS

    @property
    def group(self) -> str:
        """The heading in help."""
        return str(OPTIONS[self.option].metadata["group"]) if self.option else self.about


def _port(number: int) -> int:
    return number or NO_PORT


def _monitoring_path(file: str) -> str:
    """Return the metrics path in a MonitoringConfig file; "" for none. Raise `ConfigError`."""
    if not file:
        return ""
    try:
        prometheus = parse_text(Path(file).read_bytes(), file, option_files_pb2.MonitoringConfig).prometheus_config
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except InvalidArgument as error:
        raise ConfigError(error.message) from None
    return (prometheus.path or MONITORING_PATH) if prometheus.enable else ""


FLAGS = {
    "port": Flag(int, "port for gRPC; 0: none (default: 8500)", "grpc_port", _port, "PORT"),
    "grpc_socket_path": Flag(str, "Unix socket for gRPC, in addition to the port", "grpc_socket", value="PATH"),
    "rest_api_port": Flag(int, "port for REST; 0: none (default: 0)", "rest_port", _port, "PORT"),
    "rest_api_timeout_in_ms": Flag(
        int,
        "deadline of REST calls (default: 30000)",
        "rest_timeout",
        lambda value: value / 1000,
        "MILLISECONDS",
    ),
    "rest_api_enable_cors_support": Flag(boolean, "let web pages of any origin read REST answers", "cors"),
    "model_name": Flag(str, "name of the model at --model_base_path (default: default)", value="NAME"),
    "model_base_path": Flag(
        str, "absolute path of the model's folder, which has a folder for each version", value="FOLDER"
    ),
    "model_config_file": Flag(
        str, "a ModelServerConfig in text format, instead of --model_name and --model_base_path", value="FILE"
    ),
    "model_config_file_poll_wait_seconds": Flag(
        float, "time between two reads of --model_config_file; 0: one read, at the start (default: 0)"
    ),
    "file_system_poll_wait_seconds": Flag(
        float, "time between two scans for versions; 0: one scan, at the start (default: 1)", "poll_interval"
    ),
    "max_num_load_retries": Flag(
        int, "how many times a version that failed to load is tried again (default: 5)", "load_retries"
    ),
    "load_retry_interval_micros": Flag(
        int,
        "time between a failed load and the next try; below 0: no time (default: 60000000)",
        "load_retry_interval",
        lambda value: max(value, 0) / 1_000_000,
        "MICROSECONDS",
    ),
    "allowed_model_roots": Flag(
        str,
        "folders that HandleReloadConfigRequest may name besides those of --model_base_path or "
        "--model_config_file; / allows all (not a flag of tensorflow_model_server)",
        "allowed_model_roots",
        value="FOLDER,...",
    ),
    "tensorflow_op_libraries": Flag(
        str,
        "shared libraries with operations that the models use (not a flag of tensorflow_model_server)",
        "tensorflow_op_libraries",
        value="FILE,...",
    ),
    "allow_version_labels_for_unavailable_models": Flag(
        boolean, "let a new version label point to a version not yet available", "labels_before_load"
    ),
    "enable_serialization_as_tensor_content": Flag(
        boolean, "answer Predict with tensor_content instead of typed fields", "tensor_content"
    ),
    "enable_model_warmup": Flag(
        boolean, "run a version's recorded requests before it serves (default: true)", "warm_up"
    ),
    "monitoring_config_file": Flag(
        str,
        "a MonitoringConfig in text format, which enables metrics in TensorFlow Serving's format",
        "monitoring_path",
        _monitoring_path,
        "FILE",
    ),
    "saved_model_tags": Flag(str, "tags of the graph to load from a SavedModel (default: serve)", value="TAG,..."),
    "enable_batching": Flag(boolean, "run queued requests in batches", about=SCHEDULING),
    "batching_parameters_file": Flag(
        str, "BatchingParameters in text format, for --enable_batching", value="FILE", about=SCHEDULING
    ),
    "enable_per_model_batching_parameters": Flag(
        boolean,
        "batch a version as the batching_params.pbtxt in its folder says, and do not batch it without one",
        about=SCHEDULING,
    ),
}

TUNING: dict[str, Kind] = {
    "rest_api_num_threads": int,
    "num_load_threads": int,
    "num_unload_threads": int,
    "flush_filesystem_caches": boolean,
    "tensorflow_session_parallelism": int,
    "tensorflow_intra_op_parallelism": int,
    "tensorflow_inter_op_parallelism": int,
    "tensorflow_session_config_file": str,
    "per_process_gpu_memory_fraction": float,
    "grpc_channel_arguments": str,
    "grpc_max_threads": int,
    "num_request_iterations_for_warmup": int,
    "remove_unused_fields_from_bundle_metagraph": boolean,
    "prefer_tflite_model": boolean,
    "num_tflite_pools": int,
    "num_tflite_interpreters_per_pool": int,
    "enable_signature_method_name_check": boolean,
    "enable_profiler": boolean,
    "thread_pool_factory_config_file": str,
    "mixed_precision": str,
    "skip_initialize_tpu": boolean,
    "enable_grpc_healthcheck_service": boolean,
    "xla_cpu_compilation_enabled": boolean,
    "xla_gpu_compilation_enabled": boolean,
}
"""Flags that are ignored: tuning, thread counts, and features that are always on."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A flag that is an error, unless its value is `harmless`, which has no effect."""

    kind: Kind
    harmless: Any
    reason: str


REFUSED = {
    "ssl_config_file": Refused(
        str,
        "",
        "its PEM texts are not read; name files of them, for every port, by TRIGLOT_TLS_CERTIFICATE, "
        "TRIGLOT_TLS_KEY and, in place of client_verify, TRIGLOT_TLS_CLIENT_CA",
    ),
    "use_alts_credentials": Refused(boolean, False, "ALTS is not supported; put the server behind a proxy"),
    "platform_config_file": Refused(
        str,
        "",
        "the platforms cannot be configured; --enable_batching with --batching_parameters_file, and "
        "--saved_model_tags, stand for its parts",
    ),
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its flags, with TensorFlow Serving's names."""
    parser = commands.add_parser(
        "tfserving",
        help="serve models under TensorFlow Serving's flags",
        description="Takes tensorflow_model_server's flags and configuration files. TRIGLOT_* variables set the "
        "options of `triglot serve` that have no flag here.",
        epilog=f"Accepted and ignored: {', '.join(TUNING)}. Not supported: {', '.join(REFUSED)}.",
        usage="triglot tfserving [OPTION ...]",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"triglot {__version__} ({build()})")
    titles = dict.fromkeys(flag.group for flag in FLAGS.values())
    groups = {title: parser.add_argument_group(title) for title in titles}
    for name, flag in FLAGS.items():
        _add(groups[flag.group], name, flag.kind, flag.help, flag.value)
    for name, kind in TUNING.items():
        _add(parser, name, kind, argparse.SUPPRESS)
    for name, refused in REFUSED.items():
        _add(parser, name, refused.kind, argparse.SUPPRESS)


def _add(parser: argparse._ActionsContainer, name: str, kind: Kind, text: str, value: str = "") -> None:
    add = partial(parser.add_argument, f"--{name}", type=kind, default=argparse.SUPPRESS, help=text)
    if kind is boolean:
        add(nargs="?", const=True, metavar="true|false")
    else:
        add(metavar=value or ("N" if kind is int else "SECONDS" if kind is float else "TEXT"))


def start(flags: Mapping[str, Any], others: Iterable[str], environment: Mapping[str, str]) -> Start:
    """Return the start of `triglot tfserving`. Raise `ConfigError`."""
    for other in others:
        raise ConfigError(f"expected flags only, got {other!r}")
    flags = with_variables(flags, environment)
    config = configuration(flags, environment)
    file, seconds = config_file(flags), poll_seconds(flags)
    return Start(
        config,
        models=models(flags),
        load=loading(flags),
        adapt=batching(flags),
        follow=partial(follow, file, seconds) if file and seconds else None,
        warnings=warnings(flags),
        opened=partial(opened, config.host),
    )


def configuration(flags: Mapping[str, Any], environment: Mapping[str, str]) -> Config:
    """Return the options for these flags. Raise `ConfigError`, also for flags that contradict each other."""
    for name, refused in REFUSED.items():
        if flags.get(name, refused.harmless) != refused.harmless:
            raise ConfigError(f"--{name}: {refused.reason}")
    if flags.get("batching_parameters_file") and not flags.get("enable_batching"):
        raise ConfigError("--batching_parameters_file: needs --enable_batching")
    if poll_seconds(flags) < 0:
        raise ConfigError("--model_config_file_poll_wait_seconds: expected at least 0")
    defaults = {**DEFAULTS, "rest_port": CONTAINER_REST_PORT} if _has_variables(environment) else DEFAULTS
    options = {}
    for name, flag in FLAGS.items():
        if flag.option and name in flags:
            options[flag.option] = flag.convert(flags[name])
            check_option(flag.option, options[flag.option], f"--{name}")
    try:
        return load_config(None, environment, options, defaults, TfservingConfig)
    except ConfigError as error:
        raise ConfigError(_by_flags(str(error))) from None


def _by_flags(text: str) -> str:
    """Translate option names in an error about two ports to TensorFlow Serving's flags."""
    if "grpc_port and rest_port" not in text:
        return text
    for name in ("port", "grpc_socket_path", "rest_api_port"):
        text = re.sub(rf"\b{FLAGS[name].option}\b", f"--{name}", text)
    return text.replace(f"both {NO_PORT}", "both 0").replace("grpc_transport ", "TRIGLOT_GRPC_TRANSPORT=")


def with_variables(flags: Mapping[str, Any], environment: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the flags, with those that the entry point of TensorFlow Serving's image derives from variables."""
    if not _has_variables(environment):
        return flags
    name = environment.get(NAME_VARIABLE) or "model"
    folder = Path(environment.get(PATH_VARIABLE) or "/models") / name
    return {"model_name": name, "model_base_path": str(folder), **flags}


def _has_variables(environment: Mapping[str, str]) -> bool:
    return any(environment.get(name) for name in (NAME_VARIABLE, PATH_VARIABLE))


def opened(host: str, grpc_port: int, rest_port: int) -> Iterable[str]:
    """Yield the lines that TensorFlow Serving logs when its ports are open; scripts wait for them."""
    if grpc_port:
        yield f"Running gRPC ModelServer at {host}:{grpc_port} ..."
    if rest_port:
        yield f"Exporting HTTP/REST API at:localhost:{rest_port} ..."


def config_file(flags: Mapping[str, Any]) -> Path | None:
    """Return the configuration file, if given; it alone then determines the models (tfs 6.2)."""
    return Path(flags["model_config_file"]) if flags.get("model_config_file") else None


def poll_seconds(flags: Mapping[str, Any]) -> float:
    """Return the seconds between reads of the configuration file; 0: it is read once."""
    seconds: float = flags.get("model_config_file_poll_wait_seconds", 0.0)
    return seconds


def loading(flags: Mapping[str, Any]) -> Load:
    """Return the function that loads models."""
    tags = flags.get("saved_model_tags", SERVE)
    if tags == SERVE:
        return backends.load

    def load(backend: str, file: Path, config: ModelConfig) -> Model:
        if backend == "tensorflow":
            config = replace(config, parameters={**config.parameters, GRAPH_TAG: tags})
        return backends.load(backend, file, config)

    return load


def batching(flags: Mapping[str, Any]) -> Batching | None:
    """Return the batching of the models, None without. Raise `ConfigError`."""
    if not flags.get("enable_batching"):
        return None
    parameters = parameters_of(BatchingParameters(), "")
    if name := flags.get("batching_parameters_file"):
        try:
            parameters = read_parameters(Path(name))
        except OSError as error:
            raise ConfigError(f"{name}: {error.strerror}") from None
        except InvalidArgument as error:
            raise ConfigError(error.message) from None
    return Batching(parameters, per_model=flags.get("enable_per_model_batching_parameters", False))


def models(flags: Mapping[str, Any]) -> list[ModelSettings]:
    """Return the models in the flags. Raise `ConfigError`."""
    if file := config_file(flags):
        return read_models(file)
    if not flags.get("model_base_path"):
        raise ConfigError(f"expected --model_base_path, --model_config_file, {NAME_VARIABLE} or {PATH_VARIABLE}")
    model = pb.ModelConfig(
        name=flags.get("model_name", "default"), base_path=flags["model_base_path"], model_platform=TENSORFLOW
    )
    try:
        return model_settings(pb.ModelServerConfig(model_config_list=pb.ModelConfigList(config=[model])))
    except InvalidArgument as error:
        raise ConfigError(error.message) from None


def read_models(file: Path) -> list[ModelSettings]:
    """Return the models in a configuration file. Raise `ConfigError`."""
    try:
        config = parse_text(file.read_bytes(), str(file), pb.ModelServerConfig)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except InvalidArgument as error:
        raise ConfigError(error.message) from None
    if not config.HasField("model_config_list"):
        # The file may be empty as it is just being written.
        raise ConfigError(f"{file}: expected a model_config_list")
    try:
        return model_settings(config)
    except InvalidArgument as error:
        raise ConfigError(f"{file}: {error.message}") from None


def warnings(flags: Mapping[str, Any]) -> list[str]:
    """Return warnings about flags without effect."""
    texts = []
    if without_effect := [f"--{name}" for name in TUNING if name in flags]:
        texts.append(f"not supported, ignored: {', '.join(without_effect)}")
    if flags.get("enable_per_model_batching_parameters") and not flags.get("enable_batching"):
        texts.append("--enable_per_model_batching_parameters: ignored without --enable_batching")
    return texts


async def follow(file: Path, seconds: float, reload: Apply) -> None:
    """Apply the configuration file every `seconds`, forever; a rejected one changes nothing.

    An unchanged file is applied, too: a label may be waiting for its version (tfs 6.2, 6.3).
    """
    logged = ""
    while True:
        await asyncio.sleep(seconds)
        text, trouble = "", None
        try:
            await reload(await asyncio.to_thread(read_models, file))
        except (ConfigError, InvalidArgument, FailedPrecondition) as error:
            where = "" if isinstance(error, ConfigError) else f"{file}: "
            text = f"{where}{error}; the models stay as they are"
        except ServingError as error:
            log.debug("%s: %s", file, error.message)
        except Exception as error:  # An error here must not prevent later files from being applied.
            text, trouble = f"{file} could not be applied: {type(error).__name__}: {error}", error
        if text and text != logged:
            log.log(logging.ERROR if trouble else logging.WARNING, "%s", text, exc_info=trouble)
        logged = text
