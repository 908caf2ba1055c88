"""A reconciler that looks at the disk: what it finds there, what of that is wanted, and what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from triglot.core.errors import ModelLoadError, ServingError
from triglot.model.config import ALL, LATEST
from triglot.repository.config.completed import Loaded
from triglot.repository.config.settings import ModelSettings
from triglot.repository.manager.loader import Load, Warm
from triglot.repository.manager.plan import State
from triglot.repository.manager.reconciler import Reconciler
from triglot.repository.manager.thread import in_thread
from triglot.repository.scan.load_errors import broken_names, by_name, why_not, wrong_models
from triglot.repository.scan.once_logger import OnceLogger
from triglot.repository.scan.scanner import AtOnce, Scan, Scanner, Wanted
from triglot.repository.scan.source import ModelFiles, Overrides, Root
from triglot.scheduling.servable import Servable

NO_OVERRIDES: Overrides = MappingProxyType({})
EVERY_MODEL = "*"


class Looks(Reconciler):
    """Looks at the `roots`; `Manager` says when.

    `settle_seconds`, `allow_symlinks`: see `Scanner`. `more_looks`: it looks again and again. `explicit`: see
    `Manager`. `options` are those of `Reconciler`.
    """

    def __init__(
        self,
        roots: Sequence[Root],
        load: Load,
        warm: Warm | None,
        *,
        settle_seconds: float,
        more_looks: bool,
        explicit: Collection[str] | None,
        allow_symlinks: bool,
        left_out: Collection[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(load, warm, may_be_empty=explicit is not None, **options)
        self._roots = tuple(roots)
        self._more_looks = more_looks
        self._explicit = explicit
        self._not_at_start = left_out
        self._settle_seconds = settle_seconds
        self._scanner = Scanner(settle_seconds, allow_symlinks=allow_symlinks)
        self._once_logger = OnceLogger()
        self._problems: dict[str, ServingError | None] = {}
        self._looking = asyncio.Lock()
        self._asked: set[str] = set()
        """Those that somebody has asked for by name, as long as they load."""
        self._along: set[str] = set()
        """Those that were loaded only because ensembles are made of them."""

    @property
    def _more_may_come(self) -> bool:
        return self._explicit is not None or self._more_looks

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
        version = self._versions[name][number]
        files = version.served or version.files
        wanted = self._wanted.get(name, {}).get(number)
        # The policy may have changed since it was loaded, which changes nothing else.
        latest = wanted if wanted is not None and wanted == files else files
        policies = (root.policy for root in self._roots if isinstance(root, ModelSettings) and root.name == name)
        return Loaded(servable, latest, LATEST if files.config.text else next(policies, ALL))

    def _note(self, look: Scan, asked: AtOnce = lambda _: True) -> None:
        """Have what is wrong with the models readable, or with those that are `asked` for."""
        found = by_name(look.problems, self._wanted, self._roots)
        errors = {name: ServingError(str(problem), code=problem.code) for name, problem in found.items()}
        for name in filter(asked, self._versions):
            self._problems[name] = errors.get(name)
            wanted = self._wanted.get(name, {})
            for number, version in self._versions[name].items():
                version.problem = errors.get(name) if number in wanted else None

    def broken(self) -> dict[str, ServingError]:
        """What is wrong with those wanted models of which there is no version at all."""
        without = set(self._wanted).difference(version.files.name for version in self.versions())
        problems = {name: self._problems.get(name) for name in sorted(without)}
        return {name: problem for name, problem in problems.items() if problem is not None}

    async def _look(
        self,
        roots: Sequence[Root],
        at_once: AtOnce,
        held: Wanted | None = None,
        overrides: Overrides = NO_OVERRIDES,
    ) -> Scan:
        """`held`: what stays wanted where it cannot be read; without it, all that is wanted now."""
        held = self._wanted if held is None else held
        loaded = [
            version.files
            for versions in self._versions.values()
            for version in versions.values()
            if version.state in (State.LOADING, State.READY)
        ]
        busy = set(self._workers)
        return await in_thread(partial(self._scanner.look, roots, held, loaded, at_once, overrides, busy))

    async def never_loaded(self) -> list[str]:
        """The models that could be loaded, and never were; none unless models are controlled explicitly."""
        if self._explicit is None:
            return []
        found = await in_thread(partial(self._scanner.find, self._roots))
        names = [*found.models, *broken_names(found.problems, found.models, self._roots)]
        return [name for name in names if name not in self._wanted]

    # --- what is loaded along with an ensemble ---

    async def _until_loaded(self, names: Collection[str]) -> None:
        """Wait for those that were asked for, and for what comes along with them."""
        try:
            await self.wait_for(names)
        finally:
            self._asked = {name for name in self._asked if name in self._workers}

    def _loaded_along_with(self, name: str) -> set[str]:
        """What was loaded only because this ensemble is made of it, or because of what this is made of."""
        going, found = {name}, [name]
        while found:
            parts = self._dependents.made_of(found.pop()) & self._along - going
            # An ensemble that goes, too, needs nothing any more.
            parts = {part for part in parts if self._dependents.needed_by(part) <= going}
            going |= parts
            found += parts
        return going

    def _go(self, names: Collection[str]) -> None:
        """These are unloaded; whoever is loading what they are part of does not bring them back."""
        self._along.difference_update(names)
        for name in names:
            self._asked -= self._dependents.needed_by(name)

    async def _bring(self, name: str, parts: Collection[str]) -> None:
        """As somebody who asks for an ensemble asks for what it is made of (spec 3.9)."""
        missing = [
            part
            for part in parts
            if name in self._asked and part not in self._workers and self.serving(part) is None
        ]
        if not missing:
            return
        async with self._looking:
            others = {key: versions for key, versions in self._wanted.items() if key not in missing}
            look = await self._look(self._roots, missing.__contains__, others)
            self._once_logger.log(look, missing.__contains__, others=False)
            found = [part for part in missing if not why_not(part, look, self._roots)]
            for part in found:
                self.retry(part)
            self._asked.update(found)
            self._along.update(part for part in found if not self.is_wanted(part))
            self.want({**self._wanted, **{part: look.wanted[part] for part in found}})
            self._note(look, found.__contains__)
