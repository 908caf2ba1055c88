"""A model's own Python modules, under the names that its author gave them, seen by this model alone.

Strategy: a module `helper` of the model becomes `triglot_modules_7.helper` in `sys.modules`, a name that no other
model has. An `import helper` in a module of the model is led there: Python looks `__import__` up in the
`__builtins__` of the module that imports, and these modules have their own. So another version of the same model
has modules of its own, an import works whenever it runs, and none shadows a package for the rest of the process.
Pickles name modules too, and the code that reads them is not the model's: while the model loads, and only then,
anyone can import its modules by their plain names, as far as these are free. Where it is known whose code runs
(`running`), what that calls may import them, too: under the plain name stands a module that leads to that model's.
"""

from __future__ import annotations

import builtins
import importlib
import itertools
import os
import pkgutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

_numbers = itertools.count()
_STANDARD_LIBRARY = str(Path(os.__file__).parent)
running: ContextVar[ModelModules | None] = ContextVar("running_model_modules", default=None)
"""Those of the model whose code runs, where that is known."""
_plain_names = threading.RLock()
"""Held while a model's modules go by their plain names."""


class FreshLoader(SourceFileLoader):
    """Compiles the source whenever it is loaded.

    Python takes a cached file for current if the source has the same size and was written in the same second: a
    model that is changed and reloaded would be the former one.
    """

    def path_stats(self, path: str) -> NoReturn:
        """Raises `OSError`: no cached file is read, and none is written."""
        raise OSError(f"{path}: the source itself is compiled")


