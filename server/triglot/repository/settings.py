"""What a configuration says of one model: where its versions lie, which are wanted, what they are called."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from triglot.core.errors import InvalidArgument

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
NAME_RULE = "expected 1 to 128 letters, digits, '.', '_' and '-', without a dot in front"


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Which of the versions on disk are wanted: all, the `latest` highest, or the `specific` ones (tfs 6.1).

    Raises `ValueError` for a number below 1, and for both.
    """

    latest: int | None = None
    specific: frozenset[int] | None = None

    def __post_init__(self) -> None:
        if self.latest is not None and self.latest < 1:
            raise ValueError(f"latest: expected at least 1 version, got {self.latest}")
        if self.latest is not None and self.specific is not None:
            raise ValueError("expected the latest versions or specific ones, got both")

    def wanted(self, found: Collection[int]) -> list[int]:
        """The wanted ones of the versions that were found, ascending."""
        versions = sorted(found)
        if self.specific is not None:
            return [version for version in versions if version in self.specific]
        return versions if self.latest is None else versions[-self.latest :]

    def missing(self, found: Collection[int]) -> list[int]:
        """The specific ones that were not found, ascending."""
        return sorted((self.specific or frozenset()).difference(found))


ALL = VersionPolicy()
LATEST = VersionPolicy(latest=1)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """One model: `base_path` holds a folder for each version. `labels` name versions.

    `platform` is what the configuration calls its kind; what the folder holds decides how it is loaded, so that
    settings are equal without it.
    """

    name: str
    base_path: Path
    policy: VersionPolicy = LATEST
    labels: Mapping[str, int] = field(default_factory=dict)
    platform: str = field(default="", compare=False)


def check_names(names: Iterable[str]) -> None:
    """Raises `InvalidArgument` for a name that clients could not send, and for one that comes twice (tfs 3.7)."""
    seen: set[str] = set()
    for name in names:
        if not NAME.fullmatch(name):
            raise InvalidArgument(f"model name {name!r}: {NAME_RULE}")
        if name in seen:
            raise InvalidArgument(f"Illegal to list model {name} multiple times in config list")
        seen.add(name)
