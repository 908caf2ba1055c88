"""Checks of kserve's stub and clients: models loaded and unloaded.

python control_kserve.py GRPC_ADDRESS REST_ADDRESS

The server is that of control_triton.py. kserve's own clients have no call for it; its stub has, and its REST
interface, which people call by hand.
"""

import sys
from contextlib import asynccontextmanager

import checks
import grpc
import httpx
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub


class KServe:
    def __init__(self, channel, grpc_client, rest_client, http):
        self.stub = GRPCInferenceServiceStub(channel)
        self.grpc = grpc_client
        self.rest = rest_client
        self.http = http
        self.url = f"http://{sys.argv[2]}"

    async def load(self, name):
        return await self.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=name))

    async def unload(self, name):
        return await self.stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name=name))

    async def post(self, name, verb):
        return await self.http.post(f"{self.url}/v2/repository/models/{name}/{verb}")

    async def ready(self, name):
        """What both clients say, which has to be the same."""
        found = [await self.grpc.is_model_ready(name), await self.rest.is_model_ready(self.url, name)]
        assert found[0] is found[1], found
        return found[0]

    async def ask(self, name):
        request = InferRequest(name, [InferInput("x", [1], "INT32", [0])])
        answers = [await self.grpc.infer(request), await self.rest.infer(self.url, request, model_name=name)]
        found = [answer.outputs[0].as_numpy().tolist()[0] for answer in answers]
        assert found[0] == found[1], found
        return found[0]

    async def refused(self, call, code, text):
        with checks.Raises(grpc.RpcError) as caught:
            await call
        code_and_text = f"{caught.error.code()}: {caught.error.details()}"
        assert caught.error.code() is code, code_and_text
        assert text in caught.error.details(), f"{code_and_text!r} does not have {text!r}"


async def check_never_loaded(k):
    assert await k.ready("says") is False
    assert await k.grpc.is_server_ready() is True


async def check_load_and_unload_by_stub(k):
    reply = await k.load("says")
    assert reply == pb.RepositoryModelLoadResponse(model_name="says", isLoaded=True)
    assert await k.ready("says") is True
    assert await k.ask("says") == 2
    reply = await k.unload("says")
    assert reply == pb.RepositoryModelUnloadResponse(model_name="says", isUnloaded=True)
    assert await k.ready("says") is False


async def check_load_and_unload_by_rest(k):
    answer = await k.post("says", "load")
    assert (answer.status_code, answer.json()) == (200, {"name": "says", "load": True})
    assert await k.ready("says") is True
    models = await k.http.get(f"{k.url}/v2/models")
    assert models.json() == {"models": ["says"]}
    answer = await k.post("says", "unload")
    assert (answer.status_code, answer.json()) == (200, {"name": "says", "unload": True})
    assert await k.ready("says") is False
    models = await k.http.get(f"{k.url}/v2/models")
    assert models.json() == {"models": []}


async def check_unknown_model(k):
    text = "failed to load 'nope', failed to poll from model repository"
    await k.refused(k.load("nope"), grpc.StatusCode.INTERNAL, text)
    answer = await k.post("nope", "load")
    assert answer.status_code == 500
    assert answer.json()["error"].startswith(text)
    assert (await k.unload("nope")).isUnloaded is True


async def check_broken_model(k):
    text = "load failed for model 'broken': version 1 is at UNAVAILABLE state: "
    await k.refused(k.load("broken"), grpc.StatusCode.INVALID_ARGUMENT, text)
    answer = await k.post("broken", "load")
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(text)
    assert await k.ready("broken") is False
    await k.unload("broken")


async def check_infer_after_unload(k):
    await k.load("says")
    await k.unload("says")
    request = InferRequest("says", [InferInput("x", [1], "INT32", [0])])
    text = "Request for unknown model: 'says' has no available versions"
    await k.refused(k.grpc.infer(request), grpc.StatusCode.NOT_FOUND, text)
    with checks.Raises(httpx.HTTPStatusError) as caught:
        await k.rest.infer(k.url, request, model_name="says")
    assert caught.error.response.status_code == 404
    assert text in str(caught.error)


@asynccontextmanager
async def open_clients():
    async with (
        grpc.aio.insecure_channel(sys.argv[1]) as channel,
        InferenceGRPCClient(sys.argv[1]) as grpc_client,
        InferenceRESTClient(RESTConfig(protocol="v2")) as rest_client,
        httpx.AsyncClient() as http,
    ):
        yield KServe(channel, grpc_client, rest_client, http)


if __name__ == "__main__":
    checks.run([sys.modules["__main__"]], open_clients)
