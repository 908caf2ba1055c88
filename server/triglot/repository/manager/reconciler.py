"""Brings each model to its wanted state: loads, replaces and drains versions.

The wanted versions replace the previous ones (`Registry.want`). Each model then has a worker task, which asks
`plan` for the next step until there is none; changes of what is wanted never wait for a worker. Everything runs on
the event loop, blocking code on threads. Models are loaded one at a time, since two threads that import large
libraries at the same time may fail; a load that takes long releases the lock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from triglot.core.errors import Code, MissingDependency, ModelLoadError, ServingError
from triglot.core.response_buffer import MAX_UNREAD_BYTES
from triglot.executors.loading import ANY_CLUSTER
from triglot.model.config import ALL
from triglot.model.model import Model
from triglot.repository.config.completed import Loaded, differs_only_in_instances
from triglot.repository.manager.dependents import Actions, Dependents
from triglot.repository.manager.garbage import GarbageCollector
from triglot.repository.manager.instances import apply_instances
from triglot.repository.manager.loader import (
    Adapt,
    Builds,
    Complete,
    Load,
    LoadEnded,
    Loader,
    Verify,
    Warm,
    clear_frames,
    model_exception,
    never,
)
from triglot.repository.manager.plan import Plan, State, Version, plan
from triglot.repository.manager.registry import Registry
from triglot.repository.manager.thread import in_thread
from triglot.repository.scan.scanner import Wanted
from triglot.repository.scan.source import ModelFiles
from triglot.scheduling.servable import Servable

log = logging.getLogger(__name__)

DRAIN_SECONDS = 60.0
"""Seconds for the calls of a retired version to complete, while the server runs."""
LOAD_LOCK_SECONDS = 10.0
"""Seconds after which a running load no longer blocks others."""
ABANDON_SECONDS = 5.0
"""Seconds for a cancelled load to end; after that it no longer counts as being in memory."""


class LoadLock:
    """A lock that is released automatically when its holder takes longer than `timeout` seconds."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[Callable[[], None]]:
        """Hold the lock in the block, for at most `timeout` seconds; yield a function that releases it early."""
        await self._lock.acquire()
        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                self._lock.release()

        timer = asyncio.get_running_loop().call_later(self.timeout, release)
        try:
            yield release
        finally:
            timer.cancel()
            release()


