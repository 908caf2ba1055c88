"""Brings the models to what is wanted: loads, swaps, drains, and looks at the disk again.

Strategy: what is wanted comes from a look at the disk and replaces what was wanted before (`Registry.want`). Then
each model is brought there by a worker of its own, which asks `plan` for the next step until there is none. No
look waits for a worker, and a later one changes what it does next. Everything here runs on the event loop;
code that blocks runs on threads. Loading is one at a time: large libraries do not bear being imported by two.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from functools import partial

from triglot.core.errors import (
    FailedPrecondition,
    InvalidArgument,
    MissingDependency,
    ModelLoadError,
    ServingError,
    Unavailable,
)
from triglot.engine.servable import Servable
from triglot.repository.loader import Load, Loader, Warm
from triglot.repository.plan import State, Version, plan
from triglot.repository.registry import Registry
from triglot.repository.settings import ModelSettings, check_names
from triglot.repository.source import ModelFiles, Root
from triglot.repository.thread import in_thread
from triglot.repository.watch import AtOnce, Look, Wanted, Watch

log = logging.getLogger(__name__)

DRAIN_SECONDS = 60.0
"""How long the calls of a version that goes have to end, while the server runs."""
SETTLE_SECONDS = 5.0
"""How long a new version's files have to stay as they are, unless looks are more frequent."""


