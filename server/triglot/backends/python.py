"""Models written as a `triglot.Model` class in a Python file."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
from pathlib import Path
from types import ModuleType

from triglot.core.errors import ModelLoadError
from triglot.core.model import Model
from triglot.core.model_config import ModelConfig

_numbers = itertools.count()


def load(file: Path, config: ModelConfig) -> Model:
    """The model class of `file`, instantiated and loaded.

    The file is found by its location and never through `sys.path`, so its name cannot shadow a package; its
    neighbours are imported relatively (`from . import helper`).

    Raises `ModelLoadError` when there is no model class, or more than one.
    """
    model = _model_class(_import(file))()
    model.config = config
    model.load(file.parent)
    return model


def _import(file: Path) -> ModuleType:
    name = f"triglot_model_{next(_numbers)}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[str(file.parent)])
    if spec is None or spec.loader is None:
        raise ModelLoadError(f"{file}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and relative imports look the module up by its name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _model_class(module: ModuleType) -> type[Model]:
    found = [
        value
        for value in dict.fromkeys(filter(inspect.isclass, vars(module).values()))
        if issubclass(value, Model) and value.__module__ == module.__name__
    ]
    usable = [value for value in found if hasattr(value, "infer")]
    if not usable:
        raise ModelLoadError(f"{module.__file__}: no class here derives from triglot.Model and has an infer()")
    if len(usable) > 1:
        named = [value for value in usable if value.__name__ == "Model"]
        if not named:
            names = ", ".join(value.__name__ for value in usable)
            raise ModelLoadError(
                f"{module.__file__}: more than one model class ({names}); call the one to serve Model"
            )
        usable = named
    return usable[0]
