"""Finds the model versions at paths and in configured models: what a scan sees on disk.

It only collects, without acting. A problem of one model is recorded and does not affect the others; the caller
decides what it means.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from triglot.core.errors import Code, ModelLoadError
from triglot.model.config import ALL, NO_CONFIG, ModelConfig, VersionPolicy
from triglot.model.model import Model
from triglot.repository.config.bounds import UNBOUNDED, Bounds, check_bounds, instances_of
from triglot.repository.config.model_config import CONFIG_FILE, config_of, in_its_environment, read_config
from triglot.repository.config.settings import NAME, NAME_RULE, ModelSettings
from triglot.repository.config.version_names import NAMES_FILE, VersionNames, read_names
from triglot.repository.scan import mlserver_folders as mlserver
from triglot.repository.scan.layout import (
    BACKEND_OF_FILE,
    backend_by_name,
    backend_of,
    candidates,
    conversion,
    listed,
)
from triglot.repository.scan.paths import check_links, check_links_below

GRPS_PROJECT = ("conf/inference.yml", "conf/server.yml")
_FILES = f"{{{listed(BACKEND_OF_FILE)}}}"
_EXPECTED = f"[VERSION/]{_FILES}, where VERSION is an integer like 1"
_NUMBER = re.compile("0*([0-9]{1,19})")
LAST_VERSION = 2**63 - 1


class FoundTwice(ModelLoadError):
    """Raised when two models have the same name."""


class NotYet(ModelLoadError):
    """Raised when a path does not exist or holds no model; one may be added later."""


class NothingFound(NotYet):
    """Raised when a folder exists and holds no model."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """One version of one model on disk.

    Attributes:
        file: File that the backend opens.
        folder: Folder with everything that belongs to the version, if that is not the file's.
        alone: Whether only the file belongs to the version.
        stamp: Hash of the files' signs; 0 if they were not scanned.
        label: Additional name of the version.
        make: Makes the loaded model, instead of the backend.
    """

    name: str
    version: int
    backend: str
    file: Path
    stamp: int = 0
    label: str = ""
    single_file: bool = False
    folder: Path | None = None
    config: ModelConfig = field(default=NO_CONFIG, hash=False)
    make: Callable[[], Model] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.name} version {self.version}" + (f" ({self.label})" if self.label else "")

    @property
    def named_config(self) -> ModelConfig:
        """The configuration to load the model with, which has its name."""
        return replace(self.config, name=self.name)

    def differs_only_in_instances(self, before: ModelFiles) -> bool:
        """Whether only the configured instances differ from those of `before`."""
        same_files = replace(self, config=before.config) == before
        return same_files and self.config.differs_only_in_instances(before.config)


@dataclass(frozen=True, slots=True)
class NamedPath:
    """A model's folder or file, and the name that it is served under."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class MLServerFolder:
    """A folder in MLServer's layout, and what applies to models whose `model-settings.json` leaves it out."""

    path: Path
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)


Root = Path | NamedPath | MLServerFolder | ModelSettings | ModelFiles
"""A place of models: a repository folder, a model's folder or file, a configured model, or a version that is
known."""


@dataclass(frozen=True, slots=True)
class Override:
    """A client's replacement for a model's config.pbtxt: the `message` from `parse_override`.

    `bounds`: limits on what it asks for, unless the model's own configuration asks for more. `folder`: uploaded
    files that replace the model's folder.
    """

    message: Any
    bounds: Bounds = UNBOUNDED
    folder: Path | None = None


Overrides = Mapping[str, Override]
"""Overrides by model name."""


@dataclass(slots=True)
class Found:
    """The versions of each model, ascending; problems and warnings by the model's name or the path.

    `folders`: the models' folders, which may hold configurations. `policies`: the configured version policies;
    these, and the version `names`, belong to a model and not to its versions.
    """

    models: dict[str, list[ModelFiles]] = field(default_factory=dict)
    policies: dict[str, VersionPolicy] = field(default_factory=dict)
    names: dict[str, VersionNames] = field(default_factory=dict)
    folders: dict[str, Path] = field(default_factory=dict)
    problems: dict[str, ModelLoadError] = field(default_factory=dict)
    warnings: dict[str, list[str]] = field(default_factory=dict)

    def warn(self, key: str, *texts: str) -> None:
        """Add warnings about `key`."""
        self.warnings.setdefault(key, []).extend(texts)

    @contextmanager
    def collecting(self, key: str) -> Iterator[None]:
        """Record what the block raises as the problem of `key`."""
        try:
            yield
        except OSError as error:
            self.problems[key] = ModelLoadError(f"{error.filename}: {error.strerror}")
        except ModelLoadError as error:
            self.problems[key] = error