class Manager(Registry):
    """Loads the models at some roots and finds the servable for a request.

    `skip_missing_dependencies`: leave out, with a warning, models whose backend is not installed.
    `warm` runs on each version before it takes calls. `poll_interval`: seconds between two looks at the disk;
    0 looks once. `labels_before_load`: a new label may point to a version that is not available yet.
    """

    def __init__(
        self,
        roots: Sequence[Root],
        load: Load,
        *,
        max_queue_size: int,
        skip_missing_dependencies: bool = False,
        warm: Warm | None = None,
        poll_interval: float = 0.0,
        labels_before_load: bool = False,
        drain_seconds: float = DRAIN_SECONDS,
    ) -> None:
        super().__init__(labels_before_load=labels_before_load)
        self._roots = tuple(roots)
        self._loader = Loader(load, warm, max_queue_size)
        self._skip_missing_dependencies = skip_missing_dependencies
        self._poll_interval = poll_interval
        self._drain_seconds = drain_seconds
        self._settle_seconds = min(poll_interval, SETTLE_SECONDS)
        self._watch = Watch(self._settle_seconds)
        self._left_out: set[ModelFiles] = set()
        self._workers: dict[str, asyncio.Task[None]] = {}
        self._drains: set[asyncio.Task[None]] = set()
        self._polling: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._looking = asyncio.Lock()
        self._reloading = asyncio.Lock()
        self._turn = asyncio.Lock()

    # --- what is wanted ---

    async def load_all(self) -> list[ModelLoadError]:
        """Load what is wanted; what could not be is logged and returned. Then look again, if so configured.

        A label for a version that is not available afterwards is an error, too. Raises `ModelLoadError` when the
        paths themselves, or a model's name, are wrong.
        """
        models = [root for root in self._roots if isinstance(root, ModelSettings)]
        try:
            check_names([model.name for model in models])
        except InvalidArgument as error:
            raise ModelLoadError(error.message) from None
        async with self._looking:
            look = await self._look(self._roots, lambda _: True)
            if look.problems and not models:
                raise next(iter(look.problems.values()))
            self._labels = {model.name: dict(model.labels) for model in models} | _own_labels(self._roots)
            self.want(look.wanted)
        await self._wait_for(look.wanted)
        errors = [
            ModelLoadError(version.error.message) for version in self.versions() if version.error is not None
        ]
        others = [str(problem) for problem in look.problems.values()]
        try:
            self.label(models)
        except FailedPrecondition as error:
            others.append(error.message)
        self._labels = {**self._labels, **_own_labels(self._roots)}
        for text in others:
            log.error("%s", text)
        if self._poll_interval > 0:
            self._polling = asyncio.create_task(self._poll())
        return errors + [ModelLoadError(text) for text in others]

    def first_version(self, name: str) -> str:
        """The version of this model that its configuration names first; "" where none lists them one by one."""
        listed = (str(root.version) for root in self._roots if isinstance(root, ModelFiles) and root.name == name)
        return next(listed, "")

    def platforms(self) -> dict[str, str]:
        """What the configuration calls the kind of each model that it names."""
        return {root.name: root.platform for root in self._roots if isinstance(root, ModelSettings)}

    async def reload(self, models: Sequence[ModelSettings]) -> None:
        """Serve these models, and no others (tfs 3.7).

        Returns when each model that was not wanted before, or that served nothing and is tried again, serves or
        has failed. All other changes happen in the background. What raises `InvalidArgument` (a wrong name) or
        `FailedPrecondition` (a label whose version is not available, a server that was started with paths) has
        changed nothing. Raises `ServingError` (UNKNOWN) when models failed, and `Unavailable` when the manager is
        closed meanwhile.
        """
        check_names([model.name for model in models])
        if any(not isinstance(root, ModelSettings) for root in self._roots):
            raise FailedPrecondition(
                "the models are those at the paths that the server was started with; `triglot tfserving` starts "
                "one whose list of models can be replaced"
            )
        async with self._reloading:
            async with self._looking:
                look = await self._look(models, self._at_once(models))
                self.label(models)
                self._roots = tuple(models)
                new = look.wanted.keys() - self.names()
                self.want(look.wanted)
                tried = {name for name in look.wanted if name in self._workers and name not in self._default}
            await self._wait_for(new | tried)
            if self._closing.is_set():
                raise Unavailable("the server is shutting down")
            failed = [name for name in look.wanted if name in new | tried and name not in self._default]
            if failed:
                texts = "".join(f"{{{self._failure(name, look)}}}, " for name in failed)
                raise ServingError(f"{len(failed)} model(s) did not become available: {{{texts}}}")

    def _failure(self, name: str, look: Look) -> str:
        if (problem := look.problems.get(name)) is not None:
            return f"{{name: {name}}} due to error: NOT_FOUND: {problem}"
        failed = [version for _, version in sorted(self._versions[name].items()) if version.error is not None]
        if not failed:
            return f"{{name: {name}}}"
        last = failed[-1]
        code = "" if last.error is None else last.error.code.name
        return f"{{name: {name} version: {last.files.version}}} due to error: {code}: {last.error}"

    def _at_once(self, models: Sequence[ModelSettings]) -> AtOnce:
        """A model that is new, or wanted in another way; all of them when there is no other look to come."""
        before = {
            (root.name, root.base_path, root.policy) for root in self._roots if isinstance(root, ModelSettings)
        }
        same = {one.name for one in models if (one.name, one.base_path, one.policy) in before}
        return lambda name: not self._poll_interval or name not in same

    async def refresh(self) -> bool:
        """Look at the disk again, and start what follows from it; whether something is still being written."""
        async with self._looking:
            look = await self._look(self._roots)
            self.want(look.wanted)
            return look.unsettled

    async def _look(self, roots: Sequence[Root], at_once: AtOnce = lambda _: False) -> Look:
        held = self._wanted
        loaded = [
            version.files
            for versions in self._versions.values()
            for version in versions.values()
            if version.state in (State.LOADING, State.READY)
        ]
        return await in_thread(partial(self._watch.look, roots, held, loaded, at_once))

    async def _poll(self) -> None:
        delay = self._poll_interval
        while True:
            await asyncio.sleep(delay)
            try:
                unsettled = await self.refresh()
                delay = self._settle_seconds if unsettled else self._poll_interval
            except Exception:
                log.exception("the models' folders could not be looked at")

    # --- getting there ---

    def want(self, wanted: Wanted) -> None:
        """As `Registry.want`, and start what follows from it. A closed manager wants nothing."""
        super().want({} if self._closing.is_set() else self._without_left_out(wanted))
        for name in self._versions:
            if self._next(name) is not None and name not in self._workers:
                self._workers[name] = asyncio.create_task(self._work(name))

    def _without_left_out(self, wanted: Wanted) -> Wanted:
        if not self._left_out:
            return wanted
        kept = {
            name: {number: files for number, files in versions.items() if files not in self._left_out}
            for name, versions in wanted.items()
        }
        return {name: versions for name, versions in kept.items() if versions}

    def _next(self, name: str) -> ModelFiles | None:
        """Retire what is to go now; the files to load next."""
        known = self._versions[name]
        step = plan(known, self._wanted.get(name, {}))
        for number in step.retire:
            self._retire(known[number])
        return step.load

    async def _work(self, name: str) -> None:
        try:
            while (files := self._next(name)) is not None:
                async with self._turn:
                    if self._next(name) == files:
                        await self._load(files)
        finally:
            del self._workers[name]

    async def _wait_for(self, names: Collection[str]) -> None:
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
        version.files = files
        started = time.monotonic()
        try:
            servable = await self._loader.open(files)
        except ModelLoadError as error:
            self._failed(version, error)
            return
        log.info("loaded %s (%s) in %.2f s", files, files.backend, time.monotonic() - started)
        former, version.servable = version.servable, servable
        version.state, version.error = State.READY, None
        self.update(files.name)
        if former is not None:
            self._spawn_drain(former)

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
            self._spawn_drain(servable, version)

    def _spawn_drain(self, servable: Servable, version: Version | None = None) -> None:
        drain = asyncio.create_task(self._drain(servable, version))
        self._drains.add(drain)
        drain.add_done_callback(self._drains.discard)

    async def _drain(self, servable: Servable, version: Version | None) -> None:
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
        tasks = [*self._workers.values(), *([self._polling] if self._polling else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.want({})
        await asyncio.gather(*self._drains)


def _own_labels(roots: Sequence[Root]) -> dict[str, dict[str, int]]:
    """The labels that versions bring themselves."""
    labels: dict[str, dict[str, int]] = {}
    for root in roots:
        if isinstance(root, ModelFiles) and root.label:
            labels.setdefault(root.name, {})[root.label] = root.version
    return labels
