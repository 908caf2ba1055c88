"""What a `model-settings.json` says, with the defaults that MLServer's variables set."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from triglot.core.errors import ModelLoadError
from triglot.core.types import TensorSpec
from triglot.model.config import ModelConfig
from triglot.model.scheduling import DynamicBatching

SETTINGS = "model-settings.json"
DEFAULTS = "model_settings"
"""Parameter of the configuration with the defaults, as JSON."""
NO_EFFECT = ("parallel_workers", "warm_workers")
"""Settings of MLServer's own parallelism, which have no effect."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that the stock runtimes read.

    `file` is the model's, or its folder. `content_types` are those of inputs and outputs, by name; `content_type`
    is the requests' own. `inputs` are declared for clients; empty: what the model itself knows.
    """

    file: Path
    content_type: str = ""
    content_types: Mapping[str, str] = field(default_factory=dict)
    inputs: Sequence[TensorSpec] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    response_cache: bool = False


def values_of(file: Path, config: ModelConfig) -> dict[str, Any]:
    """Return the values in the file, over the defaults; only these if `file` is no settings file that exists.

    Raise `ValueError` and `TypeError` for anything but an object of settings.
    """
    values: Any = json.loads(file.read_bytes()) if file.name == SETTINGS and file.exists() else {}
    if not isinstance(values, dict):  # A scan refuses it, but a file may change after that.
        raise TypeError(f"expected a JSON object, got {type(values).__name__}")
    defaults = json.loads(config.parameters.get(DEFAULTS, "{}"))
    parameters = values.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise TypeError(f"parameters: expected an object, got {type(parameters).__name__}")
    return {**defaults, **values, "parameters": {**defaults.get("parameters", {}), **parameters}}


def warn_of_ignored(file: Path, values: Mapping[str, Any]) -> None:
    """Log a warning for each setting that has no effect."""
    for name in NO_EFFECT:
        if values.get(name):
            log.warning("%s: %s: not supported, ignored", file, name)


def batching_of(values: Mapping[str, Any]) -> DynamicBatching | None:
    """Return MLServer's adaptive batching: none without a size above 1 and a time. Raise `TypeError`.

    As there, the size is no limit on a request.
    """
    size, seconds = values.get("max_batch_size") or 0, values.get("max_batch_time") or 0.0
    for name, value, kinds in (("max_batch_size", size, int), ("max_batch_time", seconds, int | float)):
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise TypeError(f"{name}: expected a number, got {value!r:.60}")
    if size <= 1 or seconds <= 0:
        return None
    return DynamicBatching(max_queue_delay=seconds, max_batch_size=size, limits_requests=False)


def settings_of(file: Path, values: Mapping[str, Any]) -> Settings:
    """Return the settings of a stock runtime. Raise `ModelLoadError`."""
    try:
        parameters = values["parameters"]
        tensors = [_tensor(key, value) for key in ("inputs", "outputs") for value in values.get(key) or ()]
        return Settings(
            _place(file, parameters.get("uri")),
            _text(parameters, "content_type"),
            {name: content_type for _, name, content_type, _ in tensors if content_type},
            [spec for key, _, _, spec in tensors if key == "inputs"],
            parameters.get("extra") or {},
            bool(values.get("cache_enabled")),
        )
    except (TypeError, ValueError) as error:
        raise ModelLoadError(f"{file}: {error}") from None


def _place(file: Path, uri: Any) -> Path:
    folder = file if file.is_dir() else file.parent
    if not uri:
        return folder if file.name == SETTINGS else file
    if not isinstance(uri, str):
        raise TypeError(f"parameters.uri: expected a path, got {uri!r:.60}")
    parts = urlsplit(uri, "file")
    if parts.scheme != "file":
        raise ValueError(
            f"parameters.uri: expected a path, got {uri!r}; give the URL to triglot in place of a folder"
        )
    place = folder / parts.path
    if not place.exists():
        raise ValueError(f"parameters.uri: {place}: no such file or folder")
    return place


def _tensor(key: str, value: Any) -> tuple[str, str, str, TensorSpec]:
    if not isinstance(value, dict):
        raise TypeError(f"{key}: expected objects, got {type(value).__name__}")
    try:
        spec = TensorSpec(value["name"], value["datatype"], value["shape"])
    except KeyError as error:
        raise ValueError(f"{key}: expected name, datatype and shape, got no {error.args[0]}") from None
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    return key, spec.name, _text(value.get("parameters") or {}, "content_type"), spec


def _text(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key) or ""
    if not isinstance(value, str):
        raise TypeError(f"{key}: expected a string, got {value!r:.60}")
    return value
