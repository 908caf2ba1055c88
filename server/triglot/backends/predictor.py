"""AI Platform's custom prediction routines (tfs 7.5), named by a `predictor.toml` in the model's folder:

    prediction_class = "my_module.MyPredictor"
    packages = ["my_package-0.1.tar.gz"]
    path = ["src"]

`packages` are source distributions, as they were deployed to AI Platform; `path` are folders of modules and
packages, the model's own one by default. The class is duck-typed: `from_path(model_dir)` is a class method,
`predict(instances, **kwargs)` takes decoded JSON and returns a JSON-serializable value. Its code runs in the
server, so files come from the configured repositories only.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import tomllib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import orjson

from triglot.backends.model_modules import ModelModules
from triglot.backends.parameters import warn_of_unknown
from triglot.core.errors import Internal, InvalidArgument, ModelLoadError, is_serving_error, text_of
from triglot.core.tensor import Array, object_array
from triglot.core.types import TensorSpec
from triglot.model.config import ModelConfig
from triglot.model.model import Model
from triglot.model.signature import DEFAULT_SIGNATURE, Signature
from triglot.platform.archives import TarError, unpack

log = logging.getLogger(__name__)

_ONLY_JSON = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME


def load(file: Path, config: ModelConfig) -> Model:
    """Returns the predictor that `file` describes.

    Raises `ModelLoadError` for errors in the file, the packages or the class.
    """
    warn_of_unknown(file, config, "predictor")
    routine = _read(file)
    with ExitStack() as opened:
        modules = ModelModules(_folders(file, routine, opened))
        opened.callback(modules.close)
        with modules.by_plain_names():
            predictor = _predictor(file, routine.prediction_class, modules)
        return PredictorModel(predictor, opened.pop_all())


class PredictorModel(Model):
    """A predictor, whose tensors contain JSON texts.

    `instances` [-1] has one element per instance, `parameters` [1] an object of keyword arguments (`{}` by
    default), `predictions` [1] the result of `predict`. `opened` is closed with the model.
    """

    platform = "predictor"
    speaks_json = True
    signatures = {
        DEFAULT_SIGNATURE: Signature(
            [TensorSpec("instances", "BYTES", [-1]), TensorSpec("parameters", "BYTES", [1])],
            [TensorSpec("predictions", "BYTES", [1])],
            defaults={"parameters": object_array([b"{}"], [1])},
        )
    }

    def __init__(self, predictor: Any, opened: ExitStack) -> None:
        self._predict: Callable[..., Any] = predictor.predict
        self._name = f"predict() of {type(predictor).__qualname__}"
        # The signature of the underlying function, as a keyword may have the name of its first argument, too.
        self._leading = [predictor] if hasattr(predictor.predict, "__func__") else []
        self._signature = inspect.signature(getattr(predictor.predict, "__func__", predictor.predict))
        self._opened = opened

    def infer(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Calls `predict`.

        Raises `InvalidArgument` for invalid JSON and for arguments that `predict` lacks, and `Internal` for a
        result that is not JSON-serializable and, with its text, for an exception of `predict`.
        """
        elements = inputs["instances"].ravel().tolist()
        instances = [_parse(f"instances[{at}]", element) for at, element in enumerate(elements)]
        parameters = _parse("parameters", inputs["parameters"].item())
        if not isinstance(parameters, dict):
            raise InvalidArgument("parameters: expected a JSON object of keyword arguments")
        try:
            self._signature.bind(*self._leading, instances, **parameters)
        except TypeError as error:
            raise InvalidArgument(f"parameters: predict() {error}") from None
        try:
            predictions = self._predict(instances, **parameters)
        except Exception as error:
            if is_serving_error(error):
                raise
            log.error("%s failed", self._name, exc_info=error)
            raise Internal(text_of(error) or type(error).__name__) from error
        return {"predictions": object_array([_serialize(predictions)], [1])}

    def close(self) -> None:
        """Removes the modules and the unpacked packages."""
        self._opened.close()


