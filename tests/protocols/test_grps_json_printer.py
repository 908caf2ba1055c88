"""grps' messages → JSON: the layout of its servers, protobuf's mapping, and large arrays."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from tests.protocols.grps_messages import JSON_DATA, messages, same_message
from triglot.core.errors import Internal
from triglot.core.tensor import Array
from triglot.model.grps_types import LISTS
from triglot.pb.grps import grps_pb2 as pb
from triglot.protocols.grps.codec import encode_message
from triglot.protocols.grps.json_printer import MAX_EMPTY_LISTS, answer_size, print_message, print_ndarray
from triglot.protocols.grps.json_reader import read_message
from triglot.protocols.grps.message import OK, GrpsMap, GrpsTensor, Message, NDArray, Status

pytestmark = pytest.mark.usefixtures("json_library")

LARGE = 40_000


def tensor(dtype: int, values: Any, *shape: int, name: str = "") -> GrpsTensor:
    wire = LISTS[dtype].wire if dtype in LISTS else np.dtype(np.float32)
    return GrpsTensor(name, dtype, shape, np.array(values, wire).reshape(-1))


def printed(message: Message) -> Any:
    """What a strict parser makes of it."""
    return json.loads(print_message(message), parse_constant=pytest.fail)


def test_the_layout_of_a_text() -> None:
    text = '{\n "status": {\n  "code": 200,\n  "msg": "OK",\n  "status": "SUCCESS"\n },\n "str_data": "4"\n}'
    assert print_message(Message("", "4", OK)) == text.encode()


def test_members_come_in_their_order_and_text_is_ascii() -> None:
    assert print_message(Message("m", "中\n", OK)).endswith(b' },\n "model": "m",\n "str_data": "\\u4e2d\\n"\n}')


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (None, {}),
        ("", {"str_data": ""}),
        ([], {"gtensors": {}}),
        (GrpsMap(), {"gmap": {}}),
        (NDArray(), {"ndarray": {}}),
        (b"", {"bin_data": ""}),
        (b"\0\xffhi", {"bin_data": "AP9oaQ=="}),
        ([tensor(0, [])], {"gtensors": {"tensors": [{}]}}),
        ([tensor(7, [], name="x")], {"gtensors": {"tensors": [{"name": "x", "dtype": "DT_FLOAT32"}]}}),
        ([tensor(42, [], 0)], {"gtensors": {"tensors": [{"dtype": 42, "shape": [0]}]}}),
        (GrpsMap({"k": ""}, s_i64={"k": 0}), {"gmap": {"s_s": {"k": ""}, "s_i64": {"k": "0"}}}),
        (GrpsMap(s_f={"k": 0.0, "n": -math.inf}), {"gmap": {"s_f": {"k": 0.0, "n": "-Infinity"}}}),
    ],
)
def test_a_data_member_is_kept_and_its_defaults_are_not(data: Any, expected: Any) -> None:
    assert printed(Message("", data)) == expected


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (Status(500, "", 2), {"code": 500, "status": "FAILURE"}),
        (Status(0, "", 0), {}),
        (Status(1, "é", 7), {"code": 1, "msg": "é", "status": 7}),
    ],
)
def test_statuses(status: Status, expected: Any) -> None:
    assert printed(Message(status=status)) == {"status": expected}


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        (1, [0, 255], [0, 255]),
        (2, [300, -1], [300, -1]),
        (5, [2**53 + 1, 0], ["9007199254740993", "0"]),
        (6, [0.1, np.inf], [0.1, "Infinity"]),
        (7, [0.1, 3, np.nan, -np.inf], [0.1, 3.0, "NaN", "-Infinity"]),
        (7, [1e-45, 3.4028235e38, 16777216], [1e-45, 3.4028235e38, 16777216.0]),
        (8, [0.1, 1 / 3], [0.1, 1 / 3]),
        (9, ["中", ""], ["中", ""]),
    ],
)
def test_elements(dtype: int, values: Any, expected: Any) -> None:
    row = LISTS[dtype]
    only = {"dtype": row.name, "shape": [1, 2], row.field: expected}
    assert repr(printed(Message("", [tensor(dtype, values, 1, 2)]))) == repr({"gtensors": {"tensors": [only]}})


def test_whole_floats_keep_their_point() -> None:
    assert b'"flat_float32": [\n     3.0\n    ]' in print_message(Message("", [tensor(7, [3])]))


@given(messages(JSON_DATA))
def test_what_is_printed_is_read_again(message: Message) -> None:
    again = read_message(print_message(message))
    again.status = message.status
    assert same_message(again, message)


@given(messages(JSON_DATA | st.none() | st.binary(max_size=9) | st.just(NDArray())))
def test_protobuf_prints_the_same(message: Message) -> None:
    twin = pb.GrpsMessage.FromString(encode_message(message))
    text = json_format.MessageToJson(twin, preserving_proto_field_name=True, indent=1)
    assert alike(printed(message), json.loads(text))


def alike(first: Any, other: Any) -> bool:
    """Equal, numbers as closely as FP32 tells."""
    if isinstance(first, dict):
        return first.keys() == other.keys() and all(alike(item, other[key]) for key, item in first.items())
    if isinstance(first, list):
        return len(first) == len(other) and all(map(alike, first, other))
    if isinstance(first, float):
        return isinstance(other, float) and math.isclose(first, other, rel_tol=1e-6, abs_tol=1e-45)
    return type(first) is type(other) and bool(first == other)


@pytest.mark.parametrize("values", [[1, 2.5], [[1], [2]]])
def test_small_answers_are_protobufs_to_the_byte(values: Any) -> None:
    message = Message("m-1", [tensor(7, values, 2, 1, name="é"), tensor(4, values)], OK)
    twin = pb.GrpsMessage.FromString(encode_message(message))
    text = json_format.MessageToJson(twin, preserving_proto_field_name=True, indent=1)
    assert print_message(message).decode() == text


def large(dtype: int) -> Array:
    rng = np.random.default_rng(dtype)
    wire = LISTS[dtype].wire
    if wire.hasobject:
        elements = np.empty(LARGE, object)
        elements[:] = [f'"é{at}\\' for at in range(LARGE)]
        return elements
    if wire.kind == "f":
        return rng.normal(size=LARGE).astype(wire)
    bounds = np.iinfo(wire)
    return rng.integers(bounds.min, bounds.max, LARGE, wire, endpoint=True)


@pytest.mark.parametrize("dtype", LISTS)
def test_large_arrays_are_read_again(dtype: int) -> None:
    message = Message("m", [GrpsTensor("x", dtype, (LARGE,), large(dtype)), tensor(7, [1])])
    assert same_message(read_message(print_message(message)), message)


@pytest.mark.parametrize("dtype", [6, 7, 8])
def test_large_arrays_with_strange_floats(dtype: int) -> None:
    elements = large(dtype)
    elements[[0, 5, LARGE - 1]] = np.nan, np.inf, -np.inf
    elements[7] = elements.dtype.type(0.1)
    values = printed(Message("", [GrpsTensor("", dtype, (LARGE,), elements)]))["gtensors"]["tensors"][0]
    shown = values[LISTS[dtype].field]
    assert (shown[0], shown[5], shown[7], shown[-1]) == ("NaN", "Infinity", 0.1, "-Infinity")
    message = Message("", [GrpsTensor("", dtype, (LARGE,), elements)])
    assert same_message(read_message(print_message(message)), message)


def shown_ndarray(only: GrpsTensor) -> Any:
    body = json.loads(print_ndarray(Message("m", [only], OK)), parse_constant=pytest.fail)
    assert list(body) == ["status", "ndarray"]
    assert body["status"] == {"code": 200, "msg": "OK", "status": "SUCCESS"}
    return body["ndarray"]


@pytest.mark.parametrize(
    ("values", "shape", "expected"),
    [
        ([1, 2, 3, 4, 5, 6], (2, 3), [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
        ([0.1], (), 0.10000000149011612),
        ([0], (), 0.0),
        ([np.nan], (), None),
        ([np.nan, np.inf, -np.inf, 1], (2, 2), [[None, None], [None, 1.0]]),
        ([], (0,), []),
        ([], (2, 0), [[], []]),
        ([], (2, 0, 2**32 - 1, 2**32 - 1), [[], []]),
    ],
)
def test_an_ndarray(values: Any, shape: tuple[int, ...], expected: Any) -> None:
    assert repr(shown_ndarray(tensor(7, values, *shape))) == repr(expected)


def test_the_layout_of_an_ndarray() -> None:
    text = print_ndarray(Message("m", [tensor(7, [1, 2], 1, 2), tensor(4, [3])]))
    assert text == b'{\n "ndarray": [\n  [\n   1.0,\n   2.0\n  ]\n ]\n}'


@pytest.mark.parametrize("shape", [(LARGE,), (1, 4, LARGE // 4), (LARGE, 1), (2, LARGE // 2)])
def test_a_large_ndarray(shape: tuple[int, ...]) -> None:
    elements = large(7)
    np.testing.assert_array_equal(shown_ndarray(GrpsTensor("", 7, shape, elements)), elements.reshape(shape))
    elements[[1, 3, 9]] = np.nan, np.inf, -np.inf
    shown = np.array(shown_ndarray(GrpsTensor("", 7, shape, elements)), np.float64).reshape(-1)
    np.testing.assert_array_equal(shown, np.where(np.isfinite(elements), elements, np.nan))


@pytest.mark.parametrize(
    "data", ["x", None, b"x", [], GrpsMap(), NDArray(), [tensor(8, [1.0], 1)], [tensor(0, [])]]
)
def test_no_ndarray(data: Any) -> None:
    with pytest.raises(Internal) as error:
        print_ndarray(Message("", data, OK))
    assert error.value.message == "No float32 tensors in output. Cannot convert to ndarray."


@pytest.mark.parametrize(
    ("values", "shape", "text"),
    [
        ([1, 2], (3,), "has 2 elements, expected 3 for shape [3]"),
        ([], (), "has 0 elements, expected 1"),
        ([1], (0,), "has 1 elements, expected 0"),
        ([1], (1,) * 33, "33 dims"),
        ([], (MAX_EMPTY_LISTS + 1, 0), "empty lists"),
        ([], (2**32 - 1, 2**32 - 1, 0), "empty lists"),
    ],
)
def test_shapes_that_make_no_ndarray(values: Any, shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(Internal, match="the output") as error:
        print_ndarray(Message("", [tensor(7, values, *shape)], OK))
    assert text in error.value.message


def test_the_size_of_an_answer() -> None:
    assert answer_size(Message("", None, OK)) == 0
    assert answer_size(Message("", "x" * 500)) == answer_size(Message("", b"x" * 500)) == 500
    assert answer_size(Message("", [GrpsTensor("", 7, (LARGE,), large(7))])) > 8 * LARGE
    assert answer_size(Message("", GrpsMap(s_s={"k": "x" * 500}, s_i32={"k": 1}))) > 500
    assert answer_size(Message("", NDArray())) == 0
