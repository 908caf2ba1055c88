"""Inference requests over REST: JSON and the binary tensor extension (spec 3.2, 3.3, 3.7)."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from triglot.core.errors import InvalidArgument, PayloadTooLarge, ServingError
from triglot.core.http import HttpRequest
from triglot.core.tensor import Array
from triglot.core.types import InputTensor
from triglot.protocols.json.dialect import DEFAULT_LIMITS
from triglot.protocols.json.text import LARGE_FROM_BYTES
from triglot.protocols.kserve.rest import RestInfer, decode_infer

LENGTH = "inference-header-content-length"
BLANKS = b" " * LARGE_FROM_BYTES
X = {"name": "x", "shape": [1], "datatype": "FP32"}


def http(body: bytes, headers: Mapping[str, str] | None = None) -> HttpRequest:
    return HttpRequest({"model": "m", "version": "3"}, headers or {}, body)


def text_of(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def both(body: Any, tail: bytes = b"") -> list[RestInfer]:
    """What a body decodes to, small and large, each with a binary part."""
    return [
        decode_infer(http(text + tail, {LENGTH: str(len(text))}))
        for text in (text_of(body), text_of(body) + BLANKS)
    ]


def refusal(body: Any, tail: bytes = b"", kind: type[ServingError] = InvalidArgument) -> str:
    """The error's text, which is the same for a large body."""
    texts = []
    for text in (text_of(body), text_of(body) + BLANKS):
        with pytest.raises(kind) as caught:
            decode_infer(http(text + tail, {LENGTH: str(len(text))}))
        texts.append(caught.value.message)
    assert texts[0] == texts[1]
    return texts[0]


def data_of(tensor: InputTensor) -> Array:
    assert isinstance(tensor.data, np.ndarray)
    return tensor.data


def raw_of(tensor: InputTensor) -> bytes:
    assert not isinstance(tensor.data, np.ndarray)
    return bytes(tensor.data)


GOLDEN = (
    b'{"id":"7","inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","parameters":{"binary_data_size":8}}],'
    b'"outputs":[{"name":"y","parameters":{"binary_data":true}}]}'
)
GOLDEN_NO_OUTPUTS = (
    b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","parameters":{"binary_data_size":8}}],'
    b'"parameters":{"binary_data_output":true}}'
)
TWO = struct.pack("<2f", 1.0, 2.0)


def test_golden_binary_request() -> None:
    assert len(GOLDEN) == 161
    rest = decode_infer(http(GOLDEN + TWO, {LENGTH: "161"}))
    request, tensor = rest.request, rest.request.inputs[0]
    assert (request.model_name, request.model_version, request.id) == ("m", "3", "7")
    assert (tensor.name, tensor.datatype, tensor.shape, raw_of(tensor)) == (
        "x",
        "FP32",
        (1, 2),
        TWO,
    )
    assert (request.outputs, request.parameters) == (["y"], {})
    assert rest.wants_binary("y")


def test_golden_binary_request_without_outputs() -> None:
    assert len(GOLDEN_NO_OUTPUTS) == 134
    rest = decode_infer(http(GOLDEN_NO_OUTPUTS + TWO, {LENGTH: str(len(GOLDEN_NO_OUTPUTS))}))
    assert (rest.request.id, list(rest.request.outputs), rest.request.parameters) == ("", [], {})
    assert rest.wants_binary("y")


def test_golden_json_request() -> None:
    sequence = {"sequence_id": "u1", "sequence_start": True, "sequence_end": False}
    body = {
        "inputs": [{"name": "s", "shape": [2], "datatype": "BYTES", "data": ["ab", ""]}],
        "outputs": [{"name": "y", "parameters": {"binary_data": False}}],
        "parameters": {**sequence, "priority": 1, "timeout": 9, "k": 1.5},
    }
    rest = decode_infer(http(text_of(body)))
    assert data_of(rest.request.inputs[0]).tolist() == [b"ab", b""]
    assert rest.request.parameters == body["parameters"]
    assert not rest.wants_binary("y")


@pytest.mark.parametrize("size", [0, 100_000])
def test_binary_tensors_are_views_of_the_body(size: int) -> None:
    tensors = [{**X, "name": name, "parameters": {"binary_data_size": 4}} for name in "ab"]
    text = text_of({"inputs": tensors}) + b" " * size
    body = text + TWO
    inputs = decode_infer(http(body, {LENGTH: str(len(text))})).request.inputs
    for at, tensor in enumerate(inputs):
        view = np.frombuffer(tensor.data, "<f4")
        assert view.tolist() == [at + 1.0]
        assert np.shares_memory(view, np.frombuffer(body, "u1"))


@pytest.mark.parametrize("length", ["-1", "", "abc", "1.0", "+5", " 5", "1_0", "٣", "0x1", "9" * 30, "163"])
def test_header_lengths_that_cannot_be(length: str) -> None:
    body = GOLDEN
    with pytest.raises(InvalidArgument) as caught:
        decode_infer(http(body, {LENGTH: length}))
    assert caught.value.message == f"inference header size should be in range (0, {len(body)}), got: {length}"


