"""The caller's deadline and disconnect reach the queue and the running model, over gRPC and REST."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
import pytest
from live import Live, live, request
from scripted_models import Scripted

from waiting import ever_later, until

pytestmark = pytest.mark.both_transports

VALUE = struct.Struct("<f")


async def grpc_call(server: Live, value: float) -> float:
    reply: bytes = await server.infer(request("scripted", VALUE.pack(value)))
    return float(VALUE.unpack(reply[-4:])[0])


async def rest_call(server: Live, value: float) -> float:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [value]}]}
    async with server.session.post(f"{server.url}/models/scripted/infer", json=body) as response:
        answer = await response.json()
        return float(answer["outputs"][0]["data"][0])


BOTH_PROTOCOLS = pytest.mark.parametrize("call", [grpc_call, rest_call])
CallFunction = Callable[[Live, float], Awaitable[float]]


def waiting(server: Live) -> int:
    """Calls beyond the one that runs."""
    return server.leases() - 1


@BOTH_PROTOCOLS
async def test_a_caller_that_leaves_the_queue_is_never_run(call: CallFunction) -> None:
    model = Scripted(open_gate=False)
    async with live({"scripted": model}) as server:
        running = asyncio.ensure_future(call(server, 0))
        await model.until_at("infer")
        leaving = asyncio.ensure_future(call(server, 1))
        await until(lambda: waiting(server) == 1)
        leaving.cancel()
        await until(lambda: waiting(server) == 0)
        model.open_point("infer")
        assert await running == 0
        assert await call(server, 2) == 4
        assert model.started == [0, 2]
        await until(lambda: server.leases() == 0)


@BOTH_PROTOCOLS
async def test_a_running_model_sees_that_its_caller_left(call: CallFunction) -> None:
    model = Scripted(open_gate=False)
    async with live({"scripted": model}) as server:
        leaving = asyncio.ensure_future(call(server, 1))
        await model.until_at("infer")
        leaving.cancel()
        await until(lambda: model.calls[0].cancelled)
        model.open_point("infer")
        assert await call(server, 2) == 4


async def test_a_deadline_reaches_the_queue_and_the_model() -> None:
    model = Scripted(open_gate=False)
    async with live({"scripted": model}) as server:
        running = asyncio.ensure_future(server.infer(request("scripted", VALUE.pack(0)), timeout=30))
        await model.until_at("infer")
        assert 0 < (model.calls[0].remaining or 0) <= 31
        for later in ever_later(0.05):
            late = asyncio.ensure_future(server.infer(request("scripted", VALUE.pack(1)), timeout=later))
            await until(lambda: waiting(server) == 1 or late.done())  # noqa: B023 - it is not called later
            waited = waiting(server) == 1
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await late
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await until(lambda: waiting(server) == 0)
            if waited:
                break
        model.open_point("infer")
        await running
        assert await grpc_call(server, 2) == 4
        assert model.started == [0, 2]


async def test_full_queue_says_when_to_retry() -> None:
    model = Scripted(open_gate=False)
    async with live({"scripted": model}, max_queue_size=1) as server:
        calls = [asyncio.ensure_future(grpc_call(server, 0))]
        await model.until_at("infer")
        calls.append(asyncio.ensure_future(grpc_call(server, 1)))
        await until(lambda: waiting(server) == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.infer(request("scripted", VALUE.pack(2), request_id="r1"))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(caught.value.details()).startswith("[request id: r1] Exceeds maximum queue size")
        assert ("grpc-retry-pushback-ms", "1000") in list(caught.value.trailing_metadata() or ())
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [3]}]}
        async with server.session.post(f"{server.url}/models/scripted/infer", json=body) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            assert "Exceeds maximum queue size" in (await response.json())["error"]
        # Questions are answered while every instance is busy and the queue is full.
        async with server.session.get(f"{server.url}/health/ready") as response:
            assert response.status == 200
        model.open_point("infer")
        assert await asyncio.gather(*calls) == [0, 2]
        assert await rest_call(server, 3) == 6
