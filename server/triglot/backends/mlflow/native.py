"""Flavors that are read without MLflow, where the result is that of its python_function."""

from __future__ import annotations

import importlib
import logging
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from triglot import backends, parts
from triglot.backends import described
from triglot.backends.columns import INPUT, Inputs, exact
from triglot.backends.mlflow.description import DATATYPES, Description, missing_module
from triglot.backends.mlflow.model import MLflowModel
from triglot.backends.mlflow.pyfunc import CONTENT_TYPE, TENSORS, PythonFunction
from triglot.core.call import Call
from triglot.core.errors import InvalidArgument, MissingDependency, ModelLoadError
from triglot.core.tensor import Array
from triglot.core.types import Answer, TensorSpec
from triglot.model.config import NO_CONFIG
from triglot.model.model import Model, signature_of

log = logging.getLogger(__name__)

Flavor = Mapping[str, Any]


def native_model(description: Description, flavor: str = "") -> Model | None:
    """Return the model of the named flavor, or of any; None if only MLflow can answer as MLflow does.

    Raise `MissingDependency` without the flavor's own library.
    """
    names = [name for name in ([flavor] if flavor else _FLAVORS) if name in description.flavors.keys() & _FLAVORS]
    for name in names:
        options = description.flavors[name]
        if options.get("code"):  # Modules of its own, which MLflow puts on the path.
            return None
        try:
            return _FLAVORS[name](description, options)
        except MissingDependency:
            raise
        except ModelLoadError as error:
            log.warning("%s; MLflow is to load the model", error)
    return None


class BackendModel(MLflowModel):
    """A model of one of our own backends, `inner`, with the inputs of the signature."""

    def __init__(self, description: Description, inner: Model) -> None:
        super().__init__(description)
        self._inner = inner
        self._takes_call = len(signature_of(inner.infer).parameters) > 1
        if not self._fields:
            self.inputs, self.columns = inner.inputs, inner.columns
        if not self.outputs:
            (output,) = inner.outputs
            self.outputs = [TensorSpec(self._output, output.datatype, output.shape)]
        names = {spec.name for spec in inner.columns}
        self._by_name = bool(self._fields) and names == {field.name for field in self._fields}
        if not self._by_name and any(field.spec.datatype == "BYTES" for field in self._fields):
            raise ModelLoadError(f"{description.file}: the model does not name the columns of its signature")

    def predict(self, inputs: Inputs, call: Call) -> Answer:
        """See `MLflowModel`."""
        if self._fields and not self._by_name:
            inputs = {INPUT: _matrix(inputs)}
        (result,) = (self._inner.infer(inputs, call) if self._takes_call else self._inner.infer(inputs)).values()
        return Answer({self._output: result})

    def close(self) -> None:
        """See `Model`."""
        self._inner.close()


def _matrix(columns: Inputs) -> Array:
    """Return the columns as a matrix. Raise `InvalidArgument` for what doubles cannot hold."""
    try:
        return np.column_stack([exact(array, np.dtype(np.float64)) for array in columns.values()])
    except ValueError as error:
        raise InvalidArgument(str(error)) from None


class OnnxModel(MLflowModel):
    """A graph, whose tensors are named as in the file; MLflow passes doubles on as its floats."""

    def __init__(self, description: Description, inner: Model) -> None:
        super().__init__(description)
        self._inner = inner
        self._names = {
            field.name: field.name if field.named else spec.name
            for field, spec in zip(description.inputs, inner.inputs, strict=True)
        }
        self._floats = {spec.name for spec in inner.inputs if spec.datatype == "FP32"}
        self.outputs = inner.outputs

    def predict(self, inputs: Inputs, call: Call) -> Answer:
        """See `MLflowModel`."""
        given = {self._names[name]: array for name, array in inputs.items()}
        feed = {
            name: array.astype(np.float32) if name in self._floats and array.dtype == np.float64 else array
            for name, array in given.items()
        }
        return Answer(self._inner.infer(feed), {CONTENT_TYPE: TENSORS})

    def close(self) -> None:
        """See `Model`."""
        self._inner.close()


class ExportedModel(MLflowModel):
    """A program of torch.export, of one tensor."""

    def __init__(self, description: Description, inner: Model) -> None:
        super().__init__(description)
        self._inner = inner

    def predict(self, inputs: Inputs, call: Call) -> Answer:
        """See `MLflowModel`."""
        (given,), (array,) = self._inner.inputs, inputs.values()
        (result,) = self._inner.infer({given.name: array}).values()
        return Answer({self._output: result})

    def close(self) -> None:
        """See `Model`."""
        self._inner.close()


class Estimator:
    """What MLflow makes of an estimator: its function `name`, called with the table as it is."""

    def __init__(self, found: Any, name: str) -> None:
        self._function = getattr(found, name)

    def predict(self, data: Any, params: object = None) -> Any:
        """Call the function; as in MLflow, `params` do not reach it."""
        return self._function(data)


# --- flavors ---


