"""Reads Triton's model configuration, `config.pbtxt` or the JSON of a load request (spec 1.4, 3.9).

One table lists the supported fields. The message is compared with it, so that any other field that is set, at any
depth, is named in a warning. An invalid value is an error, as in Triton.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, MutableSequence, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf import json_format, text_format
from google.protobuf.message import Message

from triglot.core.errors import Code, InvalidArgument, ModelLoadError
from triglot.model.config import (
    ALL,
    LATEST,
    MAX_INSTANCES,
    NO_CONFIG,
    InstanceGroup,
    ModelConfig,
    TensorConfig,
    VersionPolicy,
    WarmUpInput,
    WarmUpRequest,
)
from triglot.pb import POOL
from triglot.pb.kserve import model_config_pb2 as pb
from triglot.repository.config.as_json import json_text
from triglot.repository.config.bounds import first_response_buckets, other_metrics
from triglot.repository.config.ensembles import ensemble_of
from triglot.repository.config.ray_parameters import ray_options
from triglot.repository.config.scheduling import dynamic_batching, response_cache, sequence_batching
from triglot.repository.config.server_parameters import (
    ENVIRONMENT,
    TRAFFIC,
    environment_of,
    misspelt,
    others,
    server_parameters,
)
from triglot.repository.config.values import (
    check_name,
    datatype_of,
    either,
    existing,
    not_negative,
    reshape_of,
)
from triglot.repository.scan.layout import BACKEND_OF_FILE
from triglot.repository.scan.paths import inside

CONFIG_FILE = "config.pbtxt"
MAX_CONFIG_BYTES = 1024 * 1024
"""Limit on the size of the file, which every scan of the disk reads, and of the text in a request."""
MAX_NOTES = 50
"""Most warnings about one configuration."""
WARM_UP_FOLDER = "warmup"

_RUNTIME_ENV = "runtime_env"
"""Field of `RayOptions` that chooses which program runs."""

BACKEND_OF_NAME = {backend: backend for backend in BACKEND_OF_FILE.values()} | {
    "ensemble": "ensemble",
    "libtorch": "torch",
    "onnxruntime": "onnx",
    "onnxruntime_onnx": "onnx",
    "pytorch": "torch",
    "pytorch_libtorch": "torch",
    "tensorflow_savedmodel": "tensorflow",
    "torch_aoti": "torch",
}
"""Our backends by the names that `backend` and `platform` accept: our own and Triton's."""

_UNDERSTOOD = (
    {"name", "platform", "backend", "version_policy", "max_batch_size", "parameters", "model_warmup"}
    | {"default_model_filename", "model_transaction_policy", "metric_tags", "model_metrics"}
    # What an image format means is up to clients.
    | {"input.name", "input.data_type", "input.dims", "input.format", "input.optional", "input.reshape"}
    | {"output.name", "output.data_type", "output.dims", "output.label_filename", "output.reshape"}
    | {"instance_group.name", "instance_group.count", "instance_group.kind", "instance_group.gpus"}
    | {"dynamic_batching", "ensemble_scheduling", "response_cache"}
    | {f"sequence_batching.{name}" for name in ("max_sequence_idle_microseconds", "control_input")}
    | {f"sequence_batching.{name}" for name in ("direct", "oldest", "iterative_sequence")}
    | {f"sequence_batching.state.{name}" for name in ("input_name", "output_name", "data_type", "dims")}
    | {"sequence_batching.state.initial_state"}
)
"""Supported fields, each including everything below it."""
_UNDERSTOOD_IN_LISTS = _UNDERSTOOD | {"input.allow_ragged_batch"}
"""Supported fields of models that may receive their requests as a list."""


M = TypeVar("M", bound=Message)
_SEPARATE_SIGN = re.compile(
    r"""("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|\#[^\n]*)|-((?:[ \t\r\n\f\v]|\#[^\n]*\n)+)(?=[0-9.A-Za-z])"""
)
"""A string or a comment, or a minus with blanks and comments between it and its number."""


def parse_text(text: bytes, name: str, message_class: type[M]) -> M:
    """Parse a message in protobuf's text format. Raise `InvalidArgument` with the place in file `name`."""
    try:
        return text_format.Parse(_with_signs_joined(text.decode()), message_class(), descriptor_pool=POOL)
    except Exception as error:  # ParseError, and ValueError for numbers that no field can hold.
        raise InvalidArgument(f"Invalid protobuf file: '{name}': {error}") from None


