"""`tensorflow.TensorProto` ⇄ arrays (tfs 2.3). Pure functions.

Strategy: `tensor_content` and packed floats are the array's own bytes, so they are cut from the message and viewed
as an array, and joined from the array's memory when encoding. Everything else goes through protobuf's own lists,
but no submessage of a large message is parsed before its size is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor_pool import DescriptorPool

from triglot.core.compiling import mypyc_attr
from triglot.core.errors import InvalidArgument
from triglot.core.tensor import (
    DATATYPES,
    Array,
    Buffer,
    bytes_elements,
    element_count,
    is_addressable,
    native,
    numbers_of,
    object_array,
    raw_buffer,
)
from triglot.core.types import InputTensor
from triglot.pb.tfserving import tensor_pb2 as pb
from triglot.protocols.wire import (
    SHORT,
    MessageRules,
    TooManyFields,
    length_prefix,
    parse,
    scan,
    serialize,
)

MAX_FILLED_BYTES: Final = 64 * 1024 * 1024
"""Most bytes of a request's tensors in which few values are repeated to fill the shape."""
MAX_DIMS: Final = 32
"""numpy's own limit (before version 2)."""
MAX_SHAPE_BYTES: Final = 32 * 1024
"""Longest serialized shape that is parsed, names of dims included; as objects it is twenty times as large."""
FEW_FIELDS: Final = 64
"""A tensor with more fields than this has its elements one by one, and nothing to cut."""
TENSOR_CONTENT: Final = 4
FLOAT_VAL: Final = 5
DOUBLE_VAL: Final = 6
_ITEMSIZE: Final = {TENSOR_CONTENT: 1, FLOAT_VAL: 4, DOUBLE_VAL: 8}
_CUT: Final = MessageRules(cut=frozenset(_ITEMSIZE))

TYPES: Final[dict[str, pb.DataType]] = {
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
    "QINT8": pb.DT_QINT8,
    "QUINT8": pb.DT_QUINT8,
    "QINT16": pb.DT_QINT16,
    "QUINT16": pb.DT_QUINT16,
    "QINT32": pb.DT_QINT32,
    "BYTES": pb.DT_STRING,
}
# Names for `InputTensor.datatype`: TensorFlow's where Triglot has no datatype; reference types are never sent.
_NAMES: Final[dict[int, str]] = {
    **{number: name for name, number in pb.DataType.items() if 0 < number < pb.DT_FLOAT_REF},
    **{number: name for name, number in TYPES.items()},
}

