"""Ensembles of a registry: they wait for the models of their steps, and follow the state of these (spec 5.3).

An ensemble is loaded like any other model. Before it serves, it waits for the models of its steps that are still
being loaded; meanwhile it releases the load lock. A model that is missing then makes it fail to load. Whenever a
model starts or stops serving, or another version takes over, the ensembles that contain it are checked: one that
can no longer run is retired and loaded again, which reports the reason; one that failed is loaded again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from triglot.core import checks
from triglot.core.call import MAX_MODEL_CALLS
from triglot.core.errors import Code, MissingDependency, ModelLoadError
from triglot.model.ensemble import Ensemble
from triglot.model.ensemble_checks import IN_CONFIG, IN_PYTHON, Keys, Part, check_steps
from triglot.model.scheduling import Step
from triglot.repository.config.settings import NAME, NAME_RULE
from triglot.repository.manager.plan import State, Version
from triglot.repository.manager.registry import Registry
from triglot.repository.scan.source import ModelFiles
from triglot.scheduling.servable import Servable

log = logging.getLogger(__name__)

Served = Sequence[Version | None]
"""The serving version of each step's model; None: none serves."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The last load of an ensemble: its steps, and the files of the versions that served them."""

    steps: Sequence[Step]
    served: Sequence[ModelFiles | None]


@dataclass(frozen=True, slots=True)
class Actions:
    """What `Dependents` uses of the reconciler. `load_parts` loads the parts of a requested ensemble."""

    is_busy: Callable[[str], bool]
    is_skipped: Callable[[str], bool]
    load_parts: Callable[[str, Collection[str]], Awaitable[None]]
    retire: Callable[[Version], None]
    reconcile: Callable[[str], None]


