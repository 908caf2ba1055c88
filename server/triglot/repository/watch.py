"""Looks at the disk again and again, and says which versions are wanted now.

Strategy: a version that appears while the server runs may still be written. It exists for us when two looks,
some time apart, find the same names, sizes and times in its folder (`stamp_of`); what somebody asks for by name is
taken at once. The same goes for a version that serves, when its files or its configuration change; TensorFlow
Serving's versions never change, and are not looked into again. What cannot be read keeps what it had: a mount that
went away is no reason to stop serving, and no reason to forget the other models.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from triglot.core.errors import ModelLoadError
from triglot.core.model_config import VersionPolicy
from triglot.repository.settings import ModelSettings
from triglot.repository.source import (
    Found,
    ModelFiles,
    NothingFound,
    Overrides,
    Root,
    find_models,
    stamp_of,
)

log = logging.getLogger(__name__)

Wanted = Mapping[str, Mapping[int, ModelFiles]]
"""The files of each wanted version of each wanted model."""
AtOnce = Callable[[str], bool]
"""Whether the versions of the model of this name are taken at once."""


@dataclass(frozen=True, slots=True)
class Look:
    """What is wanted now; what is wrong, by the model's name or the path; whether something is being written."""

    wanted: Wanted
    problems: Mapping[str, ModelLoadError]
    unsettled: bool


class Sights:
    """Since when the files of each version are as they are; `settle_seconds` make them settled."""

    def __init__(self, settle_seconds: float) -> None:
        self._settle_seconds = settle_seconds
        self._seen: dict[ModelFiles, tuple[int, float]] = {}

    def settled(self, files: ModelFiles, *, at_once: bool) -> ModelFiles | None:
        """The files with their stamp; None for those that changed, or appeared, a short time ago."""
        stamp, now = stamp_of(files), time.monotonic()
        known_stamp, since = self._seen.get(files, (None, 0.0))
        if at_once:
            since = -math.inf
        elif stamp != known_stamp:
            self._seen[files] = stamp, now
            return None
        self._seen[files] = stamp, since
        return replace(files, stamp=stamp) if now - since >= self._settle_seconds else None

    def keep(self, found: Iterable[ModelFiles]) -> None:
        """Forget all others."""
        self._seen = {files: self._seen[files] for files in found if files in self._seen}


class Watch:
    """Remembers what it saw; its looks block.

    `settle_seconds`: how long the files of a version have to stay as they are. `allow_symlinks`: links may lead
    out of the root that they are found in.
    """

    def __init__(self, settle_seconds: float, *, allow_symlinks: bool = False) -> None:
        self._sights = Sights(settle_seconds)
        self._allow_symlinks = allow_symlinks
        self._said: set[str] = set()

    def names(self, roots: Sequence[Root]) -> list[str]:
        """The names of all models at the roots, loaded or not."""
        return list(find_models(roots, allow_symlinks=self._allow_symlinks).models)

    def look(
        self,
        roots: Sequence[Root],
        held: Wanted,
        loaded: Collection[ModelFiles],
        at_once: AtOnce = lambda _: False,
        overrides: Overrides = MappingProxyType({}),
    ) -> Look:
        """Look at the roots.

        `held`: what was wanted so far. `loaded`: the versions that serve or load. A warning is logged once, and
        again when it comes back; so is a problem, except of what is taken at once.
        """
        found = find_models(roots, overrides, allow_symlinks=self._allow_symlinks)
        policies = {root.name: root.policy for root in roots if isinstance(root, ModelSettings)}
        self._sights.keep(files for versions in found.models.values() for files in versions)
        in_use = {(files.name, files.version): files for files in loaded}
        unsettled: set[ModelFiles] = set()

        def whole(files: ModelFiles) -> ModelFiles | None:
            used = in_use.get((files.name, files.version))
            if used is not None and used.file == files.file and files.name in policies:
                return used
            settled = self._sights.settled(files, at_once=at_once(files.name))
            if settled is None:
                unsettled.add(files)
            return settled or used

        wanted: dict[str, Mapping[int, ModelFiles]] = {name: {} for name in policies}
        for name, versions in found.models.items():
            policy = policies.get(name) or versions[0].config.version_policy
            chosen = _choose(versions, policy, whole)
            if chosen or name in policies:
                wanted[name] = chosen
        for key, problem in found.problems.items():
            if not isinstance(problem, NothingFound):
                wanted |= _kept(key, held, wanted)
        self._warn(found, at_once)
        return Look(wanted, found.problems, bool(unsettled))

    def _warn(self, found: Found, at_once: AtOnce) -> None:
        problems = {key: str(problem) for key, problem in found.problems.items()}
        texts = [*found.warnings, *(text for key, text in problems.items() if not at_once(key))]
        for text in texts:
            if text not in self._said:
                log.warning("%s", text)
        self._said = {*found.warnings, *problems.values()}


def _choose(
    versions: Sequence[ModelFiles], policy: VersionPolicy, whole: Callable[[ModelFiles], ModelFiles | None]
) -> dict[int, ModelFiles]:
    """The versions that the policy wants of those that are whole."""
    there = {files.version: files for files in versions}
    while True:
        chosen = {number: whole(there[number]) for number in policy.wanted(there)}
        unfinished = [number for number, files in chosen.items() if files is None]
        if not unfinished:
            return {number: files for number, files in chosen.items() if files is not None}
        for number in unfinished:
            del there[number]


def _kept(key: str, held: Wanted, wanted: Wanted) -> Wanted:
    """What stays although its folder cannot be read; `key` is a model's name or a path."""
    return {
        name: versions
        for name, versions in held.items()
        if name == key
        or (name not in wanted and any(files.file.is_relative_to(key) for files in versions.values()))
    }
