"""Decides which models are wanted: at the start, when the disk changes, and when a client requests it.

A scan of the disk yields the wanted versions, which replace the previous ones; the `Reconciler` then loads and
unloads accordingly. No scan waits for that, and a later scan changes the next steps. Models are managed in one of
three ways: by repeated scans (`poll_interval`), one by one on request (`explicit`), or as a whole list (`reload`).
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from triglot.core.errors import (
    FailedPrecondition,
    Internal,
    InvalidArgument,
    ModelLoadError,
    PermissionDenied,
    ServingError,
    Unavailable,
)
from triglot.core.response_buffer import MAX_UNREAD_BYTES
from triglot.executors.loading import ANY_CLUSTER
from triglot.model.config import ALL, LATEST, NO_CONFIG
from triglot.repository.config.bounds import UNBOUNDED, Bounds
from triglot.repository.config.completed import Loaded
from triglot.repository.config.model_config import parse_override
from triglot.repository.config.settings import ModelSettings, check_names, folders_of, record_folders_of
from triglot.repository.config.version_names import VersionNames
from triglot.repository.manager.loader import Adapt, Builds, Load, LoadEnded, Verify, Warm, never
from triglot.repository.manager.on_demand import Limits, OnDemand
from triglot.repository.manager.plan import State
from triglot.repository.manager.reconciler import DRAIN_SECONDS, Reconciler
from triglot.repository.manager.registry import Registry
from triglot.repository.manager.summary import (
    VersionSummary,
    summary_of,
    summary_of_broken,
    summary_of_skipped,
)
from triglot.repository.manager.thread import in_thread, in_time
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
from triglot.repository.scan.paths import is_below
from triglot.repository.scan.scanner import Immediate, OnceLogger, Scan, Scanner, Wanted
from triglot.repository.scan.source import Found, FoundTwice, ModelFiles, Override, Overrides, Root
from triglot.repository.scan.urls import is_allowed, spelled
from triglot.repository.storage.storage import Storage
from triglot.scheduling.servable import Servable

T = TypeVar("T")
log = logging.getLogger(__name__)

NO_OVERRIDES: Overrides = MappingProxyType({})
EVERY_MODEL = "*"
SETTLE_SECONDS = 0.5
"""Seconds that a new version's files have to stay unchanged, unless scans are more frequent; a slow copy should
rename the folder at its end."""
SHUTTING_DOWN = "the server is shutting down"
NOT_EXPLICIT = (
    "explicit model load / unload is not allowed if polling is enabled; start the server with "
    "--model-control-mode explicit"
)


_PATH = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]*/)+[A-Za-z0-9_-][A-Za-z0-9._-]*")


class Upload:
    """A temporary model folder with the uploaded files; deleted when the last reference to this object is gone.

    Blocks while writing. Raise `InvalidArgument` for an invalid path, and `OSError`.
    """

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        for path in files:
            if not _PATH.fullmatch(path):
                raise InvalidArgument(
                    f"parameter 'file:{path}': expected file:VERSION/FILE, of letters, digits and ._- only"
                )
        folder = Path(tempfile.mkdtemp(prefix="triglot-upload-")).resolve()
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.folder = folder / name
        for path, content in files.items():
            file = self.folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


class Manager:
    """Loads the models at some roots, following clients' requests and the disk. Used on the event loop.

    Attributes:
        poll_interval: Seconds between scans of the disk; 0 scans once.
        explicit: Models to load at the start, "*" for all; then `load_model` and `unload_model` change the set.
            None loads all models that are found.
        left_out: Models that are not loaded at the start.
        folders: Folders that clients may load models from by `reload`.
        record_folders: Folders that clients may have requests recorded to by `reload`.
        configured: Called with each new list of configured models.
        bounds: Limits on what the configuration in a load request may ask for.
        labels_before_load: See `Registry`.
        allow_symlinks: See `Scanner`.
        on_demand: Limits on the models in memory, if calls load models; requires `explicit`.
        wait: Whether the first scan is repeated until every root has a model; requires `poll_interval`.
        storage: Downloads models that have URLs.

    The other options are those of `Reconciler`.
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
        on_demand: Limits | None = None,
        left_out: Collection[str] = (),
        allow_symlinks: bool = False,
        folders: Sequence[Path] = (),
        record_folders: Sequence[Path] = (),
        configured: Callable[[Sequence[ModelSettings]], object] = lambda _: None,
        bounds: Bounds = UNBOUNDED,
        labels_before_load: bool = False,
        wait: bool = False,
        storage: Storage | None = None,
        load_timeout: float = 0.0,
        load_retries: int = 0,
        load_retry_interval: float = 0.0,
        ray_address: str = ANY_CLUSTER,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
        op_libraries: Sequence[Path] = (),
        debug: bool = False,
        verify: Verify | None = None,
        builds: Builds = never,
        load_ended: LoadEnded = lambda *_: None,
        drain_seconds: float = DRAIN_SECONDS,
        adapt: Adapt | None = None,
    ) -> None:
        self.registry = Registry(labels_before_load=labels_before_load, may_be_empty=explicit is not None)
        self.reconciler = Reconciler(
            self.registry,
            load,
            warm,
            self._load_parts,
            max_queue_size=max_queue_size,
            skip_missing_dependencies=skip_missing_dependencies,
            load_timeout=load_timeout,
            load_retries=load_retries,
            load_retry_interval=load_retry_interval,
            ray_address=ray_address,
            max_unread_bytes=max_unread_bytes,
            op_libraries=op_libraries,
            debug=debug,
            verify=verify,
            builds=builds,
            load_ended=load_ended,
            drain_seconds=drain_seconds,
            adapt=adapt,
        )
        self._settle_seconds = min(poll_interval, SETTLE_SECONDS)
        self._scanner = Scanner(self._settle_seconds, allow_symlinks=allow_symlinks)
        self._storage = storage or Storage()
        self._roots = self._storage.local(roots)
        self._explicit = explicit
        self._skipped_at_start = left_out
        self._poll_interval = poll_interval
        self._wait_for_models = wait and poll_interval > 0
        self._folders = folders
        self._record_folders = record_folders
        self._configured = configured
        self._bounds = bounds
        self._followed: Sequence[ModelSettings] = ()
        self._once_logger = OnceLogger()
        self._problems: dict[str, ServingError | None] = {}
        self._scan_lock = asyncio.Lock()
        self._requested: set[str] = set()
        """Models that were requested by name, while they load."""
        self._loaded_as_parts: set[str] = set()
        """Models that were loaded only as parts of ensembles."""
        self._polling: asyncio.Task[None] | None = None
        self._reload_lock = asyncio.Lock()
        self.on_demand: OnDemand | None = None
        if on_demand is not None:
            self.on_demand = OnDemand(
                self.reconciler, on_demand, explicit or (), self._on_disk, self._load_named, self._unload
            )

    async def load_all(self, *, all_or_nothing: bool = True) -> list[ModelLoadError]:
        """Load the wanted models; log and return the errors. Then starts polling, if configured.

        A label of a version that is not available is an error, too. Raise `ModelLoadError` for an invalid model
        name; with `all_or_nothing` also for an invalid path and for a model with an invalid configuration, before
        anything is loaded. Of several errors it raises the first and logs the others.
        """
        models = [root for root in self._roots if isinstance(root, ModelSettings)]
        self._configured(models)
        try:
            check_names([model.name for model in models])
        except InvalidArgument as error:
            raise ModelLoadError(error.message) from None
        if self.on_demand is not None:
            await self.on_demand.find()
        async with self._scan_lock:
            scan = await self._first_scan()
            wanted, problems = self._wanted_at_start(scan)
            raised = wrong_roots(scan, self._roots, may_be_empty=self._more_may_come)
            reported = " ".join(map(str, [*raised, *problems]))
            self._once_logger.log(scan, self._loads_at_start, others=False, reported=reported)
            if not all_or_nothing:
                raised, problems = [], [*raised, *problems]
            elif not models:
                raised += problems
            for problem in raised[1:]:
                log.error("%s", problem)
            if raised:
                raise raised[0]
            self.registry.configure(models)
            self._requested = set(wanted if self._explicit is not None else ())
            if wanted:
                log.info("models to load: %d", len(wanted))
            self.reconciler.want(wanted)
            self._record_problems(scan)
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

    async def _first_scan(self) -> Scan:
        """Scan the disk; if configured so, repeatedly until there is a model at every path."""
        scan = await self._scan(self._roots, lambda _: True, requested=self._explicit or ())
        warned: set[str] = set()
        while self._wait_for_models and (missing := not_yet(scan)):
            for text in missing:
                if text not in warned:
                    log.warning("%s; waiting for it", text)
            warned.update(missing)
            await asyncio.sleep(self._poll_interval)
            scan = await self._scan(self._roots, lambda _: False, settle=True)
        while warned and scan.unsettled:
            await asyncio.sleep(self._settle_seconds)
            scan = await self._scan(self._roots, lambda _: False, settle=True)
        return scan

    async def check_folders(self, models: Sequence[ModelSettings]) -> None:
        """Raise `PermissionDenied` for a model outside of the operator's folders, as its code would run.

        Also for request records outside of the roots of records. Raise `FailedPrecondition` as `reload` does.
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
        """As `reload`, for the operator's own configuration: clients may use its folders from now on."""
        self._followed = models
        await self.reload(models)

    async def reload(self, models: Sequence[ModelSettings]) -> None:
        """Serve these models, and no others (tfs 3.7).

        Return when each model that is new, or that served nothing and is retried, serves or has failed. All other
        changes happen in the background. `InvalidArgument` (an invalid name) and `FailedPrecondition` (a label
        whose version is not available, or a server that was started with paths) are raised before any change.
        Raise `ServingError` (UNKNOWN) when models failed, and `Unavailable` when the manager is closed meanwhile.
        """
        check_names([model.name for model in models])
        self._require_list()
        roots = self._storage.local(models)
        models = [root for root in roots if isinstance(root, ModelSettings)]
        async with self._reload_lock:
            async with self._scan_lock:
                immediate = self._immediate(models)
                scan = await self._scan(roots, immediate)
                self.registry.label(models)
                if changes := _changes(self._roots, models):
                    log.info("the model list changed: %s", changes)
                self._once_logger.log(scan, immediate)
                self._roots = roots
                self._configured(models)
                new = scan.wanted.keys() - self.registry.names()
                self.reconciler.want(scan.wanted)
                self._record_problems(scan)
                tried = {
                    name
                    for name in scan.wanted
                    if name in self.reconciler.workers and not self.registry.has_default(name)
                }
            await self.reconciler.wait_for(new | tried)
            if self.reconciler.closing.is_set():
                raise Unavailable(SHUTTING_DOWN)
            failed = [name for name in scan.wanted if name in new | tried and not self.registry.has_default(name)]
            if failed:
                texts = "".join(f"{{{self._failure(name, scan)}}}, " for name in failed)
                raise ServingError(f"{len(failed)} model(s) did not become available: {{{texts}}}")

    def _require_list(self) -> None:
        if any(not isinstance(root, ModelSettings) for root in self._roots):
            raise FailedPrecondition(
                "this server's model list cannot be replaced; start the server with `triglot tfserving` for that"
            )

    def _failure(self, name: str, scan: Scan) -> str:
        if (problem := scan.problems.get(name)) is not None:
            return f"{{name: {name}}} due to error: NOT_FOUND: {problem}"
        failed = [
            version for _, version in sorted(self.registry.entries[name].items()) if version.error is not None
        ]
        if not failed:
            return f"{{name: {name}}}"
        last = failed[-1]
        code = "" if last.error is None else last.error.code.name
        return f"{{name: {name} version: {last.files.version}}} due to error: {code}: {last.error}"

    def _immediate(self, models: Sequence[ModelSettings]) -> Immediate:
        """Select models that are new or configured differently; all models if there is no polling."""
        before = {
            (root.name, root.base_path, root.policy) for root in self._roots if isinstance(root, ModelSettings)
        }
        same = {model.name for model in models if (model.name, model.base_path, model.policy) in before}
        return lambda name: not self._poll_interval or name not in same

    async def refresh(self) -> bool:
        """Scan the disk and start what follows from it. Return whether some files are still being written."""
        async with self._scan_lock:
            scan = await self._scan(self._roots, lambda _: False, settle=True)
            self._once_logger.log(scan, lambda _: False)
            self.reconciler.want(self._wanted_of(scan))
            self._record_problems(scan)
            return scan.unsettled

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
        """Load the model of this name; reloads it if its files or its configuration changed (spec 3.9).

        Return when its versions serve. `config`, the JSON of a ModelConfig, replaces its config.pbtxt until the
        next call, and `files`, by their paths, replace its folder; these need a `config`.

        Raise `Unavailable` unless models are controlled explicitly, `InvalidArgument` for an invalid name or
        `config` and for a model that cannot be loaded, and `Internal` for a model that does not exist. Versions
        that served keep serving then. If this is cancelled, the load continues.
        """
        self._require_explicit(name)
        overrides = {}
        upload = None
        if files:
            if config is None:
                raise Internal(f"{not_polled(name)}: files require a 'config' parameter, got none")
            upload = await self._in_time(partial(Upload, name, files), f"writing the files of model '{name}'")
        if config is not None:
            try:
                what = f"reading the configuration of model '{name}'"
                message = await self._in_time(partial(parse_override, config, name), what)
            except InvalidArgument as error:
                raise InvalidArgument(f"{not_polled(name)}: {error.message}") from None
            folder = None if upload is None else upload.folder
            overrides[name] = Override(message, self._bounds, folder)
        if self.on_demand is None:
            chosen = await self._load_named(name, overrides)
        else:
            self.on_demand.pin(name)
            async with self.on_demand.room([name]):
                chosen = await self._load_named(name, overrides)
        if self.reconciler.closing.is_set():
            raise Unavailable(SHUTTING_DOWN)
        if self.registry.wanted.get(name) != chosen:
            raise Unavailable(f"model '{name}' was unloaded or reloaded during this load")
        for version in self.registry.wanted_versions(name):
            # A version that continues with its former files keeps its own upload.
            if version.servable is not None and version.served == chosen[version.files.version]:
                version.servable.loaded_from = upload
        failed = [
            f"version {number} is at UNAVAILABLE state: {version.error};"
            for number, version in sorted(self.registry.entries[name].items())
            if number in chosen and version.error is not None
        ]
        if failed:
            raise InvalidArgument(f"load failed for model '{name}': {' '.join(failed)}")

    async def _load_named(self, name: str, overrides: Overrides = NO_OVERRIDES) -> Mapping[int, ModelFiles]:
        """Load a model as far as that succeeds; return the files of its versions. Raise as `load_model`."""
        async with self._scan_lock:
            others = {key: versions for key, versions in self.registry.wanted.items() if key != name}
            asked = name.__eq__
            what = f"scanning the folder of model '{name}'"
            folders = None if self.on_demand is None else self.on_demand.folders_of(name)
            scan = await self._scan(
                self._roots, asked, others, overrides, requested=[name], what=what, folders=folders
            )
            self._once_logger.log(scan, asked, others=False)
            self._record_problems(scan, asked)
            if why := why_not(name, scan, self._roots):
                # Errors in what the caller has sent are the caller's, errors in files are the server's.
                wrong = overrides and name in by_name(scan.problems, {}, self._roots)
                raise InvalidArgument(why) if wrong else Internal(why)
            chosen = scan.wanted[name]
            without = [files.file for files in chosen.values() if overrides and files.config is NO_CONFIG]
            if without:
                raise InvalidArgument(
                    f"'config' requires a model folder in a repository; model '{name}' is {without[0]}"
                )
            self.reconciler.retry(name)
            self.reconciler.dependents.requested(name)
            self._loaded_as_parts.discard(name)
            self._requested.add(name)
            self.reconciler.want({**self.registry.wanted, name: chosen})
            self._record_problems(scan, asked)
        await self._until_loaded([name])
        return chosen

    def unload_model(self, name: str, *, dependents: bool = False) -> bool:
        """Unloads the model; it takes no new calls, and running ones complete (spec 3.9).

        `dependents`: also unloads the parts that were loaded along with it, unless another ensemble contains them.
        Return whether there was something to unload: a name that was never loaded is no error. Raises
        `Unavailable` as `load_model` does, and `InvalidArgument`.
        """
        self._require_explicit(name)
        names = {name}
        if dependents:
            names |= self._loaded_along_with(name)
        names &= self.registry.wanted.keys()
        if self.on_demand is not None:
            self.on_demand.leave_out(name)
        self._unload(names)
        return bool(names)

    def _unload(self, names: Collection[str]) -> None:
        for unloaded in names:
            self.registry.forget_errors(unloaded)
        self._forget_requests(names)
        if names:
            self.reconciler.want({**self.registry.wanted, **{key: {} for key in names}})

    async def _in_time(self, work: Callable[[], T], name: str) -> T:
        """Return what `work` does on a thread, in the time that a load may take. Raise `DeadlineExceeded`."""
        return await in_time(work, self.reconciler.load_timeout, name)

    def _require_explicit(self, name: str) -> None:
        if self._explicit is None:
            raise Unavailable(NOT_EXPLICIT)
        check_names([name])

    def settle(self) -> None:
        """Excludes current objects from garbage collections, as no unload is expected."""
        self.reconciler.garbage.freeze()

    async def close(self) -> None:
        """Stop polling and close all versions, see `Reconciler.close`."""
        if self._polling is not None:
            self._polling.cancel()
        if self.on_demand is not None:
            self.on_demand.close()
        await self.reconciler.close()
        await in_thread(self._storage.close)

    # --- scans ---

    @property
    def _more_may_come(self) -> bool:
        return self._explicit is not None or self._poll_interval > 0

    def _loads_at_start(self, name: str) -> bool:
        """Whether the model of this name is loaded at the start."""
        return self._explicit is None or EVERY_MODEL in self._explicit or name in self._explicit

    def _wanted_at_start(self, scan: Scan) -> tuple[Wanted, list[ModelLoadError]]:
        """Return the models that are wanted at the start, and the errors in them."""
        if self._explicit is None or EVERY_MODEL in self._explicit:
            problems = wrong_models(scan, self._roots, may_be_empty=self._more_may_come)
            found = self._wanted_of(scan)
            return {name: found[name] for name in found if name not in self._skipped_at_start}, problems
        why = {
            name: why_not(name, scan, self._roots) for name in self._explicit if name not in self._skipped_at_start
        }
        wanted = {name: scan.wanted[name] for name, text in why.items() if not text}
        return wanted, [ModelLoadError(text) for text in why.values() if text]

    def _wanted_of(self, scan: Scan) -> Wanted:
        """Return all models of a scan; one with an invalid configuration is included without versions."""
        broken = [] if self._explicit is not None else broken_names(scan.problems, scan.wanted, self._roots)
        return dict(scan.wanted) | {name: {} for name in broken}

    def first_version(self, name: str) -> str:
        """Return the version of this model that the configuration lists first; "" if it lists no versions."""
        listed = (str(root.version) for root in self._roots if isinstance(root, ModelFiles) and root.name == name)
        return next(listed, "")

    def platforms(self) -> dict[str, str]:
        """Return the platform of each configured model, as the configuration calls it."""
        return {root.name: root.platform for root in self._roots if isinstance(root, ModelSettings)}

    def loaded(self, servable: Servable) -> Loaded:
        """Return the files of a serving version and its configuration."""
        name, number = servable.name, servable.version
        version = self.registry.entries[name][number]
        files = version.served or version.files
        wanted = self.registry.wanted.get(name, {}).get(number)
        # The policy may have changed since the load, without any other change.
        latest = wanted if wanted is not None and wanted == files else files
        policies = (root.policy for root in self._roots if isinstance(root, ModelSettings) and root.name == name)
        return Loaded(servable, latest, LATEST if files.config.text else next(policies, ALL))

    def _record_problems(self, scan: Scan, asked: Immediate = lambda _: True) -> None:
        """Record the errors and version names of the models, or of those that `asked` selects."""
        found = by_name(scan.problems, self.registry.wanted, self._roots)
        errors = {name: ServingError(str(problem), code=problem.code) for name, problem in found.items()}
        for name in filter(asked, self.registry.entries):
            self._problems[name] = errors.get(name)
            self.registry.name_versions(name, scan.names.get(name, VersionNames()))
            wanted = self.registry.wanted.get(name, {})
            for number, version in self.registry.entries[name].items():
                version.problem = errors.get(name) if number in wanted else None

    def broken(self) -> dict[str, ServingError]:
        """Return the errors of the wanted models that have no version at all."""
        without = set(self.registry.wanted).difference(version.files.name for version in self.registry.versions())
        problems = {name: self._problems.get(name) for name in sorted(without)}
        return {name: problem for name, problem in problems.items() if problem is not None}

    def summaries(self) -> list[VersionSummary]:
        """Return a summary per wanted or skipped version."""
        return [
            *map(summary_of, self.registry.versions()),
            *(summary_of_broken(name, error) for name, error in self.broken().items()),
            *(summary_of_skipped(files, why) for files, why in self.reconciler.skipped.items()),
        ]

    async def _scan(
        self,
        roots: Sequence[Root],
        immediate: Immediate,
        held: Wanted | None = None,
        overrides: Overrides = NO_OVERRIDES,
        *,
        requested: Collection[str] = (),
        settle: bool = False,
        what: str = "",
        folders: Collection[str] | None = None,
    ) -> Scan:
        """Scan the roots on a thread.

        `held`: models that stay wanted if they cannot be read; by default all wanted ones. `requested`: models
        that are wanted in addition. `settle`: see `Storage.fetch`. `what`: the name of a scan that has as much
        time as a load, after its downloads. `folders`: see `find_models`. Raise `DeadlineExceeded` then.
        """
        held = self.registry.wanted if held is None else held
        loaded = [
            version.files
            for versions in self.registry.entries.values()
            for version in versions.values()
            if version.state in (State.LOADING, State.READY)
        ]
        busy = self.reconciler.busy()
        names = None if EVERY_MODEL in requested else self._names_wanted(requested)

        def fetch() -> None:
            self._storage.fetch(roots, names, overrides, settle=settle)

        def scan() -> Scan:
            found = self._scanner.scan(roots, held, loaded, immediate, overrides, busy, folders)
            return self._storage.annotated(found, roots)

        await in_thread(fetch)
        return await (self._in_time(scan, what) if what else in_thread(scan))

    def _names_wanted(self, requested: Collection[str] = ()) -> set[str] | None:
        """Return the wanted models, and these; None: all that are found."""
        if self._explicit is None:
            return None
        return {*requested, *(name for name, versions in self.registry.wanted.items() if versions)}

    async def never_loaded(self) -> dict[str, str]:
        """Return the models that were never loaded, with a reason: their name is ambiguous, or a call loads them.

        Empty unless models are controlled explicitly.
        """
        if self._explicit is None:
            return {}
        found = await self._find()
        names = [*found.models, *broken_names(found.problems, found.models, self._roots)]
        duplicates = {
            Path(key).name: str(problem)
            for key, problem in found.problems.items()
            if isinstance(problem, FoundTwice)
        }
        reasons = dict.fromkeys(self.registry.on_demand, "not loaded; a call loads it") | duplicates
        return {name: reasons.get(name, "") for name in names if name not in self.registry.wanted}

    async def _find(self) -> Found:
        return await in_thread(lambda: self._scanner.find(self._storage.outlines(self._roots)))

    async def _on_disk(self) -> dict[str, Sequence[ModelFiles]]:
        """Return the versions of each model; of one with an invalid configuration none."""
        found = await self._find()
        broken = broken_names(found.problems, found.models, self._roots)
        return {**found.models, **dict.fromkeys(broken, ())}

    # --- parts of ensembles ---

    async def _until_loaded(self, names: Collection[str]) -> None:
        """Wait for models that were requested, and for their parts."""
        try:
            await self.reconciler.wait_for(names)
        finally:
            self._requested = {name for name in self._requested if name in self.reconciler.workers}
            if self.on_demand is not None:
                self.on_demand.forget_parts(names)

    def _loaded_along_with(self, name: str) -> set[str]:
        """Return the models that were loaded only as parts of this ensemble, recursively."""
        going, found = {name}, [name]
        while found:
            parts = self.reconciler.dependents.parts_of(found.pop()) & self._loaded_as_parts - going
            # A part is still needed by an ensemble that stays loaded.
            parts = {part for part in parts if self.reconciler.dependents.needed_by(part) <= going}
            going |= parts
            found += parts
        return going

    def _forget_requests(self, names: Collection[str]) -> None:
        """Forgets requests for unloaded models and for ensembles that contain them: no load adds them again."""
        self._loaded_as_parts.difference_update(names)
        for name in names:
            self._requested -= self.reconciler.dependents.needed_by(name)

    async def _load_parts(self, name: str, parts: Collection[str]) -> None:
        """Load the missing parts of a requested ensemble as if they had been requested, too (spec 3.9)."""
        missing = [
            part
            for part in parts
            if name in self._requested
            and part not in self.reconciler.workers
            and self.registry.serving(part) is None
        ]
        if self.on_demand is not None:
            self.on_demand.parts_needed(name, parts)
            async with self.on_demand.room(missing):
                await self._request_parts(missing)
        elif missing:
            await self._request_parts(missing)

    async def _request_parts(self, missing: Collection[str]) -> None:
        async with self._scan_lock:
            others = {key: versions for key, versions in self.registry.wanted.items() if key not in missing}
            scan = await self._scan(self._roots, missing.__contains__, others, requested=missing)
            self._once_logger.log(scan, missing.__contains__, others=False)
            found = [part for part in missing if not why_not(part, scan, self._roots)]
            for part in found:
                self.reconciler.retry(part)
            self._requested.update(found)
            self._loaded_as_parts.update(part for part in found if not self.registry.is_wanted(part))
            self.reconciler.want({**self.registry.wanted, **{part: scan.wanted[part] for part in found}})
            self._record_problems(scan, found.__contains__)


def _changes(before: Sequence[Root], models: Sequence[ModelSettings]) -> str:
    """Return the names of new, removed and changed models as a text; "" if there are none."""
    old = {root.name: root for root in before if isinstance(root, ModelSettings)}
    new = {model.name: model for model in models}
    names = {
        "new": new.keys() - old.keys(),
        "removed": old.keys() - new.keys(),
        "changed": {name for name, model in new.items() if name in old and model != old[name]},
    }
    return "; ".join(f"{what}: {', '.join(sorted(which))}" for what, which in names.items() if which)
