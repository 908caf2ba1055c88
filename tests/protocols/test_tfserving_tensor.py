"""TensorProto: what its fields mean, rule by rule (tfs 2.3), however the message is read."""

from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.protocols.wire_bytes import field, fixed32_field, fixed64_field, number, packed, varint_field
from triglot.core.tensor import DATATYPES, Array, array_over, numbers_of, object_array
from triglot.core.types import InputTensor
from triglot.pb.tfserving import tensor_pb2 as pb
from triglot.protocols.tfserving.tensor import (
    FEW_FIELDS,
    MAX_DIMS,
    TYPES,
    BadTensor,
    decode_tensor,
    dtype_name,
    read_tensor,
    tensor_message,
    tensor_pieces,
)

MANY_FIELDS = varint_field(99, 0) * (FEW_FIELDS + 1)


def array_of(tensor: InputTensor) -> Array:
    """The tensor's elements in its shape."""
    if isinstance(tensor.data, np.ndarray):
        assert tensor.data.dtype == DATATYPES[tensor.datatype].dtype
        return tensor.data.reshape(tensor.shape)
    assert len(tensor.data) == int(np.prod(tensor.shape)) * DATATYPES[tensor.datatype].itemsize
    return array_over(tensor.data, DATATYPES[tensor.datatype].dtype, tensor.shape)


def read_all(data: bytes) -> list[InputTensor]:
    """The tensor as read from the parsed message, cut from its bytes, and from a message of many fields."""
    tensors = [
        read_tensor("x", pb.TensorProto.FromString(data)),
        decode_tensor("x", data),
        decode_tensor("x", memoryview(b"??" + data)[2:]),
        decode_tensor("x", data + MANY_FIELDS),
    ]
    assert len({(tensor.name, tensor.datatype, tensor.shape) for tensor in tensors}) == 1
    return tensors


def arrays(message: pb.TensorProto | bytes) -> list[Array]:
    data = message if isinstance(message, bytes) else message.SerializeToString()
    return [array_of(tensor) for tensor in read_all(data)]


def assert_elements(message: pb.TensorProto | bytes, expected: Any) -> None:
    for array in arrays(message):
        assert numbers_of(array).tolist() == expected


def assert_refused(message: pb.TensorProto | bytes) -> None:
    data = message if isinstance(message, bytes) else message.SerializeToString()
    with pytest.raises(BadTensor):
        read_tensor("x", pb.TensorProto.FromString(data))
    for form in (data, data + MANY_FIELDS):
        with pytest.raises(BadTensor):
            decode_tensor("x", form)


def proto(dtype: str, shape: list[int], **fields: Any) -> pb.TensorProto:
    """The message; `shape` is always set."""
    return pb.TensorProto(dtype=f"DT_{dtype}", tensor_shape={"dim": [{"size": dim} for dim in shape]}, **fields)


