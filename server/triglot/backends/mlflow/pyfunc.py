"""python_function: any model that MLflow itself can load and call."""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from triglot.backends import error_text, missing_dependency
from triglot.backends.columns import Inputs, parsed, shown
from triglot.backends.json_values import serialize
from triglot.backends.mlflow.description import Description, Field, missing_module
from triglot.backends.mlflow.inputs import from_base64, is_missing
from triglot.backends.mlflow.model import MLflowModel
from triglot.core.call import Call
from triglot.core.errors import InvalidArgument, ModelLoadError
from triglot.core.tensor import Array, datatype_of, object_array
from triglot.core.types import Answer, ParameterValue
from triglot.model.model import Model
from triglot.model.signature import INSTANCES

log = logging.getLogger(__name__)

CONTENT_TYPE = "content_type"
"""Parameter of requests and responses, as MLServer has it: what the tensors are."""
FRAME, TENSORS, JSON, ROW = "pd", "dict", "json", "row"
"""Content types: columns of a DataFrame, tensors by name, JSON in one element, an object; else an array."""


def python_function(description: Description) -> Model:
    """Return the model as MLflow loads it. Raise `ModelLoadError`, and `MissingDependency` without a library."""
    if not description.python_function:
        raise ModelLoadError(
            f"{description.file}: expected the flavor python_function, found {', '.join(description.flavors)}"
        )
    # It reports its use to its makers otherwise.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    try:
        pyfunc = importlib.import_module("mlflow.pyfunc")
        exceptions = importlib.import_module("mlflow.exceptions")
    except ModuleNotFoundError as error:
        raise missing_dependency(description.file, "a model in MLflow's format", error) from error
    try:
        loaded = pyfunc.load_model(str(description.folder))
    except ModuleNotFoundError as error:
        raise missing_module(description, error) from error
    except exceptions.MlflowException as error:
        raise ModelLoadError(f"{description.file}: MLflow cannot load it: {error}") from error
    return PythonFunction(description, loaded, (exceptions.MlflowException,))


