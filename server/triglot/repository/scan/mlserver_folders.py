"""MLServer's layout: each `model-settings.json` below a folder is a version of the model that it names.

What a settings file omits comes from the `defaults`, which MLServer's variables set, or else from its place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
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
    settings = _settings(file)
    name = _text(file, "name", settings.get("name") or defaults.get("name") or file.parent.name)
    return name, _parameter(file, settings, "version", defaults)


def config_of(place: Path, defaults: Mapping[str, Any], own: ModelConfig = NO_CONFIG) -> ModelConfig:
    """Return the configuration of the model in a folder, or of a settings file; `own` is that of a config.pbtxt.

    It passes the defaults to the backend, and has the Python environment of the settings. Raise `ModelLoadError`.
    """
    if defaults:
        own = replace(own, parameters={**own.parameters, DEFAULTS: json.dumps(defaults)})
    file = place / SETTINGS if place.is_dir() else place
    settings = _settings(file) if file.name == SETTINGS and file.is_file() else {}
    # MLServer, too, looks for an archive beside the settings, and for a folder in the working directory.
    folder = _parameter(file, settings, "environment_path", defaults)
    archive = _parameter(file, settings, "environment_tarball", defaults)
    if own.environment is not None or not (folder or archive):
        return own
    found = Path(os.path.expandvars(folder)).expanduser().absolute() if folder else file.parent / archive
    return replace(own, environment=Path(os.path.normpath(found.absolute())))


def _settings(file: Path) -> dict[str, Any]:
    """Return the settings in a file, whose `parameters`, if any, are an object. Raise `ModelLoadError`."""
    try:
        settings = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file}: expected JSON: {error}") from None
    if not isinstance(settings, dict) or not isinstance(settings.get("parameters") or {}, dict):
        raise ModelLoadError(f"{file}: expected an object, with an object 'parameters' if any, got others")
    return settings


def _parameter(file: Path, settings: Mapping[str, Any], name: str, defaults: Mapping[str, Any]) -> str:
    """Return a parameter, "" without one. Raise `ModelLoadError`."""
    of_file, of_defaults = (values.get("parameters") or {} for values in (settings, defaults))
    return _text(file, f"parameters.{name}", of_file.get(name) or of_defaults.get(name) or "")


def _text(file: Path, key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ModelLoadError(f"{file}: {key}: expected a string, got {value!r:.60}")
    return value


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
