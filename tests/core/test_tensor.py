"""Datatypes, and tensors as bytes (spec 2.1, 2.2)."""

from __future__ import annotations

import struct
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from triglot.core.errors import InvalidArgument
from triglot.core.tensor import (
    DATATYPES,
    Array,
    BytesFramingError,
    array_over,
    byte_length,
    bytes_elements,
    datatype_of,
    element_count,
    object_array,
    pack_bytes,
    raw_buffer,
    unpack_bytes,
)

# Spec 2.1: name, bytes of an element, a value, and the value's encoding.
TABLE: list[tuple[str, int, Any, str]] = [
    ("BOOL", 1, True, "01"),
    ("UINT8", 1, 254, "fe"),
    ("UINT16", 2, 0x1234, "3412"),
    ("UINT32", 4, 0x12345678, "78563412"),
    ("UINT64", 8, 2**64 - 1, "ff" * 8),
    ("INT8", 1, -2, "fe"),
    ("INT16", 2, -2, "feff"),
    ("INT32", 4, -2, "feffffff"),
    ("INT64", 8, -(2**63), "0000000000000080"),
    ("FP16", 2, 1.5, "003e"),
    ("FP32", 4, 1.0, "0000803f"),
    ("FP64", 8, 1.0, "000000000000f03f"),
    ("BF16", 2, 1.0, "803f"),
    ("COMPLEX64", 8, 1 - 2j, "0000803f000000c0"),
    ("COMPLEX128", 16, 1 - 2j, "000000000000f03f00000000000000c0"),
    ("QINT8", 1, (-2,), "fe"),
    ("QUINT8", 1, (254,), "fe"),
    ("QINT16", 2, (-2,), "feff"),
    ("QUINT16", 2, (0x1234,), "3412"),
    ("QINT32", 4, (-2,), "feffffff"),
    ("BYTES", 0, b"ab", "020000006162"),
]
NUMERIC = [row[0] for row in TABLE if row[1]]


def joined(array: Array) -> bytes:
    """What leaves the server: the buffer as `b"".join` takes it, with the length that is announced for it."""
    buffer: Any = raw_buffer(array)
    data = b"".join([buffer])
    assert len(data) == byte_length(buffer)
    return data


def test_the_table_has_these_datatypes_and_no_others() -> None:
    assert {name: row.itemsize for name, row in DATATYPES.items()} == {row[0]: row[1] for row in TABLE}
    assert all(row.name == name for name, row in DATATYPES.items())


# numpy has it since 2.0.
VARIABLE_TEXT = [np.dtypes.StringDType] if hasattr(np.dtypes, "StringDType") else []


@pytest.mark.parametrize(("name", "itemsize", "value", "encoding"), TABLE)
def test_encoding_of_each_datatype(name: str, itemsize: int, value: Any, encoding: str) -> None:
    datatype = DATATYPES[name]
    array = np.array([value], dtype=datatype.dtype)
    assert datatype_of(array) == name
    assert joined(array).hex() == encoding
    if itemsize:
        assert datatype.dtype.itemsize == itemsize
        assert array_over(bytes.fromhex(encoding), datatype.dtype, (1,)).tolist() == [value]
    else:
        assert unpack_bytes(bytes.fromhex(encoding), 1) == [value]


@pytest.mark.parametrize(
    ("array", "name"),
    [
        (np.array(["a", "é"]), "BYTES"),
        (np.array([b"a"]), "BYTES"),
        *((np.array(["a"], dtype=kind()), "BYTES") for kind in VARIABLE_TEXT),
        (np.array([1, "a"], dtype=object), "BYTES"),
        (np.array([1.0], dtype=">f4"), "FP32"),
        (np.array([1], dtype=">i8"), "INT64"),
        (np.array([1], dtype=np.longlong), "INT64"),
        (np.array([1], dtype=ml_dtypes.bfloat16), "BF16"),
    ],
)
def test_datatype_of_arrays_as_models_make_them(array: Array, name: str) -> None:
    assert datatype_of(array) == name


@pytest.mark.parametrize("dtype", ["M8[s]", "m8[s]", "g", [("a", "i4")]])
def test_dtypes_without_a_datatype_are_named(dtype: Any) -> None:
    array = np.zeros(2, dtype)
    with pytest.raises(TypeError, match=r"numpy dtype .* has no datatype; use one of BOOL, .*BYTES"):
        datatype_of(array)


@pytest.mark.parametrize(
    ("shape", "count"), [((), 1), ((0,), 0), ((3, 0, 2), 0), ((2, 3), 6), ((2**62, 4), 2**64)]
)
def test_element_count(shape: tuple[int, ...], count: int) -> None:
    assert element_count(shape) == count


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("name", NUMERIC)
def test_an_array_lies_over_its_buffer_and_is_read_only(name: str, kind: type) -> None:
    datatype = DATATYPES[name]
    data = bytes(6 * datatype.itemsize)
    buffer = kind(data)
    array = array_over(buffer, datatype.dtype, (2, 3))
    assert array.shape == (2, 3)
    assert array.dtype == datatype.dtype
    assert np.shares_memory(array, np.frombuffer(buffer, np.uint8))
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1


def test_an_array_over_a_place_that_is_not_aligned() -> None:
    data = b"\0\0\0" + struct.pack("<2d", 1.5, -2.5)
    array = array_over(memoryview(data)[3:], DATATYPES["FP64"].dtype, (2,))
    assert np.shares_memory(array, np.frombuffer(data, np.uint8))
    assert array.tolist() == [1.5, -2.5]
    assert (array * 2).tolist() == [3.0, -5.0]
    assert joined(array) == data[3:]


