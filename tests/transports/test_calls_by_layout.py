"""Calls whose layout is known are answered, and counted, as calls are that are parsed as a whole."""

from __future__ import annotations

import asyncio
import gc
import re
import weakref
from collections import defaultdict
from typing import Any

import grpc.aio
import numpy as np
import pytest

import triglot
from tests.served_models import SECONDS
from tests.transports.h2_peers import Client as Peer
from tests.transports.h2_peers import data, message
from tests.transports.layout_calls import (
    COLUMNS,
    KINDS,
    MODELS,
    PROTOCOLS,
    STREAM,
    Arrays,
    Batched,
    Client,
    Mixed,
    alike,
    array,
    kserve,
    served,
)
from tests.waiting import until
from triglot.config.options import GRPC_TRANSPORTS
from triglot.core.operation import EVERYTHING
from triglot.pb.kserve import inference_pb2 as pb
from triglot.transports.http2.core import frames


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("model", MODELS)
async def test_every_outcome_is_reported_and_counted_alike(model: str, protocol: str) -> None:
    async def calls(client: Client) -> list[Any]:
        return [await client.ask(protocol, model, array(kind)) for kind in KINDS]

    await alike(lambda: {model: MODELS[model]()}, calls)


@pytest.mark.parametrize("protocol", ["kserve", "tfserving"])
async def test_the_outputs_that_are_asked_for(protocol: str) -> None:
    async def calls(client: Client) -> list[Any]:
        wanted = [("y",), ("z",), ("z", "y"), (), ("nothing",), ("y", "y")]
        return [await client.ask(protocol, "mixed", array(0, 2), *names) for names in wanted for _ in range(3)]

    await alike(lambda: {"mixed": Mixed()}, calls)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_error_of_a_request_is_reported_each_time(protocol: str) -> None:
    async def calls(client: Client) -> list[Any]:
        wrong = [np.zeros((1, COLUMNS + 1), np.float32), np.zeros((5, COLUMNS), np.float32)]
        asked = [("batched", request) for request in wrong] + [("nobody", array(0))]
        return [await client.ask(protocol, model, x) for model, x in asked for _ in range(3)]

    await alike(lambda: {"batched": Batched()}, calls)


async def test_version_is_added_and_removed() -> None:
    async def calls(client: Client) -> list[Any]:
        manager, found = client.served.server.manager, []
        for _ in range(3):
            found += [await client.ask(protocol, "mixed", array(0)) for protocol in PROTOCOLS for _ in range(3)]
            manager.unload_model("mixed")
            found += [await client.ask(protocol, "mixed", array(0)) for protocol in PROTOCOLS]
            await until(lambda: not client.served.server.dataplane.loaded())
            found += [await client.ask(protocol, "mixed", array(0)) for protocol in PROTOCOLS]
            await manager.load_model("mixed")
        return found

    explicit = {"model_control_mode": "explicit", "load_model": "*"}
    await alike(lambda: {"mixed": Mixed()}, calls, **explicit)


async def test_a_version_that_is_unloaded_is_freed() -> None:
    async with served("h2", {"mixed": Mixed()}, model_control_mode="explicit", load_model="*") as client:
        for _ in range(3):
            assert (await client.ask("kserve", "mixed", array(0))).code == "OK"
        servable = weakref.ref(client.served.server.dataplane.servable(EVERYTHING, "mixed"))
        client.served.server.manager.unload_model("mixed")

        def is_freed() -> bool:
            gc.collect()
            return servable() is None

        await until(is_freed)


@pytest.mark.parametrize("option", ["trace", "cache"])
async def test_traces_and_the_response_cache(option: str) -> None:
    class Cached(Mixed):
        response_cache = option == "cache"

    async def calls(client: Client) -> list[Any]:
        if option == "trace":
            client.served.server.dataplane.tracer.on = True
        return [await client.ask("kserve", "mixed", array(0)) for _ in range(4)]

    await alike(lambda: {"mixed": Cached()}, calls, response_cache_bytes=2**20)


