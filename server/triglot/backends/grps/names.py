"""Provides the names that a grps project imports (grps 6.1), only while the project is loaded.

No package `grps_framework` is installed. While a project is loaded, `sys.modules` has modules with these names,
made from a table, and the project's folder is first on `sys.path`. Afterwards everything is restored: the
project's own modules are removed, and modules that had these names before are back.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from triglot.core.errors import ModelLoadError

ROOT = "grps_framework"
SPAWNED = str(Path(__file__).with_name("spawned"))
"""Folder with a package for spawned processes, which inherit the path; an archive may contain grps' own one."""
TAKEN = (ROOT, "src", "test")
"""Top-level names that belong to the project while it is loaded."""

Lazy = Callable[[], Any]


class ProvidedModule(ModuleType):
    """A module made from the table; `lazy` names are created on first access."""

    def __init__(self, name: str, folder: Path, names: Mapping[str, Any], lazy: Mapping[str, Lazy]) -> None:
        super().__init__(name, "Provided by Triglot for grps projects.")
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []
        self.provided_for = folder
        self._lazy = lazy
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        if name in vars(self)["_lazy"]:
            value = self._lazy[name]()
            setattr(self, name, value)
            return value
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class ImportNames:
    """Provides a table of module name → names below `grps_framework`, and the modules in `folder`."""

    def __init__(
        self, folder: Path, table: Mapping[str, Mapping[str, Any]], lazy: Mapping[str, Mapping[str, Lazy]]
    ) -> None:
        self._folder = folder
        self._table = table
        self._lazy = lazy
        self._displaced: dict[str, ModuleType] = {}
        self._modules: frozenset[str] = frozenset()
        self._path: list[str] = []

    def provide(self) -> None:
        """Provide all names. Raise `ModelLoadError` while another project is loaded."""
        present = sys.modules.get(ROOT)
        if isinstance(present, ProvidedModule):
            raise ModelLoadError(
                f"{self._folder}: the grps project {present.provided_for} is loaded; "
                "one process runs one project at a time"
            )
        self._displaced = {name: module for name, module in sys.modules.copy().items() if _top(name) in TAKEN}
        for name in self._displaced:
            del sys.modules[name]
        self._modules = frozenset(sys.modules)
        self._path = list(sys.path)
        self.provide_missing()
        sys.path[:0] = [SPAWNED, str(self._folder)]
        importlib.invalidate_caches()

    def provide_missing(self) -> None:
        """Provide missing names only, without changing anything else."""
        for name in [*self._table, *self._lazy]:
            self._provide(f"{ROOT}.{name}", self._table.get(name, {}), self._lazy.get(name, {}))

    def _provide(self, name: str, names: Mapping[str, Any], lazy: Mapping[str, Lazy]) -> None:
        if name in sys.modules:
            return
        module = sys.modules[name] = ProvidedModule(name, self._folder, names, lazy)
        parent, _, child = name.rpartition(".")
        if parent:
            self._provide(parent, {}, {})
            setattr(sys.modules[parent], child, module)

    def remove(self) -> None:
        """Restores everything; code of the project that still runs cannot import more of it."""
        for name, module in sys.modules.copy().items():
            if _top(name) in TAKEN or (name not in self._modules and self._is_own(module)):
                del sys.modules[name]
        sys.modules.update(self._displaced)
        for entry in (str(self._folder), SPAWNED):
            if entry in sys.path:
                sys.path.remove(entry)
        sys.path[:] = [entry for entry in sys.path if entry in self._path or not self._is_below(entry)]
        importlib.invalidate_caches()

    def _is_own(self, module: ModuleType) -> bool:
        """Whether the module belongs to the project. Packages installed below its folder do not: one with native
        code cannot be imported twice."""
        file = getattr(module, "__file__", None)
        return isinstance(file, str) and self._is_below(file)

    def _is_below(self, place: str) -> bool:
        path = Path(place).absolute()
        installed = {"site-packages", "dist-packages"}.intersection(path.parts)
        return path.is_relative_to(self._folder) and not installed


def _top(name: str) -> str:
    return name.partition(".")[0]
