"""The worker's end of the channel to the supervisor: its `Control`."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from triglot.config.options import Config
from triglot.core.errors import ModelLoadError, ServingError, Unavailable
from triglot.dataplane.control import (
    LOAD_MODEL,
    METRICS,
    RELOAD,
    RETIRE,
    TFSERVING_METRICS,
    Arguments,
    Control,
    Reports,
    Wanted,
)
from triglot.workers.changes import models_changed
from triglot.workers.channel import Channel, ChannelClosed
from triglot.workers.record import Change
from triglot.workers.worker_spec import WorkerSpec

log = logging.getLogger(__name__)

LAST_REPORTS = (METRICS, TFSERVING_METRICS)


class Link(Control):
    """The control of a worker, whose `WorkerSpec` is in the text `spec`."""

    single_process = False

    def __init__(self, spec: str) -> None:
        super().__init__()
        self._spec = WorkerSpec.read(spec)
        self.number = self._spec.number
        self.tally_file = self._spec.tallies, self._spec.run
        self._revision = 0
        self._missed: list[Change] = []
        self._signals: asyncio.Queue[signal.Signals]
        self._strict: bool
        self._channel: Channel
        self._running: asyncio.Task[None]

    def configured(self, config: Config) -> Config:
        return self._spec.configured(config)

    async def open(self, signals: asyncio.Queue[signal.Signals], *, strict: bool) -> None:
        self._signals, self._strict = signals, strict
        end, self.bound = self._spec.take()
        self._channel = await Channel.open(end, self._answer)
        self._running = asyncio.create_task(self._run())
        with suppress(ChannelClosed):
            self.access_file = await self._channel.ask("access")

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
        self._missed = await self._changes("state")
        lists = [change for change in self._missed if change.name == RELOAD]
        self.left_out: Collection[str] = models_changed(self._missed)
        self._missed = [change for change in self._missed if change.name != RELOAD]
        if not lists:
            return Wanted()
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

    async def serving(self, hints: Sequence[str]) -> None:
        with suppress(ChannelClosed):
            await self._channel.ask("serving", list(hints))

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
