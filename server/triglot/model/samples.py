"""Sample tensors: small inputs for a first call, a model's own example, or made from a signature."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from triglot.core.errors import InvalidArgument
from triglot.core.tensor import Array, datatype_of, element_count
from triglot.core.types import TensorSpec
from triglot.model.signature import Signature
from triglot.model.warm_up_inputs import example_inputs

SAMPLE_VALUES: dict[str, bool | int | float | str] = {
    "BOOL": True,
    "BYTES": "text",
    "FP16": 1.5,
    "BF16": 1.5,
    "FP32": 1.5,
    "FP64": 1.5,
    "INT8": 1,
    "INT16": 1,
    "INT32": 1,
    "INT64": 1,
    "UINT8": 1,
    "UINT16": 1,
    "UINT32": 1,
    "UINT64": 1,
}
"""The element of a sample, per datatype; each can be written in JSON as it is."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample tensor for one input: `elements` of the model's example, as JSON has them, or all the same."""

    name: str
    datatype: str
    shape: list[int]
    elements: Sequence[Any] = ()

    @property
    def count(self) -> int:
        """Number of elements."""
        return element_count(self.shape)

    def flat(self) -> list[Any]:
        """Return the elements in row-major order."""
        return list(self.elements) or [SAMPLE_VALUES[self.datatype]] * self.count

    def nested(self) -> Any:
        """Return the elements as nested lists."""
        array = np.empty(self.count, object)
        array[:] = self.flat()
        return array.reshape(self.shape).tolist()

    def message_elements(self) -> list[Any]:
        """Return the elements as protobuf's JSON has them: bytes in base64."""
        return [
            base64.b64encode(value.encode()).decode() if isinstance(value, str) else value for value in self.flat()
        ]


def sample_of(spec: TensorSpec) -> Sample | None:
    """Return a sample of an input, each free dim 1; None if its rank is free or its datatype has no sample."""
    if spec.shape is None or spec.datatype not in SAMPLE_VALUES:
        return None
    return Sample(spec.name, spec.datatype, [1 if dim == -1 else dim for dim in spec.shape])


def samples_of(inputs: Sequence[TensorSpec], largest: int) -> list[Sample] | None:
    """Return a sample of each input; None if one has none, or has more than `largest` elements."""
    samples = [sample_of(spec) for spec in inputs]
    found = [sample for sample in samples if sample is not None and sample.count <= largest]
    return found if len(found) == len(samples) else None


def samples_of_example(example: Any, signature: Signature, largest: int) -> list[Sample]:
    """Return the inputs of a model's `example`, of the first call if it has several, with the declared datatypes.

    Of one with more than `largest` elements in an input it is the first row. Empty for one that is larger still,
    that has no form in JSON, or whose inputs are not those that the signature requires.
    """
    inputs = example if isinstance(example, Mapping) else next(iter(example), {})
    names = {spec.name for spec in signature.inputs}
    if names and not names - signature.may_lack <= inputs.keys() <= names:
        return []
    # Models of any inputs take declared ones, too, and most are shorter in their own datatypes.
    declared = Signature(signature.inputs, ()) if signature.any_tensors else signature
    try:
        arrays = {tensor.name: np.asarray(tensor.data) for tensor in example_inputs(inputs, declared)}
        if any(array.size > largest for array in arrays.values()):
            arrays = _first_row(arrays)
        samples = [
            Sample(name, datatype_of(array), list(array.shape), _elements(array)) for name, array in arrays.items()
        ]
    except (InvalidArgument, ValueError):
        return []
    return samples if all(sample.count <= largest for sample in samples) else []


def _first_row(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the first of as many rows as each array has. Raise `ValueError` if they have none in common."""
    if len({array.shape[:1] for array in arrays.values()}) != 1:
        raise ValueError("expected rows")
    return {name: array[:1] for name, array in arrays.items()}


def _elements(array: Array) -> list[Any]:
    """Return the elements as in JSON. Raise `ValueError` for those that have no form there."""
    elements: list[Any] = array.ravel().tolist()
    if array.dtype.hasobject:
        return [element.decode() for element in elements]
    if datatype_of(array) not in SAMPLE_VALUES or not np.isfinite(array).all():
        raise ValueError("expected values of JSON")
    # The shortest digits of the datatype, which are fewer than a double's.
    return elements if array.dtype.kind in "biu" else [float(str(element)) for element in array.ravel()]