class Large(triglot.Model):
    """Many elements for few; with `reused` it writes each answer over its last one."""

    inputs, outputs = Mixed.inputs, (triglot.TensorSpec("y", "FP32", [-1]),)
    elements = 2**18

    def __init__(self, *, reused: bool) -> None:
        self.reused = reused
        self.kept = {"y": np.zeros(self.elements, np.float32)}
        self.count = 0

    def infer(self, inputs: Arrays) -> Any:
        answer = self.kept if self.reused else {"y": np.zeros(self.elements, np.float32)}
        value = inputs["x"][0, 0]
        answer["y"][:] = value
        self.count += 1
        return answer if value else {"y": np.zeros(1, np.float32)}


@pytest.mark.parametrize("reused", [True, False])
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_large_answer_is_not_what_the_model_writes_while_it_waits(protocol: str, reused: bool) -> None:
    path, encode = PROTOCOLS[protocol]
    model = Large(reused=reused)
    async with served("h2", {"large": model}) as here:
        client = Peer(*await asyncio.open_connection("127.0.0.1", here.served.server.grpc_port))
        await client.greet()
        answers: dict[int, bytes] = defaultdict(bytes)

        async def read(stream: int, size: int) -> None:
            while len(answers[stream]) < size:
                got = await client.next(frames.DATA)
                answers[got.stream] += got.payload

        for stream, value in ((1, 0), (3, 0), (5, 1), (7, 2)):
            body = message(encode("large", array(value)))
            await client.send(client.headers(stream, path), data(stream, body))
            if stream < 7:
                await read(stream, 1)  # Of the large one as much as the window takes.
        await until(lambda: model.count == 4)
        await client.send(frames.window_update(5, 2**24), frames.window_update(0, 2**24))
        await read(5, 4 * model.elements)
        await client.close()
    assert np.float32(1).tobytes() * model.elements in answers[5]


class Stream:
    """One call of ModelStreamInfer."""

    def __init__(self, client: Client) -> None:
        self._call = client.channel.stream_stream(
            STREAM, response_deserializer=pb.ModelStreamInferResponse.FromString
        )(timeout=SECONDS)

    async def ask(self, *requests: bytes) -> list[str]:
        """What answers them, all sent before the first answer is read; without ids."""
        for request in requests:
            await self._call.write(request)
        found = []
        for _ in requests:
            answer = await self._call.read()
            answer.infer_response.id = ""
            found.append(re.sub("error [0-9a-f]{12}", "error", str(answer)))
        return found

    async def end(self) -> str:
        await self._call.done_writing()
        assert await self._call.read() is grpc.aio.EOF
        return str((await self._call.code()).name)


def named(request: bytes, request_id: str) -> bytes:
    message = pb.ModelInferRequest.FromString(request)
    message.id = request_id
    return message.SerializeToString()


@pytest.mark.parametrize("transport", GRPC_TRANSPORTS)
@pytest.mark.parametrize("model", ["mixed", "one"])
async def test_requests_of_a_stream(transport: str, model: str) -> None:
    requests = [kserve(model, array(kind)) for kind in KINDS]
    async with served(transport, {model: MODELS[model]()}) as client:
        ordinary, quick = Stream(client), Stream(client)
        expected = await ordinary.ask(*[named(request, str(at)) for at, request in enumerate(requests)])
        counts = client.call_counts()["calls"]
        found = await quick.ask(*requests)
        assert [await ordinary.end(), await quick.end()] == ["OK", "OK"]
        twice = client.call_counts()["calls"]
        await client.served.is_idle()
    without = [text.replace("[request id: <id_unknown>] ", "") for text in found]
    assert without == [re.sub(r"\[request id: \d+\] ", "", text) for text in expected]
    assert {key: 2 * count[0] for key, count in counts.items()} == {key: count[0] for key, count in twice.items()}
