"""What is wanted: at the start, when the disk changes, and when a client says so.

Strategy: what is wanted comes from a look at the disk and replaces what was wanted before; the `Reconciler`
brings the models there. No look waits for that, and a later one changes what is done next. Models come and go in
one of three ways: by looking again and again (`poll_interval`), one by one as clients say (`explicit`), or as a
whole list (`reload`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from triglot.core.errors import (
    FailedPrecondition,
    Internal,
    InvalidArgument,
    ModelLoadError,
    PermissionDenied,
    ServingError,
    Unavailable,
)
from triglot.model.config import ALL, LATEST, MAX_INSTANCES, NO_CONFIG
from triglot.repository.config.completed import Loaded
from triglot.repository.config.model_config import parse_override
from triglot.repository.config.settings import ModelSettings, check_names, folders_of, record_folders_of
from triglot.repository.config.version_names import VersionNames
from triglot.repository.manager.loader import Adapt, Load, LoadEnded, Warm
from triglot.repository.manager.plan import State
from triglot.repository.manager.reconciler import DRAIN_SECONDS, Reconciler
from triglot.repository.manager.registry import Registry
from triglot.repository.manager.summary import (
    VersionSummary,
    summary_of,
    summary_of_broken,
    summary_of_skipped,
)
from triglot.repository.manager.thread import in_thread
from triglot.repository.manager.uploads import Upload
from triglot.repository.scan.layout import listed
from triglot.repository.scan.load_errors import (
    broken_names,
    by_name,
    not_polled,
    not_yet,
    why_not,
    wrong_models,
    wrong_roots,
)
from triglot.repository.scan.once_logger import OnceLogger
from triglot.repository.scan.paths import is_below
from triglot.repository.scan.scanner import AtOnce, Scan, Scanner, Wanted
from triglot.repository.scan.source import FoundTwice, ModelFiles, Override, Overrides, Root
from triglot.repository.storage.storage import Storage
from triglot.repository.storage.urls import is_allowed, spelled
from triglot.scheduling.servable import Servable

log = logging.getLogger(__name__)

NO_OVERRIDES: Overrides = MappingProxyType({})
EVERY_MODEL = "*"
SETTLE_SECONDS = 0.5
"""How long a new version's files have to stay as they are, unless looks are more frequent: who copies them into
place slowly renames the folder when all are there."""
SHUTTING_DOWN = "the server is shutting down"
NOT_EXPLICIT = (
    "explicit model load / unload is not allowed if polling is enabled; start the server with "
    "--model-control-mode explicit"
)


class Manager:
    """Loads the models at some roots, as clients and the disk say.

    `poll_interval`: seconds between two looks at the disk; 0 looks once. `explicit`: the models to load at the
    start, "*" for all; others then come and go by `load_model` and `unload_model`. None: all that there are.
    `left_out`: what of it is not loaded at the start. `folders`: where clients may have models loaded from by
    `reload`. `most_instances`: of a model whose configuration comes with the request to load it.
    `record_folders`: where clients may have requests recorded to by `reload`. `configured` is told of the models
    that a configuration lists, whenever there is another list.
    `labels_before_load`: see `Registry`, where requests find what serves. `allow_symlinks`: see `Scanner`.
    `wait`: at the start, for what is not there yet, if it is looked for again. `storage`: where what lies at
    URLs is brought to. `options` are those of `Reconciler`.
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
        explicit: Collection[str] | None = None,
        left_out: Collection[str] = (),
        allow_symlinks: bool = False,
        folders: Sequence[Path] = (),
        record_folders: Sequence[Path] = (),
        configured: Callable[[Sequence[ModelSettings]], object] = lambda _: None,
        most_instances: int = MAX_INSTANCES,
        labels_before_load: bool = False,
        wait: bool = False,
        storage: Storage | None = None,
        load_timeout: float = 0.0,
        load_retries: int = 0,
        load_retry_interval: float = 0.0,
        load_ended: LoadEnded = lambda *_: None,
        drain_seconds: float = DRAIN_SECONDS,
        adapt: Adapt | None = None,
    ) -> None:
        self.registry = Registry(labels_before_load=labels_before_load, may_be_empty=explicit is not None)
        self.reconciler = Reconciler(
            self.registry,
            load,
            warm,
            self._bring,
            max_queue_size=max_queue_size,
            skip_missing_dependencies=skip_missing_dependencies,
            load_timeout=load_timeout,
            load_retries=load_retries,
            load_retry_interval=load_retry_interval,
            load_ended=load_ended,
            drain_seconds=drain_seconds,
            adapt=adapt,
        )
        self._settle_seconds = min(poll_interval, SETTLE_SECONDS)
        self._scanner = Scanner(self._settle_seconds, allow_symlinks=allow_symlinks)
        self._storage = storage or Storage()
        self._roots = self._storage.local(roots)
        self._explicit = explicit
        self._not_at_start = left_out
        self._poll_interval = poll_interval
        self._waits = wait and poll_interval > 0
        self._folders = folders
        self._record_folders = record_folders
        self._configured = configured
        self._most_instances = most_instances
        self._followed: Sequence[ModelSettings] = ()
        self._once_logger = OnceLogger()
        self._problems: dict[str, ServingError | None] = {}
        self._looking = asyncio.Lock()
        self._asked: set[str] = set()
        """Those that somebody has asked for by name, as long as they load."""
        self._along: set[str] = set()
        """Those that were loaded only because ensembles are made of them."""
        self._polling: asyncio.Task[None] | None = None
        self._reloading = asyncio.Lock()

    async def load_all(self, *, all_or_nothing: bool = True) -> list[ModelLoadError]:
        """Load what is wanted; what could not be is logged and returned. Then look again, if so configured.

        A label for a version that is not available afterwards is an error, too. Raises `ModelLoadError` for a
        wrong name of a model; with `all_or_nothing`, before anything is loaded, also for a wrong path, and a model
        whose configuration is wrong. Of several errors it raises the first, and logs the others.
        """
        models = [root for root in self._roots if isinstance(root, ModelSettings)]
        self._configured(models)
        try:
            check_names([model.name for model in models])
        except InvalidArgument as error:
            raise ModelLoadError(error.message) from None
        async with self._looking:
            look = await self._first_look()
            wanted, problems = self._at_start(look)
            raised = wrong_roots(look, self._roots, may_be_empty=self._more_may_come)
            elsewhere = " ".join(map(str, [*raised, *problems]))
            self._once_logger.log(look, self._at_first, others=False, elsewhere=elsewhere)
            if not all_or_nothing:
                raised, problems = [], [*raised, *problems]
            elif not models:
                raised += problems
            for problem in raised[1:]:
                log.error("%s", problem)
            if raised:
                raise raised[0]
            self.registry.labels = {model.name: dict(model.labels) for model in models}
            self._asked = set(wanted if self._explicit is not None else ())
            if wanted:
                log.info("models to load: %d", len(wanted))
            self.reconciler.want(wanted)
            self._note(look)
        await self._until_loaded(wanted)
        self.reconciler.log_level = logging.INFO
        errors = [
            ModelLoadError(version.error.message)
            for version in self.registry.versions()
            if version.error is not None
        ]
        others = list(map(str, problems))
        try:
            self.registry.label(models)
        except FailedPrecondition as error:
            others.append(error.message)
        for text in others:
            log.error("%s", text)
        if self._poll_interval > 0:
            self._polling = asyncio.create_task(self._poll())
        return errors + [ModelLoadError(text) for text in others]

    async def _first_look(self) -> Scan:
        """What there is, once there is a model at every path, if these are waited for."""
        look = await self._look(self._roots, lambda _: True, asked_for=self._explicit or ())
        said: set[str] = set()
        while self._waits and (missing := not_yet(look)):
            for text in missing:
                if text not in said:
                    log.warning("%s; waiting for it", text)
            said.update(missing)
            await asyncio.sleep(self._poll_interval)
            look = await self._look(self._roots, lambda _: False, settle=True)
        while said and look.unsettled:
            await asyncio.sleep(self._settle_seconds)
            look = await self._look(self._roots, lambda _: False, settle=True)
        return look

    async def check_folders(self, models: Sequence[ModelSettings]) -> None:
        """Raises `PermissionDenied` for a model in a folder that is not the operator's: its code would run.

        So it does for records in one that is not. Raises `FailedPrecondition` as `reload`.
        """
        self._require_list()
        allowed = list(dict.fromkeys([*self._folders, *folders_of(self._followed)]))
        records = list(dict.fromkeys([*self._record_folders, *record_folders_of(self._followed)]))
        for model in models:
            if not await in_thread(partial(is_allowed, model.base_path, allowed)):
                raise PermissionDenied(
                    f"model {model.name}: expected a base_path in one of the server's folders "
                    f"({listed(map(spelled, allowed)) or 'none'}), got {spelled(model.base_path)}; add folders "
                    "with --allowed_model_roots or TRIGLOT_ALLOWED_MODEL_ROOTS"
                )
            for folder in record_folders_of([model]):
                if not await in_thread(partial(is_below, folder, records)):
                    raise PermissionDenied(
                        f"model {model.name}: expected a filename_prefix in one of the folders that the server "
                        f"records to ({listed(records) or 'none'}), got one in {folder}; name a folder with "
                        "TRIGLOT_REQUEST_LOG, or in the server's own configuration"
                    )

    async def follow(self, models: Sequence[ModelSettings]) -> None:
        """As `reload`, by the operator's own configuration: clients may name its folders, too."""
        self._followed = models
        await self.reload(models)

    async def reload(self, models: Sequence[ModelSettings]) -> None:
        """Serve these models, and no others (tfs 3.7).

        Returns when each model that was not wanted before, or that served nothing and is tried again, serves or
        has failed. All other changes happen in the background. What raises `InvalidArgument` (a wrong name) or
        `FailedPrecondition` (a label whose version is not available, a server that was started with paths) has
        changed nothing. Raises `ServingError` (UNKNOWN) when models failed, and `Unavailable` when the manager is
        closed meanwhile.
        """
        check_names([model.name for model in models])
        self._require_list()
        roots = self._storage.local(models)
        models = [root for root in roots if isinstance(root, ModelSettings)]
        async with self._reloading:
            async with self._looking:
                at_once = self._at_once(models)
                look = await self._look(roots, at_once)
                self.registry.label(models)
                if changes := _changes(self._roots, models):
                    log.info("the model list changed: %s", changes)
                self._once_logger.log(look, at_once)
                self._roots = roots
                self._configured(models)
                new = look.wanted.keys() - self.registry.names()
                self.reconciler.want(look.wanted)
                self._note(look)
                tried = {
                    name
                    for name in look.wanted
                    if name in self.reconciler.workers and not self.registry.has_default(name)
                }
            await self.reconciler.wait_for(new | tried)
            if self.reconciler.closing.is_set():
                raise Unavailable(SHUTTING_DOWN)
            failed = [name for name in look.wanted if name in new | tried and not self.registry.has_default(name)]
            if failed:
                texts = "".join(f"{{{self._failure(name, look)}}}, " for name in failed)
                raise ServingError(f"{len(failed)} model(s) did not become available: {{{texts}}}")

    def _require_list(self) -> None:
        if any(not isinstance(root, ModelSettings) for root in self._roots):
            raise FailedPrecondition(
                "this server's model list cannot be replaced; start the server with `triglot tfserving` for that"
            )

    def _failure(self, name: str, look: Scan) -> str:
        if (problem := look.problems.get(name)) is not None:
            return f"{{name: {name}}} due to error: NOT_FOUND: {problem}"
        failed = [
            version for _, version in sorted(self.registry.entries[name].items()) if version.error is not None
        ]
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
            look = await self._look(self._roots, lambda _: False, settle=True)
            self._once_logger.log(look, lambda _: False)
            self.reconciler.want(self._wanted_of(look))
            self._note(look)
            return look.unsettled

    async def _poll(self) -> None:
        delay = self._poll_interval
        while True:
            await asyncio.sleep(delay)
            try:
                unsettled = await self.refresh()
                delay = self._settle_seconds if unsettled else self._poll_interval
            except Exception:
                log.exception("scanning the model folders failed")

    # --- one by one ---

    async def load_model(
        self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None
    ) -> None:
        """Load the model of this name, or again if its files or its configuration have changed (spec 3.9).

        Returns when its versions serve. `config`, the JSON of a ModelConfig, stands in place of its config.pbtxt
        until the next call, and `files`, by their paths, in place of its folder; these need a `config`.

        Raises `Unavailable` unless the models are controlled explicitly, `InvalidArgument`
        for a wrong name or `config` and for a model that cannot be loaded, and `Internal` for one that is not
        there. What served goes on then; and when this is cancelled, the load does.
        """
        self._require_explicit(name)
        overrides = {}
        upload = None
        if files:
            if config is None:
                raise Internal(f"{not_polled(name)}: files require a 'config' parameter, got none")
            upload = await in_thread(partial(Upload, name, files))
        if config is not None:
            try:
                message = await in_thread(partial(parse_override, config, name))
            except InvalidArgument as error:
                raise InvalidArgument(f"{not_polled(name)}: {error.message}") from None
            folder = None if upload is None else upload.folder
            overrides[name] = Override(message, self._most_instances, folder)
        async with self._looking:
            others = {key: versions for key, versions in self.registry.wanted.items() if key != name}
            asked = name.__eq__
            look = await self._look(self._roots, asked, others, overrides, asked_for=[name])
            self._once_logger.log(look, asked, others=False)
            self._note(look, asked)
            if why := why_not(name, look, self._roots):
                # What the caller has sent counts as the caller's mistake, and a file as the server's.
                wrong = overrides and name in by_name(look.problems, {}, self._roots)
                raise InvalidArgument(why) if wrong else Internal(why)
            chosen = look.wanted[name]
            without = [files.file for files in chosen.values() if overrides and files.config is NO_CONFIG]
            if without:
                raise InvalidArgument(
                    f"'config' requires a model folder in a repository; model '{name}' is {without[0]}"
                )
            self.reconciler.retry(name)
            self.reconciler.dependents.asked_for(name)
            self._along.discard(name)
            self._asked.add(name)
            self.reconciler.want({**self.registry.wanted, name: chosen})
            self._note(look, asked)
        await self._until_loaded([name])
        if self.reconciler.closing.is_set():
            raise Unavailable(SHUTTING_DOWN)
        if self.registry.wanted.get(name) != chosen:
            raise Unavailable(f"model '{name}' was unloaded or reloaded during this load")
        for version in self.registry.wanted_versions(name):
            # What goes on with its former files keeps these.
            if version.servable is not None and version.served == chosen[version.files.version]:
                version.servable.loaded_from = upload
        failed = [
            f"version {number} is at UNAVAILABLE state: {version.error};"
            for number, version in sorted(self.registry.entries[name].items())
            if number in chosen and version.error is not None
        ]
        if failed:
            raise InvalidArgument(f"load failed for model '{name}': {' '.join(failed)}")

    def unload_model(self, name: str, *, dependents: bool = False) -> None:
        """Unload the model; it takes no calls any more, and those that run come to their end (spec 3.9).

        `dependents`: also what was loaded along with it, and no other ensemble is made of. A name that was never
        loaded is no error. Raises `Unavailable` as `load_model`, and `InvalidArgument`.
        """
        self._require_explicit(name)
        names = {name}
        if dependents:
            names |= self._loaded_along_with(name)
        names &= self.registry.wanted.keys()
        for one in names:
            self.registry.unloads(one)
        self._go(names)
        if names:
            self.reconciler.want({**self.registry.wanted, **{key: {} for key in names}})

    def _require_explicit(self, name: str) -> None:
        if self._explicit is None:
            raise Unavailable(NOT_EXPLICIT)
        check_names([name])

    def settle(self) -> None:
        """Nothing is going to be unloaded, as far as is known: keep the garbage collector from what is there."""
        self.reconciler.garbage.settle()

    async def close(self) -> None:
        """As `Reconciler.close`."""
        if self._polling is not None:
            self._polling.cancel()
        await self.reconciler.close()
        await in_thread(self._storage.close)

    # --- looks at the disk ---

    @property
    def _more_may_come(self) -> bool:
        return self._explicit is not None or self._poll_interval > 0

    def _at_first(self, name: str) -> bool:
        """Whether the model of this name is loaded at the start."""
        return self._explicit is None or EVERY_MODEL in self._explicit or name in self._explicit

    def _at_start(self, look: Scan) -> tuple[Wanted, list[ModelLoadError]]:
        """What is wanted at the start, and what is wrong with models of it."""
        if self._explicit is None or EVERY_MODEL in self._explicit:
            problems = wrong_models(look, self._roots, may_be_empty=self._more_may_come)
            found = self._wanted_of(look)
            return {name: found[name] for name in found if name not in self._not_at_start}, problems
        why = {name: why_not(name, look, self._roots) for name in self._explicit if name not in self._not_at_start}
        wanted = {name: look.wanted[name] for name, text in why.items() if not text}
        return wanted, [ModelLoadError(text) for text in why.values() if text]

    def _wanted_of(self, look: Scan) -> Wanted:
        """All that was found. A model that cannot be understood is known, and has no version."""
        broken = [] if self._explicit is not None else broken_names(look.problems, look.wanted, self._roots)
        return dict(look.wanted) | {name: {} for name in broken}

    def first_version(self, name: str) -> str:
        """The version of this model that its configuration names first; "" where none lists them one by one."""
        listed = (str(root.version) for root in self._roots if isinstance(root, ModelFiles) and root.name == name)
        return next(listed, "")

    def platforms(self) -> dict[str, str]:
        """What the configuration calls the kind of each model that it names."""
        return {root.name: root.platform for root in self._roots if isinstance(root, ModelSettings)}

    def loaded(self, servable: Servable) -> Loaded:
        """The files of a version that serves, and what is said of it."""
        name, number = servable.name, servable.version
        version = self.registry.entries[name][number]
        files = version.served or version.files
        wanted = self.registry.wanted.get(name, {}).get(number)
        # The policy may have changed since it was loaded, which changes nothing else.
        latest = wanted if wanted is not None and wanted == files else files
        policies = (root.policy for root in self._roots if isinstance(root, ModelSettings) and root.name == name)
        return Loaded(servable, latest, LATEST if files.config.text else next(policies, ALL))

    def _note(self, look: Scan, asked: AtOnce = lambda _: True) -> None:
        """Have what is wrong with the models, or with those `asked` for, readable, and their versions named."""
        found = by_name(look.problems, self.registry.wanted, self._roots)
        errors = {name: ServingError(str(problem), code=problem.code) for name, problem in found.items()}
        for name in filter(asked, self.registry.entries):
            self._problems[name] = errors.get(name)
            self.registry.name_versions(name, look.names.get(name, VersionNames()))
            wanted = self.registry.wanted.get(name, {})
            for number, version in self.registry.entries[name].items():
                version.problem = errors.get(name) if number in wanted else None

    def broken(self) -> dict[str, ServingError]:
        """What is wrong with those wanted models of which there is no version at all."""
        without = set(self.registry.wanted).difference(version.files.name for version in self.registry.versions())
        problems = {name: self._problems.get(name) for name in sorted(without)}
        return {name: problem for name, problem in problems.items() if problem is not None}

    def summaries(self) -> list[VersionSummary]:
        """Of all that is wanted, or was skipped."""
        return [
            *map(summary_of, self.registry.versions()),
            *(summary_of_broken(name, error) for name, error in self.broken().items()),
            *(summary_of_skipped(files, why) for files, why in self.reconciler.left_out.items()),
        ]

    async def _look(
        self,
        roots: Sequence[Root],
        at_once: AtOnce,
        held: Wanted | None = None,
        overrides: Overrides = NO_OVERRIDES,
        *,
        asked_for: Collection[str] = (),
        settle: bool = False,
    ) -> Scan:
        """`held`: what stays wanted where it cannot be read; without it, all that is wanted now.

        `asked_for`: the models that are wanted, beside those that are. `settle`: see `Storage.fetch`.
        """
        held = self.registry.wanted if held is None else held
        loaded = [
            version.files
            for versions in self.registry.entries.values()
            for version in versions.values()
            if version.state in (State.LOADING, State.READY)
        ]
        busy = self.reconciler.busy()
        names = None if EVERY_MODEL in asked_for else self._names_wanted(asked_for)

        def look() -> Scan:
            self._storage.fetch(roots, names, overrides, settle=settle)
            found = self._scanner.look(roots, held, loaded, at_once, overrides, busy)
            return self._storage.annotated(found, roots)

        return await in_thread(look)

    def _names_wanted(self, asked_for: Collection[str] = ()) -> set[str] | None:
        """The models that are wanted, and these; None: all that there are."""
        if self._explicit is None:
            return None
        return {*asked_for, *(name for name, versions in self.registry.wanted.items() if versions)}

    async def never_loaded(self) -> dict[str, str]:
        """The models that were never loaded, and why not where their name is there twice; none unless models are
        controlled explicitly."""
        if self._explicit is None:
            return {}
        found = await in_thread(lambda: self._scanner.find(self._storage.outlines(self._roots)))
        names = [*found.models, *broken_names(found.problems, found.models, self._roots)]
        twice = {Path(key).name: str(one) for key, one in found.problems.items() if isinstance(one, FoundTwice)}
        return {name: twice.get(name, "") for name in names if name not in self.registry.wanted}

    # --- what is loaded along with an ensemble ---

    async def _until_loaded(self, names: Collection[str]) -> None:
        """Wait for those that were asked for, and for what comes along with them."""
        try:
            await self.reconciler.wait_for(names)
        finally:
            self._asked = {name for name in self._asked if name in self.reconciler.workers}

    def _loaded_along_with(self, name: str) -> set[str]:
        """What was loaded only because this ensemble is made of it, or because of what this is made of."""
        going, found = {name}, [name]
        while found:
            parts = self.reconciler.dependents.made_of(found.pop()) & self._along - going
            # An ensemble that goes, too, needs nothing any more.
            parts = {part for part in parts if self.reconciler.dependents.needed_by(part) <= going}
            going |= parts
            found += parts
        return going

    def _go(self, names: Collection[str]) -> None:
        """These are unloaded; whoever is loading what they are part of does not bring them back."""
        self._along.difference_update(names)
        for name in names:
            self._asked -= self.reconciler.dependents.needed_by(name)

    async def _bring(self, name: str, parts: Collection[str]) -> None:
        """As somebody who asks for an ensemble asks for what it is made of (spec 3.9)."""
        missing = [
            part
            for part in parts
            if name in self._asked and part not in self.reconciler.workers and self.registry.serving(part) is None
        ]
        if not missing:
            return
        async with self._looking:
            others = {key: versions for key, versions in self.registry.wanted.items() if key not in missing}
            look = await self._look(self._roots, missing.__contains__, others, asked_for=missing)
            self._once_logger.log(look, missing.__contains__, others=False)
            found = [part for part in missing if not why_not(part, look, self._roots)]
            for part in found:
                self.reconciler.retry(part)
            self._asked.update(found)
            self._along.update(part for part in found if not self.registry.is_wanted(part))
            self.reconciler.want({**self.registry.wanted, **{part: look.wanted[part] for part in found}})
            self._note(look, found.__contains__)


def _changes(before: Sequence[Root], models: Sequence[ModelSettings]) -> str:
    """The models that are new, that go, and that are wanted in another way, by their names; "" for none."""
    old = {root.name: root for root in before if isinstance(root, ModelSettings)}
    new = {model.name: model for model in models}
    names = {
        "new": new.keys() - old.keys(),
        "removed": old.keys() - new.keys(),
        "changed": {name for name, model in new.items() if name in old and model != old[name]},
    }
    return "; ".join(f"{what}: {', '.join(sorted(which))}" for what, which in names.items() if which)
