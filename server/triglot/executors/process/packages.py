"""Builds Python environments of lists of packages: a requirements.txt, or the pip part of a conda.yaml."""

from __future__ import annotations

import platform
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

PYTHON = "python_env.yaml"
"""The file beside the list that has the version of Python, which MLflow writes."""
Run = Callable[[Path, Sequence[str]], object]
"""Run a command in a folder; blocks. Raise `ValueError` with its last words if it fails."""


def is_list(path: Path) -> bool:
    """Whether the path is that of a list of packages, not of an archive."""
    return path.suffix in (".txt", ".yaml", ".yml")


def build(file: Path, folder: Path, run: Run) -> None:
    """Make an environment in `folder` with the packages that a file lists. Raise `ValueError`."""
    version, packages = _conda(file) if file.suffix != ".txt" else ("", ["--requirement", str(file)])
    run(file.parent, [_interpreter(_python(file) or version), "-I", "-m", "venv", str(folder)])
    pip = [str(folder / "bin" / "python"), "-I", "-m", "pip", "--disable-pip-version-check", "--no-input"]
    run(file.parent, [*pip, "install", "--quiet", *packages])


def _python(file: Path) -> str:
    """Return the version of Python in the file beside the list, "" without one."""
    versions = file.with_name(PYTHON)
    return str(_mapping(versions).get("python") or "") if versions.is_file() else ""


def _conda(file: Path) -> tuple[str, list[str]]:
    """Return the version of Python, and the packages for pip. Raise `ValueError` for packages of conda's own."""
    version, packages = "", []
    for found in _mapping(file).get("dependencies") or ():
        if isinstance(found, dict):
            packages += [part for line in found.get("pip") or () for part in str(line).split(maxsplit=1)]
        elif str(found).startswith("python="):
            version = str(found).removeprefix("python=")
        elif re.split("[<=>]", str(found))[0] != "pip":
            raise ValueError(f"{file}: {found} is a package of conda's, which pip cannot install")
    return version, packages


def _mapping(file: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(file.read_bytes())
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file}: expected a mapping, got {type(found).__name__}")
    return found


def _interpreter(version: str) -> str:
    """Return the path of a Python of this version, its patch level aside. Raise `ValueError`."""
    minor = ".".join(version.split(".")[:2])
    if minor in ("", ".".join(platform.python_version_tuple()[:2])):
        return sys.executable
    found = shutil.which(f"python{minor}")
    if found is None:
        raise ValueError(f"expected a python{minor} on the PATH, which the model was saved with, found none")
    return found
