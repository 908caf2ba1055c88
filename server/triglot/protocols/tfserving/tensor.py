"""`tensorflow.TensorProto` ⇄ arrays (tfs 2.3). Pure functions.

Strategy: `tensor_content` and packed floats are the array's own bytes, so they are cut from the message and laid
under an array, and joined from one on the way out. Everything else goes through protobuf's own lists.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from triglot.core.errors import InvalidArgument
from triglot.core.tensor import (
    DATATYPES,
    Array,
    Buffer,
    byte_length,
    bytes_elements,
    element_count,
    is_addressable,
    native,
    object_array,
    raw_buffer,
)
from triglot.core.types import InputTensor
from triglot.pb.tfserving import tensor_pb2 as pb
from triglot.protocols.wire import (
    MessageRules,
    TooManyFields,
    length_prefix,
    parse,
    read_varint,
    scan,
    serialize,
)

MAX_FILLED_BYTES = 64 * 1024 * 1024
"""The largest tensor that a few values are repeated to fill; one sent in full may be larger."""
MAX_DIMS = 32
"""numpy's own limit."""
FEW_FIELDS = 64
"""A tensor with more fields than this has its elements one by one, and nothing to cut."""
TENSOR_CONTENT, FLOAT_VAL, DOUBLE_VAL = 4, 5, 6
_CUT = MessageRules(cut=frozenset({TENSOR_CONTENT, FLOAT_VAL, DOUBLE_VAL}))

TYPES: dict[str, pb.DataType] = {
    "BOOL": pb.DT_BOOL,
    "UINT8": pb.DT_UINT8,
    "UINT16": pb.DT_UINT16,
    "UINT32": pb.DT_UINT32,
    "UINT64": pb.DT_UINT64,
    "INT8": pb.DT_INT8,
    "INT16": pb.DT_INT16,
    "INT32": pb.DT_INT32,
    "INT64": pb.DT_INT64,
    "FP16": pb.DT_HALF,
    "FP32": pb.DT_FLOAT,
    "FP64": pb.DT_DOUBLE,
    "BF16": pb.DT_BFLOAT16,
    "COMPLEX64": pb.DT_COMPLEX64,
    "COMPLEX128": pb.DT_COMPLEX128,
    "BYTES": pb.DT_STRING,
}
DATATYPE_OF = {number: name for name, number in TYPES.items()}

_TYPED_FIELD = {
    "BOOL": "bool_val",
    "UINT8": "int_val",
    "UINT16": "int_val",
    "UINT32": "uint32_val",
    "UINT64": "uint64_val",
    "INT8": "int_val",
    "INT16": "int_val",
    "INT32": "int_val",
    "INT64": "int64_val",
    "FP16": "half_val",
    "BF16": "half_val",
    "FP32": "float_val",
    "FP64": "double_val",
    "COMPLEX64": "scomplex_val",
    "COMPLEX128": "dcomplex_val",
    "BYTES": "string_val",
}
_FIELD_DTYPE = {
    "bool_val": "?",
    "int_val": "<i4",
    "uint32_val": "<u4",
    "uint64_val": "<u8",
    "int64_val": "<i8",
    "half_val": "<i4",
    "float_val": "<f4",
    "double_val": "<f8",
    "scomplex_val": "<f4",
    "dcomplex_val": "<f8",
}
# The packed form of these fields is the array's memory: field number by datatype.
_JOINED = {"FP32": FLOAT_VAL, "FP64": DOUBLE_VAL, "COMPLEX64": 9, "BOOL": 11, "COMPLEX128": 12}
_PACKED_CUT = {"FP32": FLOAT_VAL, "FP64": DOUBLE_VAL}


class BadTensor(InvalidArgument):
    """A TensorProto that TensorFlow would refuse to parse; the text does not name the tensor."""


def type_name(datatype: str) -> str:
    """TensorFlow's short name of a datatype, such as "float"; of a type that we have no datatype for, its own."""
    number = TYPES.get(datatype)
    return (datatype if number is None else pb.DataType.Name(number)).removeprefix("DT_").lower()


def decode_tensor(name: str, data: bytes | memoryview) -> InputTensor:
    """The tensor of a serialized TensorProto; its content, or packed floats, is a view of `data`.

    Raises `BadTensor`.
    """
    try:
        rest, cuts = scan(data, _CUT, FEW_FIELDS)
    except TooManyFields:
        return read_tensor(name, _parse(bytes(data)))
    except InvalidArgument as error:
        raise BadTensor(error.message) from None
    message = _parse(rest)
    contents = [payload for number, payload in cuts if number == TENSOR_CONTENT]
    if contents and len(contents[-1]):
        return _tensor(name, message, contents[-1])
    packed = [payload for number, payload in cuts if number == _PACKED_CUT.get(_datatype(message))]
    if packed and not (message.float_val or message.double_val):
        whole = packed[0] if len(packed) == 1 else b"".join(packed)
        return _tensor(name, message, None, whole)
    return read_tensor(name, _parse(bytes(data))) if packed else _tensor(name, message, None)


def _parse(data: bytes) -> pb.TensorProto:
    try:
        message: pb.TensorProto = parse(pb.TensorProto, data)
    except InvalidArgument as error:
        raise BadTensor(error.message) from None
    return message


def read_tensor(name: str, message: pb.TensorProto) -> InputTensor:
    """The tensor of a parsed TensorProto. Raises `BadTensor`."""
    return _tensor(name, message, message.tensor_content or None)


