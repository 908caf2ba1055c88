"""The JSON of generate calls, without a server (spec 3.8)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triglot.core.errors import Internal, InvalidArgument
from triglot.core.tensor import DATATYPES, TFSERVING_DATATYPES, object_array
from triglot.core.types import InferenceRequest, InferenceResponse, OutputTensor, TensorSpec
from triglot.model.signature import Signature
from triglot.model.validation import bind_inputs
from triglot.protocols.kserve.generate_json import decode_generate, encode_event, encode_generate, shape_for

SIGNATURE = Signature(
    [
        TensorSpec("text_input", "BYTES", [-1]),
        TensorSpec("top_k", "INT32", [1], optional=True),
        TensorSpec("grid", "FP32", [-1, 2], optional=True),
        TensorSpec("any", "FP64", None, optional=True),
        TensorSpec("half", "FP16", [-1], optional=True),
    ],
    [],
)
OTHER = Signature([TensorSpec("question", "BYTES", [1])], [])


def signature_of(name: str) -> Signature:
    found = {"": SIGNATURE, "other": OTHER}.get(name)
    if found is None:
        raise InvalidArgument(f"no signature {name}")
    return found


def decoded(body: object) -> InferenceRequest:
    request = decode_generate(json.dumps(body).encode(), "m", "3", signature_of)
    assert request is not None
    return request


def arrays(request: InferenceRequest | None) -> dict[str, Any]:
    assert request is not None
    return {name: array.tolist() for name, array in bind_inputs(SIGNATURE, request).items()}


def test_inputs_are_tensors_and_everything_else_is_a_parameter() -> None:
    request = decoded(
        {
            "text_input": "héllo",
            "id": "7",
            "stream": False,
            "temperature": 0.5,
            "parameters": {"top_k": 3, "sequence_id": "u", "priority": 2},
        }
    )
    assert (request.model_name, request.model_version, request.id) == ("m", "3", "7")
    assert arrays(request) == {"text_input": ["héllo".encode()], "top_k": [3]}
    assert request.parameters == {"stream": False, "temperature": 0.5, "sequence_id": "u", "priority": 2}
    assert list(request.outputs) == []


@pytest.mark.parametrize(
    ("member", "value", "expected"),
    [
        ("text_input", ["a", "", "c"], [b"a", b"", b"c"]),
        ("text_input", [], []),
        ("grid", [1, 2, 3, 4], [[1, 2], [3, 4]]),
        ("grid", [], []),
        ("any", 1.5, 1.5),
        ("any", [1, 2], [1, 2]),
        ("any", 3, 3.0),
    ],
)
def test_values_take_the_declared_shape(member: str, value: object, expected: object) -> None:
    assert arrays(decoded({"text_input": "t", member: value}))[member] == expected


def test_floats_may_be_what_json_has_no_name_for() -> None:
    body = b'{"text_input": "t", "any": [NaN, null, Infinity, -Infinity]}'
    found = arrays(decode_generate(body, "m", "", signature_of))["any"]
    assert list(map(math.isnan, found)) == [True, True, False, False]
    assert found[2:] == [math.inf, -math.inf]


def test_long_arrays_are_read_like_short_ones() -> None:
    values = [number / 8 for number in range(5000)]
    texts = [str(number) for number in range(3000)]
    found = arrays(decoded({"text_input": texts, "any": values}))
    assert found == {"text_input": [text.encode() for text in texts], "any": values}
    with pytest.raises(
        InvalidArgument, match="'any' must be a value or an array of values, got an array of arrays"
    ):
        decoded({"text_input": "t", "any": [values]})


def test_another_signature_may_be_named() -> None:
    request = decoded({"question": "why", "parameters": {}, "signature_name": "other"})
    assert (request.signature_name, [tensor.name for tensor in request.inputs]) == ("other", ["question"])
    with pytest.raises(InvalidArgument, match="no signature third"):
        decoded({"signature_name": "third"})


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ([], "failed to parse the request JSON: expected an object, got an array"),
        ({"parameters": 5}, "'parameters' must be an object, got a number"),
        ({"parameters": ["a"]}, "'parameters' must be an object, got an array"),
        ({"parameters": {"parameters": {}}}, "parameter 'parameters' must be a string, number or boolean"),
        ({"id": 7}, "'id' must be a string, got a number"),
        ({"id": "\ud800"}, "'id' is not Unicode text"),
        ({"stop": [None]}, "parameter 'stop' must be a string, number or boolean, got an array"),
        (
            {"stop": ["a"]},
            "parameter 'stop' must be a string, number or boolean, got an array; the model's inputs",
        ),
        ({"a": 1, "parameters": {"a": 1}}, "parameter 'a' is both in the body and in its 'parameters'"),
        ({"text_input": {"b64": "x"}}, "input 'text_input' must be a value or an array of values, got an object"),
        (
            {"text_input": [["a"]]},
            "input 'text_input' must be a value or an array of values, got an array of arrays",
        ),
        ({"text_input": 5}, "input 'text_input': element 0 must be a string for BYTES, got a number"),
        ({"text_input": [None]}, "input 'text_input': element 0 must be a string for BYTES, got null"),
        ({"top_k": True}, "input 'top_k': element 0 must be an integer for INT32, got a boolean"),
        ({"top_k": 1 << 40}, "input 'top_k' has an element outside INT32's range"),
        ({"half": 1.0}, "input 'half': FP16 has no JSON form"),
        (
            {"grid": [1, 2, 3]},
            "The schema can not convert input 'grid' to tensor with proper shape: it has 3 elements",
        ),
        ({"top_k": [1, 2]}, "The schema can not convert input 'top_k' to tensor with proper shape"),
        ({"triton_x": 1}, "names that begin with 'triton_' are reserved"),
        ({"triton_enable_empty_final_response": True}, "is not allowed over HTTP"),
        ({"sequence_start": 1}, "parameter 'sequence_start': expected bool_param"),
    ],
)
def test_bodies_that_are_refused(body: object, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        decoded(body)
    assert text in caught.value.message


@pytest.mark.parametrize(
    ("signature", "text"),
    [
        (Signature([TensorSpec("parameters", "FP32", [1])], []), "has an input named 'parameters'"),
        (Signature((), (), any_tensors=True), "declares no inputs"),
    ],
)
def test_models_that_generate_cannot_serve(signature: Signature, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        decode_generate(b"{}", "m", "", lambda _: signature)


@given(
    declared=st.lists(st.integers(1, 5) | st.just(-1), max_size=4).map(tuple),
    count=st.integers(0, 60),
)
def test_shape_has_all_elements_and_fits_or_is_omitted(declared: tuple[int, ...], count: int) -> None:
    fixed = math.prod(dim for dim in declared if dim != -1)
    possible = count % fixed == 0 if -1 in declared else count == fixed
    if not possible:
        with pytest.raises(InvalidArgument, match="proper shape"):
            shape_for(count, declared, "x")
        return
    shape = shape_for(count, declared, "x")
    assert math.prod(shape) == count
    free = [got for got, dim in zip(shape, declared, strict=True) if dim == -1]
    assert [got for got, dim in zip(shape, declared, strict=True) if dim != -1] == [d for d in declared if d != -1]
    assert all(dim == 1 for dim in free[:-1])


def printed(outputs: Sequence[OutputTensor], parameters: Any = (), request_id: str = "") -> Any:
    response = InferenceResponse("m", "1", request_id, list(outputs), dict(parameters))
    return json.loads(encode_generate(response))


def test_the_answer_is_one_object() -> None:
    outputs = [
        OutputTensor("text_output", "BYTES", object_array(["zwölf\n".encode()], (1, 1))),
        OutputTensor("scores", "FP32", np.array([[0.5, 2.0]], np.float32)),
        OutputTensor("none", "INT64", np.array([], np.int64)),
        OutputTensor("scalar", "UINT64", np.array(2**64 - 1, np.uint64)),
        OutputTensor("flag", "BOOL", np.array([True])),
    ]
    assert printed(outputs, {"final": False, "cost": 0.25, "why": "length"}, "é") == {
        "model_name": "m",
        "model_version": "1",
        "id": "é",
        "final": False,
        "cost": 0.25,
        "why": "length",
        "text_output": "zwölf\n",
        "scores": [0.5, 2.0],
        "none": [],
        "scalar": 2**64 - 1,
        "flag": True,
    }
    assert printed([]) == {"model_name": "m", "model_version": "1"}


@given(
    st.sampled_from(sorted(set(DATATYPES) - {"FP16", "BF16", "BYTES", *TFSERVING_DATATYPES})),
    st.lists(st.integers(0, 1), max_size=6),
)
def test_every_number_comes_back(datatype: str, values: list[int]) -> None:
    found = printed([OutputTensor("y", datatype, np.array(values, DATATYPES[datatype].dtype))])["y"]
    assert (found if len(values) != 1 else [found]) == values


def test_an_event_is_one_line_whatever_the_text() -> None:
    response = InferenceResponse(
        "m", "1", "", [OutputTensor("y", "BYTES", object_array([b"a\n\ndata: b\r", b"\xe2\x80\xa8"], (2,)))]
    )
    event = encode_event(encode_generate(response))
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2
    assert event.count(b"\r") == 0
    assert json.loads(event[6:])["y"] == ["a\n\ndata: b\r", "\u2028"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_without_a_name_are_bare_words(value: float) -> None:
    text = encode_generate(InferenceResponse("m", "1", "", [OutputTensor("y", "FP32", np.array([value], "f4"))]))
    found = json.loads(text)["y"]
    assert found == value or (math.isnan(found) and math.isnan(value))


def test_what_has_no_json_form_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="output 'y': FP16 has no JSON form"):
        printed([OutputTensor("y", "FP16", np.zeros(1, np.float16))])
    with pytest.raises(InvalidArgument, match="not UTF-8"):
        printed([OutputTensor("y", "BYTES", object_array([b"\xff"], (1,)))])
    with pytest.raises(Internal, match="parameters have no JSON form"):
        printed([], {"x": 1 << 70})
