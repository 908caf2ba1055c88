"""Requests a second and at a time, per client, as clients meet them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.access.access_clients import GuardedServer, guarded_server, infer_request
from tests.access.access_files import client
from tests.process import SECONDS, write_model
from tests.waiting import until

FAST, SLOW = {"x-api-key": "fast"}, {"x-api-key": "slow"}
BOTH = (
    client("fast", ["fast"], ["infer", "health"]),
    client("slow", ["slow", "slow too"], ["infer", "health"], rate=0.01),
)


@pytest.fixture(params=["h2", "aio"])
def transports(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"grpc_transport": request.param, "http_transport": {"h2": "h1", "aio": "aiohttp"}[request.param]}


def pushback_of(error: grpc.aio.AioRpcError) -> str:
    """When to retry, in milliseconds."""
    metadata = error.trailing_metadata() or ()
    return str(next(value for key, value in metadata if key == "grpc-retry-pushback-ms"))


async def test_requests_a_second(tmp_path: Path, transports: dict[str, Any]) -> None:
    async with guarded_server(tmp_path, *BOTH, **transports) as here:
        assert await here.error(SLOW) is None
        error = await here.error({"x-api-key": "slow too"})
        assert error is not None
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details() == "too many requests of client 'slow': at most 0.01 a second"
        pushback = pushback_of(error)
        assert 90_000 < int(pushback) <= 100_000
        async with here.session.get(f"{here.url}/v2/health/live", headers=SLOW) as answer:
            assert answer.status == 429
            assert 90 < int(answer.headers["retry-after"]) <= 100
            assert "at most 0.01 a second" in (await answer.json())["error"]
        assert [await here.error(FAST) for _ in range(20)] == [None] * 20


async def test_messages_of_a_stream_are_requests(tmp_path: Path, transports: dict[str, Any]) -> None:
    async with guarded_server(tmp_path, client("slow", ["slow"], ["infer"], rate=0.02), **transports) as here:
        stream = here.stream_infer(metadata=list(SLOW.items()))
        await stream.write(infer_request())
        answer = await asyncio.wait_for(stream.read(), SECONDS)
        assert answer.error_message.endswith("too many requests of client 'slow': at most 0.02 a second")
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


WAITS = """
import asyncio
import triglot

class Waits(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [1, 2])]
    outputs = [triglot.TensorSpec("y", "FP32", [1, 2])]
    instances = 8

    async def infer(self, inputs):
        (self.folder / "waits").touch()
        while not (self.folder / "go").exists():
            await asyncio.sleep(0.005)
        return {"y": inputs["x"]}

    def load(self, folder):
        self.folder = folder
"""


async def test_calls_at_a_time(tmp_path: Path, transports: dict[str, Any]) -> None:
    write_model(tmp_path / "models" / "waits", WAITS)
    rules = client("slow", ["slow"], ["infer"], concurrent=2), client("fast", ["fast"], ["infer"])
    async with guarded_server(tmp_path, *rules, models=tmp_path / "models", **transports) as here:
        request = infer_request()
        request.model_name = "waits"
        metadata = list(SLOW.items())
        first = here.infer(request, metadata=metadata)
        second = here.infer(request, metadata=metadata)
        await until((tmp_path / "models" / "waits" / "waits").exists)
        error = await here.error(SLOW)
        for _ in range(100):
            if error is not None:
                break
            error = await here.error(SLOW)  # The second one may still be on its way.
        assert error is not None
        assert error.details() == "too many open calls of client 'slow': at most 2"
        assert pushback_of(error) == "1000"
        assert (await here.status(SLOW))[0] == 429
        assert await here.error(FAST) is None
        second.cancel()
        (tmp_path / "models" / "waits" / "go").touch()
        await first
        await until_free(here)


async def until_free(here: GuardedServer) -> None:
    """Until the calls that were open have ended for the server, too; nothing of them stays counted."""
    error = await here.error(SLOW)
    while error is not None:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = await here.error(SLOW)
    assert [await here.error(SLOW) for _ in range(5)] == [None] * 5
