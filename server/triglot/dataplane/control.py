"""Control actions and reports of a server, by name, so that a server may consist of several worker processes.

Strategy: a service that changes something registers an action, and runs it by `Control.act`; one that reports
counters uses `Control.reports`. With one process both are local calls; with several workers an action runs in
all of them, and reports come from all of them: the part `workers` has another `Control`.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from triglot.config.options import Config

Arguments = Mapping[str, Any]
"""Arguments of an action or a report, as JSON values."""
Action = Callable[[Arguments], Awaitable[Any]]
"""Runs a change; those of LOAD_MODEL and UNLOAD_MODEL return whether the model was to be served before."""
Report = Callable[[Arguments], Awaitable[Any]]

LOAD_MODEL, UNLOAD_MODEL, RELOAD = "load_model", "unload_model", "reload"
LOG_SETTINGS, TRACE_SETTINGS = "log_settings", "trace_settings"
REGISTER, UNREGISTER = "register_shared_memory", "unregister_shared_memory"
ONLINE = "online"
METRICS, TFSERVING_METRICS = "metrics", "tfserving_metrics"
TRAFFIC = "traffic"
"""An action, and a report."""
STATISTICS, OVERVIEW, SERIES, NAMES = "statistics", "overview", "series", "names"
RETIRE = signal.SIGHUP
"""In the queue of signals: a successor takes over. The signal itself is never sent to workers."""


@dataclass(frozen=True, slots=True)
class Reports:
    """The reports of all workers, by number, and `past`: the sum of those of ended workers, or None.

    A worker that is being replaced has the number of its successor. `up`: numbers of the workers that reported
    now; the reports of others are earlier ones. `restarts`: how often each worker was replaced, by number.
    """

    workers: Sequence[tuple[int, Any]]
    past: Any = None
    up: Collection[int] = ()
    restarts: Mapping[int, int] = field(default_factory=dict)

    @property
    def each(self) -> list[Any]:
        """The reports without the workers' numbers."""
        return [report for _, report in self.workers]


@dataclass(frozen=True, slots=True)
class Bound:
    """Sockets that another process has bound, one per address of the host; other processes may share the ports."""

    grpc: list[socket.socket]
    rest: list[socket.socket]

    def close(self) -> None:
        """Close them in this process.

        Connections that were not accepted are lost if no other process has the sockets.
        """
        for bound_socket in (*self.grpc, *self.rest):
            bound_socket.close()


@dataclass(frozen=True, slots=True)
class Wanted:
    """The state at the start, where it differs from the server's own start: `models` as last listed, or None."""

    models: list[Any] | None = None
    models_fail: bool = False
    """Whether some of them could not be loaded when they were listed."""


class Control:
    """The control of a server with one process. `number`: the number of this worker."""

    single_process = True
    number = 1
    bound: Bound | None = None
    """The ports, if another process has bound them."""
    tally_file: tuple[int, int] | None = None
    """Descriptor of a file with counters that all workers share, and the number of this worker's start."""
    access_file: Any = None
    """The access file as the supervisor knows it, see `WatchedFile`."""
    left_out: Collection[str] = ()
    """Models that are not loaded at the start, because `loaded` replays the changes made to them."""

    def __init__(self) -> None:
        self.actions: dict[str, Action] = {}
        self.report_of: dict[str, Report] = {}

    # --- at the start ---

    def configured(self, config: Config) -> Config:
        """Return the configuration of this process."""
        return config

    async def open(self, signals: asyncio.Queue[signal.Signals], *, strict: bool) -> None:
        """Connect to other processes; `signals` gets their requests to end.

        `strict`: end this process if it cannot load a model that the others have loaded.
        """

    async def catch_up(self) -> Wanted:
        """Return what other processes' earlier actions change about which models are loaded."""
        return Wanted()

    async def loaded(self) -> None:
        """Catch up with other workers' actions. Called after the models are loaded and before the ports open."""

    async def serving(self, hints: Sequence[str]) -> None:
        """Report that connections are accepted; `hints` are lines for users."""

    # --- while it serves ---

    def register_action(self, name: str, action: Action) -> None:
        """Register what runs the action of this name in this process."""
        self.actions[name] = action

    def register_report(self, name: str, report: Report) -> None:
        """Register what produces this process's report of this name."""
        self.report_of[name] = report

    async def act(self, name: str, arguments: Arguments) -> None:
        """Run an action in all workers; raises what it raises."""
        await self.actions[name](arguments)

    async def reports(self, name: str, arguments: Arguments) -> Reports:
        """Return the reports of all workers, this one included."""
        return Reports([(self.number, await self.report_of[name](arguments))])

    async def closing(self) -> None:
        """Send the last report. Called once no call runs any longer and the models are still loaded."""
