"""Checks of tritonclient's ways to say who calls: its plugins, and headers.

python triton_credentials.py GRPC_ADDRESS REST_ADDRESS
"""

import sys
from contextlib import asynccontextmanager

import checks
import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc.auth import BasicAuth as GrpcBasicAuth
from tritonclient.http.auth import BasicAuth as HttpBasicAuth
from tritonclient.utils import InferenceServerException

DATA = np.array([[1, 2]], "f4")


def token():
    """A dict of its own: the HTTP client adds headers to the one that it gets."""
    return {"authorization": "Bearer secret-of-friend"}


class ClientWithCredentials:
    """How one of the two modules makes clients, and its plugin."""

    def __init__(self, module, plugin, address):
        self.module, self.plugin = module, plugin
        self.client = module.InferenceServerClient(address)

    def infer(self, **options):
        tensor = self.module.InferInput("x", [1, 2], "FP32")
        tensor.set_data_from_numpy(DATA)
        answer = self.client.infer("identity_fp32", [tensor], **options)
        assert (answer.as_numpy("y") == DATA).all()


def assert_refused(client, code, **options):
    with checks.Raises(InferenceServerException) as caught:
        client.infer(**options)
    assert code in str(caught.error.status()), caught.error.status()
    assert "secret" not in str(caught.error)


async def check_plugin(clients):
    for client in clients:
        client.client.register_plugin(client.plugin("friend", "secret-of-friend"))
        client.infer()
        client.client.unregister_plugin()


async def check_plugin_with_a_wrong_password(clients):
    for client, code in zip(clients, ("UNAUTHENTICATED", "401"), strict=True):
        client.client.register_plugin(client.plugin("friend", "secret-of-nobody"))
        assert_refused(client, code)
        client.client.unregister_plugin()


async def check_headers(clients):
    for client, code in zip(clients, ("UNAUTHENTICATED", "401"), strict=True):
        client.infer(headers=token())
        client.infer(headers={"x-api-key": "secret-of-friend"})
        assert_refused(client, code)


async def check_health_without_any(clients):
    for client in clients:
        assert client.client.is_server_live()
        assert client.client.is_server_ready()
        assert client.client.is_model_ready("identity_fp32")


async def check_what_the_client_may_not(clients):
    for client, code in zip(clients, ("PERMISSION_DENIED", "403"), strict=True):
        with checks.Raises(InferenceServerException) as caught:
            client.client.load_model("identity_fp32", headers=token())
        assert code in str(caught.error.status()), caught.error.status()


async def check_stream(clients):
    grpc = clients[0]
    answers = []
    grpc.client.start_stream(lambda result, error: answers.append((result, error)), headers=token())
    tensor = grpc.module.InferInput("x", [1, 2], "FP32")
    tensor.set_data_from_numpy(DATA)
    grpc.client.async_stream_infer("identity_fp32", [tensor])
    grpc.client.stop_stream()
    ((result, error),) = answers
    assert error is None, error
    assert (result.as_numpy("y") == DATA).all()


@asynccontextmanager
async def subject():
    yield (
        ClientWithCredentials(tritonclient.grpc, GrpcBasicAuth, sys.argv[1]),
        ClientWithCredentials(tritonclient.http, HttpBasicAuth, sys.argv[2]),
    )


if __name__ == "__main__":
    checks.run([sys.modules["__main__"]], subject)
