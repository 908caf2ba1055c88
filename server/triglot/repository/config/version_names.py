"""Version names, the default version and the traffic in a model's folder: `versions.toml` (tfs 7.1, `traffic`).

default = "v1"
traffic = { v1 = 90, v2 = 10 }

[versions]
v1 = 1
v2 = 3
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triglot.core.errors import Code, ModelLoadError
from triglot.repository.config.settings import NAME, NAME_RULE
from triglot.repository.config.traffic import KEYS, NO_TRAFFIC, TrafficSettings, traffic_settings

NAMES_FILE = "versions.toml"
MAX_NAMES_BYTES = 1024 * 1024
"""Limit on the size of the file, which every scan of the disk reads."""


@dataclass(frozen=True, slots=True)
class VersionNames:
    """`numbers` are versions by name; `default` is for requests that name none, None: the highest version."""

    numbers: Mapping[str, int] = field(default_factory=dict)
    default: int | None = None
    traffic: TrafficSettings = NO_TRAFFIC


def read_names(file: Path) -> VersionNames:
    """Return the names in a `versions.toml`, none without a file. Raise `ModelLoadError` with file and key."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_NAMES_BYTES + 1)
    except FileNotFoundError:
        return VersionNames()
    except OSError as error:
        raise ModelLoadError(f"{file}: {error.strerror}") from None
    try:
        if len(content) > MAX_NAMES_BYTES:
            raise ValueError(f"expected at most {MAX_NAMES_BYTES} bytes")
        return _names(tomllib.loads(content.decode()))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file}: {error}", Code.INVALID_ARGUMENT) from None


def _names(content: dict[str, Any]) -> VersionNames:
    """Raise `ValueError`."""
    if unknown := sorted(content.keys() - {"default", "versions", *KEYS}):
        raise ValueError(f"unknown key {unknown[0]!r}, expected default, versions, {', '.join(KEYS)}")
    numbers = content.get("versions", {})
    if not isinstance(numbers, dict):
        raise ValueError(f"versions: expected a table of names and numbers, got {numbers!r}")
    for name, number in numbers.items():
        if not NAME.fullmatch(name) or name.isdecimal():
            raise ValueError(f"versions: {name!r}: {NAME_RULE}, and not only digits")
        if not _is_number(number):
            raise ValueError(f"versions: {name}: expected a version's number, got {number!r}")
    default = content.get("default")
    if isinstance(default, str):
        if default not in numbers:
            raise ValueError(f"default: expected a name in [versions] or a number, got {default!r}")
        default = numbers[default]
    if default is not None and not _is_number(default):
        raise ValueError(f"default: expected a name in [versions] or a number, got {default!r}")
    traffic = traffic_settings({key: content[key] for key in KEYS if key in content})
    return VersionNames(numbers, default, traffic)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