def _with_signs_joined(text: str) -> str:
    """Return the text with each minus right before its number, on the lines on which the numbers were.

    In the text format, as Triton's and TensorFlow Serving's C++ parsers read it, a sign is a token of its own;
    Python's parser (protobuf 7.36) reads none apart from its number.
    """
    return _SEPARATE_SIGN.sub(lambda found: found[1] or found[2] + "-", text)


def read_config(folder: Path, warnings: list[str], *, named: bool = False) -> ModelConfig:
    """Return a folder's configuration, or `NO_CONFIG` without one. Adds ignored fields to `warnings`.

    `named`: whether the model is not named after its folder, so that the file may have any name.

    Raise `ModelLoadError`, which names the file and the key.
    """
    file = folder / CONFIG_FILE
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not file.is_symlink():
            return NO_CONFIG
        raise ModelLoadError(f"{file}: {error.strerror}") from None
    if len(content) > MAX_CONFIG_BYTES:
        raise ModelLoadError(f"{file}: expected at most {MAX_CONFIG_BYTES} bytes", Code.INVALID_ARGUMENT)
    try:
        message = parse_text(content, str(file), pb.ModelConfig)
    except InvalidArgument as error:
        raise ModelLoadError(error.message, error.code) from None
    if message.name not in ("", folder.name) and not named:
        text = f"{file}: name: expected the folder's name, {folder.name!r}, got {message.name!r}"
        raise ModelLoadError(text, Code.INVALID_ARGUMENT)
    return config_of(message, folder, str(file), warnings)


def parse_override(text: str, name: str) -> pb.ModelConfig:
    """Parse the JSON in a load request for model `name`; 64-bit numbers may be texts, all fields are optional.

    Raise `InvalidArgument` for invalid JSON, for one above `MAX_CONFIG_BYTES`, and for another model's name.
    """
    what = f"the configuration in the request to load model '{name}'"
    if len(text) > MAX_CONFIG_BYTES:
        raise InvalidArgument(f"{what}: expected at most {MAX_CONFIG_BYTES} characters, got {len(text)}")
    if not text.lstrip(" \t\r\n").startswith("{"):
        raise InvalidArgument(f"{what}: expected a JSON object")
    try:
        message = json_format.Parse(text, pb.ModelConfig())
    except Exception as error:  # Some releases of protobuf do not wrap conversion errors.
        # Further lines of the text repeat the schema.
        raise InvalidArgument(f"{what}: {str(error).partition(chr(10))[0]}") from None
    if message.name not in ("", name):
        raise InvalidArgument(f"{what}: name: expected {name!r}, got {message.name!r}")
    return message


def config_of(message: pb.ModelConfig, folder: Path, source: str, warnings: list[str]) -> ModelConfig:
    """Convert the message of the model in `folder`; `source` names it in errors and warnings.

    Raise `ModelLoadError`, which names the key.
    """
    try:
        _check_enums(message)
        parameters = {name: value.string_value for name, value in sorted(message.parameters.items())}
        own = server_parameters(parameters)
        steps, max_inflight_requests = ensemble_of(message)
        config = ModelConfig(
            backend=_backend(message),
            file_name=_file_name(message, folder),
            version_policy=_version_policy(message.version_policy),
            max_batch_size=not_negative("max_batch_size", message.max_batch_size),
            inputs=_tensors("input", message.input, folder),
            outputs=_tensors("output", message.output, folder),
            instance_groups=tuple(_groups(message)),
            decoupled=_decoupled(message),
            parameters=others(parameters),
            warm_up=tuple(_warm_up(message, folder)),
            dynamic_batching=dynamic_batching(message),
            sequence_batching=sequence_batching(message, folder),
            ensemble=steps,
            max_inflight_requests=max_inflight_requests,
            response_cache=response_cache(message),
            first_response_buckets=first_response_buckets(message),
            execution=own.execution,
            cpus=own.cpus,
            hang_seconds=own.hang_seconds,
            longest_run=own.longest_run,
            idempotent=own.idempotent,
            inputs_in_place=own.inputs_in_place,
            environment=environment_of(parameters, folder),
            traffic=own.traffic,
            ray=ray_options(parameters),
            source=source,
            text=json_text(message),
            sign=_sign(message, "name", "version_policy", "instance_group"),
            groups_sign=_sign(pb.ModelConfig(instance_group=message.instance_group)),
        )
    except (ValueError, ModelLoadError) as error:
        raise ModelLoadError(f"{source}: {error}", Code.INVALID_ARGUMENT) from None
    understood = _UNDERSTOOD_IN_LISTS if config.backend in ("", "python") else _UNDERSTOOD
    notes = [*_without_effect(message, understood), *other_metrics(message), *misspelt(parameters)]
    if (more := len(notes) - MAX_NOTES) > 0:
        notes[MAX_NOTES:] = [f"{more} more such warnings"]
    warnings += [f"{source}: {note}" for note in notes]
    return config