@pytest.mark.parametrize("length", ["161", "0161", None])
def test_header_lengths_of_a_body_that_is_all_json(length: str | None) -> None:
    body = b'{"id":"","inputs":[]}'.ljust(161)
    assert decode_infer(http(body, {} if length is None else {LENGTH: length})).request.inputs == []


def test_a_header_length_that_cuts_the_json() -> None:
    with pytest.raises(InvalidArgument, match="failed to parse the request JSON"):
        decode_infer(http(GOLDEN + TWO, {LENGTH: "160"}))
    with pytest.raises(InvalidArgument, match="failed to parse the request JSON"):
        decode_infer(http(GOLDEN + TWO, {LENGTH: "162"}))
    with pytest.raises(InvalidArgument, match="failed to parse the request JSON"):
        decode_infer(http(GOLDEN + TWO))


def test_the_json_part_is_bounded() -> None:
    body = b" " * (DEFAULT_LIMITS.size + 1)
    with pytest.raises(PayloadTooLarge, match=r"option max_json_size.*send large tensors as binary data"):
        decode_infer(http(body))


def binary(size: Any, **more: Any) -> dict[str, Any]:
    return {"inputs": [{**X, "parameters": {"binary_data_size": size}, **more}]}


def test_sizes_of_binary_inputs() -> None:
    assert refusal(binary(8), TWO[:5]) == (
        "unexpected size for input 'x', expecting 3 additional bytes for model 'm'"
    )
    assert refusal(binary(4), TWO) == (
        "unexpected additional input data for model 'm': 4 bytes follow the last binary tensor"
    )
    assert refusal({"inputs": []}, b"x").startswith("unexpected additional input data for model 'm'")
    for body in (binary(0), binary(0, data=None)):  # KServe's client writes the null.
        assert [raw_of(rest.request.inputs[0]) for rest in both(body)] == [b"", b""]


@pytest.mark.parametrize("size", [-1, 1.0, "4", True, 10**30])
def test_sizes_that_are_none(size: Any) -> None:
    text = refusal(binary(size), TWO)
    assert text.startswith("input 'x': binary_data_size must be an unsigned integer") or "additional bytes" in text


ONLY_ONE = "Input must set only one of the following fields: "


@pytest.mark.parametrize(
    ("body", "sets"),
    [
        (binary(4, data=[1.0]), "['binary_data_size', 'data']"),
        ({"inputs": [X]}, "none"),
        ({"inputs": [{**X, "data": None}]}, "none"),
        (
            {"inputs": [{**X, "data": [1], "parameters": {"shared_memory_region": "r"}}]},
            "['shared_memory_region', '",
        ),
        (
            {"inputs": [{**X, "parameters": {"shared_memory_region": "r", "binary_data_size": 4}}]},
            "['shared_memory",
        ),
    ],
)
def test_an_input_has_one_kind_of_data(body: Any, sets: str) -> None:
    text = refusal(body, TWO[:4])
    assert text.startswith(ONLY_ONE)
    assert f"input 'x' sets {sets}" in text


LISTED = [{"name": "a", "parameters": {"binary_data": True}}, {"name": "b", "parameters": {"binary_data": False}}]


