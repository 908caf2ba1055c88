"""Models written as a class in a Python file: a `triglot.Model`, or Triton's `TritonPythonModel`."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from triglot import parts
from triglot.backends import foreign_classes, missing_dependency
from triglot.backends.child_modules import unique_name
from triglot.backends.foreign_classes import mentions
from triglot.backends.model_modules import ModelModules, ModuleFinder, remove_with
from triglot.core.errors import Code, MissingDependency, ModelLoadError, NeedsProcess
from triglot.model import tensor_types
from triglot.model.config import NO_CONFIG, REMOTE_EXECUTIONS, ModelConfig
from triglot.model.model import Model, is_async
from triglot.model.reshaping import warn_of_reshapes
from triglot.model.scheduling_rules import check_ray

log = logging.getLogger(__name__)

MISSPELT = 0.9
"""Similarity to one of a model's attributes from which a name counts as misspelt."""
TRITON_CLASS = "TritonPythonModel"


def load(file: Path, config: ModelConfig) -> Model:
    """Return the model class of `file`, instantiated and loaded.

    The file is loaded by its path and not through `sys.path`, so its name cannot shadow a package; its neighbours
    are imported relatively (`from . import helper`). All of these modules are removed with the model: their code
    that runs on after its `close` cannot import more of them.

    A file that contains `TritonPythonModel` is imported as in Triton, with Triton's utility module, and its
    neighbours by their plain names, too; a `triglot.Model` in it is served like any other.

    Raise `ModelLoadError` when there is no model class, or more than one, and for a `load` or `close` that is not
    a plain function; `NeedsProcess` when the class requires a process and the configuration does not set
    `execution`.
    """
    source = file.read_bytes()
    if TRITON_CLASS.encode() in source:
        return _load_tritons(file, config)
    if mentions(source):
        foreign_classes.provide(source)
        return _load_foreign(file, config)
    finder = ModuleFinder(unique_name("file", [file]), [str(file.parent)])
    return _load(file, config, _import(file, finder, finder.name), finder)


def _load_tritons(file: Path, config: ModelConfig) -> Model:
    try:
        loading = parts.load_module("backend", "triton_python")
    except parts.MissingPart as error:
        raise MissingDependency(f"{file}: {error}") from error
    modules = loading.modules_of(file, config)
    try:
        with modules.by_plain_names():
            module = _import(file, modules, f"{modules.name}.{file.stem}")
        model_class = getattr(module, TRITON_CLASS, None)
        if inspect.isclass(model_class) and not _usable_classes(module):
            model: Model = loading.model_of(file, config, model_class, modules)
            return model
    except BaseException:
        modules.close()
        raise
    return _load(file, config, module, modules)


def _load_foreign(file: Path, config: ModelConfig) -> Model:
    """Load another server's class, or a `triglot.Model` in a file that names one; neighbours have plain names."""
    modules = ModelModules([file.parent])
    try:
        with modules.by_plain_names():
            module = _import(file, modules, f"{modules.name}.{file.stem}")
            model = None if _usable_classes(module) else foreign_classes.model_of(module, file, config)
    except ModuleNotFoundError as error:
        modules.close()
        if (error.name or "").partition(".")[0] in foreign_classes.CLASSES:
            raise missing_dependency(file, "the model", error) from error
        raise
    except BaseException:
        modules.close()
        raise
    if model is None:
        return _load(file, config, module, modules)
    warn_of_reshapes(file, config)
    remove_with(model, type(model), modules)
    return model


def _load(file: Path, config: ModelConfig, module: ModuleType, finder: ModuleFinder) -> Model:
    try:
        model_class = _model_class(file, module)
        _check(file, model_class, config)
        if (execution := model_class.execution) in REMOTE_EXECUTIONS and not config.execution:
            if execution == "ray":
                check_ray(model_class)
            text = f"{file}: execution {execution!r}: expected to be loaded by a server"
            raise NeedsProcess(text, execution, model_class.ray if execution == "ray" else None)
        warn_of_reshapes(file, config)
        model = model_class()
        remove_with(model, model_class, finder)
        return _loaded(model, file, config)
    except BaseException:
        finder.close()
        raise


