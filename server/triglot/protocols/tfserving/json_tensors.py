"""JSON values → tensors, with TensorFlow Serving's rules and error texts (tfs 4.2, 4.3). Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from triglot.core.errors import InvalidArgument, ServingError, Unimplemented
from triglot.core.tensor import DATATYPES, Array, object_array
from triglot.core.types import InputTensor, TensorSpec
from triglot.protocols.json.arrays import LargeArray
from triglot.protocols.json.text import dense, float32_array
from triglot.protocols.tfserving.json_values import base64_text, debug_text, decode_base64, json_type, raw
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
    "BYTES": ElementRule(frozenset({str})),
}
"""Rules of the datatypes that have a JSON form here; elements of others are rejected."""


def to_array(values: list[Any], datatype: str) -> Array:
    """Return a flat array of values that passed the datatype's rule.

    A number beyond FP32's range becomes infinite.
    """
    dtype = DATATYPES[datatype].dtype
    if datatype == "BYTES":
        return object_array(values, (len(values),))
    if datatype == "FP32":
        return float32_array(values)
    if dtype.kind == "f":
        return _narrowed(np.array(values, np.float64), datatype)
    if dtype.kind in "iu":
        return _narrowed(np.array(values, np.uint64 if datatype == "UINT64" else np.int64), datatype)
    return np.array(values, dtype)


def _narrowed(numbers: Array, datatype: str) -> Array:
    with np.errstate(over="ignore"):
        return numbers.astype(DATATYPES[datatype].dtype, copy=False)


class NotDense(ValueError):
    """Values are no tensor; `check_value` says why."""


def dense_tensor(value: Any, spec: TensorSpec) -> InputTensor:
    """Return the tensor of nested lists of elements, or of one element.

    Raise `ValueError`, `TypeError` or `RuntimeError` for a `LargeArray` that has to be read as plain lists;
    `NotDense` for plain values that `check_value` rejects; `InvalidArgument` for too many dims.
    """
    datatype = spec.datatype
    if isinstance(value, LargeArray):
        shape, elements = _large(value, datatype)
    elif isinstance(value, list) and value and isinstance(value[0], LargeArray):
        shape, elements = _stacked(value, datatype)
    else:
        try:
            shape, values = dense(value)
            elements = _elements(values, datatype)
        except ValueError as error:
            raise NotDense(str(error)) from None
    _check_rank(shape)
    return InputTensor(spec.name, datatype, shape, elements)


def _large(value: LargeArray, datatype: str) -> tuple[tuple[int, ...], Array]:
    kind = DATATYPES[datatype].dtype.kind
    if datatype not in RULES or kind not in "fiu":
        raise TypeError("no datatype of numbers")
    shape, numbers = value.dense("d" if kind == "f" else "u" if datatype == "UINT64" else "i")
    if kind != "f" and not RULES[datatype].takes([int(numbers.min()), int(numbers.max())]):
        raise ValueError("beyond the datatype's range")
    return shape, _narrowed(numbers, datatype)


def _stacked(values: list[Any], datatype: str) -> tuple[tuple[int, ...], Array]:
    if set(map(type, values)) != {LargeArray}:
        raise TypeError("not only lists of numbers")
    shapes, arrays = zip(*[_large(value, datatype) for value in values], strict=True)
    if len(set(shapes)) > 1:
        raise ValueError("lists of unequal lengths")
    return (len(values), *shapes[0]), np.concatenate(arrays)


def _elements(values: list[Any], datatype: str) -> Array:
    if datatype == "BYTES":
        return to_array([_bytes_of(value) for value in values], datatype)
    if values and not (datatype in RULES and RULES[datatype].takes(values)):
        raise ValueError("not elements of the datatype")
    return to_array(values, datatype)


def _bytes_of(value: Any) -> bytes:
    """Return the element of a string, or of base64. Raise `ValueError`."""
    if isinstance(value, str):
        return raw(value)
    text = base64_text(value)
    if text is None:
        raise ValueError("neither a string nor base64")
    try:
        return decode_base64(text)
    except InvalidArgument as error:
        raise ValueError(error.message) from None


def check_value(value: Any, datatype: str, expected: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Return the shape of plain nested lists of elements.

    Raise `InvalidArgument` for a value that is not a dense tensor of the datatype, or whose shape is not the
    expected one, `Unimplemented` for a datatype without a JSON form.
    """
    shape = _shape(value)
    _check_items(value, 0, shape, datatype)
    if expected is not None and shape != expected:
        if prod(shape) != prod(expected):
            raise InvalidArgument(f"Expecting tensor size: {prod(expected)} but got: {prod(shape)}")
        raise InvalidArgument(f"Expecting shape {_shape_text(expected)} but got: {_shape_text(shape)}")
    return shape


def _shape(value: Any) -> tuple[int, ...]:
    """Return the dims by the first item of each level. Raise `InvalidArgument` for more than an array can have."""
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


def _check_items(value: Any, level: int, shape: tuple[int, ...], datatype: str) -> None:
    """Raise the error of the first wrong item; recursion is limited by the number of dims."""
    rank = len(shape)
    if not isinstance(value, list):
        if level != rank:
            raise InvalidArgument(
                f"JSON Value: {debug_text(value)} found at incorrect level: {level + 1} in the JSON DOM. "
                f"Expected at level: {rank}"
            )
        _check_element(value, datatype)
        return
    if level >= rank:
        raise InvalidArgument(f"Encountered list at unexpected level: {level} expected < {rank}")
    if len(value) != shape[level]:
        raise InvalidArgument(
            f"Encountered list at unexpected size: {len(value)} at level: {level} expected size: {shape[level]}"
        )
    if level == rank - 1 and datatype in RULES and RULES[datatype].takes(value):
        return
    for item in value:
        _check_items(item, level + 1, shape, datatype)


def _check_element(value: Any, datatype: str) -> None:
    if isinstance(value, dict):
        if datatype != "BYTES":
            raise _type_error(value, datatype)
        text = base64_text(value)
        if text is None:
            raise InvalidArgument(f"JSON Value: {debug_text(value)} not formatted correctly for base64 data")
        decode_base64(text)
    elif datatype not in RULES:
        raise Unimplemented(f"Conversion of JSON Value: {debug_text(value)} to type: {dtype_name(datatype)}")
    elif not RULES[datatype].takes([value]):
        raise _type_error(value, datatype)


def _type_error(value: Any, datatype: str) -> ServingError:
    return InvalidArgument(
        f"JSON Value: {debug_text(value)} Type: {json_type(value)} is not of expected type: {dtype_name(datatype)}"
    )
