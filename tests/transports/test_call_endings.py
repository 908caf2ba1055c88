"""Calls that are cancelled, late, too many, or running when the server stops, over gRPC and REST."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import grpc.aio
import numpy as np
import pytest

import triglot
from tests.scheduling.scripted_models import Scripted
from tests.served_models import SECONDS
from tests.transports.call_ends import seen
from tests.transports.layout_calls import (
    PROTOCOLS,
    STREAM,
    Arrays,
    Client,
    Held,
    Mixed,
    alike,
    array,
    holding,
    kserve,
    plain,
    served,
)
from tests.transports.live import Live, live, request
from tests.waiting import ever_later, until
from triglot.config.options import GRPC_TRANSPORTS
from triglot.core.call import Call
from triglot.core.operation import EVERYTHING


@pytest.mark.parametrize("transport", GRPC_TRANSPORTS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_client_leaves(transport: str, protocol: str) -> None:
    async with holding(transport, protocol) as (client, model, call):
        running, waiting = model.calls[-1], client.call(protocol, "held", array(0))
        await until(lambda: client.served.server.dataplane.queue_depth() == 1)
        waiting.cancel()
        await until(lambda: client.served.server.dataplane.queue_depth() == 0)
        assert not running.cancelled
        call.cancel()
        await until(lambda: running.cancelled)
        await client.served.is_idle()
        model.open_point("infer")
        assert (await client.ask(protocol, "held", array(0))).code == "OK"
        assert len(model.calls) == 5
        statistics = client.served.server.dataplane.servable(EVERYTHING, "held").statistics
        assert (statistics.success.count, statistics.failures["CANCELED"]) == (4, 2)
        await until(lambda: statistics.execution_count == 5)


@pytest.mark.parametrize("transport", GRPC_TRANSPORTS)
@pytest.mark.parametrize("wait", ["running", "waiting"])
async def test_a_deadline_passes(transport: str, wait: str) -> None:
    async with holding(transport, "kserve") as (client, model, call):

        def has_begun() -> bool:
            return len(model.calls) == 5 if wait == "running" else queue_depth() == 1

        assert 0 < (model.calls[-1].remaining or 0) <= SECONDS + 1
        queue_depth = client.served.server.dataplane.queue_depth
        if wait == "running":
            call.cancel()
            await client.served.is_idle()
            model.open_point("infer")
            await until(
                lambda: client.served.server.dataplane.servable(EVERYTHING, "held").statistics.execution_count == 4
            )
            model.close_point("infer")
        for later in ever_later(0.5):
            late = client.call("kserve", "held", array(0), timeout=later)
            end = asyncio.ensure_future(seen(late, with_details=False))
            await until(lambda: has_begun() or end.done())  # noqa: B023 - it is not called later
            begun_in_time = has_begun()
            assert (await end).code == "DEADLINE_EXCEEDED"
            await until(lambda: client.served.leases()["held"] == (wait == "waiting"))
            if begun_in_time:
                break
        model.open_point("infer")
        assert (await client.ask("kserve", "held", array(0))).code == "OK"
        assert len(model.calls) == (6 if wait == "running" else 5)


class GivesUp(triglot.Model):
    """Waits for its deadline, and has the loop wait, too."""

    inputs, outputs = Mixed.inputs, Mixed.outputs

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    def infer(self, inputs: Arrays, call: Call) -> Any:
        x = inputs["x"]
        if x[0, 0]:
            given_up = threading.Event()
            self.loop.call_soon_threadsafe(given_up.wait, SECONDS)
            while not call.cancelled:
                time.sleep(0.001)  # A call has nothing that a thread could wait for.
            given_up.set()
            raise triglot.Cancelled("given up")
        return plain(None, x, x[:, 0])


@pytest.mark.parametrize("transport", GRPC_TRANSPORTS)
async def test_a_model_sees_the_deadline_first(transport: str) -> None:
    async with served(transport, {"gives_up": GivesUp()}, default_timeout=0.5) as client:
        for protocol in PROTOCOLS:
            for value in (0, 0, 0, 1):
                end = await seen(client.call(protocol, "gives_up", array(value), timeout=None))
            assert "default_timeout of 0.5 seconds passed" in repr(end), (protocol, end)


async def test_what_is_too_much_is_refused() -> None:
    async def calls(client: Client) -> list[Any]:
        model: Any = client.served.server.dataplane.servable(EVERYTHING, "held").model
        found = [await client.ask(protocol, "held", array(0)) for protocol in PROTOCOLS for _ in range(2)]
        model.forget_arrivals("infer")
        model.close_point("infer")
        running = client.call("kserve", "held", array(0))
        await model.until_at("infer")
        waiting = client.call("kserve", "held", array(0))
        await until(lambda: client.served.server.dataplane.queue_depth() == 1)
        found += [await client.ask(protocol, "held", array(0)) for protocol in PROTOCOLS for _ in range(2)]
        model.open_point("infer")
        return [*found, await seen(running), await seen(waiting)]

    await alike(lambda: {"held": Held()}, calls, max_queue_size=1)
    await alike(lambda: {"held": Held()}, calls, max_total_queue_size=2)


@pytest.mark.parametrize("transport", GRPC_TRANSPORTS)
async def test_a_stop_waits_for_it_and_then_says_that_the_server_stops(transport: str) -> None:
    async with holding(transport, "kserve", grace=0.1) as (client, model, call):
        await client.served.server.stop()
        end = await seen(call, with_details=False)
        assert end.code == "UNAVAILABLE"
        assert model.calls[-1].cancelled


@pytest.mark.parametrize("transport", GRPC_TRANSPORTS)
async def test_a_stream_that_is_left_lets_go_of_its_requests(transport: str) -> None:
    model = Held()
    async with served(transport, {"held": model}) as client:
        try:
            call = client.channel.stream_stream(STREAM)(timeout=SECONDS)
            for _ in range(3):
                await call.write(kserve("held", array(0)))
                await call.read()
            model.forget_arrivals("infer")
            model.close_point("infer")
            for _ in range(3):
                await call.write(kserve("held", array(0)))
            await model.until_at("infer")
            await until(lambda: client.served.server.dataplane.queue_depth() == 2)
            call.cancel()
            await client.served.is_idle()
            assert model.calls[-1].cancelled
            assert client.served.server.dataplane.queue_depth() == 0
        finally:
            model.open_point("infer")
        assert (await client.ask("kserve", "held", array(0))).code == "OK"


# --- REST ---


async def post(server: Live, value: float) -> float:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [value]}]}
    async with server.session.post(f"{server.url}/models/scripted/infer", json=body) as response:
        assert response.status == 200
        return float((await response.json())["outputs"][0]["data"][0])


@pytest.mark.parametrize("transport", ["h1", "aiohttp"])
async def test_rest_clients_leave(transport: str) -> None:
    model = Scripted(open_gate=False)
    async with live({"scripted": model}, http_transport=transport) as server:
        running = asyncio.ensure_future(post(server, 0))
        await model.until_at("infer")
        waiting = asyncio.ensure_future(post(server, 1))
        await until(lambda: server.leases() == 2)
        waiting.cancel()
        await until(lambda: server.leases() == 1)
        assert not model.calls[0].cancelled
        running.cancel()
        await until(lambda: model.calls[0].cancelled)
        model.open_point("infer")
        assert await post(server, 2) == 4
        assert model.started == [0, 2]
        await until(lambda: server.leases() == 0)


@pytest.mark.parametrize("transport", ["h1", "aiohttp"])
async def test_full_queue_says_when_to_retry(transport: str) -> None:
    model = Scripted(open_gate=False)
    grpc_transport = "h2" if transport == "h1" else "aio"
    options = {"http_transport": transport, "grpc_transport": grpc_transport, "max_queue_size": 1}
    async with live({"scripted": model}, **options) as server:
        calls = [asyncio.ensure_future(post(server, 0))]
        await model.until_at("infer")
        calls.append(asyncio.ensure_future(post(server, 1)))
        await until(lambda: server.leases() == 2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.infer(request("scripted", np.float32(2).tobytes(), request_id="r1"))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(caught.value.details()).startswith("[request id: r1] Exceeds maximum queue size")
        assert ("grpc-retry-pushback-ms", "1000") in list(caught.value.trailing_metadata() or ())
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [3]}]}
        async with server.session.post(f"{server.url}/models/scripted/infer", json=body) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
            assert "Exceeds maximum queue size" in (await response.json())["error"]
        # Questions are answered while every instance is busy and the queue is full.
        async with server.session.get(f"{server.url}/health/ready") as response:
            assert response.status == 200
        model.open_point("infer")
        assert await asyncio.gather(*calls) == [0, 2]
        assert await post(server, 3) == 6
