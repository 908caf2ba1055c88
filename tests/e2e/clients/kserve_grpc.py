"""Checks of kserve.InferenceGRPCClient.

python kserve_grpc.py GRPC_ADDRESS REST_ADDRESS
"""

import asyncio
import sys
from contextlib import asynccontextmanager

import checks
import grpc
import numpy as np
from kserve import InferenceGRPCClient, InferInput, InferRequest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub
from kserve.protocol.infer_type import RequestedOutput
from samples import assert_same, sample


class Grpc:
    def __init__(self, client):
        self.client = client

    async def infer(self, model, inputs, **options):
        return await self.client.infer(InferRequest(model, inputs, **options))

    async def refused(self, call, code, text):
        with checks.Raises(grpc.RpcError) as caught:
            await call
        code_and_text = f"{caught.error.code()}: {caught.error.details()}"
        assert caught.error.code() is code, code_and_text
        assert text in caught.error.details(), f"{code_and_text!r} does not have {text!r}"


def from_numpy(name, datatype, array):
    tensor = InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


async def check_live(k):
    assert await k.client.is_server_live() is True


async def check_ready(k):
    assert await k.client.is_server_ready() is True


async def check_model_ready(k):
    assert await k.client.is_model_ready("half_plus_two") is True


async def check_unknown_model_is_not_ready(k):
    assert await k.client.is_model_ready("nope") is False


async def check_infer_list(k):
    response = await k.infer("half_plus_two", [InferInput("x", [2], "FP32", [1.0, 2])])
    assert (response.model_name, response.model_version) == ("half_plus_two", "1")
    (output,) = response.outputs
    assert (output.name, output.datatype, output.shape) == ("y", "FP32", [2])
    assert output.as_numpy().tolist() == [2.5, 3.0]


async def check_infer_list_datatype(k, text_datatype):
    array = sample(text_datatype)
    tensor = InferInput("x", list(array.shape), text_datatype, array.ravel().tolist())
    response = await k.infer(f"identity_{text_datatype.lower()}", [tensor])
    got = response.outputs[0].as_numpy()
    if text_datatype == "BYTES":
        assert_same(got, array)
    else:
        np.testing.assert_array_equal(got, array)


async def check_infer_numpy_datatype(k, kserve_datatype):
    array = sample(kserve_datatype)
    tensor = from_numpy("x", kserve_datatype, array)
    response = await k.infer(f"identity_{kserve_datatype.lower()}", [tensor])
    assert_same(response.outputs[0].as_numpy(), array)


async def check_infer_text(k):
    response = await k.infer("uppercase", [InferInput("text", [2], "BYTES", ["grün", b""])])
    assert response.outputs[0].as_numpy().tolist() == ["GRÜN".encode(), b""]


async def check_infer_empty(k):
    empty = np.empty((0, 3), dtype=np.float32)
    for tensor in (from_numpy("x", "FP32", empty), InferInput("x", [0, 3], "FP32", [])):
        response = await k.infer("identity_fp32", [tensor])
        assert response.outputs[0].as_numpy().shape == (0, 3)


async def check_id_version_outputs_and_parameters(k):
    response = await k.infer(
        "half_plus_two",
        [InferInput("x", [1], "FP32", [1.0], parameters={"content_type": "np"})],
        request_id="7",
        model_version="1",
        request_outputs=[RequestedOutput("y", {"binary_data": True})],
        parameters={"a": "b", "c": 1, "d": True},
    )
    assert response.id == "7"
    assert response.outputs[0].as_numpy().tolist() == [2.5]


async def check_16_mib(k):
    array = np.arange(4 * 2**20, dtype=np.float32).reshape(2048, 2048)
    response = await k.infer("identity_fp32", [from_numpy("x", "FP32", array)])
    assert_same(response.outputs[0].as_numpy(), array)


async def check_100_at_once(k):
    calls = [k.infer("half_plus_two", [InferInput("x", [1], "FP32", [float(at)])]) for at in range(100)]
    responses = await asyncio.gather(*calls)
    assert [response.outputs[0].as_numpy().item() for response in responses] == [at / 2 + 2 for at in range(100)]


async def check_error_unknown_model(k):
    call = k.infer("nope", [InferInput("x", [1], "FP32", [1.0])])
    await k.refused(call, grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'nope' is not found")


async def check_error_wrong_shape(k):
    call = k.infer("half_plus_two", [InferInput("x", [1, 1], "FP32", [1.0])])
    await k.refused(call, grpc.StatusCode.INVALID_ARGUMENT, "unexpected shape for input 'x'")


async def check_error_list_and_numpy_mixed(k):
    tensors = [InferInput("x", [1], "FP32", [1.0]), from_numpy("z", "FP16", np.ones(1, dtype=np.float16))]
    text = "contents field must not be specified when using raw_input_contents for 'x'"
    await k.refused(k.infer("half_plus_two", tensors), grpc.StatusCode.INVALID_ARGUMENT, text)


async def check_deadline(k):
    # More than can come and go in a millisecond.
    large = InferRequest("identity_fp32", [from_numpy("x", "FP32", np.zeros((4096, 4096), dtype=np.float32))])
    await k.refused(k.client.infer(large, timeout=0.001), grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


async def check_model_metadata_is_read_by_its_stub(_):
    """Field 6 means something else to every client: it must be absent."""
    async with grpc.aio.insecure_channel(sys.argv[1]) as channel:
        stub = GRPCInferenceServiceStub(channel)
        reply = await stub.ModelMetadata(pb.ModelMetadataRequest(name="half_plus_two"))
        assert (reply.name, list(reply.versions)) == ("half_plus_two", ["1"])
        assert not [field.number for field, _ in reply.ListFields() if field.number > 5]
        server = await stub.ServerMetadata(pb.ServerMetadataRequest())
        assert server.name == "triglot"


@asynccontextmanager
async def open_client():
    async with InferenceGRPCClient(sys.argv[1]) as client:
        yield Grpc(client)


if __name__ == "__main__":
    checks.run([sys.modules["__main__"]], open_client)