# Type, typed field, what is in it, the elements, their bytes.
ROWS: list[tuple[str, str, list[Any], list[Any], bytes]] = [
    ("FLOAT", "float_val", [1.5, -0.0], [1.5, -0.0], struct.pack("<2f", 1.5, -0.0)),
    ("DOUBLE", "double_val", [0.1, float("inf")], [0.1, float("inf")], struct.pack("<2d", 0.1, float("inf"))),
    ("INT32", "int_val", [-(2**31), 2**31 - 1], [-(2**31), 2**31 - 1], struct.pack("<2i", -(2**31), 2**31 - 1)),
    ("INT16", "int_val", [40000, -1], [-25536, -1], struct.pack("<2h", -25536, -1)),
    ("INT8", "int_val", [300, -129], [44, 127], bytes([44, 127])),
    ("UINT8", "int_val", [300, -1], [44, 255], bytes([44, 255])),
    ("UINT16", "int_val", [65537, -1], [1, 65535], struct.pack("<2H", 1, 65535)),
    ("INT64", "int64_val", [-(2**63), 2**63 - 1], [-(2**63), 2**63 - 1], struct.pack("<2q", -(2**63), 2**63 - 1)),
    ("UINT32", "uint32_val", [1, 2**32 - 1], [1, 2**32 - 1], struct.pack("<2I", 1, 2**32 - 1)),
    ("UINT64", "uint64_val", [1, 2**64 - 1], [1, 2**64 - 1], struct.pack("<2Q", 1, 2**64 - 1)),
    ("BOOL", "bool_val", [True, False], [True, False], b"\1\0"),
    ("STRING", "string_val", [b"a\0", b"\xff"], [b"a\0", b"\xff"], b"\2\1a\0\xff"),
    ("HALF", "half_val", [15360, 0xFC00], [1.0, float("-inf")], struct.pack("<2e", 1.0, float("-inf"))),
    ("BFLOAT16", "half_val", [16256, 0xFF80], [1.0, float("-inf")], struct.pack("<2H", 16256, 0xFF80)),
    ("COMPLEX64", "scomplex_val", [1.5, -2, 0, 3], [1.5 - 2j, 3j], struct.pack("<4f", 1.5, -2, 0, 3)),
    ("COMPLEX128", "dcomplex_val", [0.1, -2, 0, 3], [0.1 - 2j, 3j], struct.pack("<4d", 0.1, -2, 0, 3)),
    ("QINT8", "int_val", [300, -129], [44, 127], bytes([44, 127])),
    ("QUINT8", "int_val", [300, -1], [44, 255], bytes([44, 255])),
    ("QINT16", "int_val", [40000, -1], [-25536, -1], struct.pack("<2h", -25536, -1)),
    ("QUINT16", "int_val", [65537, -1], [1, 65535], struct.pack("<2H", 1, 65535)),
    ("QINT32", "int_val", [-(2**31), 2**31 - 1], [-(2**31), 2**31 - 1], struct.pack("<2i", -(2**31), 2**31 - 1)),
]
FIELDS = {member: values for _, member, values, _, _ in ROWS}
rows = pytest.mark.parametrize(
    ("dtype", "member", "values", "elements", "raw"), ROWS, ids=[row[0] for row in ROWS]
)


def zero_of(dtype: str) -> Any:
    return b"" if dtype == "STRING" else 0


def test_every_datatype_has_a_row() -> None:
    assert {f"DT_{row[0]}" for row in ROWS} == {pb.DataType.Name(number) for number in TYPES.values()}
    assert TYPES.keys() == DATATYPES.keys()


@rows
def test_typed_field_and_content(
    dtype: str, member: str, values: list[Any], elements: list[Any], raw: bytes
) -> None:
    assert_elements(proto(dtype, [2], **{member: values}), elements)
    assert_elements(proto(dtype, [2, 1], tensor_content=raw), [[element] for element in elements])


