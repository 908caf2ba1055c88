"""What model folders hold: from paths and settings to the model versions on disk.

Strategy: this looks and collects, and acts on nothing. What is wrong with one model is written down and leaves the
others as they are; whoever asked decides what a problem means.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from triglot.core.errors import ModelLoadError
from triglot.core.model import Model
from triglot.core.model_config import NO_CONFIG, ModelConfig, VersionPolicy
from triglot.pb.kserve import model_config_pb2 as pb
from triglot.repository.model_config import CONFIG_FILE, config_of, read_config
from triglot.repository.paths import check_links
from triglot.repository.settings import NAME, NAME_RULE, ModelSettings

BACKEND_OF_FILE = {
    "predictor.toml": "predictor",
    "model.py": "python",
    "model.onnx": "onnx",
    "saved_model.pb": "tensorflow",
    "model.pt2": "torch",
    "model.pt": "torch",
    "model.joblib": "sklearn",
    "model.pkl": "sklearn",
    "model.bst": "xgboost",
    "model.ubj": "xgboost",
    "model.json": "xgboost",
}
"""The files that make a folder a model, the first of them deciding. A pickle may hold a model of scikit-learn or
of XGBoost; its backend looks."""
BACKEND_OF_FOLDER = {"model.savedmodel/saved_model.pb": "tensorflow", "model.onnx/model.onnx": "onnx"}
"""Where Triton's layout has a folder in place of a file (spec 5.7)."""
BACKEND_OF_SUFFIX = {
    ".py": "python",
    ".onnx": "onnx",
    ".pt2": "torch",
    ".pt": "torch",
    ".joblib": "sklearn",
    ".pkl": "sklearn",
    ".bst": "xgboost",
    ".ubj": "xgboost",
}
GRPS_PROJECT = ("conf/inference.yml", "conf/server.yml")
_FILES = f"{{{', '.join(BACKEND_OF_FILE)}}}"
_EXPECTED = f"[VERSION/]{_FILES}, VERSION an integer like 1"
_NUMBER = re.compile("[0-9]+")
LAST_VERSION = 2**63 - 1


class NothingFound(ModelLoadError):
    """The folder is there and holds no model."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """One version of one model on disk.

    `file` is what the backend opens; `alone`: nothing beside it belongs to it. `stamp` changes with the files, see
    `stamp_of`; 0 where nobody looked. `label` is one more name of the version. `make` makes the loaded model, in
    place of the backend.
    """

    name: str
    version: int
    backend: str
    file: Path
    stamp: int = 0
    label: str = ""
    alone: bool = False
    config: ModelConfig = field(default=NO_CONFIG, hash=False)
    make: Callable[[], Model] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.name} version {self.version}" + (f" ({self.label})" if self.label else "")


Root = Path | ModelSettings | ModelFiles
"""Where models lie: a repository folder, a model's folder or file, what a configuration says of one model, or one
version that is known already."""
Overrides = Mapping[str, pb.ModelConfig]
"""What stands in place of a model's config.pbtxt, by the model's name."""


@dataclass(slots=True)
class Found:
    """The versions of each model, ascending; what is wrong, by the model's name or the path; what is odd."""

    models: dict[str, list[ModelFiles]] = field(default_factory=dict)
    problems: dict[str, ModelLoadError] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @contextmanager
    def collecting(self, key: str) -> Iterator[None]:
        """What the block raises is the problem of `key`."""
        try:
            yield
        except OSError as error:
            self.problems[key] = ModelLoadError(f"{error.filename}: {error.strerror}")
        except ModelLoadError as error:
            self.problems[key] = error