class Reconciler:
    """Loads the wanted versions of a registry and unloads all others.

    Attributes:
        skip_missing_dependencies: Whether to skip, with a warning, models that need a library that is not
            installed, unless the model serves or was requested.
        bring: Loads the parts of a requested ensemble.
        adapt: Completes each loaded model.
        warm: Warms each version up before it takes calls.
        load_timeout: Seconds after which a load fails; 0: no limit.
        load_retries: Number of automatic retries after a failure.
        load_retry_interval: Seconds between a failure and its retry.
    """

    def __init__(
        self,
        registry: Registry,
        load: Load,
        warm: Warm | None,
        load_parts: Callable[[str, Collection[str]], Awaitable[None]],
        *,
        max_queue_size: int,
        skip_missing_dependencies: bool,
        load_timeout: float,
        drain_seconds: float,
        load_lock_timeout: float = LOAD_LOCK_SECONDS,
        load_retries: int = 0,
        load_retry_interval: float = 0.0,
        ray_address: str = ANY_CLUSTER,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
        op_libraries: Sequence[Path] = (),
        debug: bool = False,
        verify: Verify | None = None,
        builds: Builds = never,
        load_ended: LoadEnded = lambda *_: None,
        adapt: Adapt | None = None,
    ) -> None:
        self.registry = registry
        changed = registry.changes.announce
        self._loader = Loader(
            load,
            warm,
            max_queue_size,
            changed,
            adapt,
            ray_address,
            max_unread_bytes,
            op_libraries,
            debug=debug,
            verify=verify,
            builds=builds,
        )
        self._debug = debug
        self._skip_missing_dependencies = skip_missing_dependencies
        self.load_timeout = load_timeout
        self._load_ended = load_ended
        self._load_retries = load_retries
        self._load_retry_interval = load_retry_interval
        self._drain_seconds = drain_seconds
        self.skipped: dict[ModelFiles, str] = {}
        """Skipped versions that need a library that is not installed, and the error that names it."""
        self.log_level = logging.DEBUG
        """Log level of the lines about each load; at the start a table of the models replaces these lines."""
        self._requested: set[str] = set()
        self.workers: dict[str, asyncio.Task[None]] = {}
        """Worker tasks by model, while there is work."""
        self._only_retry: set[str] = set()
        """Models whose workers only wait for the time of a retry."""
        self._drains: defaultdict[str, set[asyncio.Task[object]]] = defaultdict(set)
        self._wakeups: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.closing = asyncio.Event()
        self._load_lock = LoadLock(load_lock_timeout)
        self.garbage = GarbageCollector()
        self.dependents = Dependents(
            registry,
            Actions(
                is_busy=self.workers.__contains__,
                is_skipped=lambda name: any(files.name == name for files in self.skipped),
                load_parts=load_parts,
                retire=self._retire,
                reconcile=self._start,
            ),
        )
        registry.changes.subscribe(self.dependents.changed)

    def want(self, wanted: Wanted) -> None:
        """Set what is wanted, see `Registry.want`, and start the work; once closing, nothing is wanted."""
        self.registry.want({} if self.closing.is_set() else self._without_skipped(wanted))
        for name in self.registry.entries:
            self._start(name)
        self.dependents.wake()

    def _start(self, name: str) -> None:
        """Start or wake up the worker of a model that has work."""
        step = self._next_step(name)
        if name in self.workers:
            self._wakeups[name].set()
        elif step.load is not None and not self.closing.is_set():
            self.workers[name] = asyncio.create_task(self._work(name))

    def retry(self, name: str) -> None:
        """Retries failed versions of a model, see `Registry.retry`, and also those that were skipped."""
        self.registry.retry(name)
        self._requested.add(name)
        self.skipped = {files: why for files, why in self.skipped.items() if files.name != name}

    def _without_skipped(self, wanted: Wanted) -> Wanted:
        if not self.skipped:
            return wanted
        kept = {
            name: {number: files for number, files in versions.items() if files not in self.skipped}
            for name, versions in wanted.items()
        }
        return {name: versions for name, versions in kept.items() if versions or not wanted[name]}

    def _next_step(self, name: str) -> Plan:
        """Retires versions that are due, and returns the next step."""
        known = self.registry.entries[name]
        step = plan(known, self.registry.wanted.get(name, {}), draining=len(self._drains[name]))
        for number in step.retire:
            self._retire(known[number])
        return step

    async def _work(self, name: str) -> None:
        try:
            while True:
                left = self._seconds_to_retry(name)
                step = self._next_step(name)
                if step.load is None and left is None:
                    break
                if step.load is None or step.wait:
                    await self._wait_for_wakeup(name, left, only_retry=step.load is None)
                    continue
                async with self._load_lock.hold() as release_lock:
                    # What is wanted may have changed while this waited for the lock.
                    step = self._next_step(name)
                    if step.load is not None and not step.wait:
                        await self._load(step.load, release_lock)
        finally:
            del self.workers[name]
            self.dependents.wake()

    def _seconds_to_retry(self, name: str) -> float | None:
        """Return the seconds until the next automatic retry, None if there is none; mark those that are due."""
        now, left = time.monotonic(), None
        for version in self.registry.wanted_versions(name):
            if version.retry_at is None:
                continue
            if version.retry_at <= now:
                version.retry, version.retry_at = True, None
            else:
                left = min(version.retry_at - now, left or float("inf"))
        return left

    async def _wait_for_wakeup(self, name: str, seconds: float | None, *, only_retry: bool) -> None:
        self._wakeups[name].clear()
        if only_retry:
            self._only_retry.add(name)
        try:
            async with asyncio.timeout(seconds):
                await self._wakeups[name].wait()
        except TimeoutError:
            pass
        finally:
            self._only_retry.discard(name)

    def busy(self) -> set[str]:
        """Return the models of which a version may be loading."""
        return self.workers.keys() - self._only_retry

    async def wait_for(self, names: Collection[str]) -> None:
        """Wait until the workers of these models are done; if this is cancelled, they continue."""
        workers = [worker for name, worker in self.workers.items() if name in names]
        if workers:
            await asyncio.wait(workers)

    async def wait_for_drains(self, names: Collection[str]) -> None:
        """Wait until what was retired of these models has left memory."""
        drains = [drain for name in names for drain in self._drains.get(name, ())]
        if drains:
            await asyncio.wait(drains)

    async def _load(self, files: ModelFiles, release_lock: Callable[[], None]) -> None:
        known = self.registry.entries[files.name]
        version = known.get(files.version, Version(files))
        if version.closed_to_calls:
            version = version.restarted(files)
        known[files.version] = version
        before, version.files, version.retry, version.retry_at = version.files, files, False, None
        if before != files:
            version.retries = 0
        if version.state is not State.READY:
            version.state = State.LOADING
            self.registry.changes.announce()
        log.log(self.log_level, "loading %s (%s)", files, files.backend)
        started = time.monotonic()
        try:
            outcome = await self._try_load(files, release_lock)
        except asyncio.CancelledError:
            self._discard(version, before)
            raise
        self._load_ended(files, time.monotonic() - started, not isinstance(outcome, Servable))
        if not self._is_wanted(files):
            log.info("%s is no longer requested; its load is discarded", files)
            self._discard(version, before)
            if isinstance(outcome, Servable):
                self._drop(outcome, f"closed {files}")
            return
        # A new object if the version was not wanted for a while.
        version = known[files.version]
        if isinstance(outcome, Servable):
            seconds = time.monotonic() - started
            log.log(self.log_level, "loaded %s (%s) in %.2f s", files, files.backend, seconds)
            for text in outcome.model.warnings:
                log.warning("%s: %s", files, text)
            self._serve(version, outcome)
        else:
            self._record_failure(version, outcome)

    async def _try_load(self, files: ModelFiles, release_lock: Callable[[], None]) -> Servable | ModelLoadError:
        """Return the loaded version or the error; if cancelled, abandons the load."""
        complete = partial(
            self.dependents.complete, files, release_lock=release_lock, is_wanted=partial(self._is_wanted, files)
        )
        opening = asyncio.create_task(self._open(files, complete))
        try:
            await self._wait_for_load(opening, files)
        except asyncio.CancelledError:
            self._abandon(files.name, opening)
            raise
        if not opening.done():
            self._abandon(files.name, opening)
            text = f"{files.file}: loading took longer than load_timeout, {self.load_timeout:g} s"
            return ModelLoadError(text, Code.DEADLINE_EXCEEDED)
        if opening.cancelled():  # The model's own code raised it.
            return ModelLoadError(f"{files.file}: its code raised CancelledError")
        error = opening.exception()
        if error is None:
            return opening.result()
        clear_frames(error)
        return (
            error
            if isinstance(error, ModelLoadError)
            else ModelLoadError(f"{files.file}: {type(error).__name__}: {error}")
        )

    async def _open(self, files: ModelFiles, complete: Complete) -> Servable:
        version = self.registry.serving(files.name, files.version)
        if version is not None and version.servable is not None and version.served is not None:
            servable, before = version.servable, version.served
            compare = partial(differs_only_in_instances, files, Loaded(servable, before, ALL))
            differs = files.differs_only_in_instances(before) or await in_thread(compare)
            if differs and await apply_instances(servable, files.named_config, before.named_config):
                return servable
        return await self._loader.open(files, complete)

    async def _wait_for_load(self, opening: asyncio.Task[Servable], files: ModelFiles) -> None:
        """Wait until the load has ended, has timed out, or is no longer wanted and has taken long."""
        began, wakeup = time.monotonic(), self._wakeups[files.name]
        while not opening.done():
            if self.dependents.is_waiting(files.name):
                began = time.monotonic()  # The loads of its parts have timeouts of their own.
            limits = [self.load_timeout] if self.load_timeout else []
            if not self._is_wanted(files):
                limits.append(self._load_lock.timeout)
            left = min(limits) - (time.monotonic() - began) if limits else None
            if left is not None and left <= 0:
                return
            wakeup.clear()
            waiting = asyncio.create_task(wakeup.wait())
            try:
                await asyncio.wait([opening, waiting], timeout=left, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()

    def _is_wanted(self, files: ModelFiles) -> bool:
        return self.registry.wanted.get(files.name, {}).get(files.version) == files

    def _abandon(self, name: str, opening: asyncio.Task[Servable]) -> None:
        """Cancel a load; until it has ended, it counts as draining."""
        opening.cancel()
        # Code on the loop may ignore the cancellation and complete.
        opening.add_done_callback(self._close_abandoned)
        self._track_drain(name, asyncio.wait([opening], timeout=ABANDON_SECONDS))

    def _close_abandoned(self, opening: asyncio.Task[Servable]) -> None:
        if opening.cancelled():
            return
        if (error := opening.exception()) is None:
            servable = opening.result()
            self._drop(servable, f"closed {servable}")
        else:
            clear_frames(error)

    def _serve(self, version: Version, servable: Servable) -> None:
        former, version.servable = version.servable, servable
        version.state, version.served, version.error = State.READY, version.files, None
        version.retry, version.retries = False, 0  # A retry requested during the load is done, too.
        self.registry.update(version.files.name)
        if former is not None and former is not servable:
            self._drain(former, f"closed the previous {version.files}")

    def _drop(self, servable: Servable, done: str) -> None:
        """Close a loaded servable that is no longer wanted, unless it still serves with changed instances."""
        if all(version.servable is not servable for version in self.registry.entries[servable.name].values()):
            self._drain(servable, done)

    def _discard(self, version: Version, before: ModelFiles) -> None:
        """Reset a version whose load is no longer wanted."""
        if version.state is State.READY:
            version.files = before
        elif version.state is State.LOADING:
            wanted = version.files.version in self.registry.wanted.get(version.files.name, {})
            version.state = State.START if wanted else State.UNAVAILABLE
        self.registry.update(version.files.name)

    def _record_failure(self, version: Version, error: ModelLoadError) -> None:
        files = version.files
        own = model_exception(error, files)
        version.error = ServingError(str(error), code=error.code)
        version.is_secret = not self._debug and (own is not None or isinstance(error.__cause__, SyntaxError))
        if version.state is not State.READY:
            version.state = State.UNAVAILABLE
        if self._may_skip(files.name, error):
            log.warning("%s is skipped: %s", files, error)
            self.skipped[files] = str(error)
            self.want(self.registry.wanted)
        else:
            # The errors of a warm-up have this prefix.
            text = str(error).removeprefix(f"{files}: ")
            if version.retries < self._load_retries and not isinstance(error, MissingDependency):
                version.retries += 1
                version.retry_at = time.monotonic() + self._load_retry_interval
                retry_text = f"{version.retries} of {self._load_retries} in {self._load_retry_interval:g} s"
                text = f"{text}; retry {retry_text}"
            log.error(
                "%s could not be loaded: %s",
                files,
                text,
                exc_info=None if isinstance(own, ModuleNotFoundError) else own,
            )
            log.debug("traceback of the load error:", exc_info=error)
            self.registry.update(files.name)

    def _may_skip(self, name: str, error: ModelLoadError) -> bool:
        if not (isinstance(error, MissingDependency) and self._skip_missing_dependencies):
            return False
        # A serving version must not become unwanted by being skipped.
        serves = any(version.state is State.READY for version in self.registry.entries[name].values())
        return not serves and name not in self._requested

    def _retire(self, version: Version) -> None:
        """Stop new calls to the version, and unload it when its running calls have completed."""
        servable = version.servable
        version.state = State.UNAVAILABLE if servable is None else State.UNLOADING
        version.error = None
        self.registry.update(version.files.name)
        if servable is not None:
            self._drain(servable, f"unloaded {version.files}", version)

    def _drain(self, servable: Servable, done: str, version: Version | None = None) -> None:
        """Close a servable after its calls; `done` is logged then."""
        self.registry.start_drain(servable)
        self._track_drain(servable.name, self._drain_and_close(servable, done, version))

    def _track_drain(self, name: str, end: Coroutine[Any, Any, object]) -> None:
        """Count a draining object of this model until `end` has run."""
        drain = asyncio.create_task(end)
        self._drains[name].add(drain)
        drain.add_done_callback(partial(self._drain_ended, name))

    def _drain_ended(self, name: str, drain: asyncio.Task[object]) -> None:
        self._drains[name].discard(drain)
        self._wakeups[name].set()

    async def _drain_and_close(self, servable: Servable, done: str, version: Version | None) -> None:
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
        self.registry.end_drain(servable)
        await servable.close(at_once=self.closing.is_set())
        if not self.closing.is_set():
            log.info("%s", done)
        if version is not None:
            version.state, version.servable = State.UNAVAILABLE, None
        self.registry.changes.announce()
        by_python_code = servable.platform == Model.platform
        del servable
        if by_python_code and not self.closing.is_set():
            self.garbage.collect_soon()

    async def close(self) -> None:
        """Close every servable. The transports have stopped; call that still run are not awaited."""
        self.closing.set()
        self.garbage.close()
        workers = list(self.workers.values())
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        self.want({})
        while drains := [drain for drains in self._drains.values() for drain in drains]:
            await asyncio.wait(drains)