@rows
def test_too_few_and_too_many(dtype: str, member: str, values: list[Any], elements: list[Any], raw: bytes) -> None:
    """The last value is repeated, nothing at all is zero, and what is too much is dropped."""
    first, last = elements
    assert_elements(proto(dtype, [2, 2], **{member: values}), [[first, last], [last, last]])
    assert_elements(proto(dtype, [1], **{member: values}), [first])
    assert_elements(proto(dtype, [], **{member: values}), first)
    assert_elements(proto(dtype, [3], **{member: values[: len(values) // 2]}), [first] * 3)
    assert_elements(proto(dtype, [3]), [zero_of(dtype)] * 3)


@rows
def test_other_fields_are_not_looked_at(
    dtype: str, member: str, values: list[Any], elements: list[Any], raw: bytes
) -> None:
    others = {name: stray for name, stray in FIELDS.items() if name != member}
    assert_elements(proto(dtype, [2], **others), [zero_of(dtype)] * 2)
    assert_elements(proto(dtype, [2], **others, **{member: values}, version_number=7), elements)


@rows
def test_content_comes_first(dtype: str, member: str, values: list[Any], elements: list[Any], raw: bytes) -> None:
    backwards: Any = {member: values[::-1]}
    assert_elements(proto(dtype, [2], tensor_content=raw, **backwards), elements)
    # Empty content is none, also when another came before it.
    empty = field(4, raw) + proto(dtype, [2], **{member: values}).SerializeToString() + field(4, b"")
    assert_elements(empty, elements)
    again = field(4, raw * 2) + proto(dtype, [2], **backwards).SerializeToString() + field(4, raw)
    assert_elements(again, elements)


@rows
def test_content_has_exactly_the_right_length(
    dtype: str, member: str, values: list[Any], elements: list[Any], raw: bytes
) -> None:
    for content in (raw[:-1], raw + b"\0", raw[: len(raw) // 2], raw * 2, b"\0"):
        if len(content) != len(raw) or dtype == "STRING":
            assert_refused(proto(dtype, [2], tensor_content=content, **{member: values}))


@rows
def test_no_elements(dtype: str, member: str, values: list[Any], elements: list[Any], raw: bytes) -> None:
    contents: Any = {member: values}
    for message in (
        proto(dtype, [0]),
        proto(dtype, [0], tensor_content=raw + b"?"),
        proto(dtype, [0], **contents),
    ):
        assert_elements(message, [])
    for array in arrays(proto(dtype, [2, 0, 3], **contents)):
        assert array.shape == (2, 0, 3)


@rows
def test_encoded(dtype: str, member: str, values: list[Any], elements: list[Any], raw: bytes) -> None:
    """In the typed field every value stands, and the shape always; strings have no other form."""
    datatype = next(name for name, number in TYPES.items() if pb.DataType.Name(number) == f"DT_{dtype}")
    array = object_array(elements, (2,)) if dtype == "STRING" else np.array(elements, DATATYPES[datatype].dtype)
    for shaped in (array.reshape(1, 2), np.repeat(array[:1], 2), array[0:1].reshape(()), array[:0]):
        message = tensor_message(shaped, datatype)
        assert pb.DataType.Name(message.dtype) == f"DT_{dtype}"
        assert message.HasField("tensor_shape")
        assert tuple(dim.size for dim in message.tensor_shape.dim) == shaped.shape
        filled = {member} if shaped.size else set()
        assert {descriptor.name for descriptor, _ in message.ListFields()} - {"dtype", "tensor_shape"} == filled
        assert len(getattr(message, member)) == shaped.size * (2 if "complex" in member else 1)
        assert_elements(message, numbers_of(shaped).tolist())
    content = pb.TensorProto.FromString(b"".join(tensor_pieces(array, datatype, as_content=True)))
    assert content.tensor_content == (b"" if dtype == "STRING" else raw)
    assert_elements(content, elements)
    if dtype in ("HALF", "BFLOAT16"):
        assert all(0 <= bits < 2**16 for bits in tensor_message(array, datatype).half_val)


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "INT16", "FP16", "BF16", "COMPLEX64", "BOOL"])
def test_arrays_of_any_layout_are_encoded_row_by_row(datatype: str) -> None:
    array = (np.arange(12) % 5).reshape(3, 4).astype(DATATYPES[datatype].dtype)
    swapped = array if datatype in ("BF16", "BOOL") else array.astype(array.dtype.newbyteorder(">"))
    for other in (np.asfortranarray(array), array[::-1][::-1], swapped, array.repeat(2, 1)[:, ::2]):
        for as_content in (False, True):
            encoded = b"".join(tensor_pieces(other, datatype, as_content=as_content))
            assert_elements(encoded, numbers_of(array).tolist())


@pytest.mark.parametrize(("member", "dtype"), [("scomplex_val", "COMPLEX64"), ("dcomplex_val", "COMPLEX128")])
def test_half_a_complex_number_is_dropped(member: str, dtype: str) -> None:
    assert_elements(proto(dtype, [2], **{member: [1, 2, 3, 4, 5]}), [1 + 2j, 3 + 4j])
    assert_elements(proto(dtype, [2], **{member: [1, 2, 3]}), [1 + 2j] * 2)
    assert_elements(proto(dtype, [2], **{member: [1]}), [0, 0])


def test_bits_of_halves() -> None:
    bits = [0x0001, 0x7E00, 0x8000, 70000, -1]
    for dtype, numpy_type in (("HALF", np.float16), ("BFLOAT16", ml_dtypes.bfloat16)):
        for array in arrays(proto(dtype, [5], half_val=bits)):
            assert array.dtype == numpy_type
            assert array.view(np.uint16).tolist() == [0x0001, 0x7E00, 0x8000, 70000 - 65536, 0xFFFF]


@pytest.mark.parametrize(
    ("content", "strings"),
    [
        (b"\0", [b""]),
        (b"\0\0\0", [b"", b"", b""]),
        (b"\1\0\2abc", [b"a", b"", b"bc"]),
        (b"\x80\1\1" + b"a" * 128 + b"b", [b"a" * 128, b"b"]),
        (b"\x81\0a", [b"a"]),  # A longer varint than is needed.
        (b"\3\x80\x80\x80", [b"\x80\x80\x80"]),
    ],
)
def test_strings_of_content(content: bytes, strings: list[bytes]) -> None:
    assert_elements(proto("STRING", [len(strings)], tensor_content=content), strings)


@pytest.mark.parametrize(
    ("content", "count"),
    [
        (b"\1", 1),
        (b"\1ab", 1),
        (b"\2a", 1),
        (b"\x80", 1),
        (b"\x80\x80\x80\x80\x80\0", 1),  # A length takes five bytes at most.
        (b"\0", 2),
        (b"\0\0", 1),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\1", 1),
        (b"\1\xff\xff\xff\xff\x0fa", 2),
    ],
)
def test_strings_that_do_not_fill_the_content(content: bytes, count: int) -> None:
    assert_refused(proto("STRING", [count], tensor_content=content))


def test_bools_of_content_are_0_or_1() -> None:
    assert_elements(proto("BOOL", [2], tensor_content=b"\0\1"), [False, True])
    assert_refused(proto("BOOL", [2], tensor_content=b"\0\2"))
    assert_refused(proto("BOOL", [2], tensor_content=b"\xff\0"))


def test_shapes() -> None:
    assert_elements(pb.TensorProto(dtype=pb.DT_FLOAT, float_val=[1, 2]), 1.0)
    assert_elements(pb.TensorProto(dtype=pb.DT_FLOAT, tensor_shape={}), 0.0)
    of_any_rank = proto("FLOAT", [], float_val=[1, 2])
    of_any_rank.tensor_shape.unknown_rank = True
    assert_elements(of_any_rank, 1.0)
    of_any_rank.tensor_shape.dim.add(size=2)
    assert_elements(of_any_rank, [1, 2])
    assert_elements(proto("INT32", [1] * MAX_DIMS, int_val=[7]), np.full([1] * MAX_DIMS, 7).tolist())
    named = proto("INT32", [], int_val=[1, 2])
    named.tensor_shape.dim.add(size=2, name="batch")
    assert_elements(named, [1, 2])
    named.tensor_shape.dim.add()
    assert_elements(named, [[], []])


@pytest.mark.parametrize(
    "shape",
    [[-1], [2, -1], [0, -1], [-(2**63)], [1] * (MAX_DIMS + 1), [2**62, 2], [2**40, 2**40], [0, 2**62, 2**62]],
    ids=str,
)
def test_shapes_that_are_none(shape: list[int]) -> None:
    assert_refused(proto("FLOAT", shape, float_val=[1]))
    assert_refused(proto("FLOAT", shape, tensor_content=bytes(4)))


@pytest.mark.parametrize("dtype", [0, 34, 100, 101, 107, 119, 133, 999, -1, 2**31 - 1])
def test_types_that_are_none(dtype: int) -> None:
    assert_refused(varint_field(1, dtype) + field(5, bytes(4)))
    assert_refused(varint_field(1, dtype) + field(2, field(2, varint_field(1, 0))))


def test_without_a_type() -> None:
    assert_refused(b"")
    assert_refused(field(5, bytes(4)))


@pytest.mark.parametrize("dtype", sorted(set(range(1, 34)) - set(TYPES.values())))
def test_types_that_no_model_here_can_have_are_left_to_the_checks(dtype: int) -> None:
    name = pb.DataType.Name(dtype)
    for tensor in read_all(varint_field(1, dtype) + field(2, field(2, varint_field(1, 3))) + field(18, b"abc")):
        assert (tensor.datatype, tensor.shape, tensor.data) == (name, (3,), b"")
    assert dtype_name(name) == name.removeprefix("DT_").lower()


@pytest.mark.parametrize(
    ("datatype", "name"),
    [("FP32", "float"), ("FP64", "double"), ("FP16", "half"), ("BF16", "bfloat16"), ("BYTES", "string")]
    + [(name, name.lower()) for name in ("BOOL", "UINT8", "UINT64", "INT16", "INT64", "COMPLEX128")],
)
def test_names_of_types(datatype: str, name: str) -> None:
    assert dtype_name(datatype) == name


SHAPE_5 = field(2, field(2, varint_field(1, 5)))
INT32, FLOAT, DOUBLE, STRING = (varint_field(1, TYPES[name]) for name in ("INT32", "FP32", "FP64", "BYTES"))


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


@pytest.mark.parametrize(
    "data",
    [
        INT32 + SHAPE_5 + field(7, packed([1, 2])) + varint_field(7, 3) + field(7, packed([4, 5])),
        field(7, packed([1, 2, 3])) + SHAPE_5 + field(7, b"") + varint_field(7, 4) + INT32 + varint_field(7, 5),
        FLOAT + SHAPE_5 + b"".join(fixed32_field(5, floats(value)) for value in range(1, 6)),
        FLOAT + SHAPE_5 + field(5, floats(1, 2)) + field(5, floats(3)) + field(5, b"") + field(5, floats(4, 5)),
        FLOAT + SHAPE_5 + field(5, floats(1, 2)) + fixed32_field(5, floats(3)) + field(5, floats(4, 5)),
        field(5, floats(1, 2, 3, 4, 5)) + fixed64_field(6) + SHAPE_5 + FLOAT,
        field(5, floats(1, 2, 3, 4, 5)) + field(6, bytes(16)) + SHAPE_5 + FLOAT,
        varint_field(1, 99) + field(5, floats(1, 2, 3, 4, 5)) + SHAPE_5 + FLOAT,
        DOUBLE + SHAPE_5 + fixed64_field(6, struct.pack("<d", 1)) + field(6, struct.pack("<4d", 2, 3, 4, 5)),
        FLOAT + field(2, b"") + field(5, floats(1, 2, 3, 4, 5)) + SHAPE_5 + field(99, "?"),
        INT32 + SHAPE_5 + varint_field(4, 1) + field(7, packed([1, 2, 3, 4, 5])),
        INT32 + SHAPE_5 + number(7 << 3 | 2) + b"\x85\0" + packed([1, 2, 3, 4, 5]),
    ],
)
def test_fields_in_pieces_and_in_any_order(data: bytes) -> None:
    assert_elements(data, [1, 2, 3, 4, 5])


def test_dims_in_pieces() -> None:
    dim = field(2, varint_field(1, 2))
    shape = field(2, dim) + field(2, varint_field(3, 1)) + field(2, b"") + field(2, dim)
    assert_elements(INT32 + shape + varint_field(7, 7), [[7, 7], [7, 7]])


def test_strings_one_by_one() -> None:
    strings = [b"%d" % at for at in range(3 * FEW_FIELDS)]
    assert_elements(proto("STRING", [len(strings)], string_val=strings), strings)
    assert_elements(proto("STRING", [2], string_val=[b"a\0b\0"]), [b"a\0b\0"] * 2)
