"""Backends by name, each imported when its first model is loaded."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from pathlib import Path

from triglot.core.errors import MissingDependency, ModelLoadError
from triglot.core.model import Model
from triglot.core.model_config import NO_CONFIG, ModelConfig

Backend = Callable[[Path, ModelConfig], Model]
BACKENDS = {
    "onnx": "triglot.backends.onnx:load",
    "predictor": "triglot.backends.predictor:load",
    "python": "triglot.backends.python:load",
    "sklearn": "triglot.backends.sklearn:load",
    "tensorflow": "triglot.backends.tensorflow:load",
    "torch": "triglot.backends.torch:load",
    "xgboost": "triglot.backends.xgboost:load",
}
"""Name → "module:function"; the function makes a loaded `Model` of a model's file and configuration."""
PACKAGES = {"joblib": "scikit-learn", "sklearn": "scikit-learn"}
"""What to install for a module, where that has another name or comes with it."""


def load(backend: str, file: Path, config: ModelConfig = NO_CONFIG) -> Model:
    """The loaded model of `file`; what `config` says of its devices and parameters is done.

    Raises `MissingDependency` when the backend's library is not installed, and `ModelLoadError` for
    everything else that keeps the model from loading.
    """
    module_name, function_name = BACKENDS[backend].split(":")
    try:
        function: Callable[[Path, ModelConfig], Model] = getattr(
            importlib.import_module(module_name), function_name
        )
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("triglot"):
            raise
        raise missing_dependency(file, f"the {backend} backend", error) from error
    except ImportError as error:
        raise ModelLoadError(f"{file}: the {backend} backend cannot be imported: {error}") from error
    try:
        return function(file, config)
    except ModelLoadError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelLoadError(f"{_place(file, error)}: {type(error).__name__}: {error}") from error


def missing_dependency(file: Path, what: str, error: ModuleNotFoundError) -> MissingDependency:
    """The error for a model that needs a module: what to install."""
    module = (error.name or str(error)).partition(".")[0]
    return MissingDependency(
        f"{file}: {what} needs {module}, which is not installed; run: pip install {PACKAGES.get(module, module)}"
    )


def _place(file: Path, error: BaseException) -> str:
    """The model's file, or the last line in its folder that the exception went through."""
    lines = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(file.parent)
    ]
    return lines[-1] if lines else str(file)
