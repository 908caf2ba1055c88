"""Checks of kserve.InferenceRESTClient, protocol v2.

python kserve_rest.py GRPC_ADDRESS REST_ADDRESS
"""

import sys
from contextlib import asynccontextmanager

import checks
import httpx
import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig
from kserve.protocol.infer_type import RequestedOutput
from samples import assert_same, sample, strings, text_sample

BINARY = {"binary_data_output": True}
LISTS = {"BOOL": [True, False], "FP32": [1.5, -2], "FP64": [1e300, 3], "BYTES": ["", "Grüße"]}


class Rest:
    def __init__(self, client, url):
        self.client = client
        self.url = url

    async def infer(self, model, inputs, **options):
        return await self.client.infer(self.url, InferRequest(model, inputs, **options), model_name=model)

    async def refused(self, call, status, text):
        with checks.Raises(httpx.HTTPStatusError) as caught:
            await call
        assert caught.error.response.status_code == status, str(caught.error)
        assert text in str(caught.error), f"{str(caught.error)!r} does not have {text!r}"


def from_numpy(name, datatype, array, *, binary=True):
    tensor = InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


async def check_live(k):
    assert await k.client.is_server_live(k.url) is True


async def check_ready(k):
    assert await k.client.is_server_ready(k.url) is True


async def check_model_ready(k):
    assert await k.client.is_model_ready(k.url, "half_plus_two") is True


async def check_unknown_model_is_not_ready(k):
    assert await k.client.is_model_ready(k.url, "nope") is False


async def check_infer_list(k):
    response = await k.infer("half_plus_two", [InferInput("x", [2], "FP32", [1.0, 2])])
    assert (response.model_name, response.id != "") == ("half_plus_two", True)
    (output,) = response.outputs
    assert (output.name, output.datatype, output.shape, output.data) == ("y", "FP32", [2], [2.5, 3.0])
    assert output.parameters is None


async def check_infer_nested_list(k):
    response = await k.infer("identity_int64", [InferInput("x", [2, 2], "INT64", [[1, 2], [3, 4]])])
    assert response.outputs[0].as_numpy().tolist() == [[1, 2], [3, 4]]


async def check_infer_dict(k):
    body = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [4]}]}
    response = await k.client.infer(k.url, body, model_name="half_plus_two")
    assert response.outputs[0].data == [4.0]


async def check_infer_list_datatype(k, text_datatype):
    values = LISTS.get(text_datatype) or sample(text_datatype).ravel().tolist()
    tensor = InferInput("x", [1, len(values)], text_datatype, list(values))
    response = await k.infer(f"identity_{text_datatype.lower()}", [tensor])
    assert response.outputs[0].data == values
    assert response.outputs[0].shape == [1, len(values)]


async def check_infer_numpy_datatype(k, kserve_datatype):
    datatype = kserve_datatype
    # Its BYTES outputs are decoded as UTF-8.
    array = text_sample() if datatype == "BYTES" else sample(datatype)
    model = f"identity_{datatype.lower()}"
    response = await k.infer(model, [from_numpy("x", datatype, array)], parameters=dict(BINARY))
    got = response.outputs[0].as_numpy()
    if datatype == "BYTES":
        assert got.tolist() == [[element.decode() for element in row] for row in array]
    else:
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got, array)


async def check_infer_numpy_fp32_to_json(k):
    tensor = from_numpy("x", "FP32", np.array([1, 2], dtype=np.float32))
    response = await k.infer("half_plus_two", [tensor])
    assert_same(response.outputs[0].as_numpy(), np.array([2.5, 3], dtype=np.float32))


async def check_infer_numpy_bytes_to_json(k):
    response = await k.infer("uppercase", [from_numpy("text", "BYTES", strings([b"a", b""])[0])])
    assert response.outputs[0].data == ["A", ""]


async def check_infer_numpy_as_json(k):
    tensor = from_numpy("x", "FP32", np.array([1, 2], dtype=np.float32), binary=False)
    response = await k.infer("half_plus_two", [tensor])
    assert response.outputs[0].data == [2.5, 3.0]


async def check_infer_numpy_listed_output(k):
    for binary in (True, False):
        tensor = from_numpy("x", "FP32", np.array([1], dtype=np.float32))
        outputs = [RequestedOutput("y", {"binary_data": binary})]
        response = await k.infer("half_plus_two", [tensor], request_outputs=outputs)
        assert response.outputs[0].data == [2.5]
        assert (response.outputs[0].parameters is not None) is binary


async def check_infer_list_and_numpy_share_a_body(k):
    """One tensor too many for the model: but the body was understood."""
    tensors = [InferInput("x", [1], "FP32", [1.0]), from_numpy("z", "FP32", np.ones(1, dtype=np.float32))]
    await k.refused(k.infer("half_plus_two", tensors), 400, "expected 1 inputs but got 2 inputs")


async def check_infer_empty_list(k):
    response = await k.infer("identity_fp32", [InferInput("x", [0, 3], "FP32", [])])
    assert response.outputs[0].data == []
    assert response.outputs[0].shape == [0, 3]


async def check_infer_empty_numpy(k):
    """The client sends `"data": null` beside binary_data_size 0."""
    tensor = from_numpy("x", "FP32", np.empty((0, 3), dtype=np.float32))
    response = await k.infer("identity_fp32", [tensor])
    assert response.outputs[0].shape == [0, 3]


async def check_id_is_echoed(k):
    tensor = InferInput("x", [1], "FP32", [1.0])
    response = await k.infer("half_plus_two", [tensor], request_id="7")
    assert response.id == "7"


async def check_parameters(k):
    tensor = InferInput("x", [1], "FP32", [1.0], parameters={"content_type": "np"})
    response = await k.infer("half_plus_two", [tensor], parameters={"a": "b", "c": 1, "d": True})
    assert response.outputs[0].data == [2.5]


async def check_large_response_is_understood(k):
    array = np.zeros((1024, 1024), dtype=np.float32)
    response = await k.infer("identity_fp32", [from_numpy("x", "FP32", array)], parameters=dict(BINARY))
    assert_same(response.outputs[0].as_numpy(), array)


async def check_response_headers(k):
    headers = {}
    request = InferRequest("half_plus_two", [InferInput("x", [1], "FP32", [1.0])])
    await k.client.infer(k.url, request, model_name="half_plus_two", response_headers=headers)
    assert headers["content-type"] == "application/json"


async def check_error_unknown_model(k):
    call = k.infer("nope", [InferInput("x", [1], "FP32", [1.0])])
    await k.refused(call, 404, "Request for unknown model: 'nope' is not found")


async def check_error_wrong_shape(k):
    call = k.infer("half_plus_two", [InferInput("x", [1, 1], "FP32", [1.0])], request_id="7")
    await k.refused(call, 400, "[request id: 7] unexpected shape for input 'x'")


async def check_error_fp16_as_json(k):
    call = k.infer("identity_fp16", [from_numpy("x", "FP16", np.ones((1, 1), dtype=np.float16))])
    await k.refused(call, 400, "FP16 has no JSON form; request it as binary data")


async def check_error_decoupled(k):
    call = k.infer("token_stream", [InferInput("text", [1], "BYTES", ["a"])])
    await k.refused(call, 501, "HTTP end point doesn't support models with decoupled transaction policy")


@asynccontextmanager
async def open_client():
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
        yield Rest(client, f"http://{sys.argv[2]}")


if __name__ == "__main__":
    checks.run([sys.modules["__main__"]], open_client)
