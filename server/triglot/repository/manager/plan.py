"""Plans the next step for one model: a pure function of its state.

Availability is preserved (tfs 6.1). The highest new version is loaded first, one at a time. Unwanted versions are
retired only once a wanted version serves its wanted files, or when no version is wanted. So a version serves until
its successor does, and stays if the successor cannot be loaded. A version that continues with its former files
replaces no other version.

Memory holds the serving versions, the draining ones, and the one being loaded. A load begins only if there will
be, including it, at most one version more than serve or are wanted, whichever is more; otherwise it waits for
drains to end. Only the start of a load adds a version to memory. Only a successful load adds a serving version,
and then one serves its wanted files and unwanted ones are retired, so never more versions serve than were wanted
at the same time. Hence memory never holds more than one version more than were wanted at the same time.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triglot.core.errors import ServingError
from triglot.repository.scan.source import ModelFiles
from triglot.scheduling.servable import Servable


class State(enum.Enum):
    """State of a version; the values are those of the model repository extension."""

    START = "UNKNOWN"
    """Wanted, but not started."""
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    """Takes no new calls; running ones complete."""
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(slots=True, eq=False)
class Version:
    """One version of a model: its files, its state and, while READY or UNLOADING, its servable.

    Attributes:
        files: Files that are being loaded, or that were tried last.
        error: Why these could not be loaded; a READY version then still serves its former files.
        is_secret: Whether callers of the model do not get the error's text, as its own code raised it.
        problem: The error in the model's folder now.
        served: Files of the servable.
        retry: Whether `files` are to be loaded again.
        retry_at: Time of the next retry, in monotonic seconds.
        retries: Number of automatic retries so far.
    """

    files: ModelFiles
    state: State = State.START
    error: ServingError | None = None
    is_secret: bool = False
    problem: ServingError | None = None
    servable: Servable | None = None
    served: ModelFiles | None = None
    retry: bool = False
    retry_at: float | None = None
    retries: int = 0

    def restarted(self, files: ModelFiles) -> Version:
        """Return a new version to replace this one, which has ended."""
        return Version(files, retries=self.retries if files == self.files else 0)

    @property
    def ready(self) -> bool:
        """Whether it serves: loaded, and with a live instance."""
        return self.state is State.READY and self.servable is not None and self.servable.alive

    @property
    def closed_to_calls(self) -> bool:
        """Whether it takes no more calls."""
        return self.state in (State.UNLOADING, State.UNAVAILABLE)

    @property
    def failure(self) -> ServingError | None:
        """The error that keeps it from serving the files on disk."""
        return self.error or self.problem

    @property
    def reason(self) -> str:
        """Why it is UNAVAILABLE, why a READY version still serves its former files (spec 3.9), or the warnings of
        its model.
        """
        if self.failure is not None:
            return self.failure.message
        return "unloaded" if self.state is State.UNAVAILABLE else self.warnings

    @property
    def warnings(self) -> str:
        """The warnings of its loaded model; "" if there are none."""
        return "" if self.servable is None else "; ".join(self.servable.model.warnings)


@dataclass(frozen=True, slots=True)
class Plan:
    """The versions to retire now, and the one to load next; `wait`: only after a drain has ended."""

    retire: Sequence[int]
    load: ModelFiles | None
    wait: bool = False


def plan(versions: Mapping[int, Version], wanted: Mapping[int, ModelFiles], *, draining: int = 0) -> Plan:
    """Return the next step for a model with these known and wanted versions.

    `draining`: number of replaced or retired versions that are still in memory.
    """
    serving = {number for number, version in versions.items() if version.state is State.READY}
    unstarted = {number for number, version in versions.items() if version.state is State.START}
    retire = sorted(unstarted - wanted.keys())
    if not wanted or any(versions[number].served == wanted[number] for number in serving & wanted.keys()):
        retire += sorted(serving - wanted.keys())
    load = [files for number, files in sorted(wanted.items()) if needs_load(versions.get(number), files)]
    if not load:
        return Plan(retire, None)
    staying = serving.difference(retire)
    draining_then = draining + len(serving) - len(staying)
    return Plan(retire, load[-1], wait=draining_then > max(len(wanted) - len(staying), 0))


def needs_load(version: Version | None, files: ModelFiles) -> bool:
    """Whether a wanted version has to be loaded from these files.

    A failed one is loaded again when its files have changed or a retry is requested.
    """
    if version is None or version.retry or version.state in (State.START, State.UNLOADING):
        return True
    if version.state is State.READY:
        return version.files != files
    return version.state is State.UNAVAILABLE and (version.error is None or version.files != files)
