"""What clients have changed since the server was started: as much as brings another worker to the same state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triglot.dataplane.control import (
    LOAD_MODEL,
    LOG_SETTINGS,
    REGISTER,
    TRACE_SETTINGS,
    UNLOAD_MODEL,
    UNREGISTER,
    Arguments,
)

Key = tuple[str, ...]
MODEL, REGION = "model", "region"
MOST_GIVEN_BACK = 512
"""Regions that were given back, of which the last are remembered; their names come without end."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change by its name. `revision` numbers them; `went_well`: whether the call that made it had no error."""

    revision: int
    name: str
    arguments: Arguments
    went_well: bool = True

    def fields(self) -> list[Any]:
        """It as JSON's values."""
        return [self.revision, self.name, dict(self.arguments), self.went_well]


def key_of(name: str, arguments: Arguments) -> Key:
    """What a change is about: a later one for the same takes its place, and waits for its end."""
    if name in (LOAD_MODEL, UNLOAD_MODEL):
        return MODEL, str(arguments["name"])
    if name in (REGISTER, UNREGISTER):
        return REGION, str(arguments["name"])
    return (name, str(arguments["model"])) if name == TRACE_SETTINGS else (name,)


class Record:
    """The changes that count, the latest for each key. Pure."""

    def __init__(self) -> None:
        self.revision = 0
        self._kept: dict[Key, Change] = {}

    def note(self, name: str, arguments: Arguments, *, went_well: bool = True) -> None:
        """It was made."""
        key = key_of(name, arguments)
        before = self._kept.pop(key, None)
        if name == UNREGISTER:
            self._forget_regions(every=not arguments["name"])
        if before is not None:
            arguments = _with(name, before.arguments, arguments)
        self.revision += 1
        self._kept[key] = Change(self.revision, name, arguments, went_well)

    def _forget_regions(self, *, every: bool) -> None:
        """Make room for one more that is given back: who is about to start has to be told of that, too."""
        given_back = [key for key, change in self._kept.items() if change.name == UNREGISTER]
        doomed = set(given_back[: max(0, len(given_back) + 1 - MOST_GIVEN_BACK)])
        self._kept = {
            key: change
            for key, change in self._kept.items()
            if key not in doomed and not (every and key[0] == REGION)
        }

    def after(self, revision: int) -> list[Change]:
        """Those since then, in their order."""
        return [change for change in self._kept.values() if change.revision > revision]


def _with(name: str, before: Arguments, arguments: Arguments) -> Arguments:
    """Settings are changed one by one; of all else the last word counts."""
    if name == LOG_SETTINGS:
        return {**before, **_given(arguments)}
    if name == TRACE_SETTINGS:
        return {**arguments, "settings": {**before["settings"], **arguments["settings"]}}
    return arguments


def _given(arguments: Arguments) -> Mapping[str, Any]:
    return {key: value for key, value in arguments.items() if value is not None}