def find_models(
    roots: Iterable[Root], overrides: Overrides = MappingProxyType({}), *, allow_symlinks: bool = False
) -> Found:
    """Everything that lies at the roots. Of one name the first counts, and the second is a problem.

    `allow_symlinks`: links may lead out of the root that they are found in.
    """
    found = Found()
    for root in roots:
        if isinstance(root, ModelSettings):
            with found.collecting(root.name):
                _Search(found, root.base_path, overrides, allow_symlinks).find_versions(root)
        elif isinstance(root, ModelFiles):
            found.models.setdefault(root.name, []).append(root)
        else:
            # Resolves "..", but keeps the name of a symbolic link.
            path = Path(os.path.normpath(root.absolute()))
            with found.collecting(str(path)):
                _Search(found, path, overrides, allow_symlinks).find()
    return found


@dataclass(frozen=True, slots=True)
class _Search:
    """Looks below one root, and adds to what was found."""

    found: Found
    root: Path
    overrides: Overrides
    allow_symlinks: bool

    def find_versions(self, model: ModelSettings) -> None:
        """TensorFlow Serving's layout: nothing but version folders counts (tfs 6.1)."""
        if not model.base_path.is_dir():
            raise ModelLoadError(f"Could not find base path {model.base_path} for servable {model.name}")
        versions = self._version_folders(model.base_path, model.name, NO_CONFIG)
        self.found.models[model.name] = versions
        self._warn_of_missing(model.name, model.policy, versions)
        if not model.policy.wanted({files.version for files in versions}):
            raise NothingFound(
                f"No versions of servable {model.name} found under base path {model.base_path}, "
                f"expected VERSION/{_FILES}"
            )

    def find(self) -> None:
        """A model's file, a model's folder, or a repository."""
        path = self.root
        if path.is_file():
            files = _model_file(path)
            self._add(path, files.name, [files])
        elif not path.is_dir():
            raise ModelLoadError(f"{path}: no such file or folder")
        elif all((path / file).is_file() for file in GRPS_PROJECT):
            raise ModelLoadError(f"{path}: this is a grps project; to serve it, run: triglot grps {path}")
        elif versions := self._model_versions(path):
            self._add(path, path.name, versions)
        else:
            self._find_in_repository()

    def _find_in_repository(self) -> None:
        empty = True
        for folder in sorted(self.root.iterdir()):
            if not folder.is_dir() or folder.name.startswith((".", "__")):
                continue
            with self.found.collecting(str(folder)):
                versions = self._model_versions(folder)
                if not versions:
                    text = f"{folder} is left out: no model in it, expected {_EXPECTED}"
                    self.found.warnings.append(text)
                    continue
                empty = False
                self._add(folder, folder.name, versions)
        if empty:
            raise NothingFound(f"{self.root}: no models here; expected NAME/[VERSION/]{_FILES}")

    def _add(self, path: Path, name: str, versions: list[ModelFiles]) -> None:
        models = self.found.models
        if not NAME.fullmatch(name):
            raise ModelLoadError(f"{path}: a file or folder gives a model the name {name!r}; {NAME_RULE}")
        if name in models:
            raise ModelLoadError(
                f"model '{name}' appears in two or more repositories: {models[name][0].file} and "
                f"{versions[0].file}"
            )
        models[name] = versions
        self._warn_of_missing(name, versions[0].config.version_policy, versions)

    def _warn_of_missing(self, name: str, policy: VersionPolicy, versions: list[ModelFiles]) -> None:
        self.found.warnings.extend(
            f"{name} version {number} is wanted, but not found in {self.root}"
            for number in policy.missing({files.version for files in versions})
        )

    def _model_versions(self, folder: Path) -> list[ModelFiles]:
        """The versions in a model's folder, ascending; files right in it are version 1.

        Raises `ModelLoadError` when there are both, and for a configuration that is wrong.
        """
        config = self._config(folder)
        versions = self._version_folders(folder, folder.name, config)
        if files := self._files(folder, folder.name, 1, config):
            if versions:
                raise ModelLoadError(f"{folder}: expected {files.file.name} or version folders, found both")
            return [files]
        if config is not NO_CONFIG and not versions:
            expected = config.file_name or ", ".join(_files_of(config.backend)) or _FILES
            raise ModelLoadError(f"{folder}: {CONFIG_FILE}, but no version of the model; expected 1/{expected}")
        return versions

    def _config(self, folder: Path) -> ModelConfig:
        override = self.overrides.get(folder.name)
        if override is None:
            return read_config(folder, self.found.warnings)
        return config_of(override, folder, f"the configuration of model '{folder.name}'", self.found.warnings)

    def _version_folders(self, folder: Path, name: str, config: ModelConfig) -> list[ModelFiles]:
        versions: dict[int, ModelFiles] = {}
        # The plain spelling of a number first.
        for entry in sorted(folder.iterdir(), key=lambda entry: (len(entry.name), entry.name)):
            number = version_of(entry.name)
            files = None if number is None else self._files(entry, name, number, config)
            if number is None or files is None:
                continue
            if number in versions:
                text = f"{entry} is left out: {versions[number].file.parent} is version {number}, too"
                self.found.warnings.append(text)
            else:
                versions[number] = files
        return [versions[number] for number in sorted(versions)]

    def _files(self, folder: Path, name: str, version: int, config: ModelConfig) -> ModelFiles | None:
        candidates = {config.file_name: ""} if config.file_name else _files_of(config.backend)
        for file_name, backend in candidates.items():
            file = folder / file_name
            if file.is_file():
                files = ModelFiles(
                    name, version, config.backend or backend or _backend_of(file), file, config=config
                )
                if not self.allow_symlinks:
                    for path in (folder, *own_paths(files)):
                        check_links(path, self.root)
                return files
        return None


