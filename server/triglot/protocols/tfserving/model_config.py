"""A ModelServerConfig, of a file or a reload request, as the settings of our models (tfs 3.7, 6.2).

Strategy: this is about the message alone. What depends on the models that are loaded, such as a label for a
version that is not available, belongs to whoever applies the settings.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

from google.protobuf import text_format
from google.protobuf.message import Message

from triglot.backends import BACKENDS
from triglot.core.errors import InvalidArgument
from triglot.pb import POOL
from triglot.pb.tfserving import model_server_config_pb2 as pb
from triglot.repository.settings import ALL, ModelSettings, VersionPolicy, check_models

M = TypeVar("M", bound=Message)

TENSORFLOW = "tensorflow"
"""TensorFlow Serving's only platform. The names of our backends are platforms too, and all mean the same: the
files in a version's folder choose the backend."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def model_settings(config: pb.ModelServerConfig) -> list[ModelSettings]:
    """The models that a configuration wants; none when its list is empty. Raises `InvalidArgument`."""
    if config.WhichOneof("config") != "model_config_list":
        raise InvalidArgument(
            "ServerModelConfig type not supported by HandleReloadConfigRequest. "
            "Only ModelConfigList is currently supported"
        )
    models = [_settings(model) for model in config.model_config_list.config]
    check_models(models)
    return models


def parse_text(text: bytes, name: str, message_class: type[M]) -> M:
    """A message in protobuf's text format. Raises `InvalidArgument`, which says where in file `name`."""
    try:
        return text_format.Parse(text.decode(), message_class(), descriptor_pool=POOL)
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"Invalid protobuf file: '{name}': {error}") from None


def _settings(model: pb.ModelConfig) -> ModelSettings:
    base_path = _folder(model)
    _check_platform(model)
    if model.HasField("logging_config"):
        raise InvalidArgument("No request-logger-creator provided.")
    return ModelSettings(model.name, base_path, _policy(model.model_version_policy), dict(model.version_labels))


def _folder(model: pb.ModelConfig) -> Path:
    path = model.base_path.removeprefix("file://")
    if _SCHEME.match(path):
        raise InvalidArgument(
            f"Expected model {model.name} to lie in a folder of this machine; got base_path()={model.base_path}"
        )
    if not Path(path).is_absolute():
        raise InvalidArgument(
            f"Expected model {model.name} to have an absolute path or URI; got base_path()={model.base_path}"
        )
    return Path(path)


def _check_platform(model: pb.ModelConfig) -> None:
    """Raises `InvalidArgument` unless exactly one of platform and (deprecated) type is there, and is known."""
    if model.model_type == pb.MODEL_TYPE_UNSPECIFIED:
        platform = model.model_platform
    elif model.model_platform:
        raise InvalidArgument(
            "Illegal setting both ModelServerConfig::model_type (deprecated) and "
            f"ModelServerConfig::model_platform, model name is {model.name}"
        )
    elif model.model_type == pb.TENSORFLOW:
        platform = TENSORFLOW
    else:
        raise InvalidArgument(
            f"ModelServerConfig::model_type choice {model.model_type} not supported, model name is {model.name}"
        )
    if not platform:
        raise InvalidArgument(
            "Illegal setting neither ModelServerConfig::model_type (deprecated) nor "
            f"ModelServerConfig::model_platform, model name is {model.name}"
        )
    if platform not in {TENSORFLOW, *BACKENDS}:
        raise InvalidArgument(f"Model {model.name} requests unsupported platform {platform}")


def _policy(policy: pb.FileSystemStoragePathSourceConfig.ServableVersionPolicy) -> VersionPolicy:
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return ALL
    if choice == "specific":
        return VersionPolicy(specific=frozenset(policy.specific.versions))
    # Without a choice, or a number: the latest one (tfs 6.1).
    return VersionPolicy(latest=policy.latest.num_versions or 1)
