"""Isolates a model's own Python modules: each model sees its own under their plain names.

A module `helper` of a model becomes `triglot_models.NAME.helper` in `sys.modules`, with a name that no other model
has (see `child_modules`). An `import helper` in a module of the model is redirected there: Python looks
`__import__` up in the `__builtins__` of the importing module, and these modules have their own. So each version of
a model has separate modules, an import works whenever it runs, and no module shadows a package for the rest of the
process. Pickles contain module names, too, and the code that reads them is not the model's: while the model loads,
and only then, all code can import its modules by their plain names, unless these are taken. When it is known whose
code is running (`running`), the code that it calls can import them, too: a proxy module with the plain name then
forwards to that model's.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import inspect
import itertools
import os
import pkgutil
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NoReturn

from triglot.backends.child_modules import unique_name
from triglot.model.model import Model

_STANDARD_LIBRARY = str(Path(os.__file__).parent)
running: ContextVar[ModelModules | None] = ContextVar("running_model_modules", default=None)
"""The modules of the model whose code is running, if known."""
_plain_names = threading.RLock()
"""Held while a model's modules are importable by their plain names."""


class FreshLoader(SourceFileLoader):
    """Compiles the source at each load.

    Python considers a cached file up to date if the source has the same size and was written in the same second,
    so a model that was changed and reloaded could run its old code.
    """

    def path_stats(self, path: str) -> NoReturn:
        """Raise `OSError`, so that no cached file is read or written."""
        raise OSError(f"{path}: the source itself is compiled")


class ModuleFinder(MetaPathFinder):
    """Finds the modules below the module `name` in `folders`, from creation to `close()`."""

    def __init__(self, name: str, folders: Sequence[str]) -> None:
        self.name = name
        self._folders = folders
        sys.meta_path.insert(0, self)

    def close(self) -> None:
        """Remove the modules. Their code that still runs cannot import more of them."""
        try:
            sys.meta_path.remove(self)
        except ValueError:
            return  # Already closed.
        # Copied in one step, as other threads may import meanwhile.
        for name in sys.modules.copy():
            if name == self.name or name.startswith(f"{self.name}."):
                sys.modules.pop(name, None)
        for path in list(sys.path_importer_cache):
            if any(path == folder or path.startswith(folder + os.sep) for folder in self._folders):
                sys.path_importer_cache.pop(path, None)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `MetaPathFinder`; finds modules below the folders."""
        if not fullname.startswith(f"{self.name}."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        return None if spec is None else self.with_fresh_loader(spec)

    def with_fresh_loader(self, spec: ModuleSpec) -> ModuleSpec:
        """Return the spec, with Triglot's loader for source files."""
        if isinstance(spec.loader, SourceFileLoader):
            spec.loader = self._loader(spec.loader.name, spec.loader.path)
        return spec

    def _loader(self, name: str, path: str) -> Loader:
        return FreshLoader(name, path)


class ModelModules(ModuleFinder):
    """The modules and packages directly in some folders, until `close()`.

    A package has an `__init__.py`. Names of the standard library keep their meaning. If the model's code prepends
    a folder within the first one to `sys.path`, that folder takes precedence: `import model` in a `model.py` then
    finds the `model.py` in there.

    `name` is the package in `sys.modules` that they are below, by default a new one.
    """

    kind: ClassVar[str] = "folders"
    """See `child_modules.KINDS`."""

    def __init__(self, folders: Sequence[Path], name: str = "") -> None:
        paths = [str(folder) for folder in folders]
        self._folder = folders[0].resolve()
        self._packages: dict[str, str] = {}
        self._own = {module.name for module in pkgutil.iter_modules(paths)} - sys.stdlib_module_names
        self.builtins = vars(builtins) | {"__import__": self.import_from_own}
        super().__init__(name or unique_name(self.kind, folders), paths)
        self._add_package(self.name, paths)

    def __contains__(self, name: str) -> bool:
        return name.partition(".")[0] in self._own

    def __str__(self) -> str:
        return ", ".join(sorted(self._own)) or "none"

    def import_module(self, name: str) -> ModuleType:
        """Import the model's module of that name, or else a global one. Raise as `importlib.import_module`."""
        return importlib.import_module(self.real_name(name))

    def real_name(self, name: str) -> str:
        """Return the name in `sys.modules` for the model's name of a module."""
        if name not in self:
            return name
        first = name.partition(".")[0]
        package = self._packages.get(first) or self._packages.setdefault(first, self._package_of(first))
        return f"{package}.{name}"

    def _package_of(self, name: str) -> str:
        """Return the package for the folder that contains the module of that name."""
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
        """Make the modules importable by their plain names for all code in the block; one model at a time."""
        with _plain_names:
            aliases = _Aliases(self)
            sys.meta_path.insert(0, aliases)
            token = running.set(self)
            try:
                yield
            finally:
                running.reset(token)
                sys.meta_path.remove(aliases)
                for name in aliases.imported:
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
        """Do as the `__import__` of the model's modules, with the signature of `builtins.__import__`."""
        # C code such as pickle imports for its caller, too: it passes a list, and then looks up the plain name.
        if level or name not in self or isinstance(fromlist, list):
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        module = builtins.__import__(self.real_name(name), globals, locals, fromlist or ())
        # `import a.b` expects a, `from a import b` expects a, too, and `from a.b import c` expects a.b.
        return module if fromlist else sys.modules[self.real_name(name.partition(".")[0])]


