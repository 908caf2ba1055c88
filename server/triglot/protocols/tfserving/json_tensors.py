"""JSON values → tensors, with TensorFlow Serving's rules and error texts (tfs 4.2, 4.3). Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from triglot.core.errors import InvalidArgument, ServingError, Unimplemented
from triglot.core.tensor import DATATYPES, Array, object_array
from triglot.core.types import InputTensor, TensorSpec
from triglot.protocols.json.text import float32_array
from triglot.protocols.tfserving.json_values import (
    Object,
    Value,
    base64_text,
    debug_text,
    decode_base64,
    json_type,
)
from triglot.protocols.tfserving.tensor import MAX_DIMS, dtype_name


@dataclass(frozen=True, slots=True)
class PredictBody:
    """A decoded `:predict` body.

    `row`: it has the row form, and so has the response. `named`: its rows are objects by input name.
    """

    signature_name: str
    row: bool
    inputs: list[InputTensor]
    named: bool = False


@dataclass(frozen=True, slots=True)
class ElementRule:
    """The Python types, and for integers the inclusive bounds, of a datatype's elements."""

    types: frozenset[type]
    low: int | None = None
    high: int | None = None

    def takes(self, values: Sequence[Any]) -> bool:
        """Whether all values are valid elements."""
        if not self.types.issuperset(map(type, values)):
            return False
        if self.low is None or self.high is None or not values:
            return True
        lowest: int = min(values)
        highest: int = max(values)
        return self.low <= lowest and highest <= self.high


_NUMBER = ElementRule(frozenset({int, float}))
# Narrow types are converted by way of int32, and wrap around.
_INT32 = ElementRule(frozenset({int}), -(2**31), 2**31 - 1)
RULES: dict[str, ElementRule] = {
    "FP32": _NUMBER,
    "FP64": _NUMBER,
    "INT32": _INT32,
    "INT16": _INT32,
    "INT8": _INT32,
    "UINT8": _INT32,
    "INT64": ElementRule(frozenset({int}), -(2**63), 2**63 - 1),
    "UINT32": ElementRule(frozenset({int}), 0, 2**32 - 1),
    "UINT64": ElementRule(frozenset({int}), 0, 2**64 - 1),
    "BOOL": ElementRule(frozenset({bool})),
    "BYTES": ElementRule(frozenset({bytes})),
}
"""Rules of the datatypes that have a JSON form here; elements of others are rejected."""


def to_array(values: list[Any], datatype: str) -> Array:
    """Returns a flat array of values that passed the datatype's rule.

    A number beyond FP32's range becomes infinite.
    """
    dtype = DATATYPES[datatype].dtype
    if datatype == "BYTES":
        return object_array(values, (len(values),))
    if datatype == "FP32":
        return float32_array(values)
    if dtype.kind == "f":
        return narrowed(np.array(values, np.float64), datatype)
    if dtype.kind in "iu":
        return narrowed(np.array(values, np.uint64 if datatype == "UINT64" else np.int64), datatype)
    return np.array(values, dtype)


def narrowed(numbers: Array, datatype: str) -> Array:
    """Returns numbers converted to a datatype."""
    with np.errstate(over="ignore"):
        return numbers.astype(DATATYPES[datatype].dtype, copy=False)


class Column:
    """Collects the tensor of one input: its elements, and the shape of each value added."""

    __slots__ = ("_datatype", "_name", "_shape", "_size", "_values")

    def __init__(self, spec: TensorSpec) -> None:
        self._name = spec.name
        self._datatype = spec.datatype
        self._values: list[Any] = []
        self._shape: tuple[int, ...] | None = None
        self._size = 0

    def add(self, value: Value, *, keep: bool = True) -> None:
        """Add one value, scalar or nested; `keep=False` only checks it.

        Raises `InvalidArgument` for a value that is not a dense tensor of the datatype, or whose shape differs
        from earlier ones, `Unimplemented` for a datatype without a JSON form.
        """
        values: list[Any] = []
        shape = _shape(value)
        _fill(value, 0, shape, self._datatype, values)
        if self._shape is None:
            self._shape, self._size = shape, len(values)
        elif len(values) != self._size:
            raise InvalidArgument(f"Expecting tensor size: {self._size} but got: {len(values)}")
        elif shape != self._shape:
            raise InvalidArgument(f"Expecting shape {_shape_text(self._shape)} but got: {_shape_text(shape)}")
        if keep:
            self._values += values

    def tensor(self, *leading: int) -> InputTensor:
        """Returns the tensor of all that was added, with `leading` dims in front."""
        shape = (*leading, *(self._shape or ()))
        _check_rank(shape)
        return InputTensor(self._name, self._datatype, shape, to_array(self._values, self._datatype))


def _shape(value: Value) -> tuple[int, ...]:
    """Returns the dims by the first item of each level.

    Raises `InvalidArgument` for more than an array can have.
    """
    dims: list[int] = []
    while isinstance(value, list):
        dims.append(len(value))
        if not value:
            break
        value = value[0]
    _check_rank(dims)
    return tuple(dims)


def _check_rank(shape: Sequence[int]) -> None:
    if len(shape) > MAX_DIMS:
        raise InvalidArgument(f"Lists are nested too deep: {len(shape)} dims, the limit is {MAX_DIMS}")


def _shape_text(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _fill(value: Value, level: int, shape: tuple[int, ...], datatype: str, values: list[Any]) -> None:
    """Append the elements of `value`; recursion is limited by the number of dims."""
    rank = len(shape)
    if not isinstance(value, list):
        if level != rank:
            raise InvalidArgument(
                f"JSON Value: {debug_text(value)} found at incorrect level: {level + 1} in the JSON DOM. "
                f"Expected at level: {rank}"
            )
        values.append(_element(value, datatype))
        return
    if level >= rank:
        raise InvalidArgument(f"Encountered list at unexpected level: {level} expected < {rank}")
    if len(value) != shape[level]:
        raise InvalidArgument(
            f"Encountered list at unexpected size: {len(value)} at level: {level} expected size: {shape[level]}"
        )
    if level == rank - 1 and datatype in RULES and RULES[datatype].takes(value):
        values += value
        return
    for item in value:
        _fill(item, level + 1, shape, datatype, values)


def _element(value: Value, datatype: str) -> Any:
    if isinstance(value, Object):
        if datatype != "BYTES":
            raise _type_error(value, datatype)
        text = base64_text(value)
        if text is None:
            raise InvalidArgument(f"JSON Value: {debug_text(value)} not formatted correctly for base64 data")
        return decode_base64(text)
    if datatype not in RULES:
        raise Unimplemented(f"Conversion of JSON Value: {debug_text(value)} to type: {dtype_name(datatype)}")
    if not RULES[datatype].takes([value]):
        raise _type_error(value, datatype)
    return value


def _type_error(value: Value, datatype: str) -> ServingError:
    return InvalidArgument(
        f"JSON Value: {debug_text(value)} Type: {json_type(value)} is not of expected type: {dtype_name(datatype)}"
    )
