"""MLServer's layout: each `model-settings.json` below a folder is a version of the model that it names.

What a settings file omits comes from the `defaults`, which MLServer's variables set, or else from its place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from triglot.core.errors import ModelLoadError
from triglot.model.config import NO_CONFIG, ModelConfig
from triglot.repository.scan.paths import below

SETTINGS = "model-settings.json"
SERVER_SETTINGS = "settings.json"
BACKEND = "mlserver"
DEFAULTS = "model_settings"
"""The backend's parameter with the defaults, as JSON."""


def settings_files(folder: Path) -> list[Path]:
    """Return the settings files in a folder and below, in order."""
    return sorted(Path(entry.path) for entry in below(folder) if entry.name == SETTINGS and entry.is_file())


def name_and_version(file: Path, defaults: Mapping[str, Any]) -> tuple[str, str]:
    """Return the model's name, and the version, "" without one. Raise `ModelLoadError`."""
    try:
        settings = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file}: expected JSON: {error}") from None
    parameters = settings.get("parameters") or {} if isinstance(settings, dict) else None
    if not isinstance(parameters, dict):
        raise ModelLoadError(f"{file}: expected an object, with an object 'parameters' if any, got others")
    name = settings.get("name") or defaults.get("name") or file.parent.name
    version = parameters.get("version") or defaults.get("parameters", {}).get("version") or ""
    for key, value in (("name", name), ("parameters.version", version)):
        if not isinstance(value, str):
            raise ModelLoadError(f"{file}: {key}: expected a string, got {value!r:.60}")
    return name, version


def config_of(defaults: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration that passes the defaults to the backend."""
    return ModelConfig(parameters={DEFAULTS: json.dumps(defaults)}) if defaults else NO_CONFIG


def numbers_of(versions: Iterable[str]) -> dict[str, int]:
    """Return the number of each version: its own if all have one, or else its place in MLServer's order.

    There the one without a version is the newest, and others are compared as texts.
    """
    named = sorted(version for version in versions if version)
    numbers = {version: int(version) for version in named if version.isascii() and version.isdecimal()}
    if len(set(numbers.values())) < len(named):
        numbers = {version: at for at, version in enumerate(named, 1)}
    if "" in versions:
        numbers[""] = max(numbers.values(), default=0) + 1
    return numbers