class Dependents:
    """The ensembles of a registry; used on the event loop. `changed` must be called after each state change."""

    def __init__(self, registry: Registry, actions: Actions) -> None:
        self._registry = registry
        self._actions = actions
        self._names: set[str] = set()
        self._waiting: dict[str, set[str]] = {}
        self._attempts: dict[str, dict[int, _Attempt]] = {}
        self._woken = asyncio.Event()
        self._changed: deque[str] = deque()

    # --- before it serves ---

    async def complete(
        self,
        files: ModelFiles,
        servable: Servable,
        release_lock: Callable[[], None],
        is_wanted: Callable[[], bool],
    ) -> None:
        """Wait until the models of a new version's steps serve; return at once for a model without steps.

        `release_lock` releases the load lock meanwhile. Raise `ModelLoadError` if the ensemble cannot run.
        """
        model, name = servable.model, servable.name
        self._forget(name, servable.version)
        if not isinstance(model, Ensemble):
            return
        steps, keys = model.steps, _keys(files)
        self._names.add(name)
        try:
            _check_values(model, keys)
            check_steps(steps, servable.signature, keys)
        except ValueError as error:
            raise _load_error(files, error) from None
        await self._actions.load_parts(name, list(dict.fromkeys(step.model for step in steps)))
        self._attempts.setdefault(name, {})[servable.version] = _Attempt(steps, _files(self._served(steps)))
        await self._wait(name, files, steps, release_lock, is_wanted)
        served = self._served(steps)
        self._attempts[name][servable.version] = _Attempt(steps, _files(served))
        self._check_served(files, steps, served, keys)
        try:
            _connect(model, servable, served, keys)
        except ValueError as error:
            raise _load_error(files, error) from None
        if _streams(served):
            servable.stream_from(model.infer_stream)

    def _forget(self, name: str, number: int) -> None:
        """Forgets the previous load of this version, and those of versions that are no longer wanted."""
        attempts = self._attempts.get(name, {})
        for attempted in list(attempts):
            if attempted == number or not self._registry.is_wanted(name, attempted):
                del attempts[attempted]

    async def _wait(
        self,
        name: str,
        files: ModelFiles,
        steps: Sequence[Step],
        release_lock: Callable[[], None],
        is_wanted: Callable[[], bool],
    ) -> None:
        self._waiting[name] = {step.model for step in steps}
        try:
            while is_wanted():
                self._check_nesting(name, files)
                if not any(map(self._is_pending, steps)):
                    return
                release_lock()
                await self._woken.wait()
            raise ModelLoadError(f"{files.file}: it is no longer requested")
        finally:
            self._waiting.pop(name, None)

    def _is_pending(self, step: Step) -> bool:
        """Whether a step's model is not serving yet, but being loaded."""
        registry = self._registry
        wanted = registry.is_wanted(step.model, step.version) and self._actions.is_busy(step.model)
        return wanted and registry.serving(step.model, step.version) is None

    def _check_nesting(self, name: str, files: ModelFiles) -> None:
        """Raise `ModelLoadError` for ensembles that contain each other, or that are nested too deeply."""
        levels: list[dict[str, str]] = []  # Maps each part to an ensemble of the level above that contains it.
        level = {name}
        while level and len(levels) <= MAX_MODEL_CALLS and not (levels and name in level):
            levels.append(
                {part: model for model in sorted(level, reverse=True) for part in self._current_parts(model)}
            )
            level = set(levels[-1])
        if not level:
            return
        path = [name if name in level else min(level)]
        for parts in reversed(levels):
            path.insert(0, parts[path[0]])
        expected = (
            "ensembles that contain each other"
            if path[-1] == name
            else f"expected at most {MAX_MODEL_CALLS} nested ensembles, got"
        )
        raise ModelLoadError(f"{_source(files)}: {expected}: {' -> '.join(path)}", Code.INVALID_ARGUMENT)

    def _current_parts(self, name: str) -> set[str]:
        """Return the models in the steps of an ensemble that is waiting or serving."""
        if name in self._waiting:
            return self._waiting[name]
        served = self._registry.serving(name)
        model = None if served is None or served.servable is None else served.servable.model
        return {step.model for step in model.steps} if isinstance(model, Ensemble) else set()

    def _served(self, steps: Sequence[Step]) -> Served:
        return [self._registry.serving(step.model, step.version) for step in steps]

    def _check_served(self, files: ModelFiles, steps: Sequence[Step], served: Served, keys: Keys) -> None:
        for at, (step, part) in enumerate(zip(steps, served, strict=True)):
            if part is not None:
                continue
            version = f" version {step.version}" if step.version else ""
            why = self._registry.why_not_serving(step.model, step.version)
            key = f"{keys.step}[{at}].{keys.model}"
            text = f"{_source(files)}: {key}: '{step.model}'{version} is not available: {why}"
            if self._actions.is_skipped(step.model):
                raise MissingDependency(text)
            raise ModelLoadError(text, Code.FAILED_PRECONDITION)

    def requested(self, name: str) -> None:
        """Retries an ensemble that was requested while it was loading: its parts were not requested then."""
        if name in self._names:
            for version in self._registry.wanted_versions(name):
                version.retry = version.retry or version.state is State.LOADING

    # --- when something has changed ---

    def wake(self) -> None:
        """Wakes up waiting ensembles after a change of what is wanted or busy."""
        woken, self._woken = self._woken, asyncio.Event()
        woken.set()

    def changed(self, name: str | None) -> None:
        """Check the ensembles that contain this model, a version of which may have started or stopped serving.

        Checks the model itself, too: its parts may have changed during its warm-up.
        """
        if name is None:
            return
        self.wake()
        self._changed.append(name)
        if len(self._changed) > 1:
            return  # Called from the loop below, by a retirement: the loop will get to it.
        while self._changed:
            changed = self._changed[0]
            for ensemble in sorted(self._names):
                if ensemble == changed or changed in self.parts_of(ensemble):
                    self._check(ensemble)
            self._changed.popleft()

    def _check(self, name: str) -> None:
        reconcile = False
        for version in list(self._registry.wanted_versions(name)):
            servable = version.servable
            if version.state is State.READY and servable is not None and not self._runs(servable):
                log.warning(
                    "%s stops serving: one of its models is no longer available, or has changed", version.files
                )
                self._actions.retire(version)
                reconcile = True
            attempt = self._attempts.get(name, {}).get(version.files.version)
            failed = version.error is not None and attempt is not None
            if failed and attempt is not None and _files(self._served(attempt.steps)) != attempt.served:
                version.retry = reconcile = True
        if reconcile:
            self._actions.reconcile(name)

    def _runs(self, servable: Servable) -> bool:
        """Whether the models of an ensemble's steps serve, with fitting inputs and outputs."""
        model = servable.model
        if not isinstance(model, Ensemble):
            return True  # The model of this version is not an ensemble.
        served = self._served(model.steps)
        if None in served:
            return False
        if servable.decoupled is not _streams(served):
            return False
        labels = servable.labels
        try:
            _connect(model, servable, served, IN_PYTHON)
        except ValueError:
            return False
        if servable.labels != labels:  # Ensembles that contain this one inherit its labels.
            self._changed.append(servable.name)
        return True

    # --- which are made of which ---

    def _steps(self, name: str) -> list[Step]:
        steps = [step for attempt in self._attempts.get(name, {}).values() for step in attempt.steps]
        for version in self._registry.wanted_versions(name):
            if version.servable is not None and isinstance(version.servable.model, Ensemble):
                steps += version.servable.model.steps
        return steps

    def parts_of(self, name: str) -> set[str]:
        """Return the models in the steps of an ensemble; empty for any other model."""
        return {step.model for step in self._steps(name)} if name in self._names else set()

    def needed_by(self, name: str) -> set[str]:
        """Return the wanted ensembles that contain this model."""
        return {
            ensemble
            for ensemble in self._names
            if self._registry.is_wanted(ensemble) and name in self.parts_of(ensemble)
        }

    def is_waiting(self, name: str) -> bool:
        """Whether an ensemble that is being loaded is waiting for its parts."""
        return name in self._waiting


