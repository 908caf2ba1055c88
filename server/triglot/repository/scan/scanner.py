"""Scans the disk repeatedly and returns the versions that are wanted now.

Files that appear while the server runs may still be incomplete. A version is accepted when two scans, some time
apart, find the same names, sizes and times in its folder; a new model, when this holds for its whole folder.
Models that are requested by name are accepted at once. A serving version with changed files (see `file_snapshots`)
and a changed configuration have to settle in the same way; until then the model keeps what it had. Versions of
TensorFlow Serving are immutable and not scanned again. A model that cannot be read keeps its versions, too: an
unmounted volume is no reason to stop serving, nor to forget other models.
"""

from __future__ import annotations

import logging
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
"""Files of each wanted version, by model name and version number."""
Immediate = Callable[[str], bool]
"""Return whether the versions of the model of this name are accepted at once, without settling."""


@dataclass(frozen=True, slots=True)
class Scan:
    """The result of a scan: what is wanted, and errors and warnings by model name or path.

    `names`: version names that the models' folders set. `unsettled`: whether files are still being written.
    """

    wanted: Wanted
    names: Mapping[str, VersionNames]
    problems: Mapping[str, ModelLoadError]
    warnings: Mapping[str, Sequence[str]]
    unsettled: bool


@dataclass(frozen=True, slots=True)
class _Model:
    """A model that was found, with all its versions; `held` were wanted so far, and `used` serve or load.

    `folder`: the one that may hold its configuration. `settings_policy`: the version policy of its entry in a list
    of models, if it has one; `policy`: that of its configuration.
    """

    versions: Sequence[ModelFiles]
    folder: Path | None
    settings_policy: VersionPolicy | None
    policy: VersionPolicy
    held: Mapping[int, ModelFiles]
    used: Mapping[int, ModelFiles]
    busy: bool
    immediate: bool


class Scanner:
    """Scans roots and remembers what it saw. Its methods block; callable on any thread.

    `settle_seconds`: how long the files of a version have to stay unchanged. `allow_symlinks`: whether links may
    lead out of the root that contains them.
    """

    def __init__(self, settle_seconds: float, *, allow_symlinks: bool = False) -> None:
        self._snapshots = FileSnapshots(settle_seconds)
        self._allow_symlinks = allow_symlinks
        self._policies: dict[str, VersionPolicy] = {}
        self._names: dict[str, VersionNames] = {}
        self._scan_lock = threading.Lock()

    def find(self, roots: Sequence[Root]) -> Found:
        """Return everything at the roots, settled or not, without remembering it."""
        return find_models(roots, allow_symlinks=self._allow_symlinks)

    def scan(
        self,
        roots: Sequence[Root],
        held: Wanted,
        loaded: Collection[ModelFiles],
        immediate: Immediate = lambda _: False,
        overrides: Overrides = MappingProxyType({}),
        busy: Collection[str] = (),
        folders: Collection[str] | None = None,
    ) -> Scan:
        """Scan the roots.

        `held`: what was wanted so far. `loaded`: the versions that serve or load. `busy`: models of which a
        version may be loading. `folders`: see `find_models`.
        """
        found = find_models(roots, overrides, allow_symlinks=self._allow_symlinks, folders=folders)
        with self._scan_lock:  # A cancelled request's scan continues on its thread.
            explicit_files = {root.name for root in roots if isinstance(root, ModelFiles)}
            policies = {root.name: root.policy for root in roots if isinstance(root, ModelSettings)}
            used = {(files.name, files.version): files for files in loaded}
            self._snapshots.keep([*_versions_in(held), *loaded, *_versions_in(found.models)])
            wanted: dict[str, Mapping[int, ModelFiles]] = {name: {} for name in policies}
            unsettled = False
            for name, names in found.names.items():
                unsettled |= not self._names_settled(name, names, immediate=immediate(name))
            for name, versions in found.models.items():
                if name in explicit_files:
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
                    immediate=immediate(name),
                )
                chosen, settled = self._wanted_versions(model)
                if settled:
                    self._policies[name] = model.policy
                unsettled = unsettled or not settled
                if chosen or name in policies:
                    wanted[name] = chosen
            for key, problem in found.problems.items():
                if not isinstance(problem, NothingFound):
                    wanted |= _unreadable(key, held, wanted)
            return Scan(wanted, dict(self._names), found.problems, found.warnings, unsettled)

    def _names_settled(self, name: str, names: VersionNames, *, immediate: bool) -> bool:
        """Whether these version names are in effect; changed names take effect when they have settled."""
        if self._snapshots.settled(name, "names", names, immediate=immediate or name not in self._names):
            self._names[name] = names
        return self._names[name] == names

    def _wanted_versions(self, model: _Model) -> tuple[Mapping[int, ModelFiles], bool]:
        """Return the wanted versions of a model, and whether everything that may be wanted has settled."""
        available = {files.version: files for files in model.versions}
        held = {number: files for number, files in model.held.items() if number in available}
        if not self._has_settled(model):
            self._snapshots.observe(model.versions)
            return held, False
        immediate = model.immediate or (model.folder is not None and not model.held)
        unsettled = False

        def settled_files(number: int) -> ModelFiles | None:
            nonlocal unsettled
            files, used, before = available.pop(number), model.used.get(number), model.held.get(number)
            if used is not None and used.file == files.file and model.settings_policy is not None:
                return used
            settled = self._snapshots.accept(
                files, before, serving=used is not None, loading=model.busy, immediate=immediate
            )
            unsettled = unsettled or settled is None
            return settled or used or before

        chosen = _choose(available, model.settings_policy or model.policy, settled_files)
        # Observed now, so that they have settled when they are wanted later.
        self._snapshots.observe(available.values())
        if unsettled and model.settings_policy is None:
            chosen = chosen or held  # Their successors have not settled.
        return chosen, not unsettled

    def _has_settled(self, model: _Model) -> bool:
        """Whether a new model's folder, or the configuration of a known one, has settled."""
        if model.folder is None or model.immediate:
            return True
        name, config = model.versions[0].name, model.versions[0].config
        if not model.held:
            return self._snapshots.settled(name, "folder", stamp_of(folder_contents(model.folder)))
        value = config, model.policy, sign_of(model.folder / CONFIG_FILE)
        settled = self._snapshots.settled(name, "configuration", value)
        same = self._policies.get(name) == model.policy
        return settled or (same and all(files.config == config for files in model.held.values()))


