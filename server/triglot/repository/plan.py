"""What is to be done about one model: a decision on values, without waiting or acting.

Strategy: availability is preserved (tfs 6.1). The highest new version is loaded first, one at a time; versions
that are not wanted any more go only when a wanted one serves, or when none is wanted. So what serves stays until
its successor serves, and when its successor cannot be loaded. The next one is loaded when what was replaced has
left the memory, so that there is never more than one version too many in it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triglot.core.errors import ServingError
from triglot.engine.servable import Servable
from triglot.repository.source import ModelFiles


class State(enum.Enum):
    """A version's state; the values are the words of the model repository extension."""

    START = "UNKNOWN"
    """Wanted, and not begun with."""
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    """Takes no new calls; those that run come to their end."""
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(slots=True, eq=False)
class Version:
    """One version: its files, its state and, while it is READY or UNLOADING, its servable.

    `files`: those that were tried last. `error`: why these could not be loaded; of a READY one, which serves its
    former files then, too. `retry`: they are to be tried again.
    """

    files: ModelFiles
    state: State = State.START
    error: ServingError | None = None
    servable: Servable | None = None
    retry: bool = False

    @property
    def ready(self) -> bool:
        """Whether it serves: loaded, and with an instance alive."""
        return self.state is State.READY and self.servable is not None and self.servable.alive

    @property
    def gone(self) -> bool:
        """Whether it takes calls no more."""
        return self.state in (State.UNLOADING, State.UNAVAILABLE)

    @property
    def reason(self) -> str:
        """Why it is UNAVAILABLE."""
        if self.state is not State.UNAVAILABLE:
            return ""
        return "unloaded" if self.error is None else self.error.message


@dataclass(frozen=True, slots=True)
class Plan:
    """The versions to retire now, and the one to load next; `wait`: when what drains now is gone."""

    retire: Sequence[int]
    load: ModelFiles | None
    wait: bool = False


def plan(versions: Mapping[int, Version], wanted: Mapping[int, ModelFiles], *, draining: bool = False) -> Plan:
    """What to do next about a model of which these versions are known and those are wanted.

    `draining`: something that was replaced or retired still runs calls.
    """
    serving = {number for number, version in versions.items() if version.state is State.READY}
    retire = [
        number
        for number, version in sorted(versions.items())
        if number not in wanted and version.state is State.START
    ]
    if not wanted or serving & wanted.keys():
        retire += sorted(serving - wanted.keys())
    load = [files for number, files in sorted(wanted.items()) if needs_load(versions.get(number), files)]
    staying = serving.difference(retire)
    # Where nothing serves, memory has to give way.
    wait = bool(load and staying) and (draining or staying != serving)
    return Plan(retire, load[-1] if load else None, wait)


def needs_load(version: Version | None, files: ModelFiles) -> bool:
    """Whether a wanted version is to be loaded from these files.

    One that failed has its next try when its files have changed, or somebody asks for it.
    """
    if version is None or version.retry or version.state in (State.START, State.UNLOADING):
        return True
    if version.state is State.READY:
        return version.files != files
    return version.state is State.UNAVAILABLE and (version.error is None or version.files != files)
