"""The worker's end of the channel to the supervisor: its `Control`."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from triglot.core.errors import ModelLoadError, ServingError, Unavailable
from triglot.dataplane.control import (
    LOAD_MODEL,
    METRICS,
    RELOAD,
    TFSERVING_METRICS,
    Arguments,
    Control,
    Reports,
)
from triglot.transports.listening import Bound
from triglot.workers.changes import models_changed
from triglot.workers.channel import Channel, ChannelClosed
from triglot.workers.record import Change
from triglot.workers.worker_spec import WorkerSpec

log = logging.getLogger(__name__)

LAST_REPORTS = (METRICS, TFSERVING_METRICS)
RETIRE = signal.SIGHUP
"""In the queue of signals: a successor takes over. The signal itself is never sent to workers."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The state at the start, where it differs from the server's own start: `models` as last listed, or None."""

    models: list[Any] | None
    models_fail: bool
    """Whether some of them could not be loaded when they were listed."""


class Link(Control):
    """The control of a worker; create it with `open`. `signals` gets the supervisor's requests to end.

    `strict`: end the worker if it cannot load a model that the other workers have loaded.
    """

    alone = False

    def __init__(self, spec: WorkerSpec, signals: asyncio.Queue[signal.Signals], *, strict: bool) -> None:
        super().__init__()
        self.number = spec.number
        self.tally_file = spec.tallies, spec.run
        self.bound: Bound
        self._signals = signals
        self._strict = strict
        self._revision = 0
        self._missed: list[Change] = []
        self._channel: Channel
        self._running: asyncio.Task[None]

    @classmethod
    async def open(cls, spec: WorkerSpec, signals: asyncio.Queue[signal.Signals], *, strict: bool) -> Link:
        """Return the control, connected over the inherited socket."""
        link = cls(spec, signals, strict=strict)
        end, link.bound = spec.take()
        link._channel = await Channel.open(end, link._answer)
        link._running = asyncio.create_task(link._run())
        with suppress(ChannelClosed):
            link.access_file = await link._channel.ask("access")
        return link

    async def _run(self) -> None:
        await self._channel.run()
        log.warning("worker %d: lost the connection to the supervisor; stopping", self.number)
        self._signals.put_nowait(signal.SIGINT)

    async def _answer(self, what: str, argument: Any) -> Any:
        if what == "act":
            name, arguments = argument
            return await self.actions[name](arguments)
        if what == "report":
            name, arguments = argument
            return await self.report_of[name](arguments)
        if what == "alive":
            return None
        # Requests to end the worker are handled as signals.
        self._signals.put_nowait({"stop": signal.SIGTERM, "retire": RETIRE, "leave": signal.SIGINT}[what])
        return None

    # --- at the start ---

    async def catch_up(self) -> Wanted:
        """Get earlier changes; return those that affect which models are loaded. `loaded` makes the others."""
        self._missed = await self._changes("state")
        lists = [change for change in self._missed if change.name == RELOAD]
        self.left_out: Collection[str] = models_changed(self._missed)
        self._missed = [change for change in self._missed if change.name != RELOAD]
        if not lists:
            return Wanted(None, models_fail=False)
        return Wanted(list(lists[-1].arguments["models"]), models_fail=not lists[-1].succeeded)

    async def _changes(self, what: str) -> list[Change]:
        """Return the changes since the last call.

        If "join" returns none, the worker takes part in further ones.
        """
        try:
            answer = await self._channel.ask(what, self._revision)
        except ChannelClosed:
            raise Unavailable("lost the connection to the supervisor") from None
        changes = [Change(*fields) for fields in answer]
        self._revision = max([self._revision, *(change.revision for change in changes)])
        return changes

    async def loaded(self) -> None:
        """Make the changes made before this worker took part in them. Raise `ModelLoadError`."""
        missed = self._missed
        while True:
            for change in missed:
                await self._replay(change)
            missed = await self._changes("join")
            if not missed:
                return

    async def _replay(self, change: Change) -> None:
        try:
            await self.actions[change.name](change.arguments)
        except ServingError as error:
            if not change.succeeded:
                return
            text = (
                f"worker {self.number} cannot make a change that the other workers made: {change.name}: "
                f"{error.message}"
            )
            if self._strict and change.name == LOAD_MODEL:
                raise ModelLoadError(text) from None
            log.error("%s", text)

    async def serving(self, hints: list[str]) -> None:
        """Report that connections are accepted."""
        with suppress(ChannelClosed):
            await self._channel.ask("serving", hints)

    # --- while it serves ---

    async def act(self, name: str, arguments: Arguments) -> None:
        try:
            await self._channel.ask("act", [name, dict(arguments)])
        except ChannelClosed:
            raise Unavailable("the server is shutting down") from None

    async def reports(self, name: str, arguments: Arguments) -> Reports:
        try:
            answer = await self._channel.ask("reports", [name, dict(arguments)])
        except ChannelClosed:
            return await super().reports(name, arguments)
        workers = [(number, report) for number, report in answer["workers"]]
        return Reports(workers, answer["past"], set(answer["up"]), dict(answer["restarts"]))

    async def closing(self) -> None:
        last = {name: await self.report_of[name]({}) for name in LAST_REPORTS if name in self.report_of}
        with suppress(ChannelClosed):
            await self._channel.ask("final_counters", last)

    def close(self) -> None:
        """Close the channel."""
        self._running.cancel()
        self._channel.close()