_TYPED_FIELD: Final = {
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
    "QINT8": "int_val",
    "QUINT8": "int_val",
    "QINT16": "int_val",
    "QUINT16": "int_val",
    "QINT32": "int_val",
    "BYTES": "string_val",
}
_FIELD_DTYPE: Final = {
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
JOINED: Final = {"FP32": FLOAT_VAL, "FP64": DOUBLE_VAL, "COMPLEX64": 9, "BOOL": 11, "COMPLEX128": 12}
"""Fields whose packed form is the array's memory, by datatype."""
_PACKED_CUT: Final = {"FP32": FLOAT_VAL, "FP64": DOUBLE_VAL}


@mypyc_attr(native_class=False)
class BadTensor(InvalidArgument):
    """A TensorProto that TensorFlow would refuse to parse; the text does not name the tensor."""


def dtype_name(datatype: str) -> str:
    """Return TensorFlow's short name of a datatype, such as "float", also for types that are not supported."""
    number = TYPES.get(datatype)
    return (datatype if number is None else pb.DataType.Name(number)).removeprefix("DT_").lower()


def _values_class() -> Any:
    """Return a class for TensorProto that leaves the shape as bytes, and has no handles and variants.

    A submessage in two bytes becomes an object of hundreds, and there may be millions of them.
    """
    file = descriptor_pb2.FileDescriptorProto(name="tensor_values.proto", package="tensorflow", syntax="proto3")
    values = file.message_type.add()
    pb.TensorProto.DESCRIPTOR.CopyToProto(values)
    for field in list(values.field):
        if field.name in ("resource_handle_val", "variant_val"):
            values.field.remove(field)
        elif field.type_name:
            shape = field.name == "tensor_shape"
            field.type = field.TYPE_BYTES if shape else field.TYPE_INT32
            field.label = field.LABEL_REPEATED if shape else field.LABEL_OPTIONAL
            field.ClearField("type_name")
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.TensorProto"))


TensorValues = _values_class()


def decode_tensor(name: str, data: bytes | memoryview, most_filled: int = MAX_FILLED_BYTES) -> InputTensor:
    """Return the tensor of a serialized TensorProto; its content, or packed floats, is a view of `data`.

    Raise `BadTensor`, and `InvalidArgument` if the bytes are not a valid message.
    """
    cuts: list[tuple[int, memoryview]] = []
    try:
        rest, cuts = scan(data, _CUT, FEW_FIELDS)
    except TooManyFields:
        rest = bytes(data)
    for number, payload in cuts:
        if len(payload) % _ITEMSIZE[number]:
            raise InvalidArgument(
                "the request is not a valid tensorflow.TensorProto: packed numbers are truncated"
            )
    message = parse(TensorValues, rest)
    shape = _read_shape(message.tensor_shape)
    contents = [payload for number, payload in cuts if number == TENSOR_CONTENT]
    content = contents[-1] if contents else message.tensor_content
    packed = [payload for number, payload in cuts if number == _PACKED_CUT.get(_NAMES.get(message.dtype, ""))]
    if packed and (message.float_val or message.double_val):
        # Packed and unpacked values are mixed: only protobuf merges them in their order.
        packed, message = [], parse(TensorValues, bytes(data))
    packed_field = packed[0] if len(packed) == 1 else b"".join(packed) if packed else None
    return _tensor(name, message, shape, content, most_filled, packed_field)


def element_bytes(data: bytes | memoryview) -> int:
    """Estimates what `decode_tensor` reads element by element, in bytes. Raise `InvalidArgument`."""
    try:
        rest, cuts = scan(data, _CUT, FEW_FIELDS)
    except TooManyFields:
        return len(data)
    if len(rest) < MAX_SHAPE_BYTES and parse(TensorValues, rest).dtype != pb.DT_STRING:
        return len(rest)
    return len(rest) + sum([len(payload) for number, payload in cuts if number == TENSOR_CONTENT])


def _read_shape(pieces: Sequence[bytes]) -> pb.TensorShapeProto:
    if sum(map(len, pieces)) > MAX_SHAPE_BYTES:
        raise BadTensor("too many dims")
    if len(pieces) > 1:
        # Each part has to be a valid message on its own, not only all of them merged.
        for piece in filter(None, pieces):
            parse(pb.TensorShapeProto, piece)
    shape: pb.TensorShapeProto = parse(pb.TensorShapeProto, b"".join(pieces))
    return shape


def read_tensor(name: str, message: pb.TensorProto, most_filled: int = MAX_FILLED_BYTES) -> InputTensor:
    """Return the tensor of a parsed TensorProto. Raise `BadTensor`."""
    return _tensor(name, message, message.tensor_shape, message.tensor_content, most_filled)


def _tensor(
    name: str,
    message: Any,
    shape_message: pb.TensorShapeProto,
    content: Buffer,
    most_filled: int,
    packed: Buffer | None = None,
) -> InputTensor:
    """Return the tensor; `message` has the typed values, `content` is that of `tensor_content`.

    `packed` is the datatype's packed field, if it was cut from the message. Raise `BadTensor`.
    """
    datatype = _NAMES.get(message.dtype)
    if datatype is None or len(shape_message.dim) > MAX_DIMS:
        raise BadTensor("no type, or too many dims")
    # `unknown_rank` has no effect in a tensor: without dims it is a scalar anyway.
    shape = tuple([dim.size for dim in shape_message.dim])
    if any(dim < 0 for dim in shape):
        raise BadTensor("a negative dim")
    if datatype not in DATATYPES:
        return InputTensor(name, datatype, shape, b"")
    dtype = DATATYPES[datatype].dtype
    if not is_addressable(shape, dtype):
        raise BadTensor("too many elements")
    count = element_count(shape)
    data: Buffer | Array
    if not count:
        data = np.empty(0, dtype)
    elif len(content):
        data = _content(content, datatype, count)
    elif packed is not None and len(packed) == count * dtype.itemsize:
        data = packed
    else:
        values = _typed_values(message, datatype) if packed is None else np.frombuffer(packed, dtype)
        data = _filled(values, count, most_filled)
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
    """Return the strings of `tensor_content`: all their lengths as varints, then all their bytes."""
    octets = np.frombuffer(content, np.uint8)
    lasts = np.flatnonzero(octets[: count * SHORT] < 0x80)[:count]
    if len(lasts) < count:
        raise BadTensor("fewer lengths than strings")
    firsts = np.concatenate(([0], lasts[:-1] + 1))
    widths = lasts - firsts + 1
    if widths.max() > SHORT:
        raise BadTensor("a length has too many bytes")
    lengths = np.zeros(count, np.int64)
    for place in range(int(widths.max())):
        continued = widths > place
        lengths[continued] |= (octets[firsts[continued] + place].astype(np.int64) & 0x7F) << (7 * place)
    data = bytes(memoryview(content)[int(lasts[-1]) + 1 :])
    ends = np.cumsum(lengths)
    if ends[-1] != len(data):
        raise BadTensor(f"strings of {ends[-1]} bytes, {len(data)} are there")
    return [data[start:end] for start, end in zip((ends - lengths).tolist(), ends.tolist(), strict=True)]


def _typed_values(message: Any, datatype: str) -> Array:
    """Return the values of the datatype's own field; other fields are ignored."""
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
    # Narrow integers are sent as int32 and wrap around.
    return array.astype(dtype, copy=False)


def _filled(values: Array, count: int, most_bytes: int) -> Array:
    """Return `count` elements: surplus ones are dropped, missing ones are the last one repeated, or zero."""
    if values.size >= count:
        return values[:count]
    if count * values.dtype.itemsize > most_bytes:
        raise BadTensor(f"{values.size} values would be repeated to fill {count}")
    filled: Array = np.empty(count, values.dtype)
    filled[: values.size] = values
    filled[values.size :] = values[-1] if values.size else b"" if values.dtype.hasobject else 0
    return filled


def memory_field(datatype: str, *, as_content: bool) -> int | None:
    """Return the number of the field that is an array's memory; None if elements are encoded one by one.

    `as_content` asks for `tensor_content`. Clients cannot read strings from there (tfs 2.3).
    """
    return TENSOR_CONTENT if as_content and datatype != "BYTES" else JOINED.get(datatype)


@lru_cache(maxsize=1024)
def memory_head(datatype: str, shape: tuple[int, ...], field: int) -> bytes:
    """Return what precedes the tensor's memory in its serialized TensorProto."""
    size = element_count(shape) * DATATYPES[datatype].itemsize
    return _head(datatype, shape) + (length_prefix(field, size) if size else b"")


def encode_elements(array: Array, datatype: str) -> bytes:
    """Return a serialized TensorProto with the elements one by one in the typed field.

    `array`: any shape, of the dtype of `datatype`.
    """
    head = _head(datatype, array.shape)
    return head + serialize(_typed(array, datatype)) if array.size else head


def _typed(array: Array, datatype: str) -> pb.TensorProto:
    message = pb.TensorProto()
    field = _TYPED_FIELD[datatype]
    if field == "string_val":
        message.string_val.extend(bytes_elements(array))
        return message
    array = numbers_of(native(array).reshape(-1))
    if field == "half_val":
        array = array.view(np.uint16)
    getattr(message, field).extend(array.tolist())
    return message


def tensor_pieces(array: Array, datatype: str, *, as_content: bool = False) -> list[Any]:
    """Return a serialized TensorProto in pieces to join; the array's memory is one of them where possible.

    `array`: any shape, of the dtype of `datatype`.
    """
    field = memory_field(datatype, as_content=as_content)
    if field is None:
        return [encode_elements(array, datatype)]
    return [memory_head(datatype, array.shape, field), raw_buffer(array)]


def tensor_message(array: Array, datatype: str) -> pb.TensorProto:
    """Return the TensorProto of an array, with the typed field.

    `array`: any shape, of the dtype of `datatype`.
    """
    return pb.TensorProto.FromString(b"".join(tensor_pieces(array, datatype)))


@lru_cache(maxsize=1024)
def _head(datatype: str, shape: tuple[int, ...]) -> bytes:
    message = pb.TensorProto(dtype=TYPES[datatype])
    message.tensor_shape.SetInParent()
    for size in shape:
        message.tensor_shape.dim.add(size=size)
    return serialize(message)
