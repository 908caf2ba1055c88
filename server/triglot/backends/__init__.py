"""Backends by name; each is imported when its first model is loaded."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable, Collection
from pathlib import Path

from triglot import parts
from triglot.core.errors import MissingDependency, ModelLoadError, text_of
from triglot.model.config import NO_CONFIG, ModelConfig
from triglot.model.model import Model
from triglot.model.reshaping import warn_of_reshapes

RESHAPING = ("ensemble", "onnx", "python")
"""Backends that support `reshape` of a configuration."""


def load(backend: str, file: Path, config: ModelConfig = NO_CONFIG) -> Model:
    """Return the loaded model of `file`, with the devices and parameters of `config` applied.

    Raise `MissingDependency` if the backend's library is not installed, and `ModelLoadError` for any other
    failure.
    """
    if backend == "xgboost" and _begins_as_lightgbm(file):
        backend = "lightgbm"
    try:
        function: Callable[[Path, ModelConfig], Model] = parts.load("backend", backend)
    except parts.MissingPart as error:
        raise MissingDependency(f"{file}: {error}") from error
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


def _begins_as_lightgbm(file: Path) -> bool:
    """Whether a `model.bst` is LightGBM's: KServe and MLServer have that name for it, too."""
    try:
        with file.open("rb") as opened:
            return opened.read(5) == b"tree\n"
    except OSError:
        return False  # The backend says what is wrong.


def missing_dependency(file: Path, what: str, error: ModuleNotFoundError) -> MissingDependency:
    """Return the error for a model that needs a missing module; it says what to install."""
    return MissingDependency(f"{file}: {parts.missing_text(what, error)}")


def described(file: Path, error: BaseException) -> str:
    """Return the text of an exception that a model's own code raised, with its place."""
    kind = type(error).__name__
    if isinstance(error, SyntaxError) and error.filename and _is_own(file, error.filename):
        place = f"{error.filename}:{error.lineno}" if error.lineno else error.filename
        line = f": {error.text.strip()!r}" if error.text else ""
        return f"{place}: {kind}: {error.msg}{line}"
    return f"{_place(file, error)}: {kind}: {text_of(error)}"


def _place(file: Path, error: BaseException) -> str:
    """Return the last line in the model's folder that the exception passed through, or the model's file."""
    lines = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if _is_own(file, frame.filename)
    ]
    return lines[-1] if lines else str(file)


def _is_own(file: Path, other: str) -> bool:
    return Path(other).is_relative_to(file.parent.absolute())


log = logging.getLogger(__name__)


def warn_of_unknown(file: Path, config: ModelConfig, backend: str, known: Collection[str] = ()) -> None:
    """Log a warning for each parameter that is not `known`."""
    for key in config.parameters:
        if key not in known:
            log.warning(
                "%s: parameters: %s: unknown, ignored; the %s backend knows %s",
                config.source or file,
                key,
                backend,
                ", ".join(known) or "none",
            )


_PLACE = re.compile(r"\[[\d:]+\] \S+:\d+: ")
_TRACE = "\nStack trace:"


def error_text(error: Exception) -> str:
    """Return the text without the times, source files and stack traces that XGBoost includes."""
    return _PLACE.sub("", str(error)).partition(_TRACE)[0].strip()
