"""REST clients while the server goes away: none is cut off without an answer."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from tests.scheduling.scripted_models import Scripted
from tests.transports.live import Live, live
from tests.waiting import until_found

pytestmark = pytest.mark.both_transports

BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [3]}]}


async def infer(server: Live) -> tuple[int, str, Any]:
    async with server.session.post(f"{server.url}/models/scripted/infer", json=BODY) as response:
        return response.status, response.headers.get("Connection", "keep-alive"), await response.json()


async def test_connections_are_closed_with_the_answers_of_a_draining_server() -> None:
    async with live({"scripted": Scripted()}) as server:
        status, connection, _ = await infer(server)
        assert (status, connection.lower()) == (200, "keep-alive")
        await server.server.drain(0)
        status, connection, _ = await infer(server)
        assert (status, connection) == (200, "close")


async def test_a_running_call_is_answered_and_its_connection_closed() -> None:
    model = Scripted(open_gate=False)
    async with live({"scripted": model}) as server:
        running = asyncio.ensure_future(infer(server))
        await model.until_at("infer")
        stopping = asyncio.ensure_future(server.server.stop())
        # New calls are refused before this one has ended.
        await until_found(lambda: is_taken(server), lambda taken: not taken)
        model.open_point("infer")
        status, connection, answer = await running
        assert (status, connection) == (200, "close")
        assert answer["outputs"][0]["data"] == [6.0]
        await stopping


async def is_taken(server: Live) -> bool:
    try:
        async with server.session.get(f"{server.url}/health/live") as response:
            return response.status == 200
    except aiohttp.ClientConnectionError:
        return False


@pytest.mark.parametrize("grace", [0, 0.1])
async def test_call_that_outlives_the_grace_period_gets_an_error(grace: float) -> None:
    model = Scripted(open_gate=False)
    async with live({"scripted": model}, grace=grace) as server:
        running = asyncio.ensure_future(infer(server))
        await model.until_at("infer")
        stopping = asyncio.ensure_future(server.server.stop())
        assert await running == (503, "close", {"error": "the server is shutting down"})
        model.open_point("infer")
        await stopping
    assert model.calls[0].cancelled