@pytest.mark.parametrize(
    ("outputs", "default", "binary_outputs"),
    [
        (None, None, ""),
        (None, True, "abc"),
        (None, False, ""),
        ([], True, "abc"),
        (LISTED, None, "a"),
        (LISTED, True, "a"),
        ([*LISTED, {"name": "c"}], True, "a"),
        ([{"name": "c", "parameters": {}}], None, ""),
    ],
)
def test_which_outputs_are_binary(outputs: Any, default: bool | None, binary_outputs: str) -> None:
    body: dict[str, Any] = {"inputs": []}
    if outputs is not None:
        body["outputs"] = outputs
    if default is not None:
        body["parameters"] = {"binary_data_output": default}
    for rest in both(body):
        assert "".join(filter(rest.wants_binary, "abc")) == binary_outputs
        assert rest.request.parameters == {}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "'inputs' of the request must be an array of objects, got nothing"),
        ({"inputs": None}, "'inputs' of the request must be an array of objects, got nothing"),
        ({"inputs": {}}, "'inputs' of the request must be an array of objects, got an object"),
        ({"inputs": [1]}, "'inputs' of the request: element 0 must be an object, got a number"),
        ({"inputs": [], "outputs": "y"}, "'outputs' of the request must be an array of objects, got a string"),
        ({"inputs": [], "outputs": [{}]}, "'name' of an output must be a string, got nothing"),
        ({"inputs": [], "id": 7}, "'id' of the request must be a string, got a number"),
        ({"inputs": [{}]}, "'name' of an input must be a string, got nothing"),
        ({"inputs": [{"name": []}]}, "'name' of an input must be a string, got an array"),
        ({"inputs": [{"name": "x"}]}, "'datatype' of input 'x' must be a string, got nothing"),
        ({"inputs": [], "parameters": []}, "'parameters' of the request must be an object, got an array"),
        ({"inputs": [], "parameters": {"k": [1]}}, "parameter 'k' of the request must be a string, number or "),
        ({"inputs": [], "parameters": {"k": {}}}, "parameter 'k' of the request must be a string, number or "),
        (
            {"inputs": [{**X, "data": [1], "parameters": 7}]},
            "'parameters' of input 'x' must be an object, got a n",
        ),
        (
            {"inputs": [], "outputs": [{"name": "y", "parameters": {"binary_data": 1}}]},
            "output 'y': binary_data must",
        ),
        (
            {"inputs": [], "parameters": {"triton_x": 1}},
            "parameter 'triton_x': names that begin with 'triton_' are",
        ),
        ({"inputs": [], "parameters": {"headers": "a"}}, "parameter 'headers': the name is reserved"),
        (
            {"inputs": [], "parameters": {"priority": -1}},
            "parameter 'priority': expected int64_param or uint64_param",
        ),
        (
            {"inputs": [], "parameters": {"priority": True}},
            "parameter 'priority': expected int64_param or uint64_par",
        ),
        (
            {"inputs": [], "parameters": {"timeout": 1.5}},
            "parameter 'timeout': expected int64_param (JSON: an unsig",
        ),
        (
            {"inputs": [], "parameters": {"sequence_id": 1.5}},
            "parameter 'sequence_id': expected int64_param or str",
        ),
        (
            {"inputs": [], "parameters": {"sequence_start": 1}},
            "parameter 'sequence_start': expected bool_param (JSO",
        ),
        (
            {"inputs": [], "parameters": {"binary_data_output": 1}},
            "parameter 'binary_data_output': expected bool_pa",
        ),
        (
            {"inputs": [], "parameters": {"triton_enable_empty_final_response": True}},
            "parameter 'triton_enable_empty_final_response' is not allowed over HTTP",
        ),
        ({"inputs": [X] * 1025}, "the request has more than 1024 inputs"),
        ({"inputs": [], "outputs": [{"name": "y"}] * 1025}, "the request has more than 1024 requested outputs"),
        (
            {"inputs": [], "parameters": dict.fromkeys(map(str, range(257)), 1)},
            "the request has more than 256 param",
        ),
        ({"inputs": [{**X, "shape": [1] * 17, "data": [1]}]}, "the request has more than 16 dims in a shape"),
    ],
)
def test_bodies_that_are_no_request(body: Any, text: str) -> None:
    assert refusal(body).startswith(text)


@pytest.mark.parametrize("shape", [None, 1, "1", [1.0], [True], ["1"], [-1], [None], [[1]], {"0": 1}, [1e3]])
def test_shapes_that_are_none(shape: Any) -> None:
    assert refusal({"inputs": [{**X, "shape": shape, "data": [1]}]}).startswith(
        "'shape' of input 'x' must be an array of unsigned integers, got "
    )


@pytest.mark.parametrize("shape", [[2**62, 4], [2**32, 2**32], [2**64], [10**30]])
def test_shapes_beyond_what_can_be_counted(shape: list[int]) -> None:
    assert "too many elements" in refusal({"inputs": [{**X, "shape": shape, "data": []}]})


def test_unknown_keys_and_nulls_are_ignored() -> None:
    tensor = {**X, "data": [1], "unknown": {}, "parameters": {"content_type": "np"}}
    body = {"model_name": "m", "inputs": [tensor], "outputs": None, "parameters": None, "extra": [None]}
    for rest in both(body):
        assert data_of(rest.request.inputs[0]).tolist() == [1]


def test_the_last_of_two_equal_keys_holds() -> None:
    body = b'{"inputs":[{"name":"x","datatype":"INT32","shape":[1],"data":[1],"data":[2]}]}'
    assert [data_of(rest.request.inputs[0]).tolist() for rest in both(body)] == [[2], [2]]


@pytest.mark.parametrize("depth", [300, 980, 1000, 1010, 100_000])
@pytest.mark.parametrize(
    "template",
    [
        '{"inputs":[{"name":"x","datatype":"FP32","shape":NESTED,"data":[]}]}',
        '{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[{"a":NESTED}]}]}',
        '{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":NESTED,"parameters":[]}]}',
        '{"inputs":[],"parameters":{"priority":NESTED}}',
        '{"inputs":NESTED}',
    ],
)
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_deep_nesting_is_refused(depth: int, template: str, opening: str, closing: str) -> None:
    text = template.replace("NESTED", opening * depth + "1" + closing * depth).encode()
    for body in (text, text + BLANKS):
        with pytest.raises(InvalidArgument):
            decode_infer(http(body))