def _sklearn(description: Description, options: Flavor) -> Model | None:
    file = _file(description, options, "pickled_model")
    name = str(description.python_function.get("predict_fn", "predict"))
    found = _unpickled(description, file, options)
    if not description.inputs:
        if name != "predict":
            return None
        return BackendModel(description, _model_of(file, found))
    if not hasattr(found, name):
        raise ModelLoadError(f"{file}: {type(found).__name__} has no {name}, which predict_fn names")
    return PythonFunction(description, Estimator(found, name), (TypeError, ValueError))


def _xgboost(description: Description, options: Flavor) -> Model | None:
    if description.params or not _is_table_of_numbers(description):
        return None
    file = _file(description, options, "data")
    module, _, name = str(options.get("model_class", "xgboost.core.Booster")).rpartition(".")
    if name == "Booster":
        return BackendModel(description, backends.load("xgboost", file))
    if module != "xgboost.sklearn":
        return None
    try:
        found = getattr(importlib.import_module(module), name)()
    except ModuleNotFoundError as error:
        raise missing_module(description, error) from error
    found.load_model(file)
    return BackendModel(description, _model_of(file, found))


def _lightgbm(description: Description, options: Flavor) -> Model | None:
    if description.params or not _is_table(description):
        return None
    file = _file(description, options, "data")
    if str(options.get("model_class", "lightgbm.basic.Booster")).endswith(".Booster"):
        return BackendModel(description, backends.load("lightgbm", file))
    return BackendModel(description, _model_of(file, _unpickled(description, file, options)))


def _catboost(description: Description, options: Flavor) -> Model | None:
    if (
        description.params
        or not _is_table(description)
        or options.get("save_format", "cbm") not in ("cbm", "json")
    ):
        return None
    if options.get("model_type") not in ("CatBoostClassifier", "CatBoostRegressor"):
        return None  # Of other classes, `predict` returns other values.
    return BackendModel(description, backends.load("catboost", _file(description, options, "data")))


def _onnx(description: Description, options: Flavor) -> Model | None:
    if not description.takes_tensors or options.get("onnx_session_options"):
        return None
    inner = backends.load("onnx", _file(description, options, "data"))
    if len(description.inputs) == len(inner.inputs) and all(
        field.spec.datatype == spec.datatype or (field.spec.datatype, spec.datatype) == ("FP64", "FP32")
        for field, spec in _paired(description, inner)
    ):
        return OnnxModel(description, inner)
    inner.close()
    return None


def _pytorch(description: Description, options: Flavor) -> Model | None:
    file = _file(description, options, "model_data") / "model.pt2"
    if not file.is_file() or description.params or not description.takes_tensors or description.inputs[0].named:
        return None
    inner = backends.load("torch", file)
    declared = [field.spec.datatype for field in description.inputs]
    if [spec.datatype for spec in inner.inputs] == declared and len(inner.outputs) == 1:
        return ExportedModel(description, inner)
    inner.close()
    return None


def _paired(description: Description, inner: Model) -> Any:
    by_name = {spec.name: spec for spec in inner.inputs}
    for field, spec in zip(description.inputs, inner.inputs, strict=True):
        yield field, by_name.get(field.name, TensorSpec("", "BYTES", None)) if field.named else spec


_FLAVORS: Mapping[str, Callable[[Description, Flavor], Model | None]] = {
    "xgboost": _xgboost,
    "lightgbm": _lightgbm,
    "catboost": _catboost,
    "onnx": _onnx,
    "sklearn": _sklearn,
    "pytorch": _pytorch,
}


def _is_table(description: Description) -> bool:
    """Whether the inputs are columns of numbers and text, one matrix of numbers, or not known."""
    if description.takes_tensors:
        return _is_table_of_numbers(description)
    return all(
        field.kind in DATATYPES and field.kind not in ("binary", "datetime") for field in description.inputs
    )


def _is_table_of_numbers(description: Description) -> bool:
    if not description.takes_tensors:
        return all(field.spec.datatype != "BYTES" for field in description.inputs)
    (field, *others) = description.inputs
    return not others and field.spec.datatype != "BYTES" and len(field.spec.shape or ()) == 2


def _file(description: Description, options: Flavor, key: str) -> Path:
    """Return the file that a flavor names, which lies in the model's folder. Raise `ModelLoadError`."""
    name = options.get(key) or description.python_function.get("data")
    file = description.folder / str(name)
    if name is None or not file.resolve().is_relative_to(description.folder.resolve()) or not file.exists():
        raise ModelLoadError(f"{description.file}: expected a file in its folder as {key}, got {name!r}")
    return file


def _unpickled(description: Description, file: Path, options: Flavor) -> Any:
    """Return the object in a file, which may run any code, as in every flavor. Raise `ModelLoadError`."""
    kind = options.get("serialization_format", "pickle")
    try:
        if kind == "skops":
            skops = importlib.import_module("skops.io")
            return skops.load(file, trusted=options.get("skops_trusted_types"))
        with file.open("rb") as opened:
            return pickle.load(opened)
    except ModuleNotFoundError as error:
        raise missing_module(description, error) from error
    except Exception as error:
        raise ModelLoadError(described(file, error)) from error


def _model_of(file: Path, found: Any) -> Model:
    try:
        model: Model = parts.load_module("backend", "sklearn").model_of(file, found, NO_CONFIG)
    except parts.MissingPart as error:
        raise MissingDependency(f"{file}: {error}") from error
    return model
