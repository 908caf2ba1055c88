"""What single tensors ask for: regions of shared memory, and classes (spec 2.3, 2.6). Pure functions of bytes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.protocols.wire_bytes import PADDING
from triglot.core.errors import InvalidArgument
from triglot.core.http import HttpRequest
from triglot.core.types import InferenceResponse, OutputOptions, OutputTensor, RegionSlice, TensorOptions
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.kserve import rest
from triglot.protocols.kserve.codec import InferDecoder, decode_infer, encode_infer, packing_size

Parameter = pb.InferParameter


def refusal(data: bytes) -> str:
    """The text of the error, which is the same on the large path."""
    texts = []
    for request in (data, data + PADDING):
        with pytest.raises(InvalidArgument) as caught:
            decode_infer(request)
        texts.append(caught.value.message)
    assert texts[0] == texts[1]
    return texts[0]


def with_options(where: str, **parameters: pb.InferParameter) -> bytes:
    """A request with an input and an output, one of which has these parameters."""
    message = pb.ModelInferRequest(model_name="m", inputs=[{"name": "x"}], outputs=[{"name": "y"}])
    if where == "outputs":
        message.raw_input_contents.append(b"")
    for key, value in parameters.items():
        getattr(message, where)[0].parameters[key].CopyFrom(value)
    return message.SerializeToString()


REGION = {
    "shared_memory_region": Parameter(string_param="r"),
    "shared_memory_byte_size": Parameter(int64_param=8),
}
OFFSET = {"shared_memory_offset": Parameter(int64_param=2**62)}


def test_tensors_in_shared_memory() -> None:
    for more, place in (({}, RegionSlice("r", 0, 8)), (OFFSET, RegionSlice("r", 2**62, 8))):
        for data in (with_options("inputs", **REGION, **more), with_options("inputs", **REGION, **more) + PADDING):
            request = decode_infer(data)
            assert request.options == TensorOptions({0: place}, {})
            assert request.inputs[0].data == b""
        request = decode_infer(with_options("outputs", **REGION, **more))
        assert request.options == TensorOptions({}, {"y": OutputOptions(region=place)})


def test_an_input_in_shared_memory_takes_no_raw_entry() -> None:
    message = pb.ModelInferRequest(
        inputs=[{"name": "a"}, {"name": "b", "parameters": REGION}, {"name": "c"}],
        raw_input_contents=[b"1", b"3"],
    )
    request = decode_infer(message.SerializeToString())
    assert [tensor.data for tensor in request.inputs] == [b"1", b"", b"3"]
    assert request.options == TensorOptions({1: RegionSlice("r", 0, 8)}, {})
    message.raw_input_contents.append(b"4")
    assert refusal(message.SerializeToString()).startswith("the request has 3 raw_input_contents for 2 inputs")


def test_an_input_in_shared_memory_has_no_contents() -> None:
    message = pb.ModelInferRequest(model_name="m", inputs=[{"name": "a", "parameters": REGION, "contents": {}}])
    assert decode_infer(message.SerializeToString()).options == TensorOptions({0: RegionSlice("r", 0, 8)}, {})
    message.inputs[0].contents.int_contents.append(1)
    text = "contents field must not be specified when using shared memory for 'a' for model 'm'"
    assert refusal(message.SerializeToString()) == text


def test_classification() -> None:
    request = decode_infer(with_options("outputs", classification=Parameter(int64_param=3)))
    assert request.options == TensorOptions({}, {"y": OutputOptions(3)})
    assert decode_infer(with_options("inputs", **REGION, classification=Parameter())).outputs == ["y"]


UNSIGNED = "expected int64_param of at least 0 (JSON: an unsigned integer), got"


@pytest.mark.parametrize("where", ["inputs", "outputs"])
@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"shared_memory_region": Parameter(int64_param=1)},
            "parameter 'shared_memory_region' of {}: expected string_param (JSON: a string), got 1",
        ),
        (
            {"shared_memory_byte_size": Parameter(string_param="8")},
            f"parameter 'shared_memory_byte_size' of {{}}: {UNSIGNED} '8'",
        ),
        (
            {"shared_memory_byte_size": Parameter(int64_param=-1)},
            f"parameter 'shared_memory_byte_size' of {{}}: {UNSIGNED} -1",
        ),
        (
            {"shared_memory_offset": Parameter(bool_param=True)},
            f"parameter 'shared_memory_offset' of {{}}: {UNSIGNED} True",
        ),
        ({"shared_memory_offset": Parameter()}, f"parameter 'shared_memory_offset' of {{}}: {UNSIGNED} ''"),
    ],
)
def test_parameters_of_shared_memory_that_are_refused(where: str, changed: dict[str, Any], text: str) -> None:
    what = "input 'x'" if where == "inputs" else "output 'y'"
    assert refusal(with_options(where, **REGION | changed)) == text.format(what)


def test_a_region_without_a_size() -> None:
    only = {"shared_memory_region": REGION["shared_memory_region"]}
    assert refusal(with_options("inputs", **only)) == (
        "parameter 'shared_memory_byte_size' of input 'x': expected one beside 'shared_memory_region', got none"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Parameter(int64_param=0), "0"),
        (Parameter(int64_param=-1), "-1"),
        (Parameter(string_param="1"), "'1'"),
        (Parameter(bool_param=True), "True"),
        (Parameter(), "''"),
    ],
)
def test_counts_of_classes_that_are_refused(value: pb.InferParameter, text: str) -> None:
    found = refusal(with_options("outputs", classification=value))
    expected = UNSIGNED.replace("at least 0", "at least 1")
    assert found == f"parameter 'classification' of output 'y': {expected} {text}"


def test_a_region_of_classes() -> None:
    found = refusal(with_options("outputs", classification=Parameter(int64_param=1), **REGION))
    assert found == "output 'y': 'classification' and 'shared_memory_region' are mutually exclusive, got both"


def test_a_message_that_was_seen_before() -> None:
    """What is remembered of messages has no options."""
    decode = InferDecoder()
    message = pb.ModelInferRequest(
        model_name="m",
        inputs=[{"name": "x", "datatype": "FP32", "shape": [1]}],
        outputs=[{"name": "y", "parameters": {"classification": Parameter(int64_param=3)}}],
        raw_input_contents=[bytes(4)],
    )
    for _ in range(5):
        assert decode(message.SerializeToString()).options == TensorOptions({}, {"y": OutputOptions(3)})


def test_outputs_that_are_in_their_region_have_an_empty_entry() -> None:
    outputs = [
        OutputTensor("a", "FP32", np.ones((2, 1), "f4")),
        OutputTensor("b", "BYTES", np.array([b"text"] * 4, object)),
        OutputTensor("c", "FP32", np.ones(1, "f4")),
    ]
    answer = InferenceResponse("m", "1", "", outputs, placed=frozenset("ab"))
    assert packing_size(answer) == 0
    reply = pb.ModelInferResponse.FromString(encode_infer(answer))
    assert [(output.name, output.datatype, list(output.shape)) for output in reply.outputs] == [
        ("a", "FP32", [2, 1]),
        ("b", "BYTES", [4]),
        ("c", "FP32", [1]),
    ]
    assert list(reply.raw_output_contents) == [b"", b"", outputs[2].array.tobytes()]


# --- REST ---

X = {"name": "x", "shape": [1], "datatype": "FP32"}
PLACE = {"shared_memory_region": "r", "shared_memory_byte_size": 8}


def read(body: Any) -> rest.RestInfer:
    return rest.decode_infer(HttpRequest({"model": "m"}, {}, json.dumps(body).encode()))


def with_output(**parameters: Any) -> Any:
    return {"inputs": [], "outputs": [{"name": "y", "parameters": parameters}]}


def test_tensors_in_shared_memory_over_rest() -> None:
    tensors = [{**X, "data": [1]}, {**X, "parameters": PLACE | {"shared_memory_offset": 2**70}}]
    found = read({"inputs": tensors}).request
    assert found.options == TensorOptions({1: RegionSlice("r", 2**70, 8)}, {})
    assert found.inputs[1].data == b""
    found = read(with_output(**PLACE, binary_data=False)).request
    assert found.options == TensorOptions({}, {"y": OutputOptions(region=RegionSlice("r", 0, 8))})
    assert read({"inputs": [{**X, "data": [1]}]}).request.options is None


@pytest.mark.parametrize("binary", [False, True])
def test_classification_over_rest(binary: bool) -> None:
    found = read(with_output(classification=2, binary_data=binary))
    assert found.request.options == TensorOptions({}, {"y": OutputOptions(2)})
    assert found.wants_binary("y") is binary
    assert read(with_output(classification=0, binary_data=binary)).request.options is None


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"shared_memory_region": "r"}, "'shared_memory_byte_size' of output 'y': expected one beside"),
        (PLACE | {"shared_memory_region": 7}, "expected string_param (JSON: a string), got 7"),
        (PLACE | {"shared_memory_byte_size": 8.0}, f"'shared_memory_byte_size' of output 'y': {UNSIGNED} 8.0"),
        (PLACE | {"shared_memory_offset": -1}, f"'shared_memory_offset' of output 'y': {UNSIGNED} -1"),
        (
            PLACE | {"binary_data": True},
            "output 'y': binary_data true and 'shared_memory_region' are mutually exclusive",
        ),
        (
            PLACE | {"classification": 1},
            "output 'y': 'classification' and 'shared_memory_region' are mutually exclusive",
        ),
        ({"classification": "1"}, f"'classification' of output 'y': {UNSIGNED} '1'"),
        ({"classification": 1.5}, f"'classification' of output 'y': {UNSIGNED} 1.5"),
    ],
)
def test_parameters_of_outputs_that_are_refused_over_rest(parameters: Any, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read(with_output(**parameters))
    assert text in caught.value.message


@pytest.mark.parametrize("binary", [False, True])
def test_outputs_that_are_in_their_region_have_no_data_over_rest(binary: bool) -> None:
    outputs = [OutputTensor("a", "FP16", np.ones((2, 1), "f2")), OutputTensor("b", "FP32", np.ones(1, "f4"))]
    wanted = rest.RestInfer(read({"inputs": []}).request, frozenset(), binary_by_default=binary)
    answer = rest.encode_infer(InferenceResponse("m", "1", "", outputs, placed=frozenset("ab")), wanted)
    assert (answer.content_type, answer.headers) == ("application/json", {})
    assert json.loads(bytes(answer.body))["outputs"] == [
        {"name": "a", "datatype": "FP16", "shape": [2, 1]},
        {"name": "b", "datatype": "FP32", "shape": [1]},
    ]
