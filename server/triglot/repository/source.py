"""What model folders hold: from paths and settings to the model versions on disk.

Strategy: this looks and collects, and acts on nothing. What is wrong with one model is written down and leaves the
others as they are; whoever asked decides what a problem means.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from triglot.core.errors import ModelLoadError
from triglot.core.model import Model
from triglot.repository.settings import NAME, NAME_RULE, ModelSettings

BACKEND_OF_FILE = {
    "predictor.toml": "predictor",
    "model.py": "python",
    "model.onnx": "onnx",
    "saved_model.pb": "tensorflow",
    "model.joblib": "sklearn",
    "model.pkl": "sklearn",
    "model.bst": "xgboost",
    "model.ubj": "xgboost",
    "model.json": "xgboost",
}
"""The files that make a folder a model, the first of them deciding. A pickle may hold a model of scikit-learn or
of XGBoost; its backend looks."""
BACKEND_OF_SUFFIX = {
    ".py": "python",
    ".onnx": "onnx",
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
    """One version of one model on disk: `file` is what the backend opens.

    `stamp` changes with the files, see `stamp_of`; 0 where nobody looked. `label` is one more name of the version.
    `make` makes the loaded model, in place of the backend.
    """

    name: str
    version: int
    backend: str
    file: Path
    stamp: int = 0
    label: str = ""
    make: Callable[[], Model] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.name} version {self.version}" + (f" ({self.label})" if self.label else "")


Root = Path | ModelSettings | ModelFiles
"""Where models lie: a repository folder, a model's folder or file, what a configuration says of one model, or one
version that is known already."""


@dataclass(slots=True)
class Found:
    """The versions of each model, ascending; what is wrong, by the model's name or the path; what is odd."""

    models: dict[str, list[ModelFiles]] = field(default_factory=dict)
    problems: dict[str, ModelLoadError] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def find_models(roots: Iterable[Root]) -> Found:
    """Everything that lies at the roots. Of one name the first counts, and the second is a problem."""
    found = Found()
    for root in roots:
        if isinstance(root, ModelSettings):
            with _collecting(found, root.name):
                _find_versions(root, found)
        elif isinstance(root, ModelFiles):
            found.models.setdefault(root.name, []).append(root)
        else:
            # Resolves "..", but keeps the name of a symbolic link.
            path = Path(os.path.normpath(root.absolute()))
            with _collecting(found, str(path)):
                _find_path(path, found)
    return found


