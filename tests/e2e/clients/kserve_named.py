"""Checks of the kserve clients with a model that an InferenceService serves under its own name.

python kserve_named.py GRPC_ADDRESS REST_ADDRESS NAME CASE

CASE is JSON: the `inputs` of a V2 request, and the `outputs`, by their names, that the model answers with.
"""

import json
import sys
from contextlib import asynccontextmanager

import checks
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig


class Named:
    """The clients, and what they ask for."""

    def __init__(self, rest, rest_v1, grpc_client):
        self.rest, self.rest_v1, self.grpc = rest, rest_v1, grpc_client
        self.url, self.name = f"http://{sys.argv[2]}", sys.argv[3]
        case = json.loads(sys.argv[4])
        self.inputs, self.outputs = case["inputs"], case["outputs"]

    def request(self):
        inputs = []
        for tensor in self.inputs:
            values = np.array(tensor["data"], {"FP32": "f4", "FP64": "f8", "INT32": "i4"}[tensor["datatype"]])
            inputs.append(InferInput(tensor["name"], tensor["shape"], tensor["datatype"]))
            inputs[-1].set_data_from_numpy(values.reshape(tensor["shape"]), binary_data=False)
        return InferRequest(self.name, inputs)

    def assert_answered(self, response):
        assert response.model_name == self.name
        answer = {output.name: output.as_numpy().ravel().tolist() for output in response.outputs}
        assert answer.keys() == self.outputs.keys(), answer
        for name, values in self.outputs.items():
            assert np.allclose(answer[name], values, rtol=1e-4), answer


async def check_server_is_ready(k):
    assert await k.rest.is_server_ready(k.url)
    assert await k.rest.is_server_live(k.url)
    assert await k.grpc.is_server_ready()
    assert await k.grpc.is_server_live()


async def check_model_is_ready(k):
    assert await k.rest.is_model_ready(k.url, k.name)
    assert await k.grpc.is_model_ready(k.name)
    assert not await k.rest.is_model_ready(k.url, "models")


async def check_v2_over_rest(k):
    k.assert_answered(await k.rest.infer(k.url, k.request(), model_name=k.name))


async def check_v2_over_grpc(k):
    k.assert_answered(await k.grpc.infer(k.request()))


async def check_v1_over_rest(k):
    named = {tensor["name"]: np.array(tensor["data"]).reshape(tensor["shape"]).tolist() for tensor in k.inputs}
    (rows, *more) = named.values()
    body = {"inputs": named} if more else {"instances": rows}
    answer = await k.rest_v1.infer(k.url, body, model_name=k.name)
    values = answer["outputs"] if more else answer["predictions"]
    if len(k.outputs) == 1:
        values = {next(iter(k.outputs)): values}
    for name, expected in k.outputs.items():
        assert np.allclose(np.ravel(values[name]), expected, rtol=1e-4), answer


@asynccontextmanager
async def subject():
    rest, rest_v1 = (InferenceRESTClient(RESTConfig(protocol=protocol, timeout=60)) for protocol in ("v2", "v1"))
    async with rest, rest_v1, InferenceGRPCClient(sys.argv[1], timeout=60) as grpc_client:
        yield Named(rest, rest_v1, grpc_client)


if __name__ == "__main__":
    checks.run([sys.modules["__main__"]], subject)
