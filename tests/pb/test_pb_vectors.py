"""Bytes that tritonclient puts on the wire: our classes read them, and write the same."""

from __future__ import annotations

import struct

import pytest

from triglot.pb.kserve.inference_pb2 import (
    InferParameter,
    ModelInferRequest,
    ModelInferResponse,
    ModelStreamInferResponse,
)


def test_infer_request() -> None:
    wire = bytes.fromhex("0a016d 1a0137 2a0d 0a0178 120446503332 1a020102 3203 0a0179 3a08 0000803f 00000040")
    request = ModelInferRequest.FromString(wire)
    assert request == ModelInferRequest(
        model_name="m",
        id="7",
        inputs=[ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 2])],
        outputs=[ModelInferRequest.InferRequestedOutputTensor(name="y")],
        raw_input_contents=[struct.pack("<2f", 1.0, 2.0)],
    )
    assert request.SerializeToString() == wire


def test_infer_response() -> None:
    wire = bytes.fromhex("0a016d 120131 1a0137 2a0d 0a0179 120446503332 1a020101 3204 00004040")
    response = ModelInferResponse.FromString(wire)
    assert response == ModelInferResponse(
        model_name="m",
        model_version="1",
        id="7",
        outputs=[ModelInferResponse.InferOutputTensor(name="y", datatype="FP32", shape=[1, 1])],
        raw_output_contents=[struct.pack("<f", 3.0)],
    )
    assert response.SerializeToString() == wire


@pytest.mark.parametrize(
    ("key", "entry_value", "parameter"),
    [
        ("sequence_id", "1202 1005", InferParameter(int64_param=5)),
        ("sequence_start", "1202 0801", InferParameter(bool_param=True)),
        # A false is written, and differs from a parameter without a value.
        ("sequence_end", "1202 0800", InferParameter(bool_param=False)),
        ("priority", "1202 2802", InferParameter(uint64_param=2)),
        ("timeout", "1203 10e807", InferParameter(int64_param=1000)),
        ("k", "1203 1a0176", InferParameter(string_param="v")),
    ],
)
def test_request_parameters(key: str, entry_value: str, parameter: InferParameter) -> None:
    entry = bytes([0x0A, len(key)]) + key.encode() + bytes.fromhex(entry_value)
    wire = bytes([0x22, len(entry)]) + entry
    request = ModelInferRequest.FromString(wire)
    assert dict(request.parameters) == {key: parameter}
    assert request.parameters[key].WhichOneof("parameter_choice") == parameter.WhichOneof("parameter_choice")
    assert request.parameters[key] != InferParameter()
    assert request.SerializeToString() == wire
    assert ModelInferRequest(parameters={key: parameter}).SerializeToString() == wire


def test_empty_final_response_of_a_stream() -> None:
    key = b"triton_final_response"
    wire = bytes.fromhex("1223 0a016d 1a0137 221b 0a15") + key + bytes.fromhex("1202 0801")
    response = ModelStreamInferResponse.FromString(wire)
    assert response == ModelStreamInferResponse(
        infer_response=ModelInferResponse(
            model_name="m", id="7", parameters={key.decode(): InferParameter(bool_param=True)}
        )
    )
    assert response.SerializeToString() == wire


def test_error_within_a_stream() -> None:
    wire = bytes.fromhex("0a03626164 1203 1a0137")
    response = ModelStreamInferResponse.FromString(wire)
    assert response == ModelStreamInferResponse(error_message="bad", infer_response=ModelInferResponse(id="7"))
    assert response.SerializeToString() == wire
