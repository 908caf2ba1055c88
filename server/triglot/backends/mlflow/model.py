"""The base of models in MLflow's format: what a signature says of them, in the terms of a `Model`."""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from triglot.backends.columns import INPUT, Inputs
from triglot.backends.mlflow.description import DATATYPES, Description, Field
from triglot.backends.mlflow.inputs import columns_of, from_base64, is_missing, tensors_of
from triglot.core.call import Call
from triglot.core.errors import InvalidArgument
from triglot.core.tensor import Array, object_array
from triglot.core.types import Answer
from triglot.model.model import Model
from triglot.model.signature import INSTANCES

log = logging.getLogger(__name__)

INPUTS = "inputs"
"""The form of /invocations that is no DataFrame, in an example."""
OUTPUT = "output-1"
"""Name of a single output without one."""


class MLflowModel(Model):
    """A model in MLflow's format.

    Inputs are as declared, or in any form that `columns_of` and `tensors_of` take; without a signature, whatever
    the model's own code takes. As in MLflow, outputs are what the model returns: those in the signature are for
    clients to read.
    """

    platform = "mlflow"
    any_tensors = True
    any_inputs = True
    takes_parameters = True

    def __init__(self, description: Description) -> None:
        self._fields = description.inputs
        self._takes_tensors = description.takes_tensors
        self.inputs = [field.spec for field in description.inputs]
        # What a response may lack, as a chat's `usage`, is not declared.
        self.outputs = [field.spec for field in description.outputs if field.required]
        if self._fields and not self._takes_tensors and all(field.named for field in self._fields):
            self.columns = self.inputs
        self._output = description.outputs[0].name if len(description.outputs) == 1 else OUTPUT
        if example := example_of(description):
            self.example = example

    def infer(self, inputs: Inputs, call: Call) -> Answer:
        """Predict. Raise `InvalidArgument` for what does not fit the signature."""
        if self._fields:
            inputs = (tensors_of if self._takes_tensors else columns_of)(self._fields, inputs)
        return self.predict(inputs, call)

    @abstractmethod
    def predict(self, inputs: Inputs, call: Call) -> Answer:
        """Return the outputs for inputs as the signature declares them, or any without one."""


def example_of(description: Description) -> Mapping[str, Any]:
    """Return the input example as a call's inputs, in the datatypes of the signature; empty without one that fits.

    Rows are columns by name, or `instances` where a text is missing, which no tensor can express.
    """
    body, fields = description.example, description.inputs
    if not body:
        return {}
    try:
        if fields and description.takes_tensors:
            given = body[INPUTS] if isinstance(body.get(INPUTS), dict) else {fields[0].name: body[INPUTS]}
            return tensors_of(fields, {name: _array(value) for name, value in given.items()})
        if not fields and INPUTS in body:
            return {INPUT: _array(body[INPUTS])}
        rows = _rows(body, all(field.kind in DATATYPES for field in fields))
        instances = {INSTANCES: object_array([json.dumps(row).encode() for row in rows], (len(rows),))}
        columns = columns_of(fields, instances) if fields else {}
        if not columns or any(map(_lacks_text, columns.values())):
            return instances
        return {field.name: _tensor(field, columns[field.name]) for field in fields if field.name in columns}
    except (InvalidArgument, KeyError, TypeError, ValueError) as error:
        log.warning(
            "%s: the input example does not fit its signature, and is not used: %s", description.file, error
        )
        return {}


def _rows(body: Mapping[str, Any], are_columns: bool) -> list[Any]:
    """Return the rows of an example.

    `are_columns`: whether the lists of an object are columns, not values of one row. Raise `KeyError` and
    `ValueError`.
    """
    if "dataframe_split" in body:
        split = body["dataframe_split"]
        return [dict(zip(map(str, split["columns"]), row, strict=True)) for row in split["data"]]
    # Of a chat model, the body is the row.
    given = body.get(INPUTS, body)
    if isinstance(given, dict) and are_columns and all(isinstance(value, list) for value in given.values()):
        return [dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)]
    return given if isinstance(given, list) else [given]


def _lacks_text(column: Array) -> bool:
    return column.dtype.hasobject and any(map(is_missing, column.tolist()))


def _tensor(field: Field, column: Array) -> Array:
    """Return a column as a client sends it."""
    if not column.dtype.hasobject:
        return column
    values: list[Any] = column.tolist()
    if field.kind == "binary":
        return object_array([from_base64(value) for value in values], column.shape)
    if field.kind not in DATATYPES:
        values = list(map(json.dumps, values))
    return object_array([str(value).encode() for value in values], column.shape)


def _array(value: Any) -> Array:
    array = np.array(value)
    if array.dtype.kind in "USO":
        return object_array([str(text).encode() for text in array.ravel().tolist()], array.shape)
    return array
