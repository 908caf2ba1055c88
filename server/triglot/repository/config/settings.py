"""The entry of a model in a list of models: its base path, version policy, labels, weights and recording."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from triglot.core.errors import InvalidArgument
from triglot.model.config import LATEST, Recording, VersionPolicy
from triglot.repository.config.traffic import weights_of

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
NAME_RULE = "expected 1 to 128 letters, digits, '.', '_' and '-', not starting with '.'"


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """One model: `base_path` holds a folder for each version, and `labels` name versions.

    `traffic`: weights by version. `recording`: how its requests are recorded, if configured. `platform` is the
    configured one and not part of equality, as the folder decides how the model is loaded.
    """

    name: str
    base_path: Path
    policy: VersionPolicy = LATEST
    labels: Mapping[str, int] = field(default_factory=dict)
    platform: str = field(default="", compare=False)
    recording: Recording | None = None
    traffic: Mapping[str, float] = field(default_factory=dict)


def folders_of(models: Iterable[object]) -> list[Path]:
    """Return the base paths of the models that are `ModelSettings`."""
    return [model.base_path for model in models if isinstance(model, ModelSettings)]


def record_folders_of(models: Iterable[object]) -> list[Path]:
    """Return the folders that the models that are `ModelSettings` have their requests recorded to."""
    recordings = [model.recording for model in models if isinstance(model, ModelSettings)]
    return [Path(recording.prefix).parent for recording in recordings if recording is not None]


def check_names(names: Iterable[str]) -> None:
    """Raise `InvalidArgument` for a name that clients could not send, and for a duplicate (tfs 3.7)."""
    seen: set[str] = set()
    for name in names:
        if not NAME.fullmatch(name):
            raise InvalidArgument(f"model name {name!r}: {NAME_RULE}")
        if name in seen:
            raise InvalidArgument(f"Illegal to list model {name} multiple times in config list")
        seen.add(name)


def settings_fields(settings: ModelSettings) -> dict[str, Any]:
    """Return the settings as JSON values."""
    specific = settings.policy.specific
    return {
        "name": settings.name,
        "base_path": str(settings.base_path),
        "latest": settings.policy.latest,
        "specific": None if specific is None else sorted(specific),
        "labels": dict(settings.labels),
        "platform": settings.platform,
        "recording": None if settings.recording is None else asdict(settings.recording),
        "traffic": dict(settings.traffic),
    }


def settings_of(fields: Mapping[str, Any]) -> ModelSettings:
    """Return the settings from the result of `settings_fields`."""
    specific, recording = fields["specific"], fields["recording"]
    policy = VersionPolicy(fields["latest"], None if specific is None else frozenset(specific))
    return ModelSettings(
        fields["name"],
        Path(fields["base_path"]),
        policy,
        dict(fields["labels"]),
        fields["platform"],
        None if recording is None else Recording(**recording),
        weights_of(fields["traffic"]),
    )