def _choose(
    numbers: Iterable[int], policy: VersionPolicy, settled_files: Callable[[int], ModelFiles | None]
) -> dict[int, ModelFiles]:
    """Return the versions that the policy selects among those that have settled."""
    available = set(numbers)
    chosen: dict[int, ModelFiles] = {}
    while more := [number for number in policy.wanted(available) if number not in chosen]:
        for number in more:
            files = settled_files(number)
            if files is None:
                available.remove(number)
            else:
                chosen[number] = files
    return {number: chosen[number] for number in policy.wanted(available)}


def _unreadable(key: str, held: Wanted, wanted: Wanted) -> Wanted:
    """Return the models that stay although their folder cannot be read; `key` is a model's name or a path."""
    return {
        name: versions
        for name, versions in held.items()
        if name == key
        or (name not in wanted and any(files.file.is_relative_to(key) for files in versions.values()))
    }


def _versions_in(models: Mapping[str, Mapping[int, ModelFiles] | Sequence[ModelFiles]]) -> Iterator[ModelFiles]:
    for versions in models.values():
        yield from versions.values() if isinstance(versions, Mapping) else versions


log = logging.getLogger(__name__)


class OnceLogger:
    """Logs the warnings and errors of scans.

    Those of models that are loaded at once are logged at once; others only if two scans in a row find them: a
    folder that is just being created is no error.
    """

    def __init__(self) -> None:
        self._logged: set[str] = set()
        self._seen: set[str] = set()

    def log(self, scan: Scan, immediate: Immediate, *, others: bool = True, reported: str = "") -> None:
        """Log a scan. `others`: also models that are not immediate. Texts in `reported` are not repeated."""
        seen = set()
        for key, level, text in _texts(scan):
            seen.add(text)
            if text in self._logged or not (immediate(Path(key).name) or (others and text in self._seen)):
                continue
            self._logged.add(text)
            if text not in reported:
                log.log(level, "%s", text)
        self._seen = seen
        self._logged &= seen


def _texts(scan: Scan) -> Iterator[tuple[str, int, str]]:
    """Yield the model's name or path, the log level, and the text."""
    for key, texts in scan.warnings.items():
        yield from ((key, logging.WARNING, text) for text in texts)
    for key, problem in scan.problems.items():
        level = logging.WARNING if isinstance(problem, NothingFound) else logging.ERROR
        yield key, level, str(problem)
