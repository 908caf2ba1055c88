"""grps' JSON bodies that are refused, small and large: wrong, ragged and hostile ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.protocols.grps_messages import BLANKS, read, refusal, tensor
from triglot.core.errors import InvalidArgument
from triglot.protocols.grps.json_reader import read_model_name

pytestmark = pytest.mark.usefixtures("json_library")


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
        ({"dtype": 7, "flat_float32": [float("nan")]}, "NaN or a number out of range"),
        ({"dtype": 8, "flat_float64": [1.0, -float("inf")]}, "-Infinity or a number out of range"),
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


@pytest.mark.parametrize(
    ("maps", "text"),
    [
        ({"s_s": {"k": 1}}, "'s_s' of 'k' must be a string, got a number"),
        ({"s_s": {"k": None}}, "'s_s' of 'k' must be a string, got null"),
        ({"s_s": ["k"]}, "'s_s' must be an object, got an array"),
        ({"s_b": {"k": "a"}}, "'s_b' of 'k' is not base64: "),
        ({"s_b": {"good": "aGk=", "k": "!!!"}}, "'s_b' of 'k' is not base64: "),
        ({"s_b": {"k": "aGk=\N{LATIN SMALL LETTER E WITH ACUTE}"}}, "'s_b' of 'k' is not base64: "),
        ({"s_b": {"k": "aG=k"}}, "'s_b' of 'k' is not base64: "),
        ({"sB": {"k": "aGk%3D"}}, "'s_b' of 'k' is not base64: "),
        ({"s_b": {"k": "data:text/plain;base64,aGk="}}, "'s_b' of 'k' is not base64: "),
        ({"s_b": {"k": 1}}, "'s_b' of 'k' must be a string"),
        ({"s_i32": {"k": 2**31}}, "out of range of int32"),
        ({"s_i64": {"k": "9223372036854775808"}}, "out of range of int64"),
        ({"s_i32": {"k": True}}, "must be an integer, got a boolean"),
        ({"s_f": {"k": 1e39}}, "out of range of float32"),
        ({"s_d": {"k": float("nan")}}, "NaN or a number out of range"),
        ({"s_d": {"k": {}}}, "must be a number, got an object"),
        ({"s_s": dict.fromkeys(map(str, range(16385)), "")}, "more than 16384 entries in a map"),
    ],
)
def test_maps_that_are_refused(maps: dict[str, Any], text: str) -> None:
    assert text in refusal({"gmap": maps})


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


@pytest.mark.parametrize(
    "text", ['{"x": [[1,2],[3,4]], "ndarray": [[1,2],[3],4]}', '{"x": "[[,],[,]]", "ndarray": [[1],[2,3]]}']
)
def test_other_fields_do_not_hide_a_ragged_ndarray(text: str) -> None:
    assert "ragged" in refusal(text)


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


@pytest.mark.parametrize("body", [b"", b"[]", b"double", b'{"str_data":5}', b'{"str_data":["a"]}', b'"double"'])
def test_no_name_of_a_model(body: bytes) -> None:
    for text in (body, body + BLANKS):
        with pytest.raises(InvalidArgument):
            read_model_name(text)
