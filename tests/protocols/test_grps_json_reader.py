"""grps' JSON bodies → messages: what its servers take, and large bodies."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest

from tests.protocols.grps_messages import BLANKS, read, refusal, tensor
from triglot.pb.grps import grps_pb2 as pb
from triglot.protocols.grps.json_reader import read_message, read_model_name
from triglot.protocols.grps.message import GrpsMap, GrpsTensor, Message

pytestmark = pytest.mark.usefixtures("json_library")


def read_tensor(**members: Any) -> GrpsTensor:
    data = read(tensor(**members)).data
    assert isinstance(data, list)
    return data[0]


def read_map(**maps: Any) -> GrpsMap:
    data = read({"gmap": maps}).data
    assert isinstance(data, GrpsMap)
    return data


def read_ndarray(body: Any) -> GrpsTensor:
    message = read(body)
    assert message.from_ndarray
    assert isinstance(message.data, list)
    (only,) = message.data
    assert (only.name, only.dtype, only.elements.dtype) == ("", pb.DT_FLOAT32, np.dtype(np.float32))
    return only


@pytest.mark.parametrize(
    ("body", "data"),
    [
        ({"str_data": "hello"}, "hello"),
        ({"str_data": "中国\0"}, "中国\0"),
        ({"str_data": ""}, ""),
        ({"strData": "x"}, "x"),
        ({"gtensors": {}}, []),
        ({"gtensors": {"tensors": []}}, []),
        ({"gtensors": {"tensors": None}}, []),
        ({"gmap": {}}, GrpsMap()),
        ({"str_data": "x", "gmap": None, "bin_data": None, "ndarray": None}, "x"),
        ({"str_data": "x", "unknown": [{"deep": [[1], "["]}], "status": "anything"}, "x"),
    ],
)
def test_branch_is_the_present_member(body: dict[str, Any], data: Any) -> None:
    assert read(body) == Message("", data)


@pytest.mark.parametrize(("model", "name"), [("a-1.0.0", "a-1.0.0"), (None, ""), ("", "")])
def test_the_model(model: Any, name: str) -> None:
    assert read({"str_data": "x", "model": model}).model == name
    assert read({"ndarray": [1], "model": model}).model == name


@pytest.mark.parametrize(
    ("dtype", "key", "values", "elements"),
    [
        (1, "flat_uint8", [1, 255, 2**32 - 1], np.array([1, 255, 2**32 - 1], np.uint32)),
        ("DT_INT8", "flat_int8", [300, -(2**31)], np.array([300, -(2**31)], np.int32)),
        ("DT_INT16", "flatInt16", [70000], np.array([70000], np.int32)),
        ("4", "flat_int32", [1.0, "2", "-3"], np.array([1, 2, -3], np.int32)),
        ("DT_INT64", "flat_int64", ["9007199254740993", 2**63 - 1], np.array([2**53 + 1, 2**63 - 1])),
        (6.0, "flat_float16", [0.5, 2], np.array([0.5, 2], np.float32)),
        ("DT_FLOAT16", "flat_half", [1e5], np.array([1e5], np.float32)),
        (
            "DT_FLOAT32",
            "flat_float32",
            ["NaN", "Infinity", "-Infinity"],
            np.array([np.nan, np.inf, -np.inf], "f4"),
        ),
        (
            "DT_FLOAT32",
            "flatFloat",
            ["1.5", "1e3", True, 3.4028235e38],
            np.array([1.5, 1e3, 1, 3.4028235e38], "f4"),
        ),
        ("DT_FLOAT32", "flat_float32", [-3.4028235e38, 1e-50], np.array([-3.4028235e38, 0], np.float32)),
        ("DT_FLOAT64", "flat_double", [1e39, 2**70], np.array([1e39, 2.0**70])),
        ("DT_STRING", "flat_string", ["中文", ""], np.array(["中文", ""], object)),
        ("DT_FLOAT32", "flat_float32", None, np.empty(0, np.float32)),
        ("DT_STRING", "flat_string", [], np.empty(0, object)),
        ("DT_FLOAT32", "flat_int32", [1], np.empty(0, np.float32)),
        (0, "flat_int32", [1], np.empty(0, np.float32)),
        (-42, "flat_int32", [1], np.empty(0, np.float32)),
        (None, "flat_int32", [1], np.empty(0, np.float32)),
    ],
)
def test_the_dtype_chooses_the_list(dtype: Any, key: str, values: Any, elements: Any) -> None:
    only = read_tensor(name="x", dtype=dtype, shape=[7, "2", 3.0], **{key: values})
    assert (only.name, only.shape) == ("x", (7, 2, 3))
    assert only.elements.dtype == elements.dtype
    np.testing.assert_array_equal(only.elements, elements)


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        (None, 0),
        ("DT_INVALID", 0),
        ("DT_STRING", 9),
        (9, 9),
        ("9", 9),
        (42, 42),
        ("-42", -42),
        (2**31 - 1, 2**31 - 1),
    ],
)
def test_dtypes_are_names_numbers_or_digits(dtype: Any, number: int) -> None:
    assert read_tensor(dtype=dtype).dtype == number


def test_the_maps_of_the_shipped_client() -> None:
    only = read_map(
        s_s={"key": "value"},
        s_b={"key": "aGVsbG8gZ3Jwcy4="},
        s_i32={"key": 1},
        s_i64={"key": 1},
        s_f={"key": 1.0},
        s_d={"key": 1.0},
        s_t={"key": {"dtype": "DT_FLOAT32", "shape": [2, 3], "flat_float32": [1, 2, 3, 4, 5, 6]}},
    )
    assert only == GrpsMap(
        {"key": "value"}, {"key": b"hello grps."}, {"key": 1}, {"key": 1}, {"key": 1}, {"key": 1}
    )


def test_maps_in_camel_case_and_null() -> None:
    only = read_map(sS=None, sB={"k": ""}, sI32={"k": "5"}, sI64={"k": "-7"}, sF={"k": 0.1}, sD={"k": "-Infinity"})
    assert only == GrpsMap(
        {}, {"k": b""}, {"k": 5}, {"k": -7}, {"k": float(np.float32(0.1))}, {"k": float("-inf")}
    )


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("aGk=", b"hi"),
        ("aGk", b"hi"),
        ("aGk==", b"hi"),
        ("-_-_", b"\xfb\xff\xbf"),
        ("+/+/", b"\xfb\xff\xbf"),
        ("aG\r\nk =\t=\n", b"hi"),
        ("", b""),
        ("=", b""),
    ],
)
def test_base64_in_any_form(text: str, data: bytes) -> None:
    assert read_map(s_b={"k": text}).s_b == {"k": data}


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        ([[1, 2, 3], [4, 5, 6]], (2, 3)),
        (5, ()),
        (0, ()),
        (True, ()),
        ([1.5], (1,)),
        ([[]], (1, 0)),
        ([[[]], [[]]], (2, 1, 0)),
        ([[[1]], [[2]]], (2, 1, 1)),
        ([True, False, 2.5], (3,)),
        ([2**70, float("nan"), float("-inf"), 1e39], (4,)),
        (json.loads("[" * 32 + "1" + "]" * 32), (1,) * 32),
    ],
)
def test_an_ndarray_becomes_one_tensor(value: Any, shape: tuple[int, ...]) -> None:
    only = read_ndarray({"ndarray": value})
    assert only.shape == shape
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(only.elements, np.array(value, np.float64).astype(np.float32).reshape(-1))


def test_members_around_an_ndarray() -> None:
    value = np.arange(3000.0).reshape(3, 1000)
    for before in ({}, {"model": "m"}, {"a": 1, "model": "m,[1]"}, {"status": {"code": 1}}, {"x": [[1], [2, 3]]}):
        for behind in ({}, {"b": None}, {"[": ""}, {'"\\,': "\\"}):
            only = read_ndarray({**before, "ndarray": value.tolist(), **behind})
            assert only.shape == (3, 1000)
            np.testing.assert_array_equal(only.elements, value.reshape(-1))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_numbers_of_a_large_body_never_become_objects(as_tensor: bool) -> None:
    values = np.random.default_rng(4).normal(size=(1, 3, 224, 224)).astype(np.float32)
    flat = values.reshape(-1)
    members = {"dtype": "DT_FLOAT32", "shape": list(values.shape), "flat_float32": flat.tolist()}
    body = json.dumps(tensor(**members) if as_tensor else {"model": "m", "ndarray": values.tolist()}).encode()
    tracemalloc.start()
    try:
        message = read_message(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(message.data, list)
    assert message.data[0].shape == values.shape
    np.testing.assert_array_equal(message.data[0].elements, flat)
    # A Python list of so many floats alone has 32 bytes for each.
    assert peak < 32 * values.size


@pytest.mark.parametrize("strange", ['"NaN"', "true", '"1.5"', "1e40", "[1]", "NaN"])
def test_one_strange_element_among_many(strange: str) -> None:
    numbers = ",".join(["1.25"] * 2000)
    flat = f'{{"gtensors":{{"tensors":[{{"dtype":8,"flat_float64":[{numbers},{strange}]}}]}}}}'
    if strange in ("[1]", "NaN"):
        refusal(flat)
    else:
        data = read(flat).data
        assert isinstance(data, list)
        expected = {'"NaN"': np.nan, "true": 1.0, '"1.5"': 1.5}.get(strange, 1e40)
        np.testing.assert_array_equal(data[0].elements[-2:], [1.25, expected])


def test_of_equal_keys_the_last_counts() -> None:
    assert read('{"str_data":"a","str_data":"b"}').data == "b"
    assert read('{"ndarray":[[1],[2,3]],"str_data":"a","ndarray":null}').data == "a"
    assert read_ndarray('{"ndarray":[1,2],"ndarray":[[3,4]]}').shape == (1, 2)
    data = read('{"gtensors":{"tensors":[{"dtype":4,"flat_int32":[1],"flat_int32":[2,3]}]}}').data
    assert isinstance(data, list)
    assert data[0].elements.tolist() == [2, 3]


def test_a_key_ends_where_its_text_ends() -> None:
    assert read('{"str_data\\u0000x":1,"str_data":"a","ndarray\\u0000":[1]}').data == "a"


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"str_data": "double"}, "double"),
        ({"strData": "double-1.0.0", "x": [[1]]}, "double-1.0.0"),
        ({"str_data": ""}, ""),
        ({"str_data": None}, None),
        ({}, None),
    ],
)
def test_the_name_of_a_model(body: Any, name: str | None) -> None:
    text = json.dumps(body).encode()
    assert read_model_name(text) == read_model_name(text + BLANKS) == name
