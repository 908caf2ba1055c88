"""What is to be done about one model: a decision on values, without waiting or acting.

Strategy: availability is preserved (tfs 6.1). The highest new version is loaded first, one at a time; versions
that are not wanted any more go only when a wanted one serves what is wanted of it, or when none is wanted. So what
serves stays until its successor serves, and when its successor cannot be loaded: what was wanted together comes
together, and a version that goes on with its former files replaces no other.

In memory are the versions that serve, those that drain, and the one that loads. A load begins when these are, with
it, at most one more than serve or than are wanted, whichever is more; until then it waits for drains to end.
Nothing but the begin of a load makes them more. Nothing but a load that ends well makes more versions serve, and
then one serves what is wanted of it, and all that serve are wanted: never more serve than were wanted at the same
time. So there is never more than one version more in memory than were wanted at the same time.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triglot.core.errors import ServingError
from triglot.repository.scan.source import ModelFiles
from triglot.scheduling.servable import Servable


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

    `files`: those that were tried last, or are being loaded. `error`: why these could not be loaded; of a READY
    one, which serves its former files then, too. `served`: the files of its servable. `retry`: `files` are to be
    tried again; `retry_at`: at this time (monotonic seconds), after so many `retries`. `problem`: what is wrong
    with its model's folder now.
    """

    files: ModelFiles
    state: State = State.START
    error: ServingError | None = None
    problem: ServingError | None = None
    servable: Servable | None = None
    served: ModelFiles | None = None
    retry: bool = False
    retry_at: float | None = None
    retries: int = 0

    def begun_anew(self, files: ModelFiles) -> Version:
        """In place of one that is gone."""
        return Version(files, retries=self.retries if files == self.files else 0)

    @property
    def ready(self) -> bool:
        """Whether it serves: loaded, and with an instance alive."""
        return self.state is State.READY and self.servable is not None and self.servable.alive

    @property
    def gone(self) -> bool:
        """Whether it takes calls no more."""
        return self.state in (State.UNLOADING, State.UNAVAILABLE)

    @property
    def failure(self) -> ServingError | None:
        """Why it is not what is on disk, if it is not."""
        return self.error or self.problem

    @property
    def reason(self) -> str:
        """Why it is UNAVAILABLE, or why a READY one still serves its former files (spec 3.9)."""
        if self.failure is not None:
            return self.failure.message
        return "unloaded" if self.state is State.UNAVAILABLE else ""


@dataclass(frozen=True, slots=True)
class Plan:
    """The versions to retire now, and the one to load next; `wait`: only when something that drains has gone."""

    retire: Sequence[int]
    load: ModelFiles | None
    wait: bool = False


def plan(versions: Mapping[int, Version], wanted: Mapping[int, ModelFiles], *, draining: int = 0) -> Plan:
    """What to do next about a model of which these versions are known and those are wanted.

    `draining`: how many that were replaced or retired are still in memory.
    """
    serving = {number for number, version in versions.items() if version.state is State.READY}
    never_begun = {number for number, version in versions.items() if version.state is State.START}
    retire = sorted(never_begun - wanted.keys())
    if not wanted or any(versions[number].served == wanted[number] for number in serving & wanted.keys()):
        retire += sorted(serving - wanted.keys())
    load = [files for number, files in sorted(wanted.items()) if needs_load(versions.get(number), files)]
    if not load:
        return Plan(retire, None)
    staying = serving.difference(retire)
    leaving = draining + len(serving) - len(staying)
    return Plan(retire, load[-1], wait=leaving > max(len(wanted) - len(staying), 0))


def needs_load(version: Version | None, files: ModelFiles) -> bool:
    """Whether a wanted version is to be loaded from these files.

    One that failed has its next try when its files have changed, or somebody asks for it.
    """
    if version is None or version.retry or version.state in (State.START, State.UNLOADING):
        return True
    if version.state is State.READY:
        return version.files != files
    return version.state is State.UNAVAILABLE and (version.error is None or version.files != files)