def find_models(
    roots: Iterable[Root],
    overrides: Overrides = MappingProxyType({}),
    *,
    allow_symlinks: bool = False,
    folders: Collection[str] | None = None,
) -> Found:
    """Return everything at the roots. If a name occurs twice, the first model counts and the second is a problem.

    `allow_symlinks`: whether links may lead out of the root that contains them. A root itself may be a link.
    `folders`: names of the folders to search in repositories; None: all of them.
    """
    found = Found()
    sent = [override.folder for override in overrides.values() if override.folder is not None]
    for root in [*sent, *roots]:
        if isinstance(root, ModelSettings):
            with found.collecting(root.name):
                _Search(found, root.base_path, overrides, allow_symlinks, folders).find_versions(root)
        elif isinstance(root, ModelFiles):
            found.models.setdefault(root.name, []).append(root)
            numbers = found.names.get(root.name, VersionNames()).numbers
            if root.label:
                numbers = {**numbers, root.label: root.version}
            found.names[root.name] = VersionNames(numbers)
        else:
            name, path = (
                (root.name, root.path)
                if isinstance(root, NamedPath)
                else ("", root.path if isinstance(root, MLServerFolder) else root)
            )
            # Resolves "..", but keeps the name of a symbolic link.
            path = Path(os.path.normpath(path.absolute()))
            with found.collecting(str(path)):
                search = _Search(found, path, overrides, allow_symlinks, folders, name)
                if isinstance(root, MLServerFolder):
                    search.find_settings(root.defaults)
                else:
                    search.find()
    return found


