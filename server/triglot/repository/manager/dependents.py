"""Ensembles among the models: they wait for their steps' models, and follow what becomes of these (spec 5.3).

Strategy: an ensemble is loaded like any other model, and before it serves it waits for those of its steps' models
that are still being loaded, while others have their turn. What then is not there keeps it from serving. Whenever a
model begins or ceases to serve, or another version of it takes over, the ensembles made of it are looked at: one
that cannot run any more is retired and tried again, which tells why not; one that failed is tried again.
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
"""What serves for each step; None: nothing."""


@dataclass(frozen=True, slots=True)
class _Try:
    """An ensemble's last load: its steps, and the files of what served for them."""

    steps: Sequence[Step]
    served: Sequence[ModelFiles | None]


@dataclass(frozen=True, slots=True)
class Actions:
    """What is done about models. `bring`: have these loaded along with an ensemble, if somebody asked for it."""

    is_busy: Callable[[str], bool]
    is_left_out: Callable[[str], bool]
    bring: Callable[[str, Collection[str]], Awaitable[None]]
    retire: Callable[[Version], None]
    again: Callable[[str], None]


class Dependents:
    """The ensembles of a registry. `changed` is to be called after each change of a model's state."""

    def __init__(self, registry: Registry, actions: Actions) -> None:
        self._registry = registry
        self._do = actions
        self._names: set[str] = set()
        self._waiting: dict[str, set[str]] = {}
        self._tries: dict[str, dict[int, _Try]] = {}
        self._news = asyncio.Event()
        self._changed: deque[str] = deque()

    # --- before it serves ---

    async def complete(
        self, files: ModelFiles, servable: Servable, pass_on: Callable[[], None], is_wanted: Callable[[], bool]
    ) -> None:
        """Wait until a new version's steps have their models. What is no ensemble has none.

        `pass_on` lets others load meanwhile. Raises `ModelLoadError` when it cannot run.
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
            raise _wrong(files, error) from None
        await self._do.bring(name, list(dict.fromkeys(step.model for step in steps)))
        self._tries.setdefault(name, {})[servable.version] = _Try(steps, _files(self._served(steps)))
        await self._wait(name, files, steps, pass_on, is_wanted)
        served = self._served(steps)
        self._tries[name][servable.version] = _Try(steps, _files(served))
        self._check_served(files, steps, served, keys)
        try:
            _connect(model, servable, served, keys)
        except ValueError as error:
            raise _wrong(files, error) from None
        if _streams(served):
            servable.stream_from(model.infer_stream)

    def _forget(self, name: str, number: int) -> None:
        """The former try of this version, and those of versions that are not wanted any more."""
        tries = self._tries.get(name, {})
        for one in list(tries):
            if one == number or not self._registry.is_wanted(name, one):
                del tries[one]

    async def _wait(
        self,
        name: str,
        files: ModelFiles,
        steps: Sequence[Step],
        pass_on: Callable[[], None],
        is_wanted: Callable[[], bool],
    ) -> None:
        self._waiting[name] = {step.model for step in steps}
        try:
            while is_wanted():
                self._check_nesting(name, files)
                if not any(map(self._is_pending, steps)):
                    return
                pass_on()
                await self._news.wait()
            raise ModelLoadError(f"{files.file}: it is no longer requested")
        finally:
            self._waiting.pop(name, None)

    def _is_pending(self, step: Step) -> bool:
        """Whether a step's model may serve soon."""
        registry = self._registry
        wanted = registry.is_wanted(step.model, step.version) and self._do.is_busy(step.model)
        return wanted and registry.serving(step.model, step.version) is None

    def _check_nesting(self, name: str, files: ModelFiles) -> None:
        """Raises `ModelLoadError` for ensembles that contain each other, and for too many in a row."""
        levels: list[dict[str, str]] = []  # Of each part, an ensemble of the level above that is made of it.
        level = {name}
        while level and len(levels) <= MAX_MODEL_CALLS and not (levels and name in level):
            levels.append({part: one for one in sorted(level, reverse=True) for part in self._parts(one)})
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

    def _parts(self, name: str) -> set[str]:
        """What an ensemble that waits, or else serves, is made of."""
        if name in self._waiting:
            return self._waiting[name]
        served = self._registry.serving(name)
        model = None if served is None or served.servable is None else served.servable.model
        return {step.model for step in model.steps} if isinstance(model, Ensemble) else set()

    def _served(self, steps: Sequence[Step]) -> Served:
        return [self._registry.serving(step.model, step.version) for step in steps]

    def _check_served(self, files: ModelFiles, steps: Sequence[Step], served: Served, keys: Keys) -> None:
        for at, (step, one) in enumerate(zip(steps, served, strict=True)):
            if one is not None:
                continue
            version = f" version {step.version}" if step.version else ""
            why = self._registry.why_not_serving(step.model, step.version)
            key = f"{keys.step}[{at}].{keys.model}"
            text = f"{_source(files)}: {key}: '{step.model}'{version} is not available: {why}"
            if self._do.is_left_out(step.model):
                raise MissingDependency(text)
            raise ModelLoadError(text, Code.FAILED_PRECONDITION)

    def asked_for(self, name: str) -> None:
        """Somebody asks for an ensemble, and so for its parts: a load that runs may have begun without them."""
        if name in self._names:
            for version in self._registry.wanted_versions(name):
                version.retry = version.retry or version.state is State.LOADING

    # --- when something has changed ---

    def wake(self) -> None:
        """What is wanted, or busy, has changed: those that wait are to look again."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def changed(self, name: str) -> None:
        """A version of this model has begun or ceased to serve, perhaps: look at what is made of it.

        And at itself: what it is made of may have changed after its last look, while it was warmed up.
        """
        self.wake()
        self._changed.append(name)
        if len(self._changed) > 1:
            return  # One that is retired below is the next to be looked at.
        while self._changed:
            changed = self._changed[0]
            for ensemble in sorted(self._names):
                if ensemble == changed or changed in self.made_of(ensemble):
                    self._look_at(ensemble)
            self._changed.popleft()

    def _look_at(self, name: str) -> None:
        again = False
        for version in list(self._registry.wanted_versions(name)):
            servable = version.servable
            if version.state is State.READY and servable is not None and not self._runs(servable):
                log.warning(
                    "%s stops serving: one of its models is no longer available, or has changed", version.files
                )
                self._do.retire(version)
                again = True
            tried = self._tries.get(name, {}).get(version.files.version)
            failed = version.error is not None and tried is not None
            if failed and tried is not None and _files(self._served(tried.steps)) != tried.served:
                version.retry = again = True
        if again:
            self._do.again(name)

    def _runs(self, servable: Servable) -> bool:
        """Whether the models of an ensemble's steps serve, and take and give what they did."""
        model = servable.model
        if not isinstance(model, Ensemble):
            return True  # It was one in another version.
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
        if servable.labels != labels:  # They are those of the ensembles that it is part of, too.
            self._changed.append(servable.name)
        return True

    # --- which are made of which ---

    def _steps(self, name: str) -> list[Step]:
        steps = [step for one in self._tries.get(name, {}).values() for step in one.steps]
        for version in self._registry.wanted_versions(name):
            if version.servable is not None and isinstance(version.servable.model, Ensemble):
                steps += version.servable.model.steps
        return steps

    def made_of(self, name: str) -> set[str]:
        """The models of an ensemble's steps; empty for what is none."""
        return {step.model for step in self._steps(name)} if name in self._names else set()

    def needed_by(self, name: str) -> set[str]:
        """The ensembles that this model is part of, wanted ones."""
        return {one for one in self._names if self._registry.is_wanted(one) and name in self.made_of(one)}

    def are_ready(self, servable: Servable) -> bool:
        """Whether the models of its steps are ready, if it has any."""
        parts, seen = [servable], {servable}
        while parts:
            model = parts.pop().model
            for one in self._served(model.steps) if isinstance(model, Ensemble) else ():
                if one is None or one.servable is None or not one.servable.alive:
                    return False
                if one.servable not in seen:
                    seen.add(one.servable)
                    parts.append(one.servable)
        return True

    def waits(self, name: str) -> bool:
        """Whether an ensemble that is being loaded waits for others."""
        return name in self._waiting


