"""Sample tensors: small inputs for a first call, made from a signature."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from triglot.core.tensor import element_count
from triglot.core.types import TensorSpec

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
    """A sample tensor for one input, in which every element is `value`."""

    name: str
    datatype: str
    shape: list[int]

    @property
    def value(self) -> bool | int | float | str:
        """The value of every element."""
        return SAMPLE_VALUES[self.datatype]

    @property
    def count(self) -> int:
        """Number of elements."""
        return element_count(self.shape)

    def flat(self) -> list[Any]:
        """Return the elements in row-major order."""
        return [self.value] * self.count

    def nested(self) -> Any:
        """Return the elements as nested lists."""
        nested: Any = self.value
        for dim in reversed(self.shape):
            nested = [nested] * dim
        return nested

    def message_elements(self) -> list[Any]:
        """Return the elements as protobuf's JSON has them: bytes in base64."""
        value = self.value
        return [base64.b64encode(value.encode()).decode() if isinstance(value, str) else value] * self.count


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
