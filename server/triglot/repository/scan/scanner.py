"""Looks at the disk again and again, and says which versions are wanted now.

Strategy: what appears while the server runs may still be written. A version exists for us when two looks, some
time apart, find the same names, sizes and times in its folder; a new model, when that is so of all in its folder.
What somebody asks for by name is taken at once. The same goes for a version that serves, when its files change
(see `file_snapshots`), and for a model's configuration: until then the model keeps what it had. TF Serving's
versions never change, and are not looked into again. What cannot be read keeps what it had, too: a mount that went
away is no reason to stop serving, and no reason to forget the other models.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from triglot.core.errors import ModelLoadError
from triglot.model.config import ALL, VersionPolicy
from triglot.repository.config.model_config import CONFIG_FILE
from triglot.repository.config.settings import ModelSettings
from triglot.repository.config.version_names import VersionNames
from triglot.repository.scan.contents import folder_contents, sign_of, stamp_of
from triglot.repository.scan.file_snapshots import FileSnapshots
from triglot.repository.scan.source import Found, ModelFiles, NothingFound, Overrides, Root, find_models

Wanted = Mapping[str, Mapping[int, ModelFiles]]
"""The files of each wanted version of each wanted model."""
AtOnce = Callable[[str], bool]
"""Whether the versions of the model of this name are taken at once."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What is wanted now; what is wrong and what is odd, by the model's name or the path.

    `names`: what the models' folders call versions. `unsettled`: something is being written.
    """

    wanted: Wanted
    names: Mapping[str, VersionNames]
    problems: Mapping[str, ModelLoadError]
    warnings: Mapping[str, Sequence[str]]
    unsettled: bool


@dataclass(frozen=True, slots=True)
class _Model:
    """A model that was found: all its versions, and those of them that are `held` and `used`.

    `folder`: where it may have a configuration. `settings_policy`: of its settings, where it has some; `policy`:
    of its configuration.
    """

    versions: Sequence[ModelFiles]
    folder: Path | None
    settings_policy: VersionPolicy | None
    policy: VersionPolicy
    held: Mapping[int, ModelFiles]
    used: Mapping[int, ModelFiles]
    busy: bool
    at_once: bool


class Scanner:
    """Remembers what it saw; its looks block.

    `settle_seconds`: how long the files of a version have to stay as they are. `allow_symlinks`: links may lead
    out of the root that they are found in.
    """

    def __init__(self, settle_seconds: float, *, allow_symlinks: bool = False) -> None:
        self._snapshots = FileSnapshots(settle_seconds)
        self._allow_symlinks = allow_symlinks
        self._policies: dict[str, VersionPolicy] = {}
        self._names: dict[str, VersionNames] = {}
        self._looking = threading.Lock()

    def find(self, roots: Sequence[Root]) -> Found:
        """All that there is at the roots, whole or not; it is not remembered."""
        return find_models(roots, allow_symlinks=self._allow_symlinks)

    def look(
        self,
        roots: Sequence[Root],
        held: Wanted,
        loaded: Collection[ModelFiles],
        at_once: AtOnce = lambda _: False,
        overrides: Overrides = MappingProxyType({}),
        busy: Collection[str] = (),
    ) -> Scan:
        """Look at the roots.

        `held`: what was wanted so far. `loaded`: the versions that serve or load. `busy`: the models of which one
        may be loading.
        """
        found = find_models(roots, overrides, allow_symlinks=self._allow_symlinks)
        with self._looking:  # Who asked for a look may have left, and the look goes on.
            given = {root.name for root in roots if isinstance(root, ModelFiles)}
            policies = {root.name: root.policy for root in roots if isinstance(root, ModelSettings)}
            used = {(files.name, files.version): files for files in loaded}
            self._snapshots.keep([*_all_of(held), *loaded, *_all_of(found.models)])
            wanted: dict[str, Mapping[int, ModelFiles]] = {name: {} for name in policies}
            unsettled = False
            for name, names in found.names.items():
                unsettled |= not self._has_named(name, names, at_once=at_once(name))
            for name, versions in found.models.items():
                if name in given:
                    wanted[name] = {files.version: files for files in versions}
                    continue
                model = _Model(
                    versions,
                    found.folders.get(name),
                    policies.get(name),
                    found.policies.get(name, ALL),
                    held.get(name, {}),
                    {
                        files.version: used[name, files.version]
                        for files in versions
                        if (name, files.version) in used
                    },
                    busy=name in busy,
                    at_once=at_once(name),
                )
                chosen, settled = self._chosen(model)
                if settled:
                    self._policies[name] = model.policy
                unsettled = unsettled or not settled
                if chosen or name in policies:
                    wanted[name] = chosen
            for key, problem in found.problems.items():
                if not isinstance(problem, NothingFound):
                    wanted |= _kept(key, held, wanted)
            return Scan(wanted, dict(self._names), found.problems, found.warnings, unsettled)

    def _has_named(self, name: str, names: VersionNames, *, at_once: bool) -> bool:
        """Whether the model's versions are called so, and not as before until the names have settled."""
        if self._snapshots.settled(name, "names", names, at_once=at_once or name not in self._names):
            self._names[name] = names
        return self._names[name] == names

    def _chosen(self, model: _Model) -> tuple[Mapping[int, ModelFiles], bool]:
        """The wanted versions of a model, and whether everything that may be wanted has settled."""
        there = {files.version: files for files in model.versions}
        held = {number: files for number, files in model.held.items() if number in there}
        if not self._has_settled(model):
            self._snapshots.note(model.versions)
            return held, False
        at_once = model.at_once or (model.folder is not None and not model.held)
        unsettled = False

        def whole(number: int) -> ModelFiles | None:
            nonlocal unsettled
            files, used, before = there.pop(number), model.used.get(number), model.held.get(number)
            if used is not None and used.file == files.file and model.settings_policy is not None:
                return used
            settled = self._snapshots.whole(
                files, before, serving=used is not None, loading=model.busy, at_once=at_once
            )
            unsettled = unsettled or settled is None
            return settled or used or before

        chosen = _choose(there, model.settings_policy or model.policy, whole)
        # These may be wanted next, and have settled then.
        self._snapshots.note(there.values())
        if unsettled and model.settings_policy is None:
            chosen = chosen or held  # What is to take their place is not whole.
        return chosen, not unsettled

    def _has_settled(self, model: _Model) -> bool:
        """Whether a new model's folder, or the configuration of one that is known, is what it was."""
        if model.folder is None or model.at_once:
            return True
        name, config = model.versions[0].name, model.versions[0].config
        if not model.held:
            return self._snapshots.settled(name, "folder", stamp_of(folder_contents(model.folder)))
        value = config, model.policy, sign_of(model.folder / CONFIG_FILE)
        settled = self._snapshots.settled(name, "configuration", value)
        same = self._policies.get(name) == model.policy
        return settled or (same and all(files.config == config for files in model.held.values()))


def _choose(
    numbers: Iterable[int], policy: VersionPolicy, whole: Callable[[int], ModelFiles | None]
) -> dict[int, ModelFiles]:
    """The versions that the policy wants of those that are whole."""
    there = set(numbers)
    chosen: dict[int, ModelFiles] = {}
    while more := [number for number in policy.wanted(there) if number not in chosen]:
        for number in more:
            files = whole(number)
            if files is None:
                there.remove(number)
            else:
                chosen[number] = files
    return {number: chosen[number] for number in policy.wanted(there)}


def _kept(key: str, held: Wanted, wanted: Wanted) -> Wanted:
    """What stays although its folder cannot be read; `key` is a model's name or a path."""
    return {
        name: versions
        for name, versions in held.items()
        if name == key
        or (name not in wanted and any(files.file.is_relative_to(key) for files in versions.values()))
    }


def _all_of(models: Mapping[str, Mapping[int, ModelFiles] | Sequence[ModelFiles]]) -> Iterator[ModelFiles]:
    for versions in models.values():
        yield from versions.values() if isinstance(versions, Mapping) else versions