def _check_values(model: Ensemble, keys: Keys) -> None:
    """Raises `ValueError`, which names the key: what a class says may be anything."""
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
    """Raises `ValueError` as `check_fit`, and changes nothing then.

    An output that has no labels of its own has those of the step that gives it.
    """
    servables = [one.servable for one in served if one is not None and one.servable is not None]
    model.connect(servable.signature, [Part(one.signature, one.decoupled) for one in servables], keys)
    own = [tensor.name for tensor in model.model_config.outputs if tensor.label_file is not None]
    servable.labels = {
        tensor: part.labels[name]
        for step, part in zip(model.steps, servables, strict=True)
        for name, tensor in step.outputs.items()
        if name in part.labels
    } | {name: servable.labels[name] for name in own}


def _streams(served: Served) -> bool:
    """Whether one of them is decoupled, and so an ensemble made of them."""
    return any(one is not None and one.servable is not None and one.servable.decoupled for one in served)


def _files(served: Served) -> list[ModelFiles | None]:
    return [None if one is None else one.served for one in served]


def _keys(files: ModelFiles) -> Keys:
    return IN_CONFIG if files.config.ensemble else IN_PYTHON


def _source(files: ModelFiles) -> str:
    return files.config.source if files.config.ensemble else str(files.file)


def _wrong(files: ModelFiles, error: ValueError) -> ModelLoadError:
    return ModelLoadError(f"{_source(files)}: {error}", Code.INVALID_ARGUMENT)
