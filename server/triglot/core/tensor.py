"""Datatypes, and tensors as bytes.

Strategy: a numeric tensor is never copied on its way in. Its array is laid over the bytes of the request, is
read-only, and may be unaligned (numpy copes). BYTES elements become `bytes` objects in an object array.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from triglot.core.errors import InvalidArgument

Array = NDArray[Any]
Buffer = bytes | bytearray | memoryview

MAX_ARRAY_BYTES = 2**63 - 1
LONG_BYTES = 64 * 1024
"""BYTES tensors of this length and more are taken apart on a thread."""


@dataclass(frozen=True, slots=True)
class DataType:
    """One datatype: KServe V2's (spec 2.1), and the complex ones, which TensorFlow Serving has besides.

    `itemsize` is in bytes and 0 for BYTES, whose elements vary in length.
    """

    name: str
    dtype: np.dtype[Any]
    itemsize: int


def _row(name: str, dtype: Any) -> DataType:
    numpy_dtype = np.dtype(dtype)
    return DataType(name, numpy_dtype, 0 if numpy_dtype.hasobject else numpy_dtype.itemsize)


DATATYPES: dict[str, DataType] = {
    row.name: row
    for row in (
        _row("BOOL", "?"),
        _row("UINT8", "<u1"),
        _row("UINT16", "<u2"),
        _row("UINT32", "<u4"),
        _row("UINT64", "<u8"),
        _row("INT8", "<i1"),
        _row("INT16", "<i2"),
        _row("INT32", "<i4"),
        _row("INT64", "<i8"),
        _row("FP16", "<f2"),
        _row("FP32", "<f4"),
        _row("FP64", "<f8"),
        _row("BF16", ml_dtypes.bfloat16),
        _row("COMPLEX64", "<c8"),
        _row("COMPLEX128", "<c16"),
        _row("BYTES", "O"),
    )
}
_BY_DTYPE = {row.dtype: row.name for row in DATATYPES.values()}


class Typed(Protocol):
    """What has a dtype."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of its elements."""


def datatype_of(array: Typed) -> str:
    """The datatype that an array travels as; text, bytes and object arrays are BYTES.

    Raises `TypeError` for a dtype that no protocol has a name for (dates, structures).
    """
    if array.dtype.kind in "OSUT":
        return "BYTES"
    name = _BY_DTYPE.get(array.dtype.newbyteorder("=") if array.dtype.byteorder == ">" else array.dtype)
    if name is None:
        raise TypeError(f"numpy dtype {array.dtype} has no datatype; use one of {', '.join(DATATYPES)}")
    return name


def element_count(shape: Sequence[int]) -> int:
    """The product of the dims; 1 for a scalar. The dims are already known to be >= 0."""
    return math.prod(shape)


def is_addressable(shape: Sequence[int], dtype: np.dtype[Any]) -> bool:
    """Whether an array of this shape can be described at all; a zero dim does not make up for huge ones."""
    return math.prod(dim for dim in shape if dim) * dtype.itemsize <= MAX_ARRAY_BYTES


def array_over(data: Buffer, dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
    """A read-only array laid over little-endian `data`, whose length already fits `shape`."""
    array: Array = np.ndarray(shape, dtype, data)
    if array.flags.writeable:
        array.flags.writeable = False
    return array


class BytesFramingError(InvalidArgument):
    """A BYTES tensor's lengths and bytes do not fit together; the text does not name the tensor."""


def unpack_bytes(data: Buffer, count: int) -> list[bytes]:
    """The elements of a raw BYTES tensor: each a uint32 little-endian length, then its bytes (spec 2.1).

    Raises `BytesFramingError` before anything is kept when there are not exactly `count` elements.
    """
    size = len(data)
    if count > size // 4:
        raise BytesFramingError(f"unexpected number of string elements {size // 4} at most, expecting {count}")
    view = memoryview(data)
    elements: list[bytes] = []
    at = 0
    while at < size:
        if len(elements) == count:
            raise BytesFramingError(f"unexpected number of string elements {count + 1} or more, expecting {count}")
        start = at + 4
        if start > size:
            raise BytesFramingError(f"incomplete string length indicator, {size - at} bytes left of 4")
        at = start + int.from_bytes(view[at:start], "little")
        if at > size:
            raise BytesFramingError(f"incomplete string data, expecting {at - start} bytes, {size - start} left")
        elements.append(bytes(view[start:at]))
    if len(elements) != count:
        raise BytesFramingError(f"unexpected number of string elements {len(elements)}, expecting {count}")
    return elements


def bytes_elements(array: Array) -> list[bytes]:
    """The elements of a BYTES array in row-major order; text is UTF-8, other objects their `str`."""
    return [
        item if type(item) is bytes else item.encode() if type(item) is str else _bytes_of(item)
        for item in array.ravel().tolist()
    ]


def _bytes_of(item: object) -> bytes:
    if isinstance(item, bytes | bytearray | memoryview):
        return bytes(item)
    return str(item).encode()


def pack_bytes(elements: Iterable[bytes]) -> bytes:
    """The raw form of a BYTES tensor."""
    parts: list[bytes] = []
    for element in elements:
        parts.append(len(element).to_bytes(4, "little"))
        parts.append(element)
    return b"".join(parts)


def object_array(elements: list[bytes], shape: Sequence[int]) -> Array:
    """`elements` as an object array of `shape`; numpy never looks into them."""
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array.reshape(shape)


def native(array: Array) -> Array:
    """The array in row-major layout and this machine's byte order: itself where that is already so."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def raw_buffer(array: Array) -> Buffer | Array:
    """The little-endian, row-major bytes of an array: its own memory where that is already so."""
    kind = array.dtype.kind
    if kind in "OSUT":
        return pack_bytes(bytes_elements(array))
    array = native(array)
    # A custom dtype (BF16) has no buffer format of its own.
    return array.view(np.uint16) if kind == "V" else array


def byte_length(buffer: Buffer | Array) -> int:
    """The length in bytes of what `raw_buffer` gives."""
    return buffer.nbytes if isinstance(buffer, np.ndarray | memoryview) else len(buffer)