@contextmanager
def _collecting(found: Found, key: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        found.problems[key] = ModelLoadError(f"{error.filename}: {error.strerror}")
    except ModelLoadError as error:
        found.problems[key] = error


def _find_versions(model: ModelSettings, found: Found) -> None:
    """TensorFlow Serving's layout: nothing but version folders counts (tfs 6.1)."""
    if not model.base_path.is_dir():
        raise ModelLoadError(f"Could not find base path {model.base_path} for servable {model.name}")
    versions = _version_folders(model.base_path, model.name, found.warnings)
    found.models[model.name] = versions
    for number in model.policy.missing({files.version for files in versions}):
        found.warnings.append(f"{model.name} version {number} is wanted, but not found in {model.base_path}")
    if not model.policy.wanted({files.version for files in versions}):
        raise NothingFound(
            f"No versions of servable {model.name} found under base path {model.base_path}, "
            f"expected VERSION/{_FILES}"
        )


def _find_path(path: Path, found: Found) -> None:
    if path.is_file():
        files = _model_file(path)
        _add(path, files.name, [files], found)
    elif not path.is_dir():
        raise ModelLoadError(f"{path}: no such file or folder")
    elif all((path / file).is_file() for file in GRPS_PROJECT):
        raise ModelLoadError(f"{path}: this is a grps project; to serve it, run: triglot grps {path}")
    elif versions := model_versions(path, found.warnings):
        _add(path, path.name, versions, found)
    else:
        _find_in_repository(path, found)


def _find_in_repository(path: Path, found: Found) -> None:
    empty = True
    for folder in sorted(path.iterdir()):
        if not folder.is_dir() or folder.name.startswith((".", "__")):
            continue
        with _collecting(found, str(folder)):
            versions = model_versions(folder, found.warnings)
            if not versions:
                found.warnings.append(f"{folder} is left out: no model in it, expected {_EXPECTED}")
                continue
            empty = False
            _add(path, folder.name, versions, found)
    if empty:
        raise NothingFound(f"{path}: no models here; expected NAME/[VERSION/]{_FILES}")


def _add(path: Path, name: str, versions: list[ModelFiles], found: Found) -> None:
    if not NAME.fullmatch(name):
        raise ModelLoadError(f"{path}: a file or folder gives a model the name {name!r}; {NAME_RULE}")
    if name in found.models:
        raise ModelLoadError(
            f"model '{name}' appears in two or more repositories: {found.models[name][0].file} and "
            f"{versions[0].file}"
        )
    found.models[name] = versions


def _model_file(path: Path) -> ModelFiles:
    """A model given by its file; one of a usual name is called as its folder."""
    if path.name in BACKEND_OF_FILE:
        folder, version = path.parent, version_of(path.parent.name)
        if version is not None:
            folder = folder.parent
        return ModelFiles(folder.name, 1 if version is None else version, BACKEND_OF_FILE[path.name], path)
    backend = BACKEND_OF_SUFFIX.get(path.suffix)
    if backend is None:
        raise ModelLoadError(
            f"{path}: expected a folder, one of {', '.join(BACKEND_OF_FILE)}, or NAME with one of "
            f"{', '.join(BACKEND_OF_SUFFIX)}"
        )
    return ModelFiles(path.stem, 1, backend, path)


def model_versions(folder: Path, warnings: list[str]) -> list[ModelFiles]:
    """The versions in a model's folder, ascending; files right in it are version 1.

    Raises `ModelLoadError` when there are both.
    """
    versions = _version_folders(folder, folder.name, warnings)
    if files := _files(folder, folder.name, 1):
        if versions:
            raise ModelLoadError(f"{folder}: expected {files.file.name} or version folders, found both")
        return [files]
    return versions


def version_of(name: str) -> int | None:
    """The version that a folder of this name holds, if any; leading zeros are fine (tfs 6.1)."""
    number = int(name) if _NUMBER.fullmatch(name) else None
    return None if number is None or number > LAST_VERSION else number


def _version_folders(folder: Path, name: str, warnings: list[str]) -> list[ModelFiles]:
    versions: dict[int, ModelFiles] = {}
    # The plain spelling of a number first.
    for entry in sorted(folder.iterdir(), key=lambda entry: (len(entry.name), entry.name)):
        number = version_of(entry.name)
        files = None if number is None else _files(entry, name, number)
        if number is None or files is None:
            continue
        if number in versions:
            warnings.append(f"{entry} is left out: {versions[number].file.parent} is version {number}, too")
        else:
            versions[number] = files
    return [versions[number] for number in sorted(versions)]


def _files(folder: Path, name: str, version: int) -> ModelFiles | None:
    for file_name, backend in BACKEND_OF_FILE.items():
        if (folder / file_name).is_file():
            return ModelFiles(name, version, backend, folder / file_name)
    return None


def stamp_of(file: Path) -> int:
    """A number that changes with the names, sizes and times of a model's files.

    They are those beside a file of a usual name and those one folder below, which is where a SavedModel has its
    variables; `__pycache__` is written by reading.
    """
    paths = [file]
    if file.name in BACKEND_OF_FILE:
        paths = [path for pattern in ("*", "*/*") for path in file.parent.glob(pattern)]
    kept = sorted(path for path in paths if "__pycache__" not in path.parts[-2:])
    return hash(tuple((str(path), *_size_and_time(path)) for path in kept))


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return -1, -1  # It went away just now, or is a link to nowhere.
    # A folder's own time changes with anything in it, __pycache__ too.
    return (0, 0) if stat.S_ISDIR(status.st_mode) else (status.st_size, status.st_mtime_ns)
