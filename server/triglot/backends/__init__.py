"""Backends by name, each imported when its first model is loaded."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from pathlib import Path

from triglot.core.errors import MissingDependency, ModelLoadError, text_of
from triglot.model.config import NO_CONFIG, ModelConfig
from triglot.model.model import Model
from triglot.model.reshaping import warn_of_reshapes

BACKENDS = {
    "ensemble": "triglot.backends.ensemble:load",
    "mlserver": "triglot.backends.mlserver:load",
    "onnx": "triglot.backends.onnx:load",
    "predictor": "triglot.backends.predictor:load",
    "python": "triglot.backends.python:load",
    "sklearn": "triglot.backends.sklearn:load",
    "tensorflow": "triglot.backends.tensorflow:load",
    "torch": "triglot.backends.torch:load",
    "xgboost": "triglot.backends.xgboost:load",
}
"""Name → "module:function"; the function makes a loaded `Model` of a model's file and configuration."""
RESHAPING = ("ensemble", "onnx", "python")
"""Those that heed a configuration's `reshape`."""
EXTRAS = {
    "flask": "grps",
    "joblib": "sklearn",
    "onnxruntime": "onnx",
    "pynvml": "nvidia",
    "sklearn": "sklearn",
    "tensorflow": "tensorflow",
    "torch": "torch",
    "xgboost": "xgboost",
}
"""The extra of this distribution that a module comes with."""


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
    if backend not in RESHAPING:
        warn_of_reshapes(file, config)
    try:
        return function(file, config)
    except ModelLoadError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelLoadError(described(file, error)) from error


def missing_dependency(file: Path, what: str, error: ModuleNotFoundError) -> MissingDependency:
    """The error for a model that needs a module: what to install."""
    module = (error.name or str(error)).partition(".")[0]
    package = f"'triglot[{EXTRAS[module]}]'" if module in EXTRAS else module
    return MissingDependency(f"{file}: {what} needs {module}, which is not installed; run: pip install {package}")


def described(file: Path, error: BaseException) -> str:
    """What a model's own code has raised, and where."""
    kind = type(error).__name__
    if isinstance(error, SyntaxError) and error.filename and _is_own(file, error.filename):
        place = f"{error.filename}:{error.lineno}" if error.lineno else error.filename
        line = f": {error.text.strip()!r}" if error.text else ""
        return f"{place}: {kind}: {error.msg}{line}"
    return f"{_place(file, error)}: {kind}: {text_of(error)}"


def _place(file: Path, error: BaseException) -> str:
    """The model's file, or the last line in its folder that the exception went through."""
    lines = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if _is_own(file, frame.filename)
    ]
    return lines[-1] if lines else str(file)


def _is_own(file: Path, other: str) -> bool:
    return Path(other).is_relative_to(file.parent.absolute())