@dataclass(frozen=True, slots=True)
class _Search:
    """Searches one root and adds to `found`. `name`: the name of the model at the root; "" for its folder's."""

    found: Found
    root: Path
    overrides: Overrides
    allow_symlinks: bool
    folders: Collection[str] | None
    name: str = ""

    def _name_of(self, folder: Path) -> str:
        return self.name if self.name and folder == self.root else folder.name

    def find_versions(self, model: ModelSettings) -> None:
        """Search TensorFlow Serving's layout, in which only version folders count (tfs 6.1)."""
        not_found = NotYet(f"Could not find base path {model.base_path} for servable {model.name}")
        if not model.base_path.is_dir():
            raise not_found
        versions = self._version_folders(model.base_path, model.name, NO_CONFIG, model.name)
        if not model.base_path.is_dir():
            raise not_found  # It was removed during the search, so the result is not reliable.
        self.found.models[model.name] = versions
        self._warn_of_missing(model.name, model.name, model.base_path, model.policy, versions)
        if not model.policy.wanted({files.version for files in versions}):
            raise NothingFound(
                f"No versions of servable {model.name} found under base path {model.base_path}, "
                f"expected VERSION/{_FILES}"
            )

    def find(self) -> None:
        """Search a path: a model's file, a model's folder, or a repository."""
        path = self.root
        if self._find_configured_version():
            return
        if path.is_file():
            files = _model_file(path)
            files = replace(files, name=self.name or files.name)
            self._add(path, files.name, [files])
        elif not path.is_dir():
            raise NotYet(f"{path}: no such file or folder")
        elif (path / mlserver.SERVER_SETTINGS).is_file() and mlserver.settings_files(path):
            self.find_settings()
        elif all((path / file).is_file() for file in GRPS_PROJECT):
            raise ModelLoadError(f"{path}: this is a grps project; to serve it, run: triglot grps {path}")
        elif versions := self._model_versions(path):
            self._add_folder(path, versions)
        elif self.name and (file := self._only_file()):
            self._add(file, self.name, [ModelFiles(self.name, 1, backend_of(file), file, single_file=True)])
        else:
            self._find_in_repository()
            if self.name:
                text = f"{path} is a repository, whose models keep their names; the name {self.name!r} is not used"
                self.found.warn(str(path), text)

    def find_settings(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Search MLServer's layout: every `model-settings.json` below the root.

        Without one the defaults may describe a model. Raise `ModelLoadError`.
        """
        files = mlserver.settings_files(self.root) if self.root.is_dir() else []
        if not files and "implementation" in defaults:
            self._add_of_defaults(defaults)
            return
        if not files:
            kind = NothingFound if self.root.is_dir() else NotYet
            raise kind(f"{self.root}: expected {mlserver.SETTINGS} in it, or in folders below, found none")
        models: dict[str, dict[str, Path]] = {}
        for file in files:
            with self.found.collecting(str(file.parent)):
                self._check(file)
                name, version = mlserver.name_and_version(file, defaults)
                if (other := models.setdefault(name, {}).setdefault(version, file)) != file:
                    which = f"version {version!r}" if version else "no version"
                    raise FoundTwice(f"{file}: model '{name}' with {which} is also in {other}")
        for name, versions in models.items():
            folders = [file.parent for file in versions.values()]
            with self.found.collecting(str(folders[0])):
                self._add_settings(name, versions, defaults)

    def _add_settings(self, name: str, versions: Mapping[str, Path], defaults: Mapping[str, Any]) -> None:
        numbers = mlserver.numbers_of(versions)
        files = [
            ModelFiles(
                name,
                numbers[version],
                mlserver.BACKEND,
                file,
                folder=file.parent,
                config=mlserver.config_of(file, defaults),
            )
            for version, file in versions.items()
        ]
        self._add(files[0].file.parent, name, sorted(files, key=lambda version: version.version))
        names = {version: number for version, number in numbers.items() if version and not version.isdecimal()}
        if invalid := next((version for version in names if not NAME.fullmatch(version)), None):
            raise ModelLoadError(f"{versions[invalid]}: parameters.version: {invalid!r}: {NAME_RULE}")
        self.found.names[name] = VersionNames(names)

    def _add_of_defaults(self, defaults: Mapping[str, Any]) -> None:
        place = Path(defaults.get("parameters", {}).get("uri") or self.root)
        if not place.exists():
            raise NotYet(f"{place}: no such file or folder")
        version = defaults.get("parameters", {}).get("version") or ""
        config, number = mlserver.config_of(place, defaults), mlserver.numbers_of([version])[version]
        folder = place if place.is_dir() else place.parent
        name = defaults.get("name") or folder.absolute().name
        self._add(folder, name, [ModelFiles(name, number, mlserver.BACKEND, place, folder=folder, config=config)])
        if version and not version.isdecimal():
            self.found.names[name] = VersionNames({version: number})

    def _only_file(self) -> Path | None:
        """Return the only model file, of any name, in a folder without subfolders."""
        entries = [entry for entry in self.root.iterdir() if not entry.name.startswith((".", "__"))]
        files = [entry for entry in entries if entry.is_file() and backend_by_name(entry)]
        if len(files) != 1 or any(map(Path.is_dir, entries)):
            return None
        self._check(files[0])
        return files[0]

    def _find_configured_version(self) -> bool:
        """Add the version whose folder or file the root is, if it has a configuration; return whether it did."""
        path = self.root
        for folder in path.parents if path.is_file() else [path]:
            model, number = folder.parent, version_of(folder.name)
            if number is None or folder.name.startswith("0") or not (model / CONFIG_FILE).is_file():
                continue
            search = replace(self, root=model)
            config, name = search._config(model), search._name_of(model)
            if name not in self.found.models:  # A version that is named explicitly overrides the policy.
                del self.found.policies[name]
            files = search._files(folder, name, number, config)
            if files is not None and path in (folder, files.file):
                search._add(model, name, [files])
                return True
        return False

    def _find_in_repository(self) -> None:
        empty = True
        for folder in sorted(self.root.iterdir()):
            if folder.name.startswith((".", "__")):
                continue
            if self.folders is not None and folder.name not in self.folders:
                empty = False
                continue
            with self.found.collecting(str(folder)):
                if not folder.is_dir() or self._is_replaced(folder):
                    continue
                if not NAME.fullmatch(folder.name):
                    # Not opened: folders of the file system itself may be unreadable.
                    text = f"{folder} is skipped: {folder.name!r} is not a valid model name; {NAME_RULE}"
                    self.found.warn(str(folder), text)
                    continue
                if versions := self._model_versions(folder):
                    self._add_folder(folder, versions)
                elif mlserver.settings_files(folder):
                    replace(self, root=folder).find_settings()
                else:
                    text = f"{folder} is skipped: it contains no model, expected {_EXPECTED}{conversion(folder)}"
                    self.found.warn(str(folder), text)
                    continue
            empty = False
        if empty:
            raise NothingFound(
                f"{self.root}: no models here; expected NAME/[VERSION/]{_FILES}{conversion(self.root)}"
            )

    def _is_replaced(self, folder: Path) -> bool:
        override = self.overrides.get(folder.name)
        return override is not None and override.folder is not None

    def _add_folder(self, folder: Path, versions: list[ModelFiles]) -> None:
        names = self._names(folder, [files.version for files in versions])
        if (weights := versions[0].config.traffic) and not names.traffic.weights:
            names = replace(names, traffic=replace(names.traffic, weights=weights))
        name = self._name_of(folder)
        self._add(folder, name, versions)
        self.found.names[name] = names

    def _names(self, folder: Path, present: list[int]) -> VersionNames:
        """Return the version names. Raise `ModelLoadError` for an unknown default; warns of unknown versions."""
        file = folder / NAMES_FILE
        self._check_file(file)
        names = read_names(file)
        wanted = self.found.policies.get(self._name_of(folder), ALL).wanted(present)
        if names.default is not None and names.default not in wanted:
            raise ModelLoadError(
                f"{file}: default: expected one of the served versions, {listed(wanted)}, got {names.default}",
                Code.INVALID_ARGUMENT,
            )
        for name, number in names.numbers.items():
            if number not in wanted:
                text = f"{file}: {name}: version {number} is not served; the served versions are {listed(wanted)}"
                self.found.warn(str(folder), text)
        return names

    def _add(self, path: Path, name: str, versions: list[ModelFiles]) -> None:
        models = self.found.models
        if not NAME.fullmatch(name):
            raise ModelLoadError(f"{path}: {name!r} is not a valid model name; {NAME_RULE}")
        if name in models:
            raise FoundTwice(
                f"model '{name}' appears in two or more repositories: {models[name][0].file} and "
                f"{versions[0].file}"
            )
        policy = self.found.policies.get(name, ALL)
        present = [files.version for files in versions]
        if not policy.wanted(present):
            raise ModelLoadError(
                f"{versions[0].config.source}: version_policy.specific: expected one of the versions "
                f"{listed(present)} in {path}, got {listed(policy.missing(present))}",
                Code.INVALID_ARGUMENT,
            )
        models[name] = versions
        if path != versions[0].file:
            self.found.folders[name] = path
        self._warn_of_missing(str(path), name, path, policy, versions)

    def _warn_of_missing(
        self, key: str, name: str, folder: Path, policy: VersionPolicy, versions: list[ModelFiles]
    ) -> None:
        if missing := policy.missing({files.version for files in versions}):
            text = "version {}" if len(missing) == 1 else "versions {}"
            self.found.warn(key, f"{name}: version_policy: {text.format(listed(missing))} not found in {folder}")

    # --- one model's folder ---

    def _model_versions(self, folder: Path) -> list[ModelFiles]:
        """Return the versions in a model's folder, ascending; files directly in it are version 1.

        Raise `ModelLoadError` when there are both, and for an invalid configuration.
        """
        config, name = self._config(folder), self._name_of(folder)
        versions = self._version_folders(folder, name, config, str(folder))
        if config is not NO_CONFIG and versions:
            return versions
        if files := self._files(folder, name, 1, config):
            if versions:
                raise ModelLoadError(f"{folder}: expected {files.file.name} or version folders, found both")
            return [files]
        if config is not NO_CONFIG:
            expected = listed(candidates(config))
            what = "a configuration" if name in self.overrides else CONFIG_FILE
            raise NothingFound(f"{folder}: found {what}, but no version of the model; expected 1/{{{expected}}}")
        return versions

    def _config(self, folder: Path) -> ModelConfig:
        self._check(folder)
        warnings = self.found.warnings.setdefault(str(folder), [])
        name = self._name_of(folder)
        override = self.overrides.get(name)
        if override is None:
            config = self._own_config(folder, warnings)
        else:
            config = self._override(override, folder, warnings)
        for file in named_files(config):
            self._check(file)
        if config is NO_CONFIG:
            return config
        if name not in self.found.models:  # Otherwise `_add` will reject it.
            self.found.policies[name] = config.version_policy
        return replace(config, version_policy=ALL)

    def _own_config(self, folder: Path, warnings: list[str]) -> ModelConfig:
        self._check_file(folder / CONFIG_FILE)
        return read_config(folder, warnings, named=self._name_of(folder) != folder.name)

    def _override(self, override: Override, folder: Path, warnings: list[str]) -> ModelConfig:
        """Return the configuration that a client sent; it cannot choose programs or exceed resource limits."""
        source = f"the configuration in the request to load model '{self._name_of(folder)}'"
        own = NO_CONFIG
        with suppress(ModelLoadError):
            own = self._own_config(folder, [])
        check_bounds(override.message, own, override.bounds, source)
        config = in_its_environment(config_of(override.message, folder, source, warnings), own)
        return replace(config, max_instances=max(override.bounds.instances, instances_of(own)))

    def _check(self, path: Path) -> None:
        if not self.allow_symlinks:
            check_links(path, self.root)

    def _check_file(self, file: Path) -> None:
        self._check(file)
        if file.exists() and not file.is_file():  # Reading a pipe may block forever.
            raise ModelLoadError(f"{file}: expected a file")

    def _version_folders(self, folder: Path, name: str, config: ModelConfig, key: str) -> list[ModelFiles]:
        versions: dict[int, ModelFiles] = {}
        left_out: list[str] = []
        unnumbered: list[Path] = []
        # The spelling without leading zeros comes first.
        for entry in sorted(folder.iterdir(), key=lambda entry: (len(entry.name), entry.name)):
            # Triton skips names with leading zeros, and so version 0; TensorFlow Serving does not (spec 5.7, tfs
            # 6.1).
            passed_over = config is not NO_CONFIG and entry.name.startswith("0")
            number = None if passed_over else version_of(entry.name)
            if entry.is_file():
                continue
            if number is None:
                unnumbered.append(entry)
                continue
            if (files := self._files(entry, name, number, config)) is None:
                expected = listed(candidates(config))
                left_out.append(f"{entry} is skipped: it contains no model, expected {{{expected}}}")
            elif number in versions:
                left_out.append(f"{entry} is skipped: {versions[number].file.parent} is also version {number}")
            else:
                versions[number] = files
        if versions:  # Otherwise these may be models or parts of one.
            left_out += [
                f"{entry} is skipped: expected an integer like 1 as the version's name"
                for entry in unnumbered
                if not entry.name.startswith(".") and any((entry / file).is_file() for file in candidates(config))
            ]
            self.found.warn(key, *left_out)
        return [versions[number] for number in sorted(versions)]

    def _files(self, folder: Path, name: str, version: int, config: ModelConfig) -> ModelFiles | None:
        if config.ensemble:  # It has no file; the contents of its folders are ignored.
            self._check(folder)
            return ModelFiles(name, version, config.backend, folder, folder=folder, config=config)
        for file_name, usual_backend in candidates(config).items():
            file = folder / file_name
            if not file.is_file():
                continue
            if not self.allow_symlinks:
                for path in (folder, file):
                    check_links(path, self.root)
                check_links_below(folder, self.root)
            backend = config.backend or usual_backend or backend_by_name(file)
            if not backend:
                raise ModelLoadError(
                    f"{config.source}: backend: expected the backend of {config.file_name!r}, got none; "
                    f"known backends: "
                    f"{listed(dict.fromkeys(BACKEND_OF_FILE.values()))}"
                )
            if (folder / mlserver.SETTINGS).is_file():  # Those of a model.py, too.
                config = mlserver.config_of(folder, {}, config)
            return ModelFiles(name, version, backend, file, folder=folder, config=config)
        return None


def named_files(config: ModelConfig) -> list[Path]:
    """Return the files that a configuration names: labels, warm-up data and initial states."""
    inputs = [tensor for request in config.warm_up for tensor in request.inputs.values()]
    states = [] if config.sequence_batching is None else config.sequence_batching.states
    files = [*(tensor.label_file for tensor in config.outputs), *(tensor.file for tensor in inputs)]
    files += [state.initial.file for state in states if state.initial is not None]
    return [file for file in files if file is not None]


def _model_file(path: Path) -> ModelFiles:
    """Return the model of a file; with a standard file name the model is named after its folder."""
    if path.name not in BACKEND_OF_FILE:
        return ModelFiles(path.stem, 1, backend_of(path), path, single_file=True)
    folder, version = path.parent, version_of(path.parent.name)
    if version is not None:
        folder = folder.parent
    backend = BACKEND_OF_FILE[path.name]
    return ModelFiles(folder.name, 1 if version is None else version, backend, path, folder=path.parent)


def version_of(name: str) -> int | None:
    """Return the version number in a folder's name, or None; leading zeros are allowed (tfs 6.1)."""
    match = _NUMBER.fullmatch(name)  # Python refuses to convert thousands of digits.
    number = LAST_VERSION + 1 if match is None else int(match[1])
    return None if number > LAST_VERSION else number
