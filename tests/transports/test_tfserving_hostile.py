"""What TensorFlow Serving's protocol does with requests that are large, odd or meant to harm."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import threading
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

import triglot
from tests.transports.live import Live, live
from tests.waiting import SECONDS, until
from triglot.core.tensor import Array
from triglot.pb.tfserving import management_pb2, predict_pb2, tensor_pb2

pytestmark = pytest.mark.both_transports

EMPTY_DOCUMENT = {"error": "JSON Parse error: The document is empty"}


class Adder(triglot.Model):
    """y = x + b; b has a default, and the model changes what it is given, if it can."""

    signatures = {
        "serving_default": triglot.Signature(
            inputs=[triglot.TensorSpec("x", "FP32", [-1]), triglot.TensorSpec("b", "FP32", [1])],
            outputs=[triglot.TensorSpec("y", "FP32", [-1])],
            defaults={"b": np.array([5], "f4")},
        ),
        "nothing": triglot.Signature(inputs=[], outputs=[triglot.TensorSpec("y", "FP32", [])]),
        "texts": triglot.Signature(
            inputs=[triglot.TensorSpec("s", "BYTES", [-1])], outputs=[triglot.TensorSpec("y", "FP32", [])]
        ),
    }

    def infer(self, inputs: Mapping[str, Array], call: triglot.Call) -> dict[str, Any]:
        if call.signature_name != "serving_default":
            return {"y": np.float32(sum(array.size for array in inputs.values()))}
        b = inputs["b"]
        if b.flags.writeable:
            b += 1
        return {"y": inputs["x"] + b}


@pytest.fixture
async def server() -> AsyncIterator[Live]:
    async with live({"m": Adder()}, max_message_size=200 * 2**20, max_json_size=200 * 2**20) as running:
        yield running


async def post(server: Live, body: bytes, coding: str = "", path: str = "m:predict") -> tuple[int, Any]:
    headers = {"Content-Encoding": coding} if coding else {}
    url = server.url.removesuffix("/v2") + f"/v1/models/{path}"
    async with server.session.post(url, data=body, headers=headers) as response:
        return response.status, json.loads(await response.read() or b"null")


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "gzip, deflate", "deflate,GZIP"])
async def test_gzip_anywhere_in_the_header(server: Live, coding: str) -> None:
    body = gzip.compress(b'{"inputs": {"x": [1.0], "b": [1.0]}}')
    assert await post(server, body, coding) == (200, {"outputs": [2.0]})


@pytest.mark.parametrize("coding", ["br", "utf-8", "deflate", "identity"])
async def test_other_codings_mean_nothing(server: Live, coding: str) -> None:
    assert await post(server, b'{"inputs": {"x": [1.0], "b": [1.0]}}', coding) == (200, {"outputs": [2.0]})


async def test_a_body_that_inflates_to_too_much_counts_as_empty(server: Live) -> None:
    start, room = b'{"inputs": {"x": [1.0], "b": [1.0]}}', 100 * 2**20
    fits, too_much = (gzip.compress(start + b" " * (size - len(start))) for size in (room, room + 1))
    assert await post(server, fits, "gzip") == (200, {"outputs": [2.0]})
    assert await post(server, too_much, "gzip") == (400, EMPTY_DOCUMENT)


@pytest.mark.parametrize("inputs", ["{}", '{"a": 1}', "{} ignored"])
async def test_a_signature_without_inputs_has_no_json(server: Live, inputs: str) -> None:
    body = f'{{"signature_name": "nothing", "inputs": {inputs}}}'
    if "ignored" in inputs:
        body = '{"signature_name": "nothing", "inputs": {}} ignored'
    assert await post(server, body.encode()) == (400, {"error": "Failed to get input map for signature: nothing"})


@pytest.mark.parametrize(
    ("target", "answer"),
    [
        ("/v1/models/a%0Ab", (404, {"error": "Could not find any versions of model a\nb"})),
        ("http://localhost/v1/models/nope", (404, {"error": "Could not find any versions of model nope"})),
        ("/v1/models/" + "n" * 20000, (404, {"error": f"Could not find any versions of model {'n' * 4059}"})),
        ("/", (200, {"status": "alive"})),
        ("/v1/models", (200, {"models": ["m"]})),
    ],
)
async def test_odd_paths(server: Live, target: str, answer: tuple[int, Any]) -> None:
    def get() -> tuple[int, Any]:
        with closing(http.client.HTTPConnection("127.0.0.1", server.server.rest_port, timeout=20)) as connection:
            connection.request("GET", target)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    assert await asyncio.to_thread(get) == answer


def predict(channel: grpc.aio.Channel) -> Any:
    return channel.unary_unary(
        "/tensorflow.serving.PredictionService/Predict",
        response_deserializer=predict_pb2.PredictResponse.FromString,
    )


@pytest.fixture
async def channel(server: Live) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.server.grpc_port}") as opened:
        yield opened


async def test_no_request_changes_a_default(channel: grpc.aio.Channel) -> None:
    request = predict_pb2.PredictRequest(model_spec={"name": "m"})
    request.inputs["x"].dtype = tensor_pb2.DT_FLOAT
    request.inputs["x"].tensor_shape.dim.add(size=1)
    request.inputs["x"].float_val.append(1)
    for _ in range(3):
        reply = await predict(channel)(request.SerializeToString())
        assert list(reply.outputs["y"].float_val) == [6]


class HeldThreads(ThreadPoolExecutor):
    """Runs nothing before `go_on`; `begun` is set once there is something to run."""

    def __init__(self) -> None:
        super().__init__(initializer=self._wait)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def _wait(self) -> None:
        self.begun.set()
        assert self.go_on.wait(SECONDS)


async def test_many_strings_are_read_off_the_loop(server: Live, channel: grpc.aio.Channel) -> None:
    threads = HeldThreads()
    asyncio.get_running_loop().set_default_executor(threads)
    count = 500_000
    request = predict_pb2.PredictRequest(model_spec={"name": "m", "signature_name": "texts"})
    request.inputs["s"].dtype = tensor_pb2.DT_STRING
    request.inputs["s"].tensor_shape.dim.add(size=count)
    request.inputs["s"].tensor_content = b"\1" * count + b"s" * count
    asked = asyncio.ensure_future(predict(channel)(request.SerializeToString()))
    await until(threads.begun.is_set)
    for _ in range(2):
        async with server.session.get(server.url + "/health/live") as response:
            assert response.status == 200
    assert not asked.done()
    threads.go_on.set()
    assert list((await asked).outputs["y"].float_val) == [count]


async def test_models_at_paths_are_not_replaced_over_the_wire(
    server: Live, channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"model_config_list": {"config": [{"name": "n", "base_path": "/", "model_platform": "tensorflow"}]}}
    reload = channel.unary_unary("/tensorflow.serving.ModelService/HandleReloadConfigRequest")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reload(management_pb2.ReloadConfigRequest(config=config).SerializeToString())
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    refused = f"rejected a request to replace the model list: {caught.value.details()}"
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [refused]
    assert (await post(server, b'{"inputs": {"x": [1.0], "b": [1.0]}}'))[0] == 200
