"""Arrays as GenericTensors, and back."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.backends.grps_tensor_messages import filled, floats, same
from triglot.backends.grps.gtensors import DTYPES, to_array
from triglot.core.tensor import Array, object_array
from triglot.pb.grps import grps_pb2 as pb

NUMBERS = {
    pb.DT_UINT8: ("u1", "flat_uint8"),
    pb.DT_INT8: ("i1", "flat_int8"),
    pb.DT_INT16: ("i2", "flat_int16"),
    pb.DT_INT32: ("i4", "flat_int32"),
    pb.DT_INT64: ("i8", "flat_int64"),
    pb.DT_FLOAT16: ("f2", "flat_float16"),
    pb.DT_FLOAT32: ("f4", "flat_float32"),
    pb.DT_FLOAT64: ("f8", "flat_float64"),
}


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    dtype = np.dtype(draw(st.sampled_from([text for text, _ in NUMBERS.values()])))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = int(np.prod(shape))
    content = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    return np.frombuffer(content, dtype).reshape(shape)


@given(arrays())
def test_numbers_come_back_as_they_were(array: Array) -> None:
    tensor = filled(array)
    dtype, field = NUMBERS[tensor.dtype]
    assert (tensor.name, list(tensor.shape), np.dtype(dtype)) == ("x", list(array.shape), array.dtype)
    used = [descriptor.name for descriptor, _ in tensor.ListFields() if descriptor.name.startswith("flat_")]
    assert used == ([field] if array.size else [])
    back = to_array(tensor)
    assert back.flags.writeable
    assert back.flags.c_contiguous
    same(back, array)


@given(st.lists(st.text(), max_size=5))
def test_text_comes_back_as_utf8(texts: list[str]) -> None:
    encoded = [text.encode() for text in texts]
    tensor = filled(object_array(encoded, [len(texts)]))
    assert (tensor.dtype, list(tensor.flat_string)) == (pb.DT_STRING, texts)
    assert to_array(tensor).tolist() == encoded


@pytest.mark.parametrize("array", [np.array(["ja", "größer"]), np.array(["ja", "größer"], object)])
def test_numpy_text_is_a_string_tensor(array: Array) -> None:
    assert list(filled(array).flat_string) == ["ja", "größer"]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=np.float32).reshape(4, 6)[::2, 1::3],
        np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        np.arange(6, dtype=">f8"),
        np.arange(6, dtype=">i4"),
        np.float32(1.5) * np.ones((), np.float32),
    ],
    ids=["strided", "columns", "big-endian floats", "big-endian integers", "scalar"],
)
def test_any_layout_in_memory_is_sent_row_by_row(array: Array) -> None:
    same(to_array(filled(array)), np.asarray(array, array.dtype.newbyteorder("=")))


@pytest.mark.parametrize(
    ("array", "sent"),
    [
        (np.array([True, False]), np.array([1, 0], "u1")),
        (np.array([65535], "u2"), np.array([65535], "i4")),
        (np.array([2**32 - 1], "u4"), np.array([2**32 - 1], "i8")),
        (np.array([1.5, 3e38], ml_dtypes.bfloat16), np.array([1.5, 3e38], ml_dtypes.bfloat16).astype("f4")),
    ],
    ids=["bool", "uint16", "uint32", "bfloat16"],
)
def test_other_datatypes_are_sent_as_wider_ones(array: Array, sent: Array) -> None:
    same(to_array(filled(array)), sent)


@pytest.mark.parametrize("dtype", ["u8", "c8", "M8[s]"])
def test_what_nothing_holds_is_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match=r"^grps has no dtype for "):
        filled(np.zeros(2, dtype))


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^DT_STRING takes UTF-8 only, got b'\\xff'$"):
        filled(object_array([b"\xff"], [1]))


def test_halves_are_rounded_and_overflow_to_infinity() -> None:
    tensor = pb.GenericTensor(dtype=pb.DT_FLOAT16, shape=[4], flat_float16=[0.1, 65519, 65520, -1e30])
    assert to_array(tensor).tolist() == [float(np.float16(0.1)), 65504.0, float("inf"), float("-inf")]


@pytest.mark.parametrize(
    ("dtype", "values", "found"),
    [
        (pb.DT_INT8, [0, 128, -5], 128),
        (pb.DT_INT8, [0, -129], -129),
        (pb.DT_UINT8, [256], 256),
        (pb.DT_INT16, [2**15], 2**15),
    ],
)
def test_elements_out_of_range(dtype: pb.DataType, values: list[int], found: int) -> None:
    field = NUMBERS[dtype][1]
    tensor = pb.GenericTensor(dtype=dtype, shape=[len(values)], **{field: values})  # type: ignore[arg-type]  # Any list.
    with pytest.raises(ValueError, match=f"^{pb.DataType.Name(dtype)} cannot hold {found}, which is in {field}$"):
        to_array(tensor)


@pytest.mark.parametrize("dtype", [pb.DT_INVALID, 77])
def test_dtypes_without_tensors(dtype: Any) -> None:
    with pytest.raises(ValueError, match=f"^expected dtype DT_UINT8, .*, DT_STRING, got {int(dtype)}$"):
        to_array(pb.GenericTensor(dtype=dtype, shape=[1], flat_float32=[1]))


def test_more_dims_than_numpy_has() -> None:
    with pytest.raises(ValueError, match="dimension"):
        to_array(floats("", [1] * 100, 1))


def test_every_dtype_is_known() -> None:
    assert {number for number in pb.DataType.values() if number != pb.DT_INVALID} == DTYPES
