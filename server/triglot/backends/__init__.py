"""Backends by name, each imported when its first model is loaded."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from pathlib import Path

from triglot.core.errors import MissingDependency, ModelLoadError
from triglot.core.model import Model

BACKENDS = {
    "onnx": "triglot.backends.onnx:load",
    "python": "triglot.backends.python:load",
}
"""Name → "module:function"; the function makes a loaded `Model` of a model's file."""


def load(backend: str, file: Path) -> Model:
    """The loaded model of `file`.

    Raises `MissingDependency` when the backend's library is not installed, and `ModelLoadError` for
    everything else that keeps the model from loading.
    """
    module_name, function_name = BACKENDS[backend].split(":")
    try:
        function: Callable[[Path], Model] = getattr(importlib.import_module(module_name), function_name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("triglot"):
            raise
        raise MissingDependency(
            f"{file}: the {backend} backend needs {error.name}, which is not installed; "
            f"run: pip install {error.name}"
        ) from error
    except ImportError as error:
        raise ModelLoadError(f"{file}: the {backend} backend cannot be imported: {error}") from error
    try:
        return function(file)
    except ModelLoadError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelLoadError(f"{_place(file, error)}: {type(error).__name__}: {error}") from error


def _place(file: Path, error: BaseException) -> str:
    """The model's file, or the last line in its folder that the exception went through."""
    lines = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(file.parent)
    ]
    return lines[-1] if lines else str(file)