class OwnFinder(MetaPathFinder):
    """Finds what lies below the module `name` in `folders`, from when it is made to `close()`."""

    def __init__(self, name: str, folders: Sequence[str]) -> None:
        self.name = name
        self._folders = folders
        sys.meta_path.insert(0, self)

    def close(self) -> None:
        """Forget the modules. Code of theirs that still runs cannot import any more of them."""
        try:
            sys.meta_path.remove(self)
        except ValueError:
            return  # They have been forgotten.
        # Other threads import meanwhile: the names are copied in one step.
        for name in sys.modules.copy():
            if name == self.name or name.startswith(f"{self.name}."):
                sys.modules.pop(name, None)
        for path in list(sys.path_importer_cache):
            if any(path == folder or path.startswith(folder + os.sep) for folder in self._folders):
                sys.path_importer_cache.pop(path, None)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds what lies below the folders."""
        if not fullname.startswith(f"{self.name}."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        return None if spec is None else self.adopted(spec)

    def adopted(self, spec: ModuleSpec) -> ModuleSpec:
        """`spec`; a source is loaded by our own loader."""
        if isinstance(spec.loader, SourceFileLoader):
            spec.loader = self._loader(spec.loader.name, spec.loader.path)
        return spec

    def _loader(self, name: str, path: str) -> Loader:
        return FreshLoader(name, path)


class ModelModules(OwnFinder):
    """The modules and packages right in some folders, until `close()`.

    A package has an `__init__.py`. Names of the standard library stay the standard library's. A folder within the
    first one comes first when the model's code has put it in front of `sys.path`: its `model.py` is what
    `import model` in another `model.py` means.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        paths = [str(folder) for folder in folders]
        self._folder = folders[0].resolve()
        self._packages: dict[str, str] = {}
        self._own = {module.name for module in pkgutil.iter_modules(paths)} - sys.stdlib_module_names
        self.builtins = vars(builtins) | {"__import__": self.import_from_own}
        super().__init__(f"triglot_modules_{next(_numbers)}", paths)
        self._add_package(self.name, paths)

    def __contains__(self, name: str) -> bool:
        return name.partition(".")[0] in self._own

    def __str__(self) -> str:
        return ", ".join(sorted(self._own)) or "none"

    def import_module(self, name: str) -> ModuleType:
        """The module of that name: the model's, or else anybody's. Raises as `importlib.import_module`."""
        return importlib.import_module(self.real_name(name))

    def real_name(self, name: str) -> str:
        """The name in `sys.modules` of what the model calls `name`."""
        if name not in self:
            return name
        first = name.partition(".")[0]
        package = self._packages.get(first) or self._packages.setdefault(first, self._package_of(first))
        return f"{package}.{name}"

    def _package_of(self, name: str) -> str:
        """The package for the folder that has the module of that name."""
        for entry in itertools.takewhile(_STANDARD_LIBRARY.__ne__, map(str, sys.path)):
            if self._folder in Path(entry).resolve().parents and PathFinder.find_spec(name, [entry]):
                return self._add_package(f"{self.name}.<{name}>", [entry])
        return self.name

    def _add_package(self, name: str, paths: list[str]) -> str:
        package = ModuleType(name)
        package.__path__ = paths
        sys.modules[name] = package
        return name

    @contextmanager
    def by_plain_names(self) -> Iterator[None]:
        """Within the block everybody finds the modules by their plain names; one model at a time."""
        with _plain_names:
            aliases = _Aliases(self)
            sys.meta_path.insert(0, aliases)
            token = running.set(self)
            try:
                yield
            finally:
                running.reset(token)
                sys.meta_path.remove(aliases)
                for name in aliases.given:
                    sys.modules.pop(name, None)

    def _loader(self, name: str, path: str) -> Loader:
        return _SourceLoader(name, path, self)

    def import_from_own(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,  # noqa: A002
        locals: Mapping[str, Any] | None = None,  # noqa: A002
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """What `import` statements in the model's modules call, as `builtins.__import__`."""
        # C code imports for its caller too, with a list, and then looks for the plain name: pickle does.
        if level or name not in self or isinstance(fromlist, list):
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        module = builtins.__import__(self.real_name(name), globals, locals, fromlist or ())
        # `import a.b` is given a, and `from a import b` is given a.
        return module if fromlist else sys.modules[self.real_name(name.partition(".")[0])]


class _SourceLoader(FreshLoader):
    """Runs a module with an `__import__` of its model's."""

    def __init__(self, name: str, path: str, modules: ModelModules) -> None:
        super().__init__(name, path)
        self._modules = modules

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = self._modules.builtins
        super().exec_module(module)


class _Aliases(MetaPathFinder, Loader):
    """Finds a model's modules by their plain names; `given` are those that were asked for."""

    def __init__(self, modules: ModelModules) -> None:
        self._modules = modules
        self._specs: dict[str, ModuleSpec | None] = {}

    @property
    def given(self) -> list[str]:
        return list(self._specs)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in self._modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = self._modules.import_module(spec.name)
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has put the alias's own spec there.
        assert module.__spec__ is not None
        module.__spec__ = self._specs[module.__spec__.name]


# --- plain names while models serve ---


class PlainNames(MetaPathFinder, Loader):
    """Finds the modules of the model whose code runs, for code that is not the model's: importlib, unittest.

    From when it is made to `close()`. What a name means to everybody stays that.
    """

    def __init__(self) -> None:
        sys.meta_path.insert(0, self)

    def close(self) -> None:
        """Forget the names."""
        sys.meta_path.remove(self)
        for name, module in sys.modules.copy().items():  # Others import meanwhile.
            if isinstance(module, _RunningModels):
                sys.modules.pop(name, None)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `MetaPathFinder`."""
        modules = running.get()
        if modules is None or fullname not in modules:
            return None
        if path is None:
            found = PathFinder.find_spec(fullname)
            free = found is None or found.loader is None  # A folder without an `__init__.py` comes last.
        else:
            free = isinstance(sys.modules.get(fullname.partition(".")[0]), _RunningModels)
        return ModuleSpec(fullname, self) if free else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """See `Loader`."""
        return _RunningModels(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """See `Loader`. Raises what the model's own module raises."""
        module.__dir__()


class _RunningModels(ModuleType):
    """The module of this name of the model whose code runs."""

    def __getattr__(self, name: str) -> Any:
        modules = running.get()
        if modules is None or self.__name__ not in modules:
            raise AttributeError(
                f"{self.__name__} is a module of a model's, usable only while that model's code runs"
            )
        return getattr(modules.import_module(self.__name__), name)

    def __dir__(self) -> list[str]:
        return list(self.__getattr__("__dict__"))