def remove_with(model: Model, model_class: type[Model], finder: ModuleFinder) -> None:
    """Remove the model's modules after it has been closed, or once it is garbage-collected without that."""
    weakref.finalize(model, finder.close).atexit = False
    # A weak reference, as the modules may refer to the model. A subclass's `close` need not call the base's.
    close = inspect.getattr_static(model_class, "close")
    served = weakref.ref(model)

    @functools.wraps(model_class.close)
    def close_and_remove(self: Model) -> None:
        try:
            close.__get__(self, model_class)()
        finally:
            if self is served():
                finder.close()

    model_class.close = close_and_remove  # type: ignore[method-assign]  # Each load has its own class.


class _SourceLoader(FreshLoader):
    """Executes a module with the `__import__` of its model."""

    def __init__(self, name: str, path: str, modules: ModelModules) -> None:
        super().__init__(name, path)
        self._modules = modules

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = self._modules.builtins
        super().exec_module(module)


class _Aliases(MetaPathFinder, Loader):
    """Finds a model's modules by their plain names; `imported` are the names that were imported."""

    def __init__(self, modules: ModelModules) -> None:
        self._modules = modules
        self._specs: dict[str, ModuleSpec | None] = {}

    @property
    def imported(self) -> list[str]:
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
        # The import system has set the spec of the alias; the module's own one is restored.
        assert module.__spec__ is not None
        module.__spec__ = self._specs[module.__spec__.name]


# --- plain names while models serve ---


class PlainNames(MetaPathFinder, Loader):
    """Finds the modules of the model whose code is running, for other code that it calls, such as unittest.

    Active from creation to `close()`. Names that exist globally keep their meaning.
    """

    def __init__(self) -> None:
        sys.meta_path.insert(0, self)

    def close(self) -> None:
        """Remove the names."""
        sys.meta_path.remove(self)
        for name, module in sys.modules.copy().items():  # Other threads may import meanwhile.
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
            free = found is None or found.loader is None  # A namespace package has the lowest precedence.
        else:
            free = isinstance(sys.modules.get(fullname.partition(".")[0]), _RunningModels)
        return ModuleSpec(fullname, self) if free else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """See `Loader`."""
        return _RunningModels(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """See `Loader`. Raise the exceptions of the model's own module."""
        module.__dir__()


class _RunningModels(ModuleType):
    """A proxy for the module of this name of the model whose code is running."""

    def __getattr__(self, name: str) -> Any:
        modules = running.get()
        if modules is None or self.__name__ not in modules:
            raise AttributeError(
                f"{self.__name__} is a module of a model's, usable only while that model's code runs"
            )
        return getattr(modules.import_module(self.__name__), name)

    def __dir__(self) -> list[str]:
        return list(self.__getattr__("__dict__"))


# --- in processes that a model's code starts ---


def spec_in_child(name: str, folders: Sequence[Path]) -> ModuleSpec:
    """See `child_modules.KINDS`."""
    PlainNames()
    return spec_of_own(ModelModules(folders, name))


def spec_of_own(modules: ModelModules) -> ModuleSpec:
    """Return the spec of the modules' package, in a process that runs the code of this model only."""
    running.set(modules)
    spec = ModuleSpec(modules.name, None, is_package=True)
    spec.submodule_search_locations = list(sys.modules[modules.name].__path__)
    return spec
