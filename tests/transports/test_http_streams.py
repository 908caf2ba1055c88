"""Streams over HTTP, and what holds for all calls of a transport: how many may be open."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import grpc.aio
import numpy as np
import pytest

from tests.transports.live import Live, live, request
from triglot import Model, TensorSpec
from triglot.transports.off_loop import OFF_LOOP_BYTES

pytestmark = pytest.mark.both_transports

JSON = {"Content-Type": "application/json"}
BODY = {"ndarray": [1.0]}
COUNT = 20


class Steps(Model):
    """Yield one number for each time that the test lets it continue; knows when it is closed."""

    inputs = [TensorSpec("x", "FP32", [-1])]
    outputs = [TensorSpec("y", "FP32", [-1])]

    def __init__(self, answers: int) -> None:
        self.answers = answers
        self.go = threading.Semaphore(0)
        self.closed = threading.Event()

    def infer(self, inputs: Any) -> Iterator[dict[str, Any]]:
        try:
            for value in range(self.answers):
                assert self.go.acquire(timeout=30)
                yield {"y": np.array([value], np.float32)}
        finally:
            self.closed.set()


class Gated(Model):
    """Waits in `infer` until the test opens the gate."""

    inputs, outputs = Steps.inputs, Steps.outputs

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.entered = asyncio.Event()

    async def infer(self, inputs: Any) -> dict[str, Any]:
        self.entered.set()
        await self.gate.wait()
        return {"y": inputs["x"]}


class Endless(Model):
    """Yield without end, on the loop."""

    inputs, outputs = Steps.inputs, Steps.outputs

    async def infer(self, inputs: Any) -> AsyncIterator[dict[str, Any]]:
        while True:
            yield {"y": inputs["x"]}


def predict(server: Live, query: str = "streaming=true") -> Any:
    url = f"http://127.0.0.1:{server.server.rest_port}/grps/v1/infer/predict?{query}"
    return server.session.post(url, json=BODY, headers=JSON)


async def test_head_and_each_response_are_sent_at_once() -> None:
    model = Steps(3)
    async with live({"steps": model}) as server, predict(server) as response:
        assert (response.status, response.headers["Content-Type"]) == (200, "application/octet-stream")
        assert response.headers["Transfer-Encoding"] == "chunked"
        for value in range(3):
            model.go.release()
            chunk, ends = await response.content.readchunk()
            assert ends
            assert json.loads(chunk)["gtensors"]["tensors"][0]["flat_float32"] == [value]
        # Not by chunks: for aiohttp's client an end that comes by itself is an empty one.
        assert await response.content.read() == b""


async def test_no_short_answer_overtakes_a_long_one_that_is_encoded_on_a_thread() -> None:
    class Numbers(Model):
        inputs = Steps.inputs
        outputs = [TensorSpec("y", "INT64", [-1])]

        def infer(self, inputs: Any) -> Iterator[dict[str, Any]]:
            for at in range(COUNT):
                # The text of the long ones is short enough that the next one is asked for at once.
                yield {"y": np.full(1 if at % 2 else OFF_LOOP_BYTES // 8 + 1, at % 10)}

    async with live({"numbers": Numbers()}) as server:
        url = f"{server.url}/models/numbers/generate_stream"
        async with server.session.post(url, json={"x": [1.0]}) as response:
            *documents, rest = (await response.text()).split("\n\n")
    answers = [json.loads(document.removeprefix("data: "))["y"] for document in documents]
    first = [answer[0] if isinstance(answer, list) else answer for answer in answers]
    assert (first, rest) == ([at % 10 for at in range(COUNT)], "")


async def test_a_client_that_leaves_ends_the_model() -> None:
    model = Steps(10**9)
    async with live({"steps": model}) as server:
        async with predict(server) as response:
            model.go.release()
            await response.content.readchunk()
            response.close()
            # The model waits for us; it is closed at its next answer.
            model.go.release(100)
        assert await asyncio.to_thread(model.closed.wait, 30)


async def test_http_1_0_gets_the_documents_and_then_the_end() -> None:
    model = Steps(2)
    model.go.release(2)
    async with live({"steps": model}) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.server.rest_port)
        body = json.dumps(BODY).encode()
        writer.write(
            b"POST /grps/v1/infer/predict?streaming=true HTTP/1.0\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        head, _, documents = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.0 200 OK\r\n")
    assert b"chunked" not in head.lower()
    assert documents.count(b'"flat_float32"') == 2


async def test_a_stream_ends_when_the_server_stops() -> None:
    async with live({"endless": Endless()}, grace=0.1) as server:
        response = await predict(server)
        await response.content.readchunk()
        stopping = asyncio.ensure_future(server.server.stop())
        with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientConnectionError)):
            await response.read()
        await stopping
        response.close()


async def test_no_more_calls_are_open_than_may_be() -> None:
    model = Gated()
    infer = request("gated", np.float32(1).tobytes())
    async with live({"gated": model}, max_connections=1) as server:
        first = asyncio.ensure_future(server.infer(infer))
        await model.entered.wait()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.infer(infer)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.details() == "Concurrent RPC limit exceeded!"
        model.entered.clear()
        second = asyncio.ensure_future(predict(server, "return-ndarray=true"))
        await model.entered.wait()
        async with predict(server) as refused:
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
            assert (await refused.json())["status"]["msg"] == (
                "1 requests are in flight, the most that max_connections allows"
            )
        model.gate.set()
        await first
        async with await second as response:
            assert (await response.json())["ndarray"] == [1.0]
        async with predict(server, "return-ndarray=true") as response:
            assert response.status == 200
