"""What model folders hold: from paths on disk to the model versions that are wanted."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from triglot.core.errors import ModelLoadError

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
VERSION = re.compile(r"[1-9][0-9]{0,18}")
BACKEND_OF_FILE = {"model.py": "python", "model.onnx": "onnx"}
_EXPECTED = f"[VERSION/]{{{', '.join(BACKEND_OF_FILE)}}}, VERSION an integer like 1"
BACKEND_OF_SUFFIX = {".py": "python", ".onnx": "onnx"}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """One version of one model on disk: `file` is what the backend opens."""

    name: str
    version: int
    backend: str
    file: Path

    def __str__(self) -> str:
        return f"{self.name} version {self.version}"


def find_models(paths: Iterable[Path]) -> dict[str, list[ModelFiles]]:
    """The models at `paths`, each a repository folder, a model folder or a model file; versions ascending.

    Raises `ModelLoadError` for a path that holds no model, a name that clients could not send, or a name that
    comes twice.
    """
    models: dict[str, list[ModelFiles]] = {}
    for path in paths:
        for name, versions in _find(path).items():
            if not NAME.fullmatch(name):
                raise ModelLoadError(
                    f"{path}: a file or folder gives a model the name {name!r}; expected 1 to 128 letters, "
                    "digits, '.', '_' and '-', without a dot in front"
                )
            if name in models:
                raise ModelLoadError(
                    f"model '{name}' appears in two or more repositories: {models[name][0].file} and "
                    f"{versions[0].file}"
                )
            models[name] = versions
    return models


def _find(path: Path) -> dict[str, list[ModelFiles]]:
    # Resolves "..", but keeps the name of a symbolic link.
    path = Path(os.path.normpath(path.absolute()))
    if path.is_file():
        backend = BACKEND_OF_SUFFIX.get(path.suffix)
        if backend is None:
            raise ModelLoadError(f"{path}: expected a folder, a .py or an .onnx file")
        if path.name not in BACKEND_OF_FILE:
            return {path.stem: [ModelFiles(path.stem, 1, backend, path)]}
        folder, version = path.parent, 1
        if VERSION.fullmatch(folder.name):
            folder, version = folder.parent, int(folder.name)
        return {folder.name: [ModelFiles(folder.name, version, backend, path)]}
    if not path.is_dir():
        raise ModelLoadError(f"{path}: no such file or folder")
    if versions := model_versions(path):
        return {path.name: versions}
    models = {}
    for folder in sorted(path.iterdir()):
        if not folder.is_dir() or folder.name.startswith((".", "__")):
            continue
        if versions := model_versions(folder):
            models[folder.name] = versions
        else:
            log.warning("%s is left out: no model in it, expected %s", folder, _EXPECTED)
    if not models:
        raise ModelLoadError(f"{path}: no models here; expected NAME/[VERSION/]{{{', '.join(BACKEND_OF_FILE)}}}")
    return models


def model_versions(folder: Path) -> list[ModelFiles]:
    """The versions in a model's folder, ascending; files right in it are version 1.

    Raises `ModelLoadError` when there are both.
    """
    found = [
        _files(entry, folder.name, int(entry.name))
        for entry in folder.iterdir()
        if entry.is_dir() and VERSION.fullmatch(entry.name)
    ]
    versions = sorted((files for files in found if files), key=lambda files: files.version)
    if files := _files(folder, folder.name, 1):
        if versions:
            raise ModelLoadError(f"{folder}: expected {files.file.name} or version folders, found both")
        return [files]
    return versions


def _files(folder: Path, name: str, version: int) -> ModelFiles | None:
    for file_name, backend in BACKEND_OF_FILE.items():
        if (folder / file_name).is_file():
            return ModelFiles(name, version, backend, folder / file_name)
    return None
