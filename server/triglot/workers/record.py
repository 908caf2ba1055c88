"""The changes that clients have made since the start: as many as bring a new worker to the same state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triglot.dataplane.control import (
    LOAD_MODEL,
    LOG_SETTINGS,
    REGISTER,
    TRACE_SETTINGS,
    TRAFFIC,
    UNLOAD_MODEL,
    UNREGISTER,
    Arguments,
)

Key = tuple[str, ...]
MODEL, REGION = "model", "region"
MAX_UNREGISTERED = 512
"""Unregistered shared-memory regions that are remembered, because there is no limit on their names."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change. `revision` numbers changes; `succeeded`: whether the call that made it succeeded."""

    revision: int
    name: str
    arguments: Arguments
    succeeded: bool = True

    def fields(self) -> list[Any]:
        """Return the change as JSON values."""
        return [self.revision, self.name, dict(self.arguments), self.succeeded]


def key_of(name: str, arguments: Arguments) -> Key:
    """Return the subject of a change: a later change of the same subject waits for it, and replaces it here."""
    if name in (LOAD_MODEL, UNLOAD_MODEL):
        return MODEL, str(arguments["name"])
    if name in (REGISTER, UNREGISTER):
        return REGION, str(arguments["name"])
    return (name, str(arguments["model"])) if name in (TRACE_SETTINGS, TRAFFIC) else (name,)


class Record:
    """The changes that are still in effect, the latest per key."""

    def __init__(self) -> None:
        self.revision = 0
        self._kept: dict[Key, Change] = {}

    def note(self, name: str, arguments: Arguments, *, succeeded: bool = True) -> None:
        """Record a change that was made."""
        key = key_of(name, arguments)
        before = self._kept.pop(key, None)
        if name == UNREGISTER:
            self._forget_regions(every=not arguments["name"])
        if before is not None:
            arguments = _merged(name, before.arguments, arguments)
        self.revision += 1
        self._kept[key] = Change(self.revision, name, arguments, succeeded)

    def _forget_regions(self, *, every: bool) -> None:
        """Make room for one more unregistered region.

        These are kept because a starting worker may need them too.
        """
        unregistered = [key for key, change in self._kept.items() if change.name == UNREGISTER]
        forgotten = set(unregistered[: max(0, len(unregistered) + 1 - MAX_UNREGISTERED)])
        self._kept = {
            key: change
            for key, change in self._kept.items()
            if key not in forgotten and not (every and key[0] == REGION)
        }

    def after(self, revision: int) -> list[Change]:
        """Return the changes since a revision, in order."""
        return [change for change in self._kept.values() if change.revision > revision]


def _merged(name: str, before: Arguments, arguments: Arguments) -> Arguments:
    """Return merged arguments: settings are merged one by one, other changes replace earlier ones."""
    if name == LOG_SETTINGS:
        return {**before, **_given(arguments)}
    if name == TRACE_SETTINGS:
        return {**arguments, "settings": {**before["settings"], **arguments["settings"]}}
    return arguments


def _given(arguments: Arguments) -> Mapping[str, Any]:
    return {key: value for key, value in arguments.items() if value is not None}
