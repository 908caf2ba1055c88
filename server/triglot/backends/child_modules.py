"""Makes a model's modules importable in processes that its code starts.

Unless it is forked, a new process of `multiprocessing` gets functions and classes as the names of modules to
import. A model's modules have names that no other model's have, and only the server finds them. Therefore these
names begin with a package, `triglot_models`, whose folder is on `sys.path`, which such processes inherit, and they
contain the paths of the model's files: a process needs nothing but the name to load the module.
"""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType, ModuleType
from urllib.parse import quote, unquote

ROOT = "triglot_models"
SPAWNED = str(Path(__file__).with_name("spawned"))
"""Folder of the package `ROOT` for such processes."""
KINDS: Mapping[str, str] = MappingProxyType(
    {
        "file": "triglot.backends.python:spec_in_child",
        "folders": "triglot.backends.model_modules:spec_in_child",
        "triton": "triglot.backends.triton_python.loading:spec_in_child",
    }
)
"""By kind: the function that returns the spec of such a module, given its name and the paths in it."""
_SEPARATOR = "__"
_numbers = itertools.count()

# The server's own package finds nothing: the modules of a closed model are gone.
sys.modules.setdefault(ROOT, ModuleType(ROOT))


def unique_name(kind: str, paths: Sequence[Path]) -> str:
    """Return a new module name for a model with these files, an identifier after `ROOT` and a dot."""
    if SPAWNED not in sys.path:
        sys.path.append(SPAWNED)
    return f"{ROOT}.{_SEPARATOR.join([f'{kind}{next(_numbers)}', *map(_encoded, paths)])}"


def _encoded(path: Path) -> str:
    """Return the absolute path as a part of an identifier: "_" and two hex digits stand for a byte."""
    quoted = quote(str(path.absolute())[1:], safe="")
    return re.sub(r"[_.~-]", lambda found: f"%{ord(found[0]):02X}", quoted).replace("%", "_")


def _decoded(text: str) -> Path:
    return Path("/" + unquote(text.replace("_", "%")))


class ChildFinder(MetaPathFinder):
    """Finds the modules directly below `ROOT`, from creation on."""

    def __init__(self) -> None:
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `MetaPathFinder`."""
        package, _, name = fullname.rpartition(".")
        if package != ROOT:
            return None
        kind, *paths = name.split(_SEPARATOR)
        module, _, function = KINDS[kind.rstrip("0123456789")].partition(":")
        spec: ModuleSpec = getattr(importlib.import_module(module), function)(fullname, list(map(_decoded, paths)))
        return spec