def _files_of(backend: str) -> dict[str, str]:
    """The usual files of a backend, and the backend of each; "": of all backends."""
    return {file: kind for file, kind in (BACKEND_OF_FILE | BACKEND_OF_FOLDER).items() if backend in ("", kind)}


def _backend_of(file: Path) -> str:
    """The backend for a file of any name. Raises `ModelLoadError`."""
    backend = BACKEND_OF_FILE.get(file.name) or BACKEND_OF_SUFFIX.get(file.suffix)
    if backend is None:
        raise ModelLoadError(
            f"{file}: expected a folder, one of {', '.join(BACKEND_OF_FILE)}, or NAME with one of "
            f"{', '.join(BACKEND_OF_SUFFIX)}"
        )
    return backend


def _model_file(path: Path) -> ModelFiles:
    """A model given by its file; one of a usual name is called as its folder."""
    if path.name in BACKEND_OF_FILE:
        folder, version = path.parent, version_of(path.parent.name)
        if version is not None:
            folder = folder.parent
        return ModelFiles(folder.name, 1 if version is None else version, BACKEND_OF_FILE[path.name], path)
    return ModelFiles(path.stem, 1, _backend_of(path), path, alone=True)


def version_of(name: str) -> int | None:
    """The version that a folder of this name holds, if any; leading zeros are fine (tfs 6.1)."""
    number = int(name) if _NUMBER.fullmatch(name) else None
    return None if number is None or number > LAST_VERSION else number


def own_paths(files: ModelFiles) -> list[Path]:
    """The model's file; unless it is alone, all files and folders beside it, and those one folder below.

    That is where a SavedModel has its variables. What Python and editors leave there does not count.
    """
    if files.alone:
        return [files.file]
    folder = files.file.parent
    paths = [path for pattern in ("*", "*/*") for path in folder.glob(pattern)]
    return sorted(path for path in paths if not any(map(_is_aside, path.relative_to(folder).parts)))


def _is_aside(name: str) -> bool:
    return name == "__pycache__" or name.endswith((".swp", ".swx", "~"))


def stamp_of(files: ModelFiles) -> int:
    """A number that changes with the names, sizes and times of the version's `own_paths`."""
    return hash(tuple((str(path), *_size_and_time(path)) for path in own_paths(files)))


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return -1, -1  # It went away just now, or is a link to nowhere.
    # A folder's own time changes with anything in it, __pycache__ too.
    return (0, 0) if stat.S_ISDIR(status.st_mode) else (status.st_size, status.st_mtime_ns)
