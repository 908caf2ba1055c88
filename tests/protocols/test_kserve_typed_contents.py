"""Outputs in typed fields, for clients that read `contents` as MLServer's answers have them."""

from __future__ import annotations

from typing import Any

import grpc.aio
import numpy as np
import pytest

from tests.protocols.stream_requests import FINAL, answers, asking, parameters
from tests.scheduling.scripted_models import Plain
from tests.transports.live import Live, live
from triglot import Model, TensorSpec
from triglot.core.tensor import DATATYPES
from triglot.core.types import InferenceResponse, OutputTensor
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.kserve.codec import (
    encode_infer,
    encode_stream_infer,
    packing_size,
    scatter_infer,
    small_answer,
)

FIELDS: dict[str, tuple[str, list[Any]]] = {
    "BOOL": ("bool_contents", [True, False]),
    "INT8": ("int_contents", [-128, 127]),
    "INT16": ("int_contents", [-(2**15), 2**15 - 1]),
    "INT32": ("int_contents", [-(2**31), 2**31 - 1]),
    "INT64": ("int64_contents", [-(2**63), 2**63 - 1]),
    "UINT8": ("uint_contents", [0, 255]),
    "UINT16": ("uint_contents", [0, 2**16 - 1]),
    "UINT32": ("uint_contents", [0, 2**32 - 1]),
    "UINT64": ("uint64_contents", [0, 2**64 - 1]),
    "FP32": ("fp32_contents", [-1.5, 1e30]),
    "FP64": ("fp64_contents", [-1.5, 1e300]),
    "BYTES": ("bytes_contents", [b"\xff", "ö".encode()]),
}


def response_of(*outputs: OutputTensor, **more: Any) -> InferenceResponse:
    return InferenceResponse("m", "1", "7", list(outputs), typed=True, **more)


def output(datatype: str, values: list[Any], name: str = "y") -> OutputTensor:
    return OutputTensor(name, datatype, np.array(values, DATATYPES[datatype].dtype))


@pytest.mark.parametrize("datatype", FIELDS)
def test_every_datatype_in_its_field(datatype: str) -> None:
    field, values = FIELDS[datatype]
    tensor = output(datatype, [values, values]).array.T
    message = pb.ModelInferResponse.FromString(encode_infer(response_of(OutputTensor("y", datatype, tensor))))
    assert (message.model_name, message.model_version, message.id) == ("m", "1", "7")
    (found,) = message.outputs
    assert (found.name, found.datatype, list(found.shape)) == ("y", datatype, [2, 2])
    ((descriptor, _),) = found.contents.ListFields()
    assert descriptor.name == field
    elements = getattr(found.contents, field)
    first, other = ([np.float32(value) if datatype == "FP32" else value] * 2 for value in values)
    assert list(elements) == [*first, *other]
    assert not message.raw_output_contents


def test_texts_of_numpy_are_bytes() -> None:
    message = pb.ModelInferResponse.FromString(
        encode_infer(response_of(OutputTensor("y", "BYTES", np.array(["ä", "b"]))))
    )
    assert list(message.outputs[0].contents.bytes_contents) == ["ä".encode(), b"b"]


def test_an_empty_tensor_has_contents_without_elements() -> None:
    message = pb.ModelInferResponse.FromString(encode_infer(response_of(output("FP32", []))))
    assert message.outputs[0].HasField("contents")
    assert list(message.outputs[0].shape) == [0]
    assert not message.raw_output_contents


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_where_one_has_no_field_all_are_raw(datatype: str) -> None:
    message = pb.ModelInferResponse.FromString(
        encode_infer(response_of(output("FP32", [1.5], "x"), output(datatype, [1.5])))
    )
    assert len(message.raw_output_contents) == 2
    assert not any(output.HasField("contents") for output in message.outputs)


def test_outputs_in_shared_memory_have_neither() -> None:
    outputs = output("FP32", [1.5], "x"), output("FP32", [2.5])
    message = pb.ModelInferResponse.FromString(encode_infer(response_of(*outputs, placed=frozenset("x"))))
    assert [output.HasField("contents") for output in message.outputs] == [False, True]
    assert not message.raw_output_contents


def test_large_ones_are_not_sent_from_where_they_lie() -> None:
    large = OutputTensor("y", "FP32", np.arange(100_000, dtype=np.float32))
    sent = scatter_infer(response_of(large))
    assert isinstance(sent, bytes)
    assert list(pb.ModelInferResponse.FromString(sent).outputs[0].contents.fp32_contents) == list(range(100_000))
    assert packing_size(response_of(large)) > 100_000


def test_in_a_stream() -> None:
    response = response_of(output("INT64", [1]), parameters={FINAL: True})
    assert small_answer(response, final=True) is None
    message = pb.ModelStreamInferResponse.FromString(encode_stream_infer(response)).infer_response
    assert list(message.outputs[0].contents.int64_contents) == [1]
    assert message.parameters[FINAL].bool_param


class Counting(Model):
    """Yield 0, 1 and so on."""

    inputs, outputs = [TensorSpec("x", "FP32", [-1])], [TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs: Any) -> Any:
        for number in range(int(inputs["x"][0])):
            yield {"y": np.array([number], np.float32)}


async def infer(server: Live, data: bytes) -> pb.ModelInferResponse:
    return pb.ModelInferResponse.FromString(await server.infer(data))


def typed(reply: pb.ModelInferResponse) -> list[float] | None:
    """The elements, or None where they are raw."""
    (tensor,) = reply.outputs
    assert tensor.HasField("contents") != bool(reply.raw_output_contents)
    return list(tensor.contents.fp32_contents) if tensor.HasField("contents") else None


@pytest.mark.parametrize("option", [False, True])
async def test_the_servers_option_and_the_requests_parameter(option: bool) -> None:
    models = {"plain": Plain(lambda inputs: {"y": inputs["x"]}), "counting": Counting()}
    expected = {None: option, True: True, False: False}
    async with live(models, typed_contents=option) as server:
        for parameter, is_typed in expected.items():
            given: dict[str, Any] = {} if parameter is None else {"typed_contents": parameter}
            assert typed(await infer(server, asking("plain", 3, "7", **given))) == ([3.0] if is_typed else None)
            streamed = await answers(server, asking("plain", 3, "7", **given), asking("counting", 2, **given))
            found = [typed(answer.infer_response) for answer in streamed]
            assert sorted(found, key=str) == sorted([[3.0], [0.0], [1.0]] if is_typed else [None] * 3, key=str)
            finals = [answer for answer in streamed if answer.infer_response.model_name == "plain"]
            assert [parameters(answer)[FINAL] for answer in finals] == [True]


async def test_the_parameter_is_a_truth_value() -> None:
    async with live({"plain": Plain(lambda inputs: {"y": inputs["x"]})}) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.infer(asking("plain", 3, typed_contents=1))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "parameter 'typed_contents': expected bool_param" in str(caught.value.details())
        assert typed(await infer(server, asking("plain", 3))) is None
