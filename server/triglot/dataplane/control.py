"""What clients change of a server, and what it says of itself, by name: so that it may be several processes.

Strategy: who offers a call that changes something gives the change a name, and has it done by `Control.act`. Who
prints what was counted asks `Control.reports`. A server that is one process does it on the spot; one of several
workers sends the change to all of them, and gets the reports of all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Arguments = Mapping[str, Any]
"""JSON's values, of a change or of a question."""
Action = Callable[[Arguments], Awaitable[Any]]
"""Of LOAD_MODEL it tells whether the model was wanted before."""
Report = Callable[[Arguments], Awaitable[Any]]

LOAD_MODEL, UNLOAD_MODEL, RELOAD = "load_model", "unload_model", "reload"
LOG_SETTINGS, TRACE_SETTINGS = "log_settings", "trace_settings"
REGISTER, UNREGISTER = "register_shared_memory", "unregister_shared_memory"
ONLINE = "online"
METRICS, TFSERVING_METRICS = "metrics", "tfserving_metrics"
STATISTICS, OVERVIEW, SERIES, NAMES = "statistics", "overview", "series", "names"


@dataclass(frozen=True, slots=True)
class Reports:
    """What each worker says, with its number, and `past`: what the workers said that are gone, or None.

    One that is being replaced has the number of its successor. `up`: those that have said it now, and not only
    before. `restarts`: how often each was replaced, by its number.
    """

    workers: Sequence[tuple[int, Any]]
    past: Any = None
    up: Collection[int] = ()
    restarts: Mapping[int, int] = field(default_factory=dict)

    @property
    def each(self) -> list[Any]:
        """Of the workers, without their numbers."""
        return [report for _, report in self.workers]


class Control:
    """Of a server that is one process. `number`: of the worker that this process is."""

    alone = True
    number = 1
    tally_file: tuple[int, int] | None = None
    """The descriptor of a file that workers count in, and which start of a worker this one is."""
    left_out: Collection[str] = ()
    """Models that are not loaded at the start: what became of them since is told later."""

    def __init__(self) -> None:
        self.actions: dict[str, Action] = {}
        self.report_of: dict[str, Report] = {}

    def register_action(self, name: str, action: Action) -> None:
        """From now on `action` is what the change of this name is, in this process."""
        self.actions[name] = action

    def register_report(self, name: str, report: Report) -> None:
        """From now on `report` is what this process says when it is asked for this."""
        self.report_of[name] = report

    async def act(self, name: str, arguments: Arguments) -> None:
        """Have the change made everywhere; raises what it raises."""
        await self.actions[name](arguments)

    async def reports(self, name: str, arguments: Arguments) -> Reports:
        """What every worker, this one among them, says of this."""
        return Reports([(self.number, await self.report_of[name](arguments))])

    async def loaded(self) -> None:
        """The models are loaded, and the ports not open yet: the time to catch up with what others have done."""

    async def closing(self) -> None:
        """No call runs any more, and the models are still there: the time for last words."""