def in_its_environment(config: ModelConfig, own: ModelConfig) -> ModelConfig:
    """Return a client's configuration with the Python environment of the model's `own` one.

    Raise `ModelLoadError` if it sets another one: clients must not choose which program runs.
    """
    if config.environment not in (None, own.environment):
        raise ModelLoadError(
            f"{config.source}: parameters[{ENVIRONMENT}]: expected none, or the one in its {CONFIG_FILE}",
            Code.INVALID_ARGUMENT,
        )
    if config.ray.get(_RUNTIME_ENV, {}) not in ({}, own.ray.get(_RUNTIME_ENV, {})):
        raise ModelLoadError(
            f"{config.source}: parameters[ray_runtime_env]: expected none, or the one in its {CONFIG_FILE}",
            Code.INVALID_ARGUMENT,
        )
    if own.environment is not None and config.execution not in ("", "process"):
        raise ModelLoadError(
            f"{config.source}: parameters[execution]: expected 'process', as its {CONFIG_FILE} has {ENVIRONMENT}, "
            f"got {config.execution!r}",
            Code.INVALID_ARGUMENT,
        )
    ray = {name: value for name, value in config.ray.items() if name != _RUNTIME_ENV}
    ray |= {name: value for name, value in own.ray.items() if name == _RUNTIME_ENV}
    return replace(config, environment=own.environment, ray=ray)


def _sign(message: pb.ModelConfig, *without: str) -> str:
    own = pb.ModelConfig()
    own.CopyFrom(message)
    for name in without:
        own.ClearField(name)
    own.parameters.pop(TRAFFIC, None)
    return hashlib.sha256(own.SerializeToString(deterministic=True)).hexdigest()


# --- walking all fields ---