@dataclass(frozen=True, slots=True)
class _Routine:
    """The contents of a `predictor.toml`."""

    prediction_class: str
    packages: tuple[str, ...] = ()
    path: tuple[str, ...] = (".",)


def _read(file: Path) -> _Routine:
    content = tomllib.loads(file.read_text("utf-8"))
    known = [field.name for field in fields(_Routine)]
    if unknown := sorted(content.keys() - known):
        raise ModelLoadError(f"{file}: unknown key {unknown[0]!r}, expected {', '.join(known)}")
    name = content.get("prediction_class")
    if not isinstance(name, str) or "." not in name.strip("."):
        raise ModelLoadError(f"{file}: prediction_class: expected a name like 'module.Class', got {name!r}")
    for key in ("packages", "path"):
        value = content.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelLoadError(f"{file}: {key}: expected a list of names, got {value!r}")
    return _Routine(**content)


def _folders(file: Path, routine: _Routine, opened: ExitStack) -> list[Path]:
    """Returns the folders of the predictor's modules; unpacked packages are removed when `opened` is closed."""
    folders = [_below(file, name) for name in routine.path]
    for folder in folders:
        if not folder.is_dir():
            raise ModelLoadError(f"{file}: path: {folder} is not a folder")
    for name in routine.packages:
        unpacked = Path(opened.enter_context(TemporaryDirectory(prefix="triglot-package-")))
        folders += _unpack(file, _below(file, name), unpacked)
    return folders


def _below(file: Path, name: str) -> Path:
    folder = file.parent.absolute()
    path = Path(os.path.normpath(folder / name))
    if not path.is_relative_to(folder):
        raise ModelLoadError(f"{file}: {name!r} is not inside the model's folder")
    return path


def _unpack(file: Path, package: Path, target: Path) -> list[Path]:
    """Returns the folders of a source distribution's modules."""
    try:
        unpack(package, target)
    except (OSError, TarError) as error:
        raise ModelLoadError(f"{file}: packages: cannot unpack {package.name}: {error}") from error
    entries = list(target.iterdir())
    # A source distribution contains one folder, NAME-VERSION.
    top = entries[0] if len(entries) == 1 and entries[0].is_dir() else target
    return [folder for folder in (top / "src", top) if folder.is_dir()]


def _predictor(file: Path, name: str, modules: ModelModules) -> Any:
    """Returns the predictor that the class makes from the model's folder."""
    module_name, _, class_name = name.rpartition(".")
    try:
        module = modules.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{modules.real_name(module_name)}.".startswith(f"{error.name}."):
            raise
        raise ModelLoadError(
            f"{file}: prediction_class: no module {module_name!r}; the model has {modules}"
        ) from error
    predictor_class = getattr(module, class_name, None)
    if predictor_class is None:
        raise ModelLoadError(f"{file}: prediction_class: {module.__file__} has no {class_name!r}")
    if not callable(getattr(predictor_class, "from_path", None)):
        raise ModelLoadError(f"{file}: {name} has no class method from_path(model_dir)")
    predictor = predictor_class.from_path(str(file.parent.absolute()))
    if not callable(getattr(predictor, "predict", None)):
        raise ModelLoadError(
            f"{file}: from_path() of {name} returned {type(predictor).__name__}, which has no "
            "predict(instances, **kwargs)"
        )
    return predictor


# --- JSON with the extensions of Python's own module ---


def _parse(what: str, text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except ValueError:
        pass  # NaN and Infinity need the standard library; so do other errors, for its texts.
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{what}: expected JSON: {error}") from None


def _serialize(result: object) -> bytes:
    try:
        text = orjson.dumps(result, default=_plain, option=_ONLY_JSON)
        if b"null" not in text:  # orjson writes null for NaN and Infinity, too.
            return text
    except TypeError:
        pass  # Integers beyond 64 bits and keys that are not strings need the standard library.
    try:
        return json.dumps(result, default=_plain, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        message = (
            f"There was a problem processing the outputs: predict() returned a value with no JSON form: {error}"
        )
        log.error("%s", message)
        raise Internal(message) from error


def _plain(value: object) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
