"""Checks of the kserve clients' way to say who calls: headers, and metadata.

python kserve_credentials.py GRPC_ADDRESS REST_ADDRESS
"""

import sys
from contextlib import asynccontextmanager

import checks
import grpc
import httpx
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

TOKEN = {"authorization": "Bearer secret-of-friend"}
WRONG = {"authorization": "Bearer secret-of-nobody"}


class Clients:
    """Of both kinds."""

    def __init__(self, rest, grpc_client):
        self.rest, self.grpc = rest, grpc_client
        self.url = f"http://{sys.argv[2]}"

    def request(self):
        return InferRequest("identity_fp32", [InferInput("x", [1, 2], "FP32", [1.0, 2.0])])

    async def over_rest(self, headers):
        return await self.rest.infer(self.url, self.request(), model_name="identity_fp32", headers=headers)

    async def over_grpc(self, headers):
        return await self.grpc.infer(self.request(), headers=list(headers.items()))


async def check_rest(clients):
    answer = await clients.over_rest(TOKEN)
    assert answer.outputs[0].data == [1.0, 2.0]
    for headers in ({}, WRONG):
        with checks.Raises(httpx.HTTPStatusError) as caught:
            await clients.over_rest(headers)
        assert caught.error.response.status_code == 401


async def check_grpc(clients):
    answer = await clients.over_grpc(TOKEN)
    assert (answer.outputs[0].as_numpy() == [[1.0, 2.0]]).all()
    for headers in ({}, WRONG):
        with checks.Raises(grpc.RpcError) as caught:
            await clients.over_grpc(headers)
        assert caught.error.code() is grpc.StatusCode.UNAUTHENTICATED


async def check_health_without_any(clients):
    assert await clients.rest.is_server_ready(clients.url)
    assert await clients.grpc.is_server_ready()
    assert await clients.grpc.is_model_ready("identity_fp32")


@asynccontextmanager
async def subject():
    rest = InferenceRESTClient(RESTConfig(protocol="v2"))
    async with rest, InferenceGRPCClient(sys.argv[1]) as grpc_client:
        yield Clients(rest, grpc_client)


if __name__ == "__main__":
    checks.run([sys.modules["__main__"]], subject)