@pytest.mark.parametrize("name", NUMERIC)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 1)])
def test_scalars_and_empty_tensors(name: str, shape: tuple[int, ...]) -> None:
    datatype = DATATYPES[name]
    data = bytes(element_count(shape) * datatype.itemsize)
    array = array_over(data, datatype.dtype, shape)
    assert array.shape == shape
    assert joined(array) == data


@pytest.mark.parametrize("name", NUMERIC)
def test_the_buffer_of_an_array_that_is_laid_out_right_is_its_own_memory(name: str) -> None:
    array = np.ones((3, 4), DATATYPES[name].dtype)
    assert np.shares_memory(np.frombuffer(raw_buffer(array), np.uint8), array)


@pytest.mark.parametrize("name", NUMERIC)
def test_other_layouts_are_put_in_row_major_order(name: str) -> None:
    array = np.arange(24).astype(DATATYPES[name].dtype).reshape(2, 3, 4)
    for view in (array.T, array[:, ::-1], array[:, 1:, ::2], np.broadcast_to(array[:1], (5, 3, 4))):
        expected = b"".join(element.tobytes() for element in view.reshape(-1))
        assert joined(view) == expected


@pytest.mark.parametrize("name", [name for name in NUMERIC if DATATYPES[name].itemsize > 1])
def test_big_endian_arrays_leave_little_endian(name: str) -> None:
    array = np.arange(-2, 4).astype(DATATYPES[name].dtype)
    swapped = array.astype(array.dtype.newbyteorder(">"))
    assert datatype_of(swapped) == name
    assert joined(swapped) == joined(array)
    assert joined(swapped[::2]) == joined(array[::2])


@given(
    hnp.arrays(
        hnp.integer_dtypes(endianness="?")
        | hnp.unsigned_integer_dtypes()
        | hnp.floating_dtypes(sizes=(16, 32, 64)),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    )
)
def test_numeric_round_trip(array: Array) -> None:
    back = array_over(joined(array), DATATYPES[datatype_of(array)].dtype, array.shape)
    np.testing.assert_array_equal(back, array)


@given(st.lists(st.binary()))
def test_bytes_round_trip(elements: list[bytes]) -> None:
    packed = pack_bytes(elements)
    assert unpack_bytes(packed, len(elements)) == elements
    assert unpack_bytes(memoryview(packed), len(elements)) == elements
    assert joined(object_array(elements, (len(elements),))) == packed


@given(st.binary(max_size=40), st.integers(0, 12))
def test_any_bytes_unpack_exactly_or_not_at_all(data: bytes, count: int) -> None:
    try:
        elements = unpack_bytes(data, count)
    except BytesFramingError:
        return
    assert len(elements) == count
    assert pack_bytes(elements) == data


def test_the_golden_bytes_tensor() -> None:
    wire = bytes.fromhex("02000000 6162 00000000")
    assert pack_bytes([b"ab", b""]) == wire
    assert unpack_bytes(wire, 2) == [b"ab", b""]
    assert unpack_bytes(b"", 0) == []


@pytest.mark.parametrize(
    ("data", "count", "text"),
    [
        ("", 1, "unexpected number of string elements 0 at most, expecting 1"),
        ("00000000", 2, "unexpected number of string elements 1 at most, expecting 2"),
        ("00000000", 0, "unexpected number of string elements 1 or more, expecting 0"),
        ("00000000 00000000", 1, "unexpected number of string elements 2 or more, expecting 1"),
        ("04000000 00000000", 2, "unexpected number of string elements 1, expecting 2"),
        ("01000000 61 0000", 1, "unexpected number of string elements 2 or more, expecting 1"),
        ("02000000 6161 000000", 2, "incomplete string length indicator, 3 bytes left of 4"),
        ("03000000 6161", 1, "incomplete string data, expecting 3 bytes, 2 left"),
        ("ffffffff 6161", 1, "incomplete string data, expecting 4294967295 bytes, 2 left"),
        ("000000", 0, "unexpected number of string elements 1 or more, expecting 0"),
    ],
)
def test_framing_errors(data: str, count: int, text: str) -> None:
    with pytest.raises(BytesFramingError) as caught:
        unpack_bytes(bytes.fromhex(data), count)
    assert caught.value.message == text
    assert isinstance(caught.value, InvalidArgument)


def test_what_a_bytes_array_may_hold() -> None:
    objects = np.array(["é", b"\xff\0", bytearray(b"x"), memoryview(b"y"), 7, None, 1.5], dtype=object)
    assert bytes_elements(objects) == ["é".encode(), b"\xff\0", b"x", b"y", b"7", b"None", b"1.5"]
    assert bytes_elements(np.array([["a", "b"], ["c", "d"]]).T) == [b"a", b"c", b"b", b"d"]
    assert bytes_elements(np.array("a")) == [b"a"]
    assert all(bytes_elements(np.array(["a"], dtype=kind())) == [b"a"] for kind in VARIABLE_TEXT)


@pytest.mark.parametrize("shape", [(2, 2), (4,), (1, 4, 1)])
def test_object_arrays_keep_their_elements_whole(shape: tuple[int, ...]) -> None:
    elements = [b"ab", b"", b"\0", b"abcd"]
    array = object_array(elements, shape)
    assert array.shape == shape
    assert array.dtype == object
    assert array.reshape(-1).tolist() == elements
    assert object_array([b"abc"], ()).item() == b"abc"
    assert object_array([], (0, 3)).shape == (0, 3)


def test_the_tests_run_on_a_little_endian_machine() -> None:
    assert sys.byteorder == "little"
