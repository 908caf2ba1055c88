"""grps' JSON bodies → messages: what its servers take, what they refuse, and what nobody should have sent."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format
from grps_messages import same_message
from hypothesis import given, settings
from hypothesis import strategies as st

from triglot.core.errors import InvalidArgument
from triglot.pb.grps import grps_pb2 as pb
from triglot.protocols.grps.codec import decode_message
from triglot.protocols.grps.json_reader import read_message, read_model_name
from triglot.protocols.grps.message import GrpsMap, GrpsTensor, Message
from triglot.protocols.json_text import SIMD_FROM_BYTES

BLANKS = b" " * SIMD_FROM_BYTES


def text_of(body: Any) -> bytes:
    if isinstance(body, bytes):
        return body
    return body.encode() if isinstance(body, str) else json.dumps(body).encode()


def read(body: Any) -> Message:
    """The message of a body, which is the same for a small and a large one."""
    text = (
        body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    )
    message = read_message(text)
    assert same_message(message, read_message(text + BLANKS))
    return message


def refusal(body: Any) -> str:
    """The text of what is raised for a body, small or large."""
    text = (
        body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    )
    with pytest.raises(InvalidArgument) as small:
        read_message(text)
    with pytest.raises(InvalidArgument):
        read_message(text + BLANKS)
    return small.value.message


def tensor(**members: Any) -> dict[str, Any]:
    return {"gtensors": {"tensors": [members]}}


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
def test_the_branch_is_the_member_that_is_there(body: dict[str, Any], data: Any) -> None:
    assert read(body) == Message("", data)


@pytest.mark.parametrize(("model", "name"), [("a-1.0.0", "a-1.0.0"), (None, ""), ("", "")])
def test_the_model(model: Any, name: str) -> None:
    assert read({"str_data": "x", "model": model}).model == name
    assert read({"ndarray": [1], "model": model}).model == name


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "No legal field in json."),
        ({"str_data": None, "model": "x"}, "No legal field in json."),
        ({"bin_data": "aGk="}, "bin_data should use application/octet-stream format."),
        ({"binData": "aGk="}, "bin_data should use application/octet-stream format."),
        ({"str_data": "a", "gmap": {"s_s": {"k": "v"}}}, "got str_data and gmap"),
        ({"ndarray": [1], "gtensors": {}}, "got gtensors and ndarray"),
        ({"str_data": "a", "strData": "a"}, "'str_data' and 'strData' are the same field"),
        ({"str_data": 5}, "'str_data' must be a string, got a number"),
        ({"str_data": ["a"]}, "'str_data' must be a string, got an array"),
        ({"str_data": "a", "model": 5}, "'model' must be a string, got a number"),
        ({"gmap": []}, "'gmap' must be an object, got an array"),
        ({"gtensors": "x"}, "'gtensors' must be an object, got a string"),
        ({"gtensors": {"tensors": {}}}, "'tensors' must be an array of objects, got an object"),
        ({"gtensors": {"tensors": [{}, 1]}}, "tensor 1 must be an object, got a number"),
        ({"gtensors": {"tensors": [None]}}, "tensor 0 must be an object, got null"),
        ([], "expected an object, got an array"),
        ("{bad", "failed to parse the request JSON"),
        ("", "failed to parse the request JSON"),
        ('{"str_data":"a"} x', "failed to parse the request JSON"),
    ],
)
def test_bodies_without_a_message_are_refused(body: Any, text: str) -> None:
    assert text in refusal(body)


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


@pytest.mark.parametrize(
    ("members", "text"),
    [
        (
            {"dtype": "FLOAT32"},
            "'dtype' of tensor 0 is 'FLOAT32', expected a number or one of DT_INVALID, DT_UINT8",
        ),
        ({"dtype": True}, "must be an integer, got a boolean"),
        ({"dtype": 2**31}, "out of range of int32"),
        ({"dtype": [7]}, "must be an integer, got an array"),
        ({"name": 5}, "'name' of tensor 0 must be a string"),
        ({"shape": [-1]}, "out of range of uint32: -1"),
        ({"shape": [2**32]}, "out of range of uint32"),
        ({"shape": [1.5]}, "must be an integer, got a number 1.5"),
        ({"shape": 3}, "'shape' of tensor 0 must be an array, got a number"),
        ({"shape": [1] * 33}, "more than 32 dims"),
        ({"dtype": 4, "flat_int32": [3000000000]}, "out of range of int32: 3000000000"),
        ({"dtype": 4, "flat_int32": ["3000000000"]}, "out of range of int32: 3000000000"),
        ({"dtype": 1, "flat_uint8": [-1]}, "out of range of uint32: -1"),
        ({"dtype": 5, "flat_int64": [2**63]}, "out of range of int64"),
        ({"dtype": 5, "flat_int64": [2**64]}, "out of range of int64: 18446744073709551616"),
        ({"dtype": 5, "flat_int64": ["9" * 500]}, "out of range of int64"),
        ({"dtype": 4, "flat_int32": [1.5]}, "must be an integer, got a number 1.5"),
        ({"dtype": 4, "flat_int32": [True]}, "must be an integer, got a boolean"),
        ({"dtype": 4, "flat_int32": [None]}, "must be an integer, got null"),
        ({"dtype": 4, "flat_int32": ["1-2"]}, "must be an integer, got a string '1-2'"),
        ({"dtype": 4, "flat_int32": [""]}, "must be an integer, got a string"),
        ({"dtype": 4, "flat_int32": ["1", " 2"]}, "must be an integer, got a string ' 2'"),
        ({"dtype": 4, "flat_int32": 1}, "must be an array, got a number"),
        ({"dtype": 7, "flat_float32": [1e39]}, "out of range of float32: 1e+39"),
        ({"dtype": 7, "flat_float32": ["-1e39"]}, "out of range of float32: -1e+39"),
        ({"dtype": 8, "flat_float64": ["1e400"]}, "out of range of float64"),
        ({"dtype": 8, "flat_float64": [10**400]}, "out of range of float64"),
        ({"dtype": 7, "flat_float32": [float("nan")]}, "a bare NaN"),
        ({"dtype": 8, "flat_float64": [1.0, -float("inf")]}, "a bare -Infinity"),
        ({"dtype": 7, "flat_float32": ["nan"]}, "must be a number, got a string 'nan'"),
        ({"dtype": 7, "flat_float32": ["1_0"]}, "must be a number, got a string '1_0'"),
        ({"dtype": 7, "flat_float32": [None]}, "must be a number, got null"),
        ({"dtype": 7, "flat_float32": [[1.0]]}, "must be a number, got an array"),
        ({"dtype": 7, "flat_float32": [1, [2, 3], []]}, "must be a number, got an array"),
        ({"dtype": 9, "flat_string": ["a", 1]}, "must be a string, got a number"),
        ({"dtype": 8, "flat_double": [1], "flat_float64": [1]}, "are the same field"),
    ],
)
def test_tensors_that_are_refused(members: dict[str, Any], text: str) -> None:
    assert text in refusal(tensor(**members))


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
        ("a G\nk é!", b"hi"),
    ],
)
def test_lenient_base64(text: str, data: bytes) -> None:
    assert read_map(s_b={"k": text}).s_b == {"k": data}


@pytest.mark.parametrize(
    ("maps", "text"),
    [
        ({"s_s": {"k": 1}}, "'s_s' must be a string, got a number"),
        ({"s_s": {"k": None}}, "'s_s' must be a string, got null"),
        ({"s_s": ["k"]}, "'s_s' must be an object, got an array"),
        ({"s_b": {"k": "a"}}, "'s_b' is not base64"),
        ({"s_b": {"k": 1}}, "'s_b' must be a string"),
        ({"s_i32": {"k": 2**31}}, "out of range of int32"),
        ({"s_i64": {"k": "9223372036854775808"}}, "out of range of int64"),
        ({"s_i32": {"k": True}}, "must be an integer, got a boolean"),
        ({"s_f": {"k": 1e39}}, "out of range of float32"),
        ({"s_d": {"k": float("nan")}}, "a bare NaN"),
        ({"s_d": {"k": {}}}, "must be a number, got an object"),
        ({"s_s": dict.fromkeys(map(str, range(16385)), "")}, "more than 16384 entries in a map"),
    ],
)
def test_maps_that_are_refused(maps: dict[str, Any], text: str) -> None:
    assert text in refusal({"gmap": maps})


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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([], "'ndarray' is empty"),
        ([[1], [2, 3]], "ragged"),
        ([[1, 2], [3], [4, 5, 6]], "ragged"),
        ([[1], 2], "ragged"),
        ([1, [2]], "ragged"),
        ([[[1]], 2, 3], "ragged"),
        ([[], [1]], "ragged"),
        (["a"], "got a string in it"),
        ([1, None], "got null in it"),
        ("a", "got a string in it"),
        ({}, "got an object in it"),
        ([10**400], "out of range of float64"),
        (json.loads("[" * 33 + "1" + "]" * 33), "more than 32 dims"),
    ],
)
def test_an_ndarray_that_is_refused(value: Any, text: str) -> None:
    assert text in refusal({"ndarray": value})


def test_members_around_an_ndarray() -> None:
    value = np.arange(3000.0).reshape(3, 1000)
    for before in ({}, {"model": "m"}, {"a": 1, "model": "m,[1]"}, {"status": {"code": 1}}, {"x": [[1], [2, 3]]}):
        for behind in ({}, {"b": None}, {"[": ""}, {'"\\,': "\\"}):
            only = read_ndarray({**before, "ndarray": value.tolist(), **behind})
            assert only.shape == (3, 1000)
            np.testing.assert_array_equal(only.elements, value.reshape(-1))


@pytest.mark.parametrize(
    "text", ['{"x": [[1,2],[3,4]], "ndarray": [[1,2],[3],4]}', '{"x": "[[,],[,]]", "ndarray": [[1],[2,3]]}']
)
def test_what_stands_beside_a_ragged_ndarray_does_not_make_up_for_it(text: str) -> None:
    assert "ragged" in refusal(text)


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


def test_the_limits_of_a_message() -> None:
    data = read({"gtensors": {"tensors": [{}] * 1024}}).data
    assert isinstance(data, list)
    assert len(data) == 1024
    assert "more than 1024 tensors" in refusal({"gtensors": {"tensors": [{}] * 1025}})


@pytest.mark.parametrize(
    "body",
    [
        '{"ndarray":' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"ndarray":' + "[" * 100_000,
        '{"str_data":"x","y":' + '{"a":' * 100_000 + "1" + "}" * 100_001,
        '{"gtensors":' * 100_000,
        '{"ndarray":[' + "9" * 100_000 + "]}",
        '{"gtensors":{"tensors":[{"shape":[' + "9" * 5000 + "]}]}}",
        b'{"str_data":"\xff"}',
        b'{"\xff":1,"str_data":"a"}',
        b"\xff\xfe",
        '{"str_data":"\\ud800"}',
        '{"str_data":"a","model":"\\udc00"}',
        '{"gmap":{"s_s":{"\\ud800":"a"}}}',
        '{"gmap":{"s_s":{"a":"\\ud800"}}}',
        '{"gmap":{"s_b":{"a":"\\ud800"}}}',
        '{"gtensors":{"tensors":[{"dtype":9,"flat_string":["a","\\ud800"]}]}}',
        '{"gtensors":{"tensors":[{"name":"\\ud800"}]}}',
        '{"gtensors":{"tensors":[{"dtype":"\\ud800"}]}}',
        '{"str_data":"\n"}',
        "null",
        "NaN",
    ],
)
def test_hostile_bodies_are_refused(body: Any) -> None:
    refusal(body)


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


@pytest.mark.parametrize("body", [b"", b"[]", b"double", b'{"str_data":5}', b'{"str_data":["a"]}', b'"double"'])
def test_no_name_of_a_model(body: bytes) -> None:
    for text in (body, body + BLANKS):
        with pytest.raises(InvalidArgument):
            read_model_name(text)


INTEGERS = st.sampled_from(
    [0, 1, -1, 300, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63)]
)
NUMBERS = INTEGERS | st.sampled_from([0.5, 1.0, -0.0, 1e39, 3.4028234663852886e38, 1e-50, 1e300, 2.0**40])
STRINGS = st.sampled_from(["1", "-5", "2147483648", "NaN", "Infinity", "-Infinity", "a", "", "aGk=", "é", "nan x"])
ODD = st.sampled_from([None, True, [], [1], {}, {"k": 1}])
LEAVES = NUMBERS | STRINGS | ODD
LISTS = st.lists(NUMBERS, max_size=4) | st.lists(LEAVES, max_size=3) | ODD
MAPS = st.dictionaries(st.sampled_from(["k", "é", ""]), LEAVES, max_size=2) | ODD
NAMES = ["flat_uint8", "flat_int8", "flat_int16", "flat_int32", "flat_int64", "flat_float16", "flat_float32"]
NAMES += ["flat_float64", "flat_string"]


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, Any]:
    number = draw(st.integers(1, 9))
    members = {"dtype": draw(st.sampled_from([number, str(number), pb.DataType.Name(number)]))}
    members[NAMES[number - 1]] = draw(LISTS)
    members["shape"] = draw(st.just([2, 3]) | LISTS)
    members["name"] = draw(st.just("x") | STRINGS | ODD)
    return members


MAP_NAMES = ["s_s", "s_b", "s_i32", "s_i64", "s_f", "s_d"]
BODIES = (
    st.fixed_dictionaries({"gtensors": st.fixed_dictionaries({"tensors": st.lists(tensors(), max_size=2) | ODD})})
    | st.fixed_dictionaries(
        {
            "gmap": st.dictionaries(
                st.sampled_from(["s_s", "s_b", "s_i32", "s_i64", "s_f", "s_d"]), MAPS, max_size=2
            )
        }
    )
    | st.fixed_dictionaries({"str_data": STRINGS, "model": STRINGS | st.none()})
)


@settings(max_examples=400)
@given(BODIES)
def test_it_takes_what_protobuf_takes(body: dict[str, Any]) -> None:
    try:
        parsed = json_format.ParseDict(body, pb.GrpsMessage())
        expected = decode_message(parsed.SerializeToString())
    except (json_format.ParseError, ValueError, TypeError, AttributeError, OverflowError):
        expected = None
    if expected is None:
        refusal(body)
    else:
        assert same_message(read(body), expected)


PIECES = [
    b'{"',
    b'":',
    b"}",
    b"[",
    b"]",
    b",",
    b'"',
    b"\\",
    b"\\u0041",
    b"\\ud800",
    b"\xff",
    b"\0",
    b"1",
    b"-",
    b"e9",
]
PIECES += [b"NaN", b"null", b"true", b"str_data", b"ndarray", b"gtensors", b"tensors", b"dtype", b"gmap", b" "]
SEEDS = [b'{"ndarray":[[1,2],[3,4]],"model":"a"}', b'{"gtensors":{"tensors":[{"dtype":7,"flat_float32":[1,2]}]}}']
SEEDS += [b'{"gmap":{"s_f":{"k":1},"s_b":{"k":"aGk="}}}', b'{"str_data":"x"}']


@settings(max_examples=400)
@given(st.sampled_from(SEEDS), st.data())
def test_damaged_bodies_are_read_or_refused_alike(seed: bytes, data: st.DataObject) -> None:
    body = seed
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body)))
        skipped = data.draw(st.integers(0, 3))
        body = body[:at] + data.draw(st.sampled_from(PIECES)) + body[at + skipped :]
    try:
        message = read_message(body)
    except InvalidArgument:
        refusal(body)
    else:
        assert same_message(message, read_message(body + BLANKS))