class PythonFunction(MLflowModel):
    """A model that MLflow loaded, or what stands for one: `loaded.predict` gets a DataFrame, an array or a dict.

    `refusals` are its errors that are the request's fault.

    The result is one output, of an array, a list or a scalar; one for each column of a DataFrame, and for each
    array of a dict; or else its JSON in one element.
    """

    def __init__(self, description: Description, loaded: Any, refusals: tuple[type[Exception], ...]) -> None:
        super().__init__(description)
        try:
            self._pandas = importlib.import_module("pandas")
        except ModuleNotFoundError as error:
            raise missing_dependency(description.file, "a model in MLflow's format", error) from error
        self._loaded = loaded
        self._refusals = refusals
        self._params = {str(param["name"]): param for param in description.params}
        self._from_type_hint = description.from_type_hint

    def predict(self, inputs: Inputs, call: Call) -> Answer:
        """See `MLflowModel`. Raise `InvalidArgument` with the reason for what is refused."""
        try:
            result = self._loaded.predict(self._data(inputs, call), params=self._params_of(call) or None)
        except self._refusals as error:
            raise InvalidArgument(error_text(error)) from error
        return self._answer(result)

    # --- what goes in ---

    def _data(self, inputs: Inputs, call: Call) -> Any:
        """Return the data in the form that the signature says, or the request without one."""
        if self._fields:
            if self._from_type_hint:
                return self._elements(inputs)
            return self._tensors(inputs) if self._takes_tensors else self._frame(inputs)
        return self._undeclared(inputs, call.parameters.get(CONTENT_TYPE))

    def _undeclared(self, inputs: Inputs, kind: object) -> Any:
        """Return data without a signature: as the request's content type says, or as they look."""
        if INSTANCES in inputs:
            rows = parsed(inputs[INSTANCES])
            if kind == FRAME:
                return self._pandas.DataFrame(rows)
            if kind == ROW:
                return rows[0]
            if not all(isinstance(row, dict) for row in rows):
                return np.array(rows)
            return {name: np.array([row.get(name) for row in rows]) for name in dict.fromkeys(chain(*rows))}
        plain = {name: _text(array) for name, array in inputs.items()}
        if kind == FRAME:
            return self._pandas.DataFrame({name: list(array.reshape(len(array))) for name, array in plain.items()})
        return next(iter(plain.values())) if len(plain) == 1 and kind != TENSORS else plain

    def _elements(self, inputs: Inputs) -> list[Any]:
        """Return a list for a model with type hints: of its only column's values, or of objects."""
        columns = {
            field.name: self._values(field, inputs[field.name]) for field in self._fields if field.name in inputs
        }
        if len(self._fields) == 1 and not self._fields[0].named:
            return next(iter(columns.values()))
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _tensors(self, inputs: Inputs) -> Any:
        arrays = {field.name: _text(inputs[field.name]) for field in self._fields}
        return arrays if self._fields[0].named else next(iter(arrays.values()))

    def _frame(self, inputs: Inputs) -> Any:
        columns = {
            field.name: self._values(field, inputs[field.name]) for field in self._fields if field.name in inputs
        }
        frame = self._pandas.DataFrame(columns)
        if not self._fields[0].named:
            frame.columns = range(len(frame.columns))
        return frame

    def _values(self, field: Field, array: Array) -> Any:
        """Return a column for a DataFrame: numbers as they are, text as objects of its type."""
        if field.spec.datatype != "BYTES":
            return array
        try:
            if field.kind == "binary":
                return self._pandas.Series(
                    [None if value is None else from_base64(value) for value in array.tolist()], dtype=object
                )
            if field.kind == "datetime":
                return self._pandas.to_datetime([_decoded(value) for value in array.tolist()])
            if field.kind == "string":
                return [_string(value) for value in array.tolist()]
            values = [json.loads(value) if isinstance(value, bytes) else value for value in array.tolist()]
            return self._pandas.Series(values, dtype=object)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgument(f"column '{field.name}': {error}") from None

    def _params_of(self, call: Call) -> dict[str, Any]:
        """Return the parameters that the signature names; lists come as JSON."""
        return {
            name: _param(name, call.parameters[name], is_list=bool(param.get("shape")))
            for name, param in self._params.items()
            if name in call.parameters
        }

    # --- what comes out ---

    def _answer(self, result: Any) -> Answer:
        pandas = self._pandas
        try:
            if isinstance(result, pandas.DataFrame):
                return Answer({str(name): _column(result[name]) for name in result}, {CONTENT_TYPE: FRAME})
            if isinstance(result, pandas.Series):
                return Answer({self._output: _column(result)})
            if isinstance(result, dict) and result:
                return Answer(
                    {str(name): _array(value) for name, value in result.items()}, {CONTENT_TYPE: TENSORS}
                )
            return Answer({self._output: _array(result)})
        except (TypeError, ValueError):
            if isinstance(result, pandas.DataFrame | pandas.Series):
                result = json.loads(result.to_json(orient="records", date_format="iso"))
            text = serialize("the model", result)
            return Answer({self._output: object_array([text], (1,))}, {CONTENT_TYPE: JSON})


def _text(array: Array) -> Array:
    """Return texts as `str`, numbers as they are."""
    if not array.dtype.hasobject:
        return array
    return object_array([_string(value) for value in array.ravel().tolist()], array.shape)


def _string(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    if is_missing(value):
        return None
    if not isinstance(value, str):
        raise ValueError(f"expected text, got {shown(value)}")
    return value


def _decoded(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _param(name: str, value: ParameterValue, *, is_list: bool) -> Any:
    if not is_list:
        return value
    try:
        found = json.loads(value) if isinstance(value, str) else None
    except ValueError:
        found = None
    if not isinstance(found, list):
        raise InvalidArgument(f"parameter {name}: expected the JSON of a list, got {value!r:.60}")
    return found


def _column(series: Any) -> Array:
    """Return a column of a DataFrame. Raise `TypeError` for one that is no tensor."""
    if series.dtype.kind == "M":
        return object_array([value.isoformat().encode() for value in series.tolist()], (len(series),))
    return _array(series.to_numpy())


def _array(value: Any) -> Array:
    """Return an array, a list or a scalar as an array of a datatype, text as bytes. Raise `TypeError`."""
    array: Array = np.asarray(value)
    datatype_of(array)
    elements = array.ravel().tolist()
    if isinstance(value, list) and len({type(element) for element in _leaves(value)}) > 1:
        raise TypeError("expected elements of one type")
    if array.dtype.kind not in "OSUT":
        return array
    if not all(isinstance(element, str | bytes) for element in elements):
        raise TypeError("expected text")
    return object_array([e.encode() if isinstance(e, str) else e for e in elements], array.shape)


def _leaves(values: Sequence[Any]) -> list[Any]:
    return [leaf for value in values for leaf in (_leaves(value) if isinstance(value, list) else [value])]
