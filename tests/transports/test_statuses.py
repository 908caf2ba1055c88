"""gRPC calls that end with a status: the garbage collector has nothing to do, and clients may try again."""

from __future__ import annotations

import gc
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import grpc.aio
import pytest
from live import METHOD, Live, live, request
from scripted_models import Inputs, Plain

from triglot import Call, FailedPrecondition, Unavailable
from waiting import until

pytestmark = pytest.mark.both_transports

TIMES = 10
LAST_ONES = 2
"""grpc.aio's own objects, and a thread, keep the last call until the next one comes."""


def fail(inputs: Inputs) -> dict[str, object]:
    raise FailedPrecondition("no such word")


async def unary(server: Live) -> None:
    await server.infer(request("fails", b"\0\0\0\0"))


async def server_stream(server: Live) -> None:
    async for _ in server.channel.unary_stream("/grpc.health.v1.Health/ConnectionTimers")(b"\xff"):
        pass


async def bidi_stream(server: Live) -> None:
    async def send() -> AsyncIterator[bytes]:
        yield request("fails", b"\0\0\0\0")

    async for _ in server.stream_infer(send(), metadata=(("triton_grpc_error", "true"),)):
        pass


def calls() -> int:
    """Those in memory, whatever keeps them."""
    return sum(isinstance(tracked, Call) for tracked in gc.get_objects())


@pytest.mark.parametrize("end", [unary, server_stream, bidi_stream], ids=lambda end: end.__name__)
async def test_a_status_leaves_nothing_to_the_garbage_collector(end: Callable[[Live], Awaitable[None]]) -> None:
    async with live({"fails": Plain(fail)}) as server:
        with pytest.raises(grpc.aio.AioRpcError):
            await end(server)
        gc.collect()
        gc.disable()
        try:
            before = calls()
            for _ in range(TIMES):
                with pytest.raises(grpc.aio.AioRpcError):
                    await end(server)
            await until(lambda: calls() <= before + LAST_ONES)
        finally:
            gc.enable()


async def test_a_client_may_try_again_by_itself() -> None:
    """gRPC's own retries are only for a call that ended before anything of an answer came."""
    asked = 0

    def infer(inputs: Inputs) -> dict[str, object]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise Unavailable("not yet", retry_after=0.01)
        return {"y": inputs["x"]}

    policy = {
        "maxAttempts": 3,
        "initialBackoff": "0.01s",
        "maxBackoff": "0.01s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    options = [("grpc.service_config", json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": policy}]}))]
    async with (
        live({"later": Plain(infer)}) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.server.grpc_port}", options=options) as channel,
    ):
        await channel.unary_unary(METHOD + "ModelInfer")(request("later", b"\0\0\0\0"))
    assert asked == 2
