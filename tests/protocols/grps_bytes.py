"""GrpsMessages as bytes: random ones of every odd form, and what protobuf's own class makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.protocols.wire_bytes import (
    UNKNOWN_FIELDS,
    field,
    fixed32_field,
    fixed64_field,
    number,
    packed,
    varint_field,
)
from triglot.core.tensor import Array
from triglot.pb.grps import grps_pb2 as pb
from triglot.protocols.grps.message import Data, GrpsMap, GrpsTensor, Message, NDArray, Status

# The list that a DataType chooses, and how it travels.
LIST_OF: dict[int, tuple[str, str]] = {
    pb.DT_UINT8: ("flat_uint8", "u4"),
    pb.DT_INT8: ("flat_int8", "i4"),
    pb.DT_INT16: ("flat_int16", "i4"),
    pb.DT_INT32: ("flat_int32", "i4"),
    pb.DT_INT64: ("flat_int64", "i8"),
    pb.DT_FLOAT16: ("flat_float16", "f4"),
    pb.DT_FLOAT32: ("flat_float32", "f4"),
    pb.DT_FLOAT64: ("flat_float64", "f8"),
    pb.DT_STRING: ("flat_string", "O"),
}
MAPS = ("s_s", "s_b", "s_i32", "s_i64", "s_f", "s_d")


def elements_of(tensor: pb.GenericTensor) -> Array:
    """The list that the tensor's dtype chooses."""
    if tensor.dtype not in LIST_OF:
        return np.empty(0, "f4")
    name, dtype = LIST_OF[tensor.dtype]
    return np.array(list(getattr(tensor, name)), dtype)


def expected(data: bytes) -> Message:
    """The message that protobuf's class reads from `data`. Raise `DecodeError`."""
    read = pb.GrpsMessage.FromString(data)
    value: Data = None
    member = read.WhichOneof("data_oneof")
    if member == "gtensors":
        value = [
            GrpsTensor(tensor.name, tensor.dtype, tuple(tensor.shape), elements_of(tensor))
            for tensor in read.gtensors.tensors
        ]
    elif member == "gmap":
        value = GrpsMap(*[dict(getattr(read.gmap, name)) for name in MAPS])
    elif member == "ndarray":
        value = NDArray()
    elif member is not None:
        value = getattr(read, member)
    status = None
    if read.HasField("status"):
        status = Status(read.status.code, read.status.msg, read.status.status)
    return Message(read.model, value, status)


def comparable(message: Message) -> tuple[Any, ...]:
    """The message in values that `==` compares, NaNs and dtypes among them."""
    data: Any = message.data
    if isinstance(data, list):
        data = [
            (
                tensor.name,
                tensor.dtype,
                tensor.shape,
                tensor.elements.dtype.str,
                list(map(repr, tensor.elements.tolist())),
            )
            for tensor in data
        ]
    elif isinstance(data, GrpsMap):
        data = [{key: repr(value) for key, value in getattr(data, name).items()} for name in MAPS]
    return message.model, type(message.data).__name__, data, message.status, message.from_ndarray


# --- random messages, field by field ---

_TEXT = st.text(max_size=5)
_INTEGERS = st.one_of(st.integers(-3, 300), st.integers(-(2**63), 2**64 - 1))


def _integer_list(tag: int) -> st.SearchStrategy[bytes]:
    values = st.lists(_INTEGERS, max_size=5)
    return st.one_of(
        values.map(lambda some: field(tag, packed(some))),
        values.map(lambda some: b"".join([varint_field(tag, value) for value in some])),
    )


def _float_list(tag: int, size: int) -> st.SearchStrategy[bytes]:
    values = st.lists(st.binary(min_size=size, max_size=size), max_size=5)
    single = fixed32_field if size == 4 else fixed64_field
    return st.one_of(
        values.map(lambda some: field(tag, b"".join(some))),
        values.map(lambda some: b"".join([single(tag, value) for value in some])),
    )


def _joined(parts: st.SearchStrategy[bytes], most: int) -> st.SearchStrategy[bytes]:
    return st.lists(parts, max_size=most).map(b"".join)


_DTYPE = st.one_of(st.integers(0, 10), _INTEGERS).map(lambda value: varint_field(2, value))
_TENSOR = _joined(
    st.one_of(
        _DTYPE,
        _DTYPE,
        _TEXT.map(lambda text: field(1, text)),
        *[_integer_list(tag) for tag in range(3, 9)],
        _float_list(9, 4),
        _float_list(10, 4),
        _float_list(10, 4),
        _float_list(11, 8),
        _TEXT.map(lambda text: field(12, text)),
        UNKNOWN_FIELDS,
    ),
    8,
)
_TENSORS = _joined(st.one_of(_TENSOR.map(lambda tensor: field(1, tensor)), UNKNOWN_FIELDS), 4)
_VALUES = {
    1: _TEXT.map(lambda text: field(2, text)),
    2: st.binary(max_size=5).map(lambda octets: field(2, octets)),
    3: _INTEGERS.map(lambda value: varint_field(2, value)),
    4: _INTEGERS.map(lambda value: varint_field(2, value)),
    5: st.binary(min_size=4, max_size=4).map(lambda octets: fixed32_field(2, octets)),
    6: st.binary(min_size=8, max_size=8).map(lambda octets: fixed64_field(2, octets)),
}


def _entry(tag: int) -> st.SearchStrategy[bytes]:
    parts = st.one_of(_TEXT.map(lambda text: field(1, text)), _VALUES[tag])
    return _joined(parts, 3).map(lambda entry: field(tag, entry))


_MAP = _joined(st.one_of(*[_entry(tag) for tag in _VALUES], UNKNOWN_FIELDS), 5)
_STATUS = _joined(
    st.one_of(
        _INTEGERS.map(lambda value: varint_field(1, value)),
        _TEXT.map(lambda text: field(2, text)),
        st.integers(0, 3).map(lambda value: varint_field(3, value)),
    ),
    3,
)
# Fields in any order and number, as protobuf would have to merge them.
MESSAGES: st.SearchStrategy[bytes] = _joined(
    st.one_of(
        _STATUS.map(lambda status: field(1, status)),
        _TEXT.map(lambda text: field(2, text)),
        st.binary(max_size=5).map(lambda octets: field(3, octets)),
        _TEXT.map(lambda text: field(4, text)),
        _TENSORS.map(lambda tensors: field(5, tensors)),
        _TENSORS.map(lambda tensors: field(5, tensors)),
        _joined(UNKNOWN_FIELDS, 2).map(lambda unknown: field(6, unknown)),
        _MAP.map(lambda entries: field(7, entries)),
        UNKNOWN_FIELDS,
        # Known fields in another wire type, which makes them unknown ones.
        st.integers(1, 7).map(lambda tag: varint_field(tag, 5)),
        st.integers(1, 7).map(lambda tag: number(tag << 3 | 5) + bytes(4)),
    ),
    5,
)
