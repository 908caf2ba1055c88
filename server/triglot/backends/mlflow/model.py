"""The base of models in MLflow's format: what a signature says of them, in the terms of a `Model`."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from triglot.backends.columns import Inputs
from triglot.backends.mlflow.description import Description
from triglot.backends.mlflow.inputs import columns_of, tensors_of
from triglot.core.call import Call
from triglot.core.tensor import Array, object_array
from triglot.core.types import Answer
from triglot.model.model import Model
from triglot.model.signature import INSTANCES

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
        self.outputs = [field.spec for field in description.outputs]
        if self._fields and not self._takes_tensors and all(field.named for field in self._fields):
            self.columns = self.inputs
        self._output = description.outputs[0].name if len(description.outputs) == 1 else OUTPUT
        self.example = example_of(description)

    def infer(self, inputs: Inputs, call: Call) -> Answer:
        """Predict. Raise `InvalidArgument` for what does not fit the signature."""
        if self._fields:
            inputs = (tensors_of if self._takes_tensors else columns_of)(self._fields, inputs)
        return self.predict(inputs, call)

    @abstractmethod
    def predict(self, inputs: Inputs, call: Call) -> Answer:
        """Return the outputs for inputs as the signature declares them, or any without one."""


def example_of(description: Description) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
    """Return the input example as inputs of a call; empty if there is none, or none that inputs can hold."""
    body = description.example
    split, found = body.get("dataframe_split"), body.get("inputs")
    if isinstance(split, dict) and "columns" in split and not description.takes_tensors:
        rows = [dict(zip(map(str, split["columns"]), row, strict=True)) for row in split["data"]]
        return {INSTANCES: object_array([json.dumps(row).encode() for row in rows], (len(rows),))}
    if found is None or not description.takes_tensors:
        return ()
    if not isinstance(found, dict):
        found = {description.inputs[0].name: found}
    return {name: _array(value) for name, value in found.items()}


def _array(value: Any) -> Array:
    array = np.array(value)
    if array.dtype.kind in "USO":
        return object_array([str(text).encode() for text in array.ravel().tolist()], array.shape)
    return array
