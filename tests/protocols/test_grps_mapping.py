"""Every tensor model answers grps: gtensors as inputs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocols.grps_inputs import ONE, TWO, inputs, refusal, signature, tensor, would_change
from triglot.core.errors import InvalidArgument
from triglot.core.tensor import DATATYPES, TFSERVING_DATATYPES, Array
from triglot.model.validation import InvalidRequest
from triglot.pb.grps import grps_pb2 as pb
from triglot.protocols.grps.codec import decode_message, encode_message
from triglot.protocols.grps.message import GrpsTensor, Message
from triglot.protocols.grps.tensors import lossless


def test_by_name_or_in_the_order_of_the_inputs() -> None:
    for tensors in (
        [tensor(7, [1.5], name="x"), tensor(5, [2, 3], name="y")],
        [tensor(5, [2, 3], name="y"), tensor(7, [1.5], name="x")],
        [tensor(7, [1.5]), tensor(5, [2, 3])],
    ):
        arrays = inputs(tensors, TWO)
        assert (arrays["x"].tolist(), arrays["y"].tolist()) == ([1.5], [2, 3])


@pytest.mark.parametrize(
    ("tensors", "kind", "text"),
    [
        (
            [tensor(7, [1], name="x"), tensor(5, [2])],
            InvalidArgument,
            "1 of 2 tensors are named, ['x']: expected names for all or for none",
        ),
        (
            [tensor(7, [1])],
            InvalidRequest,
            "expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['x']",
        ),
        (
            [tensor(7, [1]), tensor(5, [1]), tensor(5, [1])],
            InvalidRequest,
            "model 'm' has 2 inputs, ['x', 'y']; the message has 3 unnamed tensors",
        ),
        ([], InvalidRequest, "expected 2 inputs but got 0 inputs for model 'm'. Got input(s) []"),
        ([tensor(7, [1], name="x")] * 2, InvalidRequest, "input 'x' already exists in request"),
        (
            [tensor(7, [1], name="x"), tensor(9, ["a"], name="z")],
            InvalidRequest,
            "unexpected inference input 'z' for model 'm'",
        ),
        (
            [tensor(7, [1]), tensor(4, [1])],
            InvalidRequest,
            "input 'y' of model 'm' expects DT_INT64 (INT64), got DT_INT32 (INT32)",
        ),
        (
            [tensor(7, [1]), tensor(9, ["1"])],
            InvalidRequest,
            "input 'y' of model 'm' expects DT_INT64 (INT64), got DT_STRING (BYTES)",
        ),
        (
            [tensor(7, [1, 2], (2, 3)), tensor(5, [])],
            InvalidArgument,
            "tensor 'x' of shape [2,3] needs 6 elements, flat_float32 has 2",
        ),
        ([tensor(7, [1, 2], ()), tensor(5, [])], InvalidArgument, "tensor 'x' of shape [] needs 1 elements"),
        ([tensor(7, [1], (1, 1)), tensor(5, [1])], InvalidRequest, "unexpected shape for input 'x' for model 'm'"),
        (
            [tensor(0, [], (0,)), tensor(5, [1])],
            InvalidArgument,
            "tensor 'x' is DT_INVALID, expected one of DT",
        ),
        ([tensor(77, [], name="x")], InvalidArgument, "tensor 'x' is DataType 77, expected one of"),
    ],
    ids=[
        "some named",
        "too few",
        "too many",
        "none",
        "twice",
        "unknown",
        "other type",
        "text",
        "too few elements",
        "too many elements",
        "rank",
        "no type",
        "unknown type",
    ],
)
def test_tensors_that_do_not_fit(tensors: list[GrpsTensor], kind: type[InvalidArgument], text: str) -> None:
    assert refusal(tensors, TWO, kind).startswith(text)


EVERY_TYPE = [
    (1, "UINT8", [0, 255]),
    (2, "INT8", [-128, 127]),
    (3, "INT16", [-32768, 32767]),
    (4, "INT32", [-(2**31), 2**31 - 1]),
    (5, "INT64", [-(2**63), 2**63 - 1]),
    (6, "FP16", [0.5, 65504.0]),
    (7, "FP32", [0.5, -0.25]),
    (8, "FP64", [0.1, 5e-324]),
    (9, "BYTES", ["é", ""]),
]


@pytest.mark.parametrize(("dtype", "datatype", "elements"), EVERY_TYPE)
def test_every_type_arrives_as_what_it_is(dtype: int, datatype: str, elements: list[Any]) -> None:
    array = inputs([tensor(dtype, elements, (2, 1))], signature(("x", datatype, [-1, 1])))["x"]
    assert array.dtype == DATATYPES[datatype].dtype
    wanted = [text.encode() for text in elements] if datatype == "BYTES" else elements
    assert array.tolist() == [[element] for element in wanted]


@pytest.mark.parametrize(
    ("dtype", "datatype", "value", "text"),
    [
        (1, "UINT8", 256, "flat_uint8 of tensor 'x' has values from 0 to 256, the range of DT_UINT8 is 0 to 255"),
        (2, "INT8", 128, "flat_int8 of tensor 'x' has values from 0 to 128, the range of DT_INT8 is -128 to 127"),
        (2, "INT8", -129, "flat_int8 of tensor 'x' has values from -129 to 0"),
        (3, "INT16", -32769, "flat_int16 of tensor 'x' has values from -32769 to 0"),
    ],
)
def test_small_integers_are_kept_within_their_type(dtype: int, datatype: str, value: int, text: str) -> None:
    assert refusal([tensor(dtype, [0, value])], signature(("x", datatype, [-1])), InvalidArgument).startswith(text)


def test_halves_are_rounded_to_half() -> None:
    array = inputs([tensor(6, [0.1, 70000, -np.inf, np.nan])], signature(("x", "FP16", [-1])))["x"]
    assert array[:3].tolist() == [0.0999755859375, np.inf, -np.inf]
    assert np.isnan(array[3])


def test_packed_floats_reach_the_model_without_a_copy() -> None:
    values = np.arange(50_000, dtype="f4")
    data = encode_message(Message(data=[GrpsTensor("x", pb.DT_FLOAT32, (50_000,), values)]))
    array = inputs(decode_message(data), ONE)["x"]
    assert np.shares_memory(array, np.frombuffer(data, np.uint8))
    assert (array == values).all()


@pytest.mark.parametrize(
    ("datatype", "dtype", "elements"),
    [
        ("BOOL", 1, [0, 1]),
        ("BOOL", 5, [1, 0]),
        ("BOOL", 7, [1.0, -0.0]),
        ("UINT16", 4, [0, 65535]),
        ("UINT16", 6, [2048.0, 0.0]),
        ("UINT32", 5, [0, 2**32 - 1]),
        ("UINT32", 8, [4294967295.0]),
        ("UINT64", 5, [2**63 - 1]),
        ("UINT64", 1, [255]),
        ("UINT64", 8, [2.0**63]),
        ("BF16", 7, [1.5, float("inf"), -(2.0**100)]),
        ("BF16", 4, [256, -3]),
        ("BF16", 6, [0.5]),
    ],
)
def test_types_that_grps_lacks(datatype: str, dtype: int, elements: list[Any]) -> None:
    array = inputs([tensor(dtype, elements)], signature(("x", datatype, [-1])))["x"]
    assert array.dtype == DATATYPES[datatype].dtype
    assert [float(value) for value in array.tolist()] == [float(element) for element in elements]


@pytest.mark.parametrize(
    ("datatype", "dtype", "elements"),
    [
        ("BOOL", 1, [2]),
        ("BOOL", 7, [0.5]),
        ("BOOL", 7, [np.nan]),
        ("UINT16", 4, [65536]),
        ("UINT16", 2, [-1]),
        ("UINT32", 5, [2**32]),
        ("UINT32", 7, [0.5]),
        ("UINT64", 5, [-1]),
        ("UINT64", 8, [2.0**64]),
        ("UINT64", 8, [np.inf]),
        ("UINT64", 8, [np.nan]),
        ("BF16", 7, [0.1]),
        ("BF16", 8, [1e39]),
        ("BF16", 4, [257]),
        ("BF16", 5, [2**63 - 1]),
        ("BF16", 9, ["1"]),
        ("UINT16", 9, ["1"]),
        ("COMPLEX64", 7, [1]),
    ],
)
def test_types_that_grps_lacks_and_values_that_would_change(
    datatype: str, dtype: int, elements: list[Any]
) -> None:
    name = pb.DataType.Name(dtype)
    assert refusal([tensor(dtype, elements)], signature(("x", datatype, [-1]))) == would_change(datatype, name)


@given(data=st.data())
def test_a_cast_loses_nothing_or_is_refused(data: st.DataObject) -> None:
    source = data.draw(st.sampled_from(["UINT8", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64"]))
    target = data.draw(
        st.sampled_from([name for name in DATATYPES if name not in ("BYTES", *TFSERVING_DATATYPES)])
    )
    integers = st.sampled_from([0, 1, 2, 127, 128, 255, 256, 2**24 + 1, 2**53 + 1, 2**63 - 1, -1, -128, -(2**63)])
    numbers = st.one_of(integers, st.floats())
    dtype = DATATYPES[source].dtype
    with np.errstate(all="ignore"):
        values = np.array(data.draw(st.lists(numbers, max_size=3)), np.float64 if dtype.kind == "f" else object)
        if dtype.kind != "f":
            bounds = np.iinfo(dtype)
            values = np.array([int(value) for value in values if abs(value) < 1e30], object)
            values = np.array([value for value in values if bounds.min <= value <= bounds.max], object)
        array = values.astype(dtype)
    cast = lossless(array, target)
    if cast is None:
        with np.errstate(all="ignore"):
            changed = array.astype(DATATYPES[target].dtype)
        assert [exact(value) for value in changed] != [exact(value) for value in array] or beyond(array, target)
    else:
        assert cast.dtype == DATATYPES[target].dtype
        assert [exact(value) for value in cast] == [exact(value) for value in array]


def exact(value: Any) -> int | str:
    """The number itself, as an integer or in hexadecimal digits."""
    number = value.item() if not isinstance(value, ml_dtypes.bfloat16) else float(value)
    if isinstance(number, float) and not number.is_integer():
        return number.hex()
    return int(number)


def beyond(array: Array, datatype: str) -> bool:
    """Whether a number lies outside of an integer type, so that a cast may give anything."""
    dtype = DATATYPES[datatype].dtype
    if dtype.kind not in "iu":
        return False
    bounds = np.iinfo(dtype)
    return any(
        not bounds.min <= float(value) <= bounds.max + 1 or np.isnan(float(value)) for value in array
    ) or any(float(value) == bounds.max + 1 for value in array)
