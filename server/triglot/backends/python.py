"""Models written as a `triglot.Model` class in a Python file."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import sys
import weakref
from pathlib import Path
from types import ModuleType

from triglot.backends.model_modules import OwnFinder
from triglot.core.errors import ModelLoadError
from triglot.core.model import Model
from triglot.core.model_config import ModelConfig

_numbers = itertools.count()


def load(file: Path, config: ModelConfig) -> Model:
    """The model class of `file`, instantiated and loaded.

    The file is found by its location and never through `sys.path`, so its name cannot shadow a package; its
    neighbours are imported relatively (`from . import helper`). All of these modules are forgotten with the model:
    code of theirs that runs on after its `close` cannot import any more of them.

    Raises `ModelLoadError` when there is no model class, or more than one.
    """
    own = OwnFinder(f"triglot_model_{next(_numbers)}_{file.stem}", [str(file.parent)])
    try:
        model_class = _model_class(_import(file, own))
        model = model_class()
        _forget_with(model, model_class, own)
        vars(model)["model_config"] = config  # Past what a frozen dataclass forbids.
        model.load(file.parent)
    except BaseException:
        own.close()
        raise
    return model


def _import(file: Path, own: OwnFinder) -> ModuleType:
    spec = importlib.util.spec_from_file_location(own.name, file, submodule_search_locations=[str(file.parent)])
    if spec is None or spec.loader is None:
        raise ModelLoadError(f"{file}: not a Python file")
    module = importlib.util.module_from_spec(own.adopted(spec))
    # Dataclasses and relative imports look the module up by its name.
    sys.modules[own.name] = module
    spec.loader.exec_module(module)
    return module


def _forget_with(model: Model, model_class: type[Model], own: OwnFinder) -> None:
    """Forgets its modules after the model has been closed, or once it is gone without that."""
    weakref.finalize(model, own.close).atexit = False
    # Its modules may refer to the model, and would keep it. Its own `close` need not call ours.
    close = inspect.getattr_static(model_class, "close")
    served = weakref.ref(model)

    @functools.wraps(model_class.close)
    def close_and_forget(self: Model) -> None:
        try:
            close.__get__(self, model_class)()
        finally:
            if self is served():
                own.close()

    model_class.close = close_and_forget  # type: ignore[method-assign]


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