def _check_values(model: Ensemble, keys: Keys) -> None:
    """Raise `ValueError`, which names the key, for steps of wrong types: a class may declare anything."""
    if not isinstance(model.steps, list | tuple):
        raise checks.expected(keys.step, "a list of Step", model.steps)
    for at, step in enumerate(model.steps):
        where = f"{keys.step}[{at}]"
        checks.kind(where, step, Step)
        if not isinstance(step.model, str) or not NAME.fullmatch(step.model):
            raise ValueError(f"{where}.{keys.model}: {NAME_RULE}, got {step.model!r}")
        for key, names in ((keys.inputs, step.inputs), (keys.outputs, step.outputs)):
            texts = [*names, *names.values()] if isinstance(names, Mapping) else [None]
            if not all(isinstance(text, str) for text in texts):
                raise checks.expected(f"{where}.{key}", "names by name", names)
        checks.count(f"{where}.version", step.version)
    checks.count("max_inflight_requests", model.max_inflight_requests)


def _connect(model: Ensemble, servable: Servable, served: Served, keys: Keys) -> None:
    """Connect an ensemble to the models of its steps.

    An output without labels of its own inherits those of the step's output. Raise `ValueError` as `check_fit`
    does, before any change.
    """
    servables = [part.servable for part in served if part is not None and part.servable is not None]
    model.connect(servable.signature, [Part(part.signature, part.decoupled) for part in servables], keys)
    own = [tensor.name for tensor in model.model_config.outputs if tensor.label_file is not None]
    servable.labels = {
        tensor: part.labels[name]
        for step, part in zip(model.steps, servables, strict=True)
        for name, tensor in step.outputs.items()
        if name in part.labels
    } | {name: servable.labels[name] for name in own}


def _streams(served: Served) -> bool:
    """Whether one of the models is decoupled, and therefore the ensemble."""
    return any(part is not None and part.servable is not None and part.servable.decoupled for part in served)


def _files(served: Served) -> list[ModelFiles | None]:
    return [None if part is None else part.served for part in served]


def _keys(files: ModelFiles) -> Keys:
    return IN_CONFIG if files.config.ensemble else IN_PYTHON


def _source(files: ModelFiles) -> str:
    return files.config.source if files.config.ensemble else str(files.file)


def _load_error(files: ModelFiles, error: ValueError) -> ModelLoadError:
    return ModelLoadError(f"{_source(files)}: {error}", Code.INVALID_ARGUMENT)
