"""Converts GenericTensors to arrays and back (grps 1), without a Python loop over numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from triglot.core.tensor import DATATYPES, Array, bytes_elements, native, object_array
from triglot.core.varint import varint
from triglot.model.grps_types import LISTS, WIDER, FlatList
from triglot.pb.grps import grps_pb2 as pb

PACKED = 2
"""Wire type of a packed list of numbers."""


_BY_DTYPE = {DATATYPES[row.datatype].dtype: row for row in LISTS.values()}
_WIDENED = {DATATYPES[narrow].dtype: DATATYPES[wide].dtype for narrow, wide in WIDER.items() if narrow != "UINT64"}
"""Dtypes that grps lacks, and the dtype that holds all their values; no dtype holds those of UINT64."""

DTYPES = frozenset(LISTS)
"""The DataTypes of tensors."""


def dtype_name(number: int) -> str:
    """Return the name of a DataType, such as DT_FLOAT32; an unknown number as digits."""
    return LISTS[number].name if number in LISTS else str(number)


def to_array(tensor: Any) -> Array:
    """Return a GenericTensor as an array with memory of its own; DT_STRING as objects (`bytes`, UTF-8).

    Raise `ValueError` for an unsupported dtype, for a flat list that does not fit the shape, and for elements
    that the dtype cannot hold.
    """
    row = LISTS.get(tensor.dtype)
    if row is None:
        raise ValueError(f"expected dtype {', '.join(map(dtype_name, sorted(DTYPES)))}, got {tensor.dtype}")
    shape = tuple(tensor.shape)
    elements = getattr(tensor, row.field)
    if len(elements) != math.prod(shape):
        raise ValueError(
            f"expected {math.prod(shape)} elements for the shape {list(shape)}, got {len(elements)} in {row.field}"
        )
    if row.wire.hasobject:
        return object_array([element.encode() for element in elements], shape)
    return _narrowed(np.array(elements, row.wire), row).reshape(shape)


def _narrowed(array: Array, row: FlatList) -> Array:
    dtype = DATATYPES[row.datatype].dtype
    if dtype == row.wire:
        return array
    if dtype.kind == "f":
        # Values too large for a half become infinite, as IEEE 754 rounds them.
        with np.errstate(over="ignore"):
            return array.astype(dtype)
    limits = np.iinfo(dtype)
    for extreme in (array.min(initial=0), array.max(initial=0)):
        if not limits.min <= extreme <= limits.max:
            raise ValueError(f"{row.name} cannot hold {extreme}, which is in {row.field}")
    return array.astype(dtype)


def fill(tensor: Any, array: Array) -> None:
    """Set dtype, shape and elements of an empty GenericTensor; texts and bytes become DT_STRING.

    bool becomes DT_UINT8, uint16 DT_INT32, uint32 DT_INT64 and bfloat16 DT_FLOAT32, without loss. Raises
    `ValueError` for any other dtype that grps lacks, and for bytes that are not UTF-8.
    """
    array = native(array)
    if array.dtype in _WIDENED:
        array = array.astype(_WIDENED[array.dtype])
    row = LISTS[pb.DT_STRING] if array.dtype.kind in "OSUT" else _BY_DTYPE.get(array.dtype)
    if row is None:
        raise ValueError(f"grps has no dtype for {array.dtype}")
    if row.wire.hasobject:
        tensor.flat_string.extend(_texts(array))
    elif row.wire.kind == "f":
        _merge_floats(tensor, row, array)
    else:
        getattr(tensor, row.field).extend(array.ravel().tolist())
    tensor.dtype = row.dtype
    tensor.shape.extend(array.shape)


def _texts(array: Array) -> list[str]:
    try:
        return [element.decode() for element in bytes_elements(array)]
    except UnicodeDecodeError as error:
        raise ValueError(f"DT_STRING takes UTF-8 only, got {error.object[:32]!r}") from None


def _merge_floats(tensor: Any, row: FlatList, array: Array) -> None:
    """Set the flat list by parsing its packed form, the array's memory: a hundred times as fast as a list."""
    content = array.astype(row.wire, copy=False).tobytes()
    tag = row.number << 3 | PACKED
    tensor.MergeFromString(b"".join([bytes([tag]), varint(len(content)), content]))
