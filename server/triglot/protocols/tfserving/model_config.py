"""A ModelServerConfig, from a file or a reload request, as `ModelSettings` (tfs 3.7, 6.2).

Strategy: this checks the message alone. What depends on the loaded models, such as a label for a version that is
not available, is checked where the settings are applied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from triglot.core.errors import InvalidArgument
from triglot.model.config import ALL, Recording, VersionPolicy
from triglot.pb.tfserving import model_server_config_pb2 as pb
from triglot.repository.config.settings import ModelSettings, check_names
from triglot.repository.config.traffic import weights_of
from triglot.repository.scan.layout import BACKEND_OF_FILE
from triglot.repository.scan.urls import SCHEMES, url_of

TENSORFLOW = "tensorflow"
"""TensorFlow Serving's only platform.

The names of Triglot's backends are allowed too, and all mean the same: a version's files select the backend.
"""
PLATFORMS = frozenset((TENSORFLOW, *BACKEND_OF_FILE.values()))
COLLECTORS = ("", "file")
"""Types of log collectors; both write TFRecord files."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def model_settings(
    config: pb.ModelServerConfig, platforms: Mapping[str, str] | None = None
) -> list[ModelSettings]:
    """Return the configured models; none if the list is empty. `platforms` are those of the models until now.

    Raise `InvalidArgument` in TensorFlow Serving's order: names, then paths, then platforms, of all models.
    """
    if config.WhichOneof("config") != "model_config_list":
        raise InvalidArgument(
            "ServerModelConfig type not supported by HandleReloadConfigRequest. "
            "Only ModelConfigList is currently supported"
        )
    models = config.model_config_list.config
    check_names([model.name for model in models])
    base_paths = [_folder(model) for model in models]
    for model in models:
        _check_platform(model, (platforms or {}).get(model.name, ""))
    return [_settings(model, base_path) for model, base_path in zip(models, base_paths, strict=True)]


def _settings(model: pb.ModelConfig, base_path: Path) -> ModelSettings:
    policy = _policy(model.model_version_policy)
    return ModelSettings(
        model.name,
        base_path,
        policy,
        dict(model.version_labels),
        _platform(model),
        _recording(model),
        _weights(model),
    )


def _weights(model: pb.ModelConfig) -> dict[str, float]:
    """Return the weights of versions. Raise `InvalidArgument`."""
    try:
        return weights_of(dict(model.traffic))
    except ValueError as error:
        raise InvalidArgument(f"model {model.name}: {error}") from None


def _recording(model: pb.ModelConfig) -> Recording | None:
    """Return how the model's requests are recorded (tfs 6.7). Raise `InvalidArgument`."""
    if not model.HasField("logging_config"):
        return None
    config = model.logging_config
    collector, rate = config.log_collector_config, config.sampling_config.sampling_rate
    where = f"model {model.name}: logging_config"
    if config.HasField("custom_logging_config"):
        raise InvalidArgument(f"{where}: custom_logging_config is not supported, expected log_collector_config")
    if collector.type not in COLLECTORS:
        raise InvalidArgument(
            f"Cannot find LogCollector::Factory for type: {collector.type}; {where}: expected "
            f"{' or '.join(map(repr, COLLECTORS))}"
        )
    if not Path(collector.filename_prefix).is_absolute() or collector.filename_prefix.endswith("/"):
        raise InvalidArgument(
            f"{where}: expected a filename_prefix like /records/{model.name}, got {collector.filename_prefix!r}"
        )
    if not 0 <= rate <= 1:
        raise InvalidArgument(f"{where}: expected a sampling_rate from 0 to 1, got {rate:g}")
    return Recording(collector.filename_prefix, rate)


def _folder(model: pb.ModelConfig) -> Path:
    path = model.base_path.removeprefix("file://")
    if url_of(Path(path)) is not None:
        return Path(path)
    if _SCHEME.match(path):
        raise InvalidArgument(
            f"Expected model {model.name} to be in a local folder, or at a URL with "
            f"{', '.join(f'{scheme}://' for scheme in SCHEMES)}; got base_path()={model.base_path}"
        )
    if not Path(path).is_absolute():
        raise InvalidArgument(
            f"Expected model {model.name} to have an absolute path or URI; got base_path()={model.base_path}"
        )
    return Path(path)


def _platform(model: pb.ModelConfig) -> str:
    is_tensorflow = not model.model_platform and model.model_type == pb.TENSORFLOW
    return TENSORFLOW if is_tensorflow else model.model_platform


def _check_platform(model: pb.ModelConfig, before: str) -> None:
    """Raise `InvalidArgument` unless either platform or (deprecated) type is set, supported, and as before."""
    if model.model_type != pb.MODEL_TYPE_UNSPECIFIED and model.model_platform:
        raise InvalidArgument(
            "Illegal setting both ModelServerConfig::model_type (deprecated) and "
            f"ModelServerConfig::model_platform, model name is {model.name}"
        )
    if model.model_type not in (pb.MODEL_TYPE_UNSPECIFIED, pb.TENSORFLOW):
        raise InvalidArgument(
            f"ModelServerConfig::model_type choice {model.model_type} not supported, model name is {model.name}"
        )
    platform = _platform(model)
    if not platform:
        raise InvalidArgument(
            "Illegal setting neither ModelServerConfig::model_type (deprecated) nor "
            f"ModelServerConfig::model_platform, model name is {model.name}"
        )
    if before and platform != before:
        raise InvalidArgument(
            f"Illegal to change a model's platform. For model {model.name} platform was {before} and new platform "
            f"requested is {platform}"
        )
    if platform not in PLATFORMS:
        raise InvalidArgument(f"Model {model.name} requests unsupported platform {platform}")


def _policy(policy: pb.FileSystemStoragePathSourceConfig.ServableVersionPolicy) -> VersionPolicy:
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return ALL
    if choice == "specific":
        return VersionPolicy(specific=frozenset(policy.specific.versions))
    # Without a choice, or a number, the latest one is served (tfs 6.1).
    return VersionPolicy(latest=policy.latest.num_versions or 1)
