"""GenericTensors as arrays, and arrays as GenericTensors (grps 1). No element passes through a loop in Python."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from triglot.core.tensor import Array, bytes_elements, native, object_array
from triglot.pb.grps import grps_pb2 as pb

PACKED = 2
"""The wire type of a flat list of numbers."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A DataType, the flat list that it chooses, that list's dtype, and the tensor's own."""

    number: Any
    field: str
    wire: np.dtype[Any]
    dtype: np.dtype[Any]


def _row(number: Any, field: str, wire: Any, dtype: Any = None) -> _Row:
    return _Row(number, field, np.dtype(wire), np.dtype(dtype or wire))


_STRING = _row(pb.DT_STRING, "flat_string", "O")
_ROWS = (
    _row(pb.DT_UINT8, "flat_uint8", "u4", "u1"),
    _row(pb.DT_INT8, "flat_int8", "i4", "i1"),
    _row(pb.DT_INT16, "flat_int16", "i4", "i2"),
    _row(pb.DT_INT32, "flat_int32", "i4"),
    _row(pb.DT_INT64, "flat_int64", "i8"),
    _row(pb.DT_FLOAT16, "flat_float16", "f4", "f2"),
    _row(pb.DT_FLOAT32, "flat_float32", "f4"),
    _row(pb.DT_FLOAT64, "flat_float64", "f8"),
    _STRING,
)
_BY_NUMBER: dict[int, _Row] = {row.number: row for row in _ROWS}
_BY_DTYPE = {row.dtype: row for row in _ROWS}
_WIDENED = {
    np.dtype(narrow): np.dtype(wide)
    for narrow, wide in (("?", "u1"), ("u2", "i4"), ("u4", "i8"), (ml_dtypes.bfloat16, "f4"))
}
"""What grps has no DataType for, and the dtype that holds all its values."""

DTYPES = frozenset(_BY_NUMBER)
"""The DataTypes that a tensor can have."""


def dtype_name(number: int) -> str:
    """DT_FLOAT32, …; a number that has no name as digits."""
    return pb.DataType.Name(_BY_NUMBER[number].number) if number in _BY_NUMBER else str(number)


def to_array(tensor: Any) -> Array:
    """A GenericTensor as an array of its own memory; DT_STRING as objects (`bytes`, UTF-8).

    Raises `ValueError` for a dtype without tensors, for a flat list that does not fit the shape, and for elements
    that the dtype cannot hold.
    """
    row = _BY_NUMBER.get(tensor.dtype)
    if row is None:
        raise ValueError(f"expected dtype {', '.join(map(dtype_name, sorted(DTYPES)))}, got {tensor.dtype}")
    shape = tuple(tensor.shape)
    elements = getattr(tensor, row.field)
    if len(elements) != math.prod(shape):
        raise ValueError(
            f"expected {math.prod(shape)} elements for the shape {list(shape)}, got {len(elements)} in {row.field}"
        )
    if row is _STRING:
        return object_array([element.encode() for element in elements], shape)
    return _narrowed(np.array(elements, row.wire), row).reshape(shape)


def _narrowed(array: Array, row: _Row) -> Array:
    if row.dtype == row.wire:
        return array
    if row.dtype.kind == "f":
        # What is too large for a half is infinite, as IEEE 754 rounds it.
        with np.errstate(over="ignore"):
            return array.astype(row.dtype)
    limits = np.iinfo(row.dtype)
    for extreme in (array.min(initial=0), array.max(initial=0)):
        if not limits.min <= extreme <= limits.max:
            raise ValueError(f"{dtype_name(row.number)} cannot hold {extreme}, which is in {row.field}")
    return array.astype(row.dtype)


def fill(tensor: Any, array: Array) -> None:
    """Sets dtype, shape and elements of a GenericTensor that has none; text and bytes are DT_STRING.

    bool becomes DT_UINT8, uint16 DT_INT32, uint32 DT_INT64 and bfloat16 DT_FLOAT32, which lose nothing. Raises
    `ValueError` for any other dtype that grps has none for, and for bytes that are not UTF-8.
    """
    array = native(array)
    if array.dtype in _WIDENED:
        array = array.astype(_WIDENED[array.dtype])
    row = _STRING if array.dtype.kind in "OSUT" else _BY_DTYPE.get(array.dtype)
    if row is None:
        raise ValueError(f"grps has no dtype for {array.dtype}")
    if row is _STRING:
        tensor.flat_string.extend(_texts(array))
    elif row.wire.kind == "f":
        _merge_floats(tensor, row, array)
    else:
        getattr(tensor, row.field).extend(array.ravel().tolist())
    tensor.dtype = row.number
    tensor.shape.extend(array.shape)


def _texts(array: Array) -> list[str]:
    try:
        return [element.decode() for element in bytes_elements(array)]
    except UnicodeDecodeError as error:
        raise ValueError(f"DT_STRING takes UTF-8 only, got {error.object[:32]!r}") from None


def _merge_floats(tensor: Any, row: _Row, array: Array) -> None:
    """Sets the flat list by parsing its packed form, the array's memory: a hundred times as quick as a list."""
    content = array.astype(row.wire.newbyteorder("<"), copy=False).tobytes()
    tag = tensor.DESCRIPTOR.fields_by_name[row.field].number << 3 | PACKED
    tensor.MergeFromString(b"".join([bytes([tag]), _varint(len(content)), content]))


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])