def _items(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a field's value, or each of its elements, with its key."""
    if isinstance(value, Mapping):
        yield from ((f"{key}[{name}]", value[name]) for name in sorted(value))
    elif isinstance(value, MutableSequence):
        yield from ((f"{key}[{at}]", item) for at, item in enumerate(value))
    else:
        yield key, value


def _without_effect(message: Message, understood: Set[str], key: str = "", path: str = "") -> Iterator[str]:
    """Yield a note for each field that is set and not supported."""
    for field, value in message.ListFields():
        inner_path = path + field.name
        if inner_path in understood:
            continue
        if any(known.startswith(inner_path + ".") for known in understood):
            for inner_key, item in _items(key + field.name, value):
                yield from _without_effect(item, understood, inner_key + ".", inner_path + ".")
        else:
            yield f"{key}{field.name}: not supported, ignored"


def _check_enums(message: Message, key: str = "") -> None:
    """Raise `ValueError` for undefined enum numbers, which protobuf keeps."""
    for field, value in message.ListFields():
        for inner_key, item in _items(key + field.name, value):
            if isinstance(item, Message):
                _check_enums(item, inner_key + ".")
            elif field.enum_type is not None and item not in field.enum_type.values_by_number:
                raise ValueError(f"{inner_key}: expected {either(field.enum_type.values_by_name)}, got {item}")


# --- supported fields; each function raises `ValueError` with the key ---


def _backend(message: pb.ModelConfig) -> str:
    named = {key: getattr(message, key) for key in ("backend", "platform") if getattr(message, key)}
    for key, name in named.items():
        if name not in BACKEND_OF_NAME:
            raise ValueError(f"{key}: expected {either(sorted(BACKEND_OF_NAME))}, got {name!r}")
    backends = [BACKEND_OF_NAME[name] for name in named.values()]
    if len(set(backends)) > 1:
        raise ValueError(f"platform: expected one of backend {message.backend!r}, got {message.platform!r}")
    return backends[0] if backends else ""


def _file_name(message: pb.ModelConfig, folder: Path) -> str:
    inside(folder / "VERSION", message.default_model_filename, "default_model_filename")
    return message.default_model_filename


def _version_policy(policy: pb.ModelVersionPolicy) -> VersionPolicy:
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return ALL
    if choice == "latest":
        return VersionPolicy(latest=policy.latest.num_versions or 1)
    if choice is None:
        return LATEST
    for at, version in enumerate(policy.specific.versions):
        not_negative(f"version_policy.specific.versions[{at}]", version)
    if not policy.specific.versions:
        raise ValueError("version_policy.specific.versions: expected at least one version, got none")
    return VersionPolicy(specific=frozenset(policy.specific.versions))


def _tensors(
    kind: str, tensors: Sequence[pb.ModelInput | pb.ModelOutput], folder: Path
) -> tuple[TensorConfig, ...]:
    configs: dict[str, TensorConfig] = {}
    for at, tensor in enumerate(tensors):
        key = f"{kind}[{at}]"
        check_name(f"{key}.name", tensor.name, configs)
        datatype = datatype_of(f"{key}.data_type", tensor.data_type) if tensor.data_type else ""
        if any(dim < 1 and dim != -1 for dim in tensor.dims):
            raise ValueError(f"{key}.dims: expected 1 or more, or -1 for any size, got {list(tensor.dims)}")
        dims = tuple(tensor.dims) or None
        label_file = None
        if isinstance(tensor, pb.ModelOutput) and tensor.label_filename:
            label_file = existing(folder, tensor.label_filename, f"{key}.label_filename")
        optional = isinstance(tensor, pb.ModelInput) and tensor.optional
        configs[tensor.name] = TensorConfig(
            tensor.name, datatype, dims, label_file, optional, reshape_of(key, tensor)
        )
    return tuple(configs.values())


def _groups(message: pb.ModelConfig) -> Iterator[InstanceGroup]:
    instances = 0
    for at, group in enumerate(message.instance_group):
        key = f"instance_group[{at}]"
        kind = pb.ModelInstanceGroup.Kind.Name(group.kind)
        if group.gpus and kind in ("KIND_CPU", "KIND_MODEL"):
            raise ValueError(f"{key}.gpus: expected none with {kind}, got {list(group.gpus)}")
        if any(gpu < 0 for gpu in group.gpus):
            raise ValueError(f"{key}.gpus: expected numbers of at least 0, got {list(group.gpus)}")
        count = not_negative(f"{key}.count", group.count) or 1
        if count > MAX_INSTANCES:
            raise ValueError(f"{key}.count: expected at most {MAX_INSTANCES}, got {count}")
        instances += count * max(1, len(group.gpus))
        if instances > MAX_INSTANCES:
            raise ValueError(f"{key}: expected at most {MAX_INSTANCES} instances, all groups together")
        yield InstanceGroup(kind.removeprefix("KIND_"), count, tuple(group.gpus))


def _decoupled(message: pb.ModelConfig) -> bool | None:
    is_set = message.HasField("model_transaction_policy")
    return message.model_transaction_policy.decoupled if is_set else None


def _warm_up(message: pb.ModelConfig, folder: Path) -> Iterator[WarmUpRequest]:
    largest = message.max_batch_size
    for at, request in enumerate(message.model_warmup):
        key = f"model_warmup[{at}]"
        # Without a configured max_batch_size, the model may declare one.
        if request.batch_size > largest > 0:
            expected = f"at most the max_batch_size {largest}"
            raise ValueError(f"{key}.batch_size: expected {expected}, got {request.batch_size}")
        inputs = {
            name: _warm_up_input(f"{key}.inputs[{name}]", request.inputs[name], folder / WARM_UP_FOLDER)
            for name in sorted(request.inputs)
        }
        yield WarmUpRequest(request.name, inputs, request.batch_size, request.count or 1)


def _warm_up_input(key: str, tensor: pb.ModelWarmup.Input, folder: Path) -> WarmUpInput:
    datatype = datatype_of(f"{key}.data_type", tensor.data_type)
    for at, dim in enumerate(tensor.dims):
        not_negative(f"{key}.dims[{at}]", dim)
    choice = tensor.WhichOneof("input_data_type")
    if choice is None:
        raise ValueError(f"{key}: expected zero_data, random_data or input_data_file, got none")
    file = None
    if choice == "input_data_file":
        file = existing(folder, tensor.input_data_file, f"{key}.input_data_file")
    return WarmUpInput(datatype, tuple(tensor.dims), choice == "random_data", file)
