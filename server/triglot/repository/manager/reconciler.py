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
from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import partial
from typing import Any

from triglot.core.errors import Code, MissingDependency, ModelLoadError, ServingError
from triglot.model.config import ALL
from triglot.model.model import Model
from triglot.repository.config.completed import Loaded, says_other_instances
from triglot.repository.manager.dependents import Actions, Dependents
from triglot.repository.manager.garbage import Garbage
from triglot.repository.manager.instances import have_instances
from triglot.repository.manager.load_lock import LoadLock
from triglot.repository.manager.loader import (
    Adapt,
    Complete,
    Load,
    LoadEnded,
    Loader,
    Warm,
    forget_frames,
    own_error,
)
from triglot.repository.manager.plan import Plan, State, Version, plan
from triglot.repository.manager.registry import Registry
from triglot.repository.scan.scanner import Wanted
from triglot.repository.scan.source import ModelFiles
from triglot.scheduling.servable import Servable

log = logging.getLogger(__name__)

DRAIN_SECONDS = 60.0
"""How long the calls of a version that goes have to end, while the server runs."""
LOAD_LOCK_SECONDS = 10.0
"""How long a version that loads keeps the others from being loaded."""
GIVE_UP_SECONDS = 5.0
"""How long a load that was given up has to end; after that nobody waits for it, and it counts no more."""


