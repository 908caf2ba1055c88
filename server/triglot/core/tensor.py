"""Datatypes, and tensors as bytes.

Strategy: a numeric input is never copied. Its array is a read-only view of the request's bytes, and may be
unaligned (numpy handles that). BYTES elements become `bytes` objects in an object array.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from triglot.core.compiling import mypyc_attr
from triglot.core.errors import InvalidArgument

Array = NDArray[Any]
Buffer = bytes | bytearray | memoryview
MessageBytes = bytes | memoryview
"""The bytes of one message; a large one is a view of the buffer that it was received into."""

MAX_ARRAY_BYTES: Final = 2**63 - 1
LONG_BYTES: Final = 64 * 1024
"""BYTES tensors of this length in bytes and more are unpacked on a thread."""


@dataclass(frozen=True, slots=True)
class DataType:
    """A datatype of KServe V2 (spec 2.1), or one of `TFSERVING_DATATYPES`.

    `itemsize` is in bytes, and 0 for BYTES, whose elements vary in length.
    """

    name: str
    dtype: np.dtype[Any]
    itemsize: int


def _row(name: str, dtype: Any) -> DataType:
    numpy_dtype = np.dtype(dtype)
    return DataType(name, numpy_dtype, 0 if numpy_dtype.hasobject else numpy_dtype.itemsize)


DATATYPES: Final[dict[str, DataType]] = {
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
        # Structures of one field, TensorFlow's own dtypes for them: the integers alone are other datatypes.
        _row("QINT8", [("qint8", "i1")]),
        _row("QUINT8", [("quint8", "u1")]),
        _row("QINT16", [("qint16", "<i2")]),
        _row("QUINT16", [("quint16", "<u2")]),
        _row("QINT32", [("qint32", "<i4")]),
        _row("BYTES", "O"),
    )
}
TFSERVING_DATATYPES: Final = ("COMPLEX64", "COMPLEX128", "QINT8", "QUINT8", "QINT16", "QUINT16", "QINT32")
"""Those that only TensorFlow Serving has."""
_BY_DTYPE: Final = {row.dtype: row.name for row in DATATYPES.values()}


def datatype_of(array: Array | np.generic) -> str:
    """Return the datatype name for an array's dtype. Raise as `datatype_name`."""
    return datatype_name(array.dtype)


def datatype_name(dtype: np.dtype[Any]) -> str:
    """Return the datatype name for a dtype; text, bytes and object arrays are BYTES.

    Raise `TypeError` for a dtype that no protocol has a name for (dates, structures).
    """
    if dtype.kind in "OSUT":
        return "BYTES"
    name = _BY_DTYPE.get(dtype if dtype.isnative else dtype.newbyteorder("="))
    if name is None:
        raise TypeError(f"numpy dtype {dtype} has no datatype; use one of {', '.join(DATATYPES)}")
    return name


def element_count(shape: Sequence[int]) -> int:
    """Return the product of the dims, 1 for a scalar. The dims are already known to be >= 0."""
    return math.prod(shape)


def is_addressable(shape: Sequence[int], dtype: np.dtype[Any]) -> bool:
    """Whether numpy can describe an array of this shape; zero dims are skipped, so they do not hide huge ones."""
    return math.prod(dim for dim in shape if dim) * dtype.itemsize <= MAX_ARRAY_BYTES


def array_over(data: Buffer, dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
    """Return a read-only view of little-endian `data`, whose length already matches `shape`."""
    array: Array = np.ndarray(shape, dtype, data)
    if array.flags.writeable:
        array.flags.writeable = False
    return array


@mypyc_attr(native_class=False)
class BytesFramingError(InvalidArgument):
    """A BYTES tensor's length prefixes and data do not match; the text does not name the tensor."""


def unpack_bytes(data: Buffer, count: int) -> list[bytes]:
    """Return the elements of a raw BYTES tensor: each a uint32 little-endian length, then its bytes (spec 2.1).

    Raise `BytesFramingError` unless there are exactly `count` elements.
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
    """Return the elements of a BYTES array in row-major order; text becomes UTF-8, other objects their `str`.

    `array`: dtype object, of any shape.
    """
    return [
        item if type(item) is bytes else item.encode() if type(item) is str else _bytes_of(item)
        for item in array.ravel().tolist()
    ]


def _bytes_of(item: object) -> bytes:
    if isinstance(item, bytes | bytearray | memoryview):
        return bytes(item)
    return str(item).encode()


def pack_bytes(elements: Iterable[bytes]) -> bytes:
    """Return the raw form of a BYTES tensor: the inverse of `unpack_bytes`."""
    parts: list[bytes] = []
    for element in elements:
        parts.append(len(element).to_bytes(4, "little"))
        parts.append(element)
    return b"".join(parts)


def object_array(elements: list[bytes], shape: Sequence[int]) -> Array:
    """Return `elements` as an object array of `shape`, without letting numpy convert them."""
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array.reshape(shape)


def numbers_of(array: Array) -> Array:
    """Return the integers of a quantized array, which is a structure, or the array itself.

    `array`: any dtype and shape; the result has its shape and an integer dtype if it is a structure.
    """
    return array.view(array.dtype[0]) if array.dtype.names else array


def native(array: Array) -> Array:
    """Return the array in row-major layout and native byte order: itself if it already is.

    Any dtype and shape.
    """
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def raw_buffer(array: Array) -> Buffer | Array:
    """Return an array's little-endian, row-major bytes: its own memory if it already has that layout.

    Any dtype and shape.
    """
    kind = array.dtype.kind
    if kind in "OSUT":
        return pack_bytes(bytes_elements(array))
    array = native(array)
    # Neither a custom dtype (BF16) nor a structure (quantized) is a plain buffer.
    return array.view(f"u{array.itemsize}") if kind == "V" else array


def byte_length(buffer: Buffer | Array) -> int:
    """Return the length in bytes of what `raw_buffer` returns."""
    return buffer.nbytes if isinstance(buffer, np.ndarray | memoryview) else len(buffer)


SCATTER_BYTES: Final = 64 * 1024
"""Smaller arrays are quicker to copy than to send as a piece."""
SMALL_BYTES: Final = 4 * 1024
"""Up to this total size of a response, one more copy costs nothing."""


class Scattered:
    """Bytes in pieces: `bytes`, and views of memory that is not written to."""

    __slots__ = ("pieces", "size")

    def __init__(self, pieces: Iterable[Any]) -> None:
        self.pieces: list[bytes | memoryview] = []
        small: list[Any] = []
        for piece in pieces:
            if byte_length(piece) < SCATTER_BYTES:
                small.append(piece)
                continue
            # Not cast from the array's own type: memoryview supports few of them.
            view = piece.reshape(-1).view(np.uint8).data if isinstance(piece, np.ndarray) else piece
            self.pieces += b"".join(small), view
            small = []
        self.pieces.append(b"".join(small))
        self.size = sum(map(len, self.pieces))

    def __len__(self) -> int:
        return self.size

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces)
