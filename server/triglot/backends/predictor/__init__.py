"""Custom prediction routines of AI Platform (tfs 7.5), named by a `predictor.toml` in the model's folder:

    prediction_class = "my_module.MyPredictor"
    packages = ["my_package-0.1.tar.gz"]
    path = ["src"]

`packages` are source distributions, as they were deployed to AI Platform; `path` are folders of modules and
packages, the model's own one by default. The class is duck-typed: `from_path(model_dir)` is a class method,
`predict(instances, **kwargs)` takes decoded JSON and returns a JSON-serializable value. Its code runs in the
server, so files come from the configured repositories only. A class without `from_path`, or a `handler_class`, is
Vertex AI's: see `vertex_routine`.
"""

from __future__ import annotations

import inspect
import logging
import os
import tomllib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from triglot.backends import warn_of_unknown
from triglot.backends.json_values import parse, serialize
from triglot.backends.model_modules import ModelModules
from triglot.backends.predictor import vertex_routine
from triglot.core.errors import Internal, InvalidArgument, ModelLoadError, is_serving_error, text_of
from triglot.core.tensor import Array, object_array
from triglot.core.types import TensorSpec
from triglot.model.config import ModelConfig
from triglot.model.model import Model, signature_of
from triglot.model.signature import DEFAULT_SIGNATURE, Signature
from triglot.platform.archives import TarError, unpack

log = logging.getLogger(__name__)


def load(file: Path, config: ModelConfig) -> Model:
    """Return the predictor that `file` describes.

    Raise `ModelLoadError` for errors in the file, the packages or the class.
    """
    warn_of_unknown(file, config, "predictor")
    routine = _read(file)
    with ExitStack() as opened:
        modules = ModelModules(_folders(file, routine, opened))
        opened.callback(modules.close)
        with modules.by_plain_names():
            predictor_class, handler_class = (
                _class(file, key, getattr(routine, key), modules) for key in ("prediction_class", "handler_class")
            )
            if handler_class is None and callable(getattr(predictor_class, "from_path", None)):
                predictor = _predictor(file, routine.prediction_class, predictor_class)
                return PredictorModel(predictor, opened.pop_all())
            if handler_class is None and not (
                inspect.isclass(predictor_class) and hasattr(predictor_class, "load")
            ):
                raise ModelLoadError(
                    f"{file}: {routine.prediction_class} has no class method from_path(model_dir), nor a method "
                    "load(artifacts_uri), as Vertex AI's have"
                )
            return vertex_routine.model_of(predictor_class, handler_class, file, config, opened)


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
        self._signature = signature_of(getattr(predictor.predict, "__func__", predictor.predict))
        self._opened = opened

    def infer(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Call `predict`.

        Raise `InvalidArgument` for invalid JSON and for arguments that `predict` lacks, and `Internal` for a
        result that is not JSON-serializable and, with its text, for an exception of `predict`.
        """
        elements = inputs["instances"].ravel().tolist()
        instances = [parse(f"instances[{at}]", element) for at, element in enumerate(elements)]
        parameters = parse("parameters", inputs["parameters"].item())
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
        return {"predictions": object_array([serialize("predict()", predictions)], [1])}

    def close(self) -> None:
        """Remove the modules and the unpacked packages."""
        self._opened.close()


@dataclass(frozen=True, slots=True)
class _Routine:
    """The contents of a `predictor.toml`."""

    prediction_class: str = ""
    handler_class: str = ""
    packages: tuple[str, ...] = ()
    path: tuple[str, ...] = (".",)


def _read(file: Path) -> _Routine:
    content = tomllib.loads(file.read_text("utf-8"))
    known = [field.name for field in fields(_Routine)]
    if unknown := sorted(content.keys() - known):
        raise ModelLoadError(f"{file}: unknown key {unknown[0]!r}, expected {', '.join(known)}")
    for key in ("prediction_class", "handler_class"):
        name = content.get(key, None if key == "prediction_class" and "handler_class" not in content else "a.b")
        if not isinstance(name, str) or "." not in name.strip("."):
            raise ModelLoadError(f"{file}: {key}: expected a name like 'module.Class', got {name!r}")
    for key in ("packages", "path"):
        value = content.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelLoadError(f"{file}: {key}: expected a list of names, got {value!r}")
    return _Routine(**content)


def _folders(file: Path, routine: _Routine, opened: ExitStack) -> list[Path]:
    """Return the folders of the predictor's modules; unpacked packages are removed when `opened` is closed."""
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
    """Return the folders of a source distribution's modules."""
    try:
        unpack(package, target)
    except (OSError, TarError) as error:
        raise ModelLoadError(f"{file}: packages: cannot unpack {package.name}: {error}") from error
    entries = list(target.iterdir())
    # A source distribution contains one folder, NAME-VERSION.
    top = entries[0] if len(entries) == 1 and entries[0].is_dir() else target
    return [folder for folder in (top / "src", top) if folder.is_dir()]


def _class(file: Path, key: str, name: str, modules: ModelModules) -> Any:
    """Return the class of a name, None of an empty one."""
    if not name:
        return None
    module_name, _, class_name = name.rpartition(".")
    try:
        module = modules.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{modules.real_name(module_name)}.".startswith(f"{error.name}."):
            raise
        raise ModelLoadError(f"{file}: {key}: no module {module_name!r}; the model has {modules}") from error
    found = getattr(module, class_name, None)
    if found is None:
        raise ModelLoadError(f"{file}: {key}: {module.__file__} has no {class_name!r}")
    return found


def _predictor(file: Path, name: str, predictor_class: Any) -> Any:
    """Return the predictor that the class makes from the model's folder."""
    predictor = predictor_class.from_path(str(file.parent.absolute()))
    if not callable(getattr(predictor, "predict", None)):
        raise ModelLoadError(
            f"{file}: from_path() of {name} returned {type(predictor).__name__}, which has no "
            "predict(instances, **kwargs)"
        )
    return predictor