class Reconciler:
    """Loads what is wanted in a registry, and unloads the rest.

    `skip_missing_dependencies`: leave out, with a warning, what needs a library that is not installed, unless the
    model serves or somebody asks for it. `bring` has the models that an ensemble is made of loaded along with it,
    where that is asked for. `adapt` completes each model, and `warm` runs on each version before it
    takes calls. `load_timeout`: seconds after which a load has failed; 0 sets no limit. What has failed is tried
    again `load_retries` times, `load_retry_interval` seconds after each failure.
    """

    def __init__(
        self,
        registry: Registry,
        load: Load,
        warm: Warm | None,
        bring: Callable[[str, Collection[str]], Awaitable[None]],
        *,
        max_queue_size: int,
        skip_missing_dependencies: bool,
        load_timeout: float,
        drain_seconds: float,
        load_lock_timeout: float = LOAD_LOCK_SECONDS,
        load_retries: int = 0,
        load_retry_interval: float = 0.0,
        load_ended: LoadEnded = lambda *_: None,
        adapt: Adapt | None = None,
    ) -> None:
        self.registry = registry
        self._loader = Loader(load, warm, max_queue_size, self._announce, adapt)
        self._skip_missing_dependencies = skip_missing_dependencies
        self.load_timeout = load_timeout
        self._load_ended = load_ended
        self._load_retries = load_retries
        self._load_retry_interval = load_retry_interval
        self._drain_seconds = drain_seconds
        self.left_out: dict[ModelFiles, str] = {}
        """What needs a library that is not installed, and the error that says which."""
        self.log_level = logging.DEBUG
        """Of the lines about each load: at the start a table of the models takes their place."""
        self._asked_for: set[str] = set()
        self.workers: dict[str, asyncio.Task[None]] = {}
        """Of the models about which something is being done."""
        self._only_retry: set[str] = set()
        """Those of which workers only wait for the time to try again."""
        self._drains: defaultdict[str, set[asyncio.Task[object]]] = defaultdict(set)
        self._news: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.closing = asyncio.Event()
        self._load_lock = LoadLock(load_lock_timeout)
        self.garbage = Garbage()
        self.dependents = Dependents(
            registry,
            Actions(
                is_busy=self.workers.__contains__,
                is_left_out=lambda name: any(files.name == name for files in self.left_out),
                bring=bring,
                retire=self._retire,
                again=self._start,
            ),
        )
        registry.on_update = self.dependents.changed
        registry.has_its_parts = self.dependents.are_ready

    def _announce(self) -> None:
        self.registry.on_change()  # Whoever is told of changes may come later.

    def want(self, wanted: Wanted) -> None:
        """As `Registry.want`, and start what follows from it. What is closed wants nothing."""
        self.registry.want({} if self.closing.is_set() else self._without_left_out(wanted))
        for name in self.registry.entries:
            self._start(name)
        self.dependents.wake()

    def _start(self, name: str) -> None:
        """Have what is to be done about a model done."""
        step = self._next(name)
        if name in self.workers:
            self._news[name].set()
        elif step.load is not None and not self.closing.is_set():
            self.workers[name] = asyncio.create_task(self._work(name))

    def retry(self, name: str) -> None:
        """As `Registry.retry`; what was left out of the model is tried, too."""
        self.registry.retry(name)
        self._asked_for.add(name)
        self.left_out = {files: why for files, why in self.left_out.items() if files.name != name}

    def _without_left_out(self, wanted: Wanted) -> Wanted:
        if not self.left_out:
            return wanted
        kept = {
            name: {number: files for number, files in versions.items() if files not in self.left_out}
            for name, versions in wanted.items()
        }
        return {name: versions for name, versions in kept.items() if versions or not wanted[name]}

    def _next(self, name: str) -> Plan:
        """Retire what is to go now; what is to be done next."""
        known = self.registry.entries[name]
        step = plan(known, self.registry.wanted.get(name, {}), draining=len(self._drains[name]))
        for number in step.retire:
            self._retire(known[number])
        return step

    async def _work(self, name: str) -> None:
        try:
            while True:
                left = self._seconds_to_retry(name)
                step = self._next(name)
                if step.load is None and left is None:
                    break
                if step.load is None or step.wait:
                    await self._wait_for_news(name, left, only_retry=step.load is None)
                    continue
                async with self._load_lock.take() as pass_on:
                    # What is wanted may have changed while it waited for its turn.
                    step = self._next(name)
                    if step.load is not None and not step.wait:
                        await self._load(step.load, pass_on)
        finally:
            del self.workers[name]
            self.dependents.wake()

    def _seconds_to_retry(self, name: str) -> float | None:
        """Until a version that failed is tried again, None: there is none; one whose time has come is next."""
        now, left = time.monotonic(), None
        for version in self.registry.wanted_versions(name):
            if version.retry_at is None:
                continue
            if version.retry_at <= now:
                version.retry, version.retry_at = True, None
            else:
                left = min(version.retry_at - now, left or float("inf"))
        return left

    async def _wait_for_news(self, name: str, seconds: float | None, *, only_retry: bool) -> None:
        self._news[name].clear()
        if only_retry:
            self._only_retry.add(name)
        try:
            async with asyncio.timeout(seconds):
                await self._news[name].wait()
        except TimeoutError:
            pass
        finally:
            self._only_retry.discard(name)

    def busy(self) -> set[str]:
        """The models of which a version may be loading."""
        return self.workers.keys() - self._only_retry

    async def wait_for(self, names: Collection[str]) -> None:
        """Wait until the workers of these models have nothing to do; they go on when this is cancelled."""
        workers = [worker for name, worker in self.workers.items() if name in names]
        if workers:
            await asyncio.wait(workers)

    async def _load(self, files: ModelFiles, pass_on: Callable[[], None]) -> None:
        known = self.registry.entries[files.name]
        version = known.get(files.version, Version(files))
        if version.gone:
            version = version.begun_anew(files)
        known[files.version] = version
        before, version.files, version.retry, version.retry_at = version.files, files, False, None
        if before != files:
            version.retries = 0
        if version.state is not State.READY:
            version.state = State.LOADING
            self.registry.on_change()
        log.log(self.log_level, "loading %s (%s)", files, files.backend)
        started = time.monotonic()
        try:
            outcome = await self._outcome(files, pass_on)
        except asyncio.CancelledError:
            self._superseded(version, before)
            raise
        self._load_ended(files, time.monotonic() - started, not isinstance(outcome, Servable))
        if not self._is_wanted(files):
            log.info("%s is no longer requested; its load is discarded", files)
            self._superseded(version, before)
            if isinstance(outcome, Servable):
                self._drop(outcome, f"closed {files}")
            return
        # Another entry when it was not wanted for a while.
        version = known[files.version]
        if isinstance(outcome, Servable):
            seconds = time.monotonic() - started
            log.log(self.log_level, "loaded %s (%s) in %.2f s", files, files.backend, seconds)
            self._serve(version, outcome)
        else:
            self._failed(version, outcome)

    async def _outcome(self, files: ModelFiles, pass_on: Callable[[], None]) -> Servable | ModelLoadError:
        """The loaded version, or why there is none. If cancelled, gives the load up."""
        complete = partial(
            self.dependents.complete, files, pass_on=pass_on, is_wanted=partial(self._is_wanted, files)
        )
        opening = asyncio.create_task(self._opened(files, complete))
        try:
            await self._wait_for_load(opening, files)
        except asyncio.CancelledError:
            self._give_up(files.name, opening)
            raise
        if not opening.done():
            self._give_up(files.name, opening)
            text = f"{files.file}: loading took longer than load_timeout, {self.load_timeout:g} s"
            return ModelLoadError(text, Code.DEADLINE_EXCEEDED)
        if opening.cancelled():  # By the model's own code.
            return ModelLoadError(f"{files.file}: its code raised CancelledError")
        error = opening.exception()
        if error is None:
            return opening.result()
        forget_frames(error)
        return (
            error
            if isinstance(error, ModelLoadError)
            else ModelLoadError(f"{files.file}: {type(error).__name__}: {error}")
        )

    async def _opened(self, files: ModelFiles, complete: Complete) -> Servable:
        version = self.registry.serving(files.name, files.version)
        if version is not None and version.servable is not None and version.served is not None:
            servable, before = version.servable, version.served
            differs = files.says_other_instances(before) or says_other_instances(
                files, Loaded(servable, before, ALL)
            )
            if differs and await have_instances(servable, files.config, before.config):
                return servable
        return await self._loader.open(files, complete)

    async def _wait_for_load(self, opening: asyncio.Task[Servable], files: ModelFiles) -> None:
        """Until it has ended, has taken too long, or has taken long and is not wanted any more."""
        began, news = time.monotonic(), self._news[files.name]
        while not opening.done():
            if self.dependents.waits(files.name):
                began = time.monotonic()  # What it waits for has a limit of its own.
            limits = [self.load_timeout] if self.load_timeout else []
            if not self._is_wanted(files):
                limits.append(self._load_lock.timeout)
            left = min(limits) - (time.monotonic() - began) if limits else None
            if left is not None and left <= 0:
                return
            news.clear()
            waiting = asyncio.create_task(news.wait())
            try:
                await asyncio.wait([opening, waiting], timeout=left, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()

    def _is_wanted(self, files: ModelFiles) -> bool:
        return self.registry.wanted.get(files.name, {}).get(files.version) == files

    def _give_up(self, name: str, opening: asyncio.Task[Servable]) -> None:
        """Cancel a load; what it closes counts as draining meanwhile."""
        opening.cancel()
        # Code that runs on the loop may not care, and go on to its end.
        opening.add_done_callback(self._close_late)
        self._drains_until(name, asyncio.wait([opening], timeout=GIVE_UP_SECONDS))

    def _close_late(self, opening: asyncio.Task[Servable]) -> None:
        if opening.cancelled():
            return
        if (error := opening.exception()) is None:
            servable = opening.result()
            self._drop(servable, f"closed {servable}")
        else:
            forget_frames(error)

    def _serve(self, version: Version, servable: Servable) -> None:
        former, version.servable = version.servable, servable
        version.state, version.served, version.error = State.READY, version.files, None
        version.retry, version.retries = False, 0  # Whoever asked for that while it was loaded has it now.
        self.registry.update(version.files.name)
        if former is not None and former is not servable:
            self._drain(former, f"closed the previous {version.files}")

    def _drop(self, servable: Servable, done: str) -> None:
        """Nobody wants what was loaded; one that serves, with other instances by now, goes on."""
        if all(version.servable is not servable for version in self.registry.entries[servable.name].values()):
            self._drain(servable, done)

    def _superseded(self, version: Version, before: ModelFiles) -> None:
        """Forget a load that nobody waits for any more."""
        if version.state is State.READY:
            version.files = before
        elif version.state is State.LOADING:
            wanted = version.files.version in self.registry.wanted.get(version.files.name, {})
            version.state = State.START if wanted else State.UNAVAILABLE
        self.registry.update(version.files.name)

    def _failed(self, version: Version, error: ModelLoadError) -> None:
        files = version.files
        version.error = ServingError(str(error), code=error.code)
        if version.state is not State.READY:
            version.state = State.UNAVAILABLE
        if self._can_be_left_out(files.name, error):
            log.warning("%s is skipped: %s", files, error)
            self.left_out[files] = str(error)
            self.want(self.registry.wanted)
        else:
            # A warm-up's errors begin with it.
            text = str(error).removeprefix(f"{files}: ")
            if version.retries < self._load_retries and not isinstance(error, MissingDependency):
                version.retries += 1
                version.retry_at = time.monotonic() + self._load_retry_interval
                again = f"{version.retries} of {self._load_retries} in {self._load_retry_interval:g} s"
                text = f"{text}; retry {again}"
            log.error("%s could not be loaded: %s", files, text, exc_info=own_error(error, files))
            log.debug("traceback of the load error:", exc_info=error)
            self.registry.update(files.name)

    def _can_be_left_out(self, name: str, error: ModelLoadError) -> bool:
        if not (isinstance(error, MissingDependency) and self._skip_missing_dependencies):
            return False
        # What serves would not be wanted any more.
        serves = any(version.state is State.READY for version in self.registry.entries[name].values())
        return not serves and name not in self._asked_for

    def _retire(self, version: Version) -> None:
        """Let the version take no new calls, and unload it when those that run have ended."""
        servable = version.servable
        version.state = State.UNAVAILABLE if servable is None else State.UNLOADING
        version.error = None
        self.registry.update(version.files.name)
        if servable is not None:
            self._drain(servable, f"unloaded {version.files}", version)

    def _drain(self, servable: Servable, done: str, version: Version | None = None) -> None:
        """`done`: what the log says in the end."""
        self.registry.leaves(servable)
        self._drains_until(servable.name, self._drained(servable, done, version))

    def _drains_until(self, name: str, end: Coroutine[Any, Any, object]) -> None:
        """Something of this model is in memory until `end` has run."""
        drain = asyncio.create_task(end)
        self._drains[name].add(drain)
        drain.add_done_callback(partial(self._has_drained, name))

    def _has_drained(self, name: str, drain: asyncio.Task[object]) -> None:
        self._drains[name].discard(drain)
        self._news[name].set()

    async def _drained(self, servable: Servable, done: str, version: Version | None) -> None:
        ends = [asyncio.ensure_future(servable.drained()), asyncio.ensure_future(self.closing.wait())]
        await asyncio.wait(ends, timeout=self._drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if servable.leases and not self.closing.is_set():
            log.warning(
                "%s: %d requests are still in flight after draining for %.0f s",
                servable,
                servable.leases,
                self._drain_seconds,
            )
        self.registry.has_left(servable)
        await servable.close(at_once=self.closing.is_set())
        if not self.closing.is_set():
            log.info("%s", done)
        if version is not None:
            version.state, version.servable = State.UNAVAILABLE, None
        self.registry.on_change()
        by_python_code = servable.platform == Model.platform
        del servable
        if by_python_code and not self.closing.is_set():
            self.garbage.collect_soon()

    async def close(self) -> None:
        """Close every servable. The transports have stopped; a call that still runs is not waited for."""
        self.closing.set()
        self.garbage.close()
        workers = list(self.workers.values())
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        self.want({})
        while drains := [drain for drains in self._drains.values() for drain in drains]:
            await asyncio.wait(drains)