def _datatype(message: pb.TensorProto) -> str:
    """Our name of the message's type; TensorFlow's own for one that we cannot hold."""
    number = message.dtype
    if number in DATATYPE_OF:
        return DATATYPE_OF[number]
    try:
        return pb.DataType.Name(number)
    except ValueError:
        return f"DT_{number}"


def _tensor(
    name: str, message: pb.TensorProto, content: Buffer | None, packed: Buffer | None = None
) -> InputTensor:
    """`content` is what `tensor_content` holds, `packed` what the type's packed field does, if not the message."""
    datatype = _datatype(message)
    shape = () if message.tensor_shape.unknown_rank else tuple([dim.size for dim in message.tensor_shape.dim])
    if message.dtype == pb.DT_INVALID or len(shape) > MAX_DIMS or any(dim < 0 for dim in shape):
        raise BadTensor("no type, a negative dim, or too many dims")
    if datatype not in DATATYPES:
        return InputTensor(name, datatype, shape, b"")
    dtype = DATATYPES[datatype].dtype
    if not is_addressable(shape, dtype):
        raise BadTensor("too many elements")
    count = element_count(shape)
    data: Buffer | Array
    if not count:
        data = np.empty(0, dtype)
    elif content is not None:
        data = _content(content, datatype, count)
    elif packed is not None and len(packed) == count * dtype.itemsize:
        data = packed
    elif packed is not None:
        data = _filled(np.frombuffer(packed[: len(packed) // dtype.itemsize * dtype.itemsize], dtype), count)
    else:
        data = _filled(_typed_values(message, datatype), count)
    return InputTensor(name, datatype, shape, data)


def _content(content: Buffer, datatype: str, count: int) -> Buffer | Array:
    if datatype == "BYTES":
        return object_array(_string_elements(content, count), (count,))
    if len(content) != count * DATATYPES[datatype].itemsize:
        raise BadTensor(f"tensor_content has {len(content)} bytes")
    if datatype == "BOOL" and np.frombuffer(content, np.uint8).max() > 1:
        raise BadTensor("a byte of tensor_content is neither 0 nor 1")
    return content


def _string_elements(content: Buffer, count: int) -> list[bytes]:
    """The strings of `tensor_content`: all their lengths as varints, then all their bytes."""
    view = memoryview(content)
    if count > len(view):
        raise BadTensor("fewer lengths than strings")
    ends, at = [], 0
    end = 0
    try:
        for _ in range(count):
            length, at = read_varint(view, at, len(view))
            end += length
            ends.append(end)
    except InvalidArgument as error:
        raise BadTensor(error.message) from None
    if at + end != len(view):
        raise BadTensor(f"strings of {end} bytes, {len(view) - at} are there")
    data = bytes(view[at:])
    return [data[start:stop] for start, stop in zip([0, *ends[:-1]], ends, strict=True)]


def _typed_values(message: pb.TensorProto, datatype: str) -> Array:
    """What the type's own field holds; values in other fields are not looked at."""
    field = _TYPED_FIELD[datatype]
    values: Any = getattr(message, field)
    if field == "string_val":
        return object_array(list(values), (len(values),))
    dtype = DATATYPES[datatype].dtype
    array: Array = np.array(values, _FIELD_DTYPE[field])
    if field == "half_val":
        return array.astype(np.uint16).view(dtype)
    if field in ("scomplex_val", "dcomplex_val"):
        return array[: array.size // 2 * 2].view(dtype)
    # Narrow integers travel as int32 and wrap around.
    return array.astype(dtype, copy=False)


def _filled(values: Array, count: int) -> Array:
    """`count` elements: surplus ones are dropped, and the last one, or zero, is repeated for missing ones."""
    if values.size >= count:
        return values[:count]
    if count * max(values.dtype.itemsize, 1) > MAX_FILLED_BYTES:
        raise BadTensor(f"{values.size} values would be repeated to fill {count}")
    last = values[-1] if values.size else b"" if values.dtype.hasobject else values.dtype.type(0)
    filled: Array = np.full(count, last, values.dtype)
    filled[: values.size] = values
    return filled


def tensor_pieces(array: Array, datatype: str, *, as_content: bool = False) -> list[Any]:
    """A serialized TensorProto in pieces to join: in the typed field, or in `tensor_content` where that exists.

    Clients cannot read strings from `tensor_content` (tfs 2.3).
    """
    head = _head(datatype, array.shape)
    if not array.size:
        return [head]
    if as_content and datatype != "BYTES":
        buffer = raw_buffer(array)
        return [head, length_prefix(TENSOR_CONTENT, byte_length(buffer)), buffer]
    if datatype in _JOINED:
        buffer = native(array)
        return [head, length_prefix(_JOINED[datatype], byte_length(buffer)), buffer]
    return [head, serialize(_typed(array, datatype))]


def _typed(array: Array, datatype: str) -> pb.TensorProto:
    message = pb.TensorProto()
    field = _TYPED_FIELD[datatype]
    if field == "string_val":
        message.string_val.extend(bytes_elements(array))
        return message
    array = native(array).reshape(-1)
    if field == "half_val":
        array = array.view(np.uint16)
    getattr(message, field).extend(array.tolist())
    return message


def tensor_message(array: Array, datatype: str) -> pb.TensorProto:
    """The TensorProto of an array."""
    return pb.TensorProto.FromString(b"".join(tensor_pieces(array, datatype)))


@lru_cache(maxsize=1024)
def _head(datatype: str, shape: tuple[int, ...]) -> bytes:
    message = pb.TensorProto(dtype=TYPES[datatype])
    message.tensor_shape.SetInParent()
    for size in shape:
        message.tensor_shape.dim.add(size=size)
    return serialize(message)