def instance_of(model: Model | type[Model], file: Path) -> Model:
    """Return the model, or an instance of the class, loaded as if it were in `file`. Raise as `load`."""
    model_class = model if isinstance(model, type) else type(model)
    if not hasattr(model, "infer"):
        raise ModelLoadError(f"{file}: {model_class.__name__} has no infer()")
    _check(file, model_class, NO_CONFIG)
    return _loaded(model() if isinstance(model, type) else model, file, NO_CONFIG)


def _check(file: Path, model_class: type[Model], config: ModelConfig) -> None:
    _check_plain(file, model_class)
    if config.execution not in REMOTE_EXECUTIONS:  # Otherwise each process would log it.
        _warn_of_misspelt(file, model_class)


def _loaded(model: Model, file: Path, config: ModelConfig) -> Model:
    vars(model)["model_config"] = config  # Also works for a frozen dataclass.
    model.load(file.parent)
    try:
        tensor_types.declare(model)
    except ValueError as error:
        raise ModelLoadError(f"{file}: {error}", Code.INVALID_ARGUMENT) from error
    return model


def _import(file: Path, finder: ModuleFinder, name: str) -> ModuleType:
    """Import the module `name`. Close `finder` on failure."""
    try:
        spec = _spec(file, finder, name)
        module = importlib.util.module_from_spec(spec)
        # Dataclasses and relative imports look up the module by its name.
        sys.modules[name] = module
        assert spec.loader is not None
        spec.loader.exec_module(module)
    except BaseException:
        finder.close()
        raise
    return module


def _spec(file: Path, finder: ModuleFinder, name: str) -> ModuleSpec:
    """Return the spec of the module `name`; the finder's own has its neighbours below it."""
    folders = [str(file.parent)] if name == finder.name else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    if spec is None or spec.loader is None:
        raise ModelLoadError(f"{file}: not a Python file")
    return finder.with_fresh_loader(spec)


def spec_in_child(name: str, paths: Sequence[Path]) -> ModuleSpec:
    """See `child_modules.KINDS`; `paths` is the model's file."""
    (file,) = paths
    return _spec(file, ModuleFinder(name, [str(file.parent)]), name)


def _model_classes(module: ModuleType) -> list[type[Model]]:
    return [
        value
        for value in dict.fromkeys(filter(inspect.isclass, vars(module).values()))
        if issubclass(value, Model) and value.__module__ == module.__name__
    ]


def _usable_classes(module: ModuleType) -> list[type[Model]]:
    return [value for value in _model_classes(module) if hasattr(value, "infer")]


def _model_class(file: Path, module: ModuleType) -> type[Model]:
    found, usable = _model_classes(module), _usable_classes(module)
    if not usable:
        lists = [value.__name__ for value in found if value.infer_batch is not None]
        hint = f": {lists[0]} has infer_batch but no infer" if lists else ""
        raise ModelLoadError(f"{file}: found no subclass of triglot.Model with an infer(){hint}")
    if len(usable) > 1:
        named = [value for value in usable if value.__name__ == "Model"]
        if not named:
            names = ", ".join(value.__name__ for value in usable)
            raise ModelLoadError(f"{file}: more than one model class ({names}); name the one to serve Model")
        usable = named
    return usable[0]


def _warn_of_misspelt(file: Path, model_class: type[Model]) -> None:
    """Warns of attributes that probably are misspelt attributes of a model."""
    known = set(vars(Model)["__annotations__"])
    own: dict[str, Any] = {}
    for base in model_class.__mro__:
        if base.__module__.partition(".")[0] == "triglot":
            known |= set(vars(base))
        else:
            own |= vars(base)
    known = {name for name in known if not name.startswith("_")} - own.keys()
    for name in sorted(own.keys() - vars(object).keys()):
        if near := difflib.get_close_matches(name, known, n=1, cutoff=MISSPELT):
            log.warning("%s: %s.%s: did you mean %r?", file, model_class.__name__, name, near[0])


def _check_plain(file: Path, model_class: type[Model]) -> None:
    for name in ("load", "close"):
        function = inspect.unwrap(getattr(model_class, name))
        if is_async(function):
            raise ModelLoadError(
                f"{file}: {model_class.__name__}.{name}: expected a plain function, which runs on a thread, got "
                "async def; only infer may be async"
            )
