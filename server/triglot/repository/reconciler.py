"""Brings each model to what is wanted: loads, swaps, drains.

Strategy: what is wanted replaces what was wanted before (`Registry.want`). Then each model is brought there by a
worker of its own, which asks `plan` for the next step until there is none; nobody waits for a worker to change
its mind. Everything here runs on the event loop, code that blocks runs on threads. Loading is one at a time, since
large libraries do not bear being imported by two; one that takes long lets the others go on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Collection

from triglot.core.errors import Code, MissingDependency, ModelLoadError, ServingError
from triglot.engine.servable import Servable
from triglot.repository.loader import Load, Loader, Warm
from triglot.repository.plan import Plan, State, Version, plan
from triglot.repository.registry import Registry
from triglot.repository.source import ModelFiles
from triglot.repository.turns import Turns
from triglot.repository.watch import Wanted

log = logging.getLogger(__name__)

DRAIN_SECONDS = 60.0
"""How long the calls of a version that goes have to end, while the server runs."""
LOAD_PATIENCE_SECONDS = 10.0
"""How long a version that loads keeps the others from being loaded."""


class Reconciler(Registry):
    """Loads what is wanted, and unloads the rest.

    `skip_missing_dependencies`: leave out, with a warning, models whose backend is not installed. `warm` runs on
    each version before it takes calls. `load_timeout`: seconds after which a load has failed; 0 sets no limit.
    """

    def __init__(
        self,
        load: Load,
        warm: Warm | None,
        *,
        max_queue_size: int,
        skip_missing_dependencies: bool,
        load_timeout: float,
        drain_seconds: float,
        labels_before_load: bool,
        may_be_empty: bool,
    ) -> None:
        super().__init__(labels_before_load=labels_before_load, may_be_empty=may_be_empty)
        self._loader = Loader(load, warm, max_queue_size)
        self._skip_missing_dependencies = skip_missing_dependencies
        self._load_timeout = load_timeout or None
        self._drain_seconds = drain_seconds
        self._left_out: set[ModelFiles] = set()
        self._workers: dict[str, asyncio.Task[None]] = {}
        self._drains: defaultdict[str, set[asyncio.Task[None]]] = defaultdict(set)
        self._closing = asyncio.Event()
        self._turns = Turns(LOAD_PATIENCE_SECONDS)

    def want(self, wanted: Wanted) -> None:
        """As `Registry.want`, and start what follows from it. What is closed wants nothing."""
        super().want({} if self._closing.is_set() else self._without_left_out(wanted))
        for name in self._versions:
            if self._next(name).load is not None and name not in self._workers:
                self._workers[name] = asyncio.create_task(self._work(name))

    def _without_left_out(self, wanted: Wanted) -> Wanted:
        if not self._left_out:
            return wanted
        kept = {
            name: {number: files for number, files in versions.items() if files not in self._left_out}
            for name, versions in wanted.items()
        }
        return {name: versions for name, versions in kept.items() if versions or not wanted[name]}

    def _next(self, name: str) -> Plan:
        """Retire what is to go now; what is to be done next."""
        known = self._versions[name]
        step = plan(known, self._wanted.get(name, {}), draining=bool(self._drains[name]))
        for number in step.retire:
            self._retire(known[number])
        return step

    async def _work(self, name: str) -> None:
        try:
            while (step := self._next(name)).load is not None:
                if step.wait:
                    await asyncio.wait(self._drains[name], return_when=asyncio.FIRST_COMPLETED)
                    continue
                async with self._turns.take():
                    now = self._next(name)
                    if now.load == step.load and not now.wait:
                        await self._load(step.load)
        finally:
            del self._workers[name]

    async def wait_for(self, names: Collection[str]) -> None:
        """Wait until the workers of these models have nothing to do; they go on when this is cancelled."""
        workers = [worker for name, worker in self._workers.items() if name in names]
        if workers:
            await asyncio.wait(workers)

    async def _load(self, files: ModelFiles) -> None:
        known = self._versions[files.name]
        version = known.get(files.version)
        if version is None or version.gone:
            version = known[files.version] = Version(files)
        if version.state is not State.READY:
            version.state = State.LOADING
            self.on_change()
        version.files, version.retry = files, False
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._load_timeout):
                servable = await self._loader.open(files)
        except TimeoutError:
            text = f"{files.file}: it was not loaded within {self._load_timeout:g} s"
            self._failed(version, ModelLoadError(text, Code.DEADLINE_EXCEEDED))
        except ModelLoadError as error:
            self._failed(version, error)
        else:
            wanted = self._wanted.get(files.name, {}).get(files.version)
            if wanted == files and known.get(files.version) is version:
                log.info("loaded %s (%s) in %.2f s", files, files.backend, time.monotonic() - started)
                self._serve(version, servable)
            else:
                self._drop(version, servable)

    def _serve(self, version: Version, servable: Servable) -> None:
        former, version.servable = version.servable, servable
        version.state, version.error = State.READY, None
        self.update(version.files.name)
        if former is not None:
            self._drain(former)

    def _drop(self, version: Version, servable: Servable) -> None:
        """Close what was not wanted any more when it was loaded."""
        log.info("%s is not wanted any more", version.files)
        if version.state is State.LOADING:
            wanted = version.files.version in self._wanted.get(version.files.name, {})
            version.state = State.START if wanted else State.UNAVAILABLE
        self._drain(servable)
        self.update(version.files.name)

    def _failed(self, version: Version, error: ModelLoadError) -> None:
        if isinstance(error, MissingDependency) and self._skip_missing_dependencies:
            log.warning("%s is left out: %s", version.files, error)
            self._left_out.add(version.files)
            self.want(self._wanted)
        else:
            log.error("%s", error)
            log.debug("where it came from:", exc_info=error)
        version.error = ServingError(str(error), code=error.code)
        if version.state is not State.READY:
            version.state = State.UNAVAILABLE
        self.update(version.files.name)

    def _retire(self, version: Version) -> None:
        """Let the version take no new calls, and unload it when those that run have ended."""
        servable = version.servable
        version.state = State.UNAVAILABLE if servable is None else State.UNLOADING
        self.update(version.files.name)
        if servable is not None:
            self._drain(servable, version)

    def _drain(self, servable: Servable, version: Version | None = None) -> None:
        drains = self._drains[servable.name]
        drain = asyncio.create_task(self._drained(servable, version))
        drains.add(drain)
        drain.add_done_callback(drains.discard)

    async def _drained(self, servable: Servable, version: Version | None) -> None:
        ends = [asyncio.ensure_future(servable.drained()), asyncio.ensure_future(self._closing.wait())]
        await asyncio.wait(ends, timeout=self._drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if servable.leases and not self._closing.is_set():
            log.warning("%s: %d calls did not end within %.0f s", servable, servable.leases, self._drain_seconds)
        await servable.close()
        if not self._closing.is_set():
            log.info("unloaded %s", servable)
        if version is not None:
            version.state, version.servable = State.UNAVAILABLE, None
        self.on_change()

    async def close(self) -> None:
        """Close every servable. The transports have stopped; a call that still runs is not waited for."""
        self._closing.set()
        workers = list(self._workers.values())
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        self.want({})
        await asyncio.gather(*(drain for drains in self._drains.values() for drain in drains))
