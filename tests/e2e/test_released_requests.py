"""What a request held is let go of, however it ended."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from busy_servers import SOON, until_released
from live import Live, live
from scripted_models import Inputs, Plain

from process import SECONDS
from protocol_clients.every_protocol import GRPS, MODEL, grps_body, grps_message, kserve_grpc
from triglot import Call, InvalidArgument
from triglot.pb.grps import grps_pb2
from waiting import ever_later, until

pytestmark = pytest.mark.both_transports

LARGE = 1 << 20


class LoadLock:
    """Runs a request when it is its turn, and keeps nothing of it; the input says how it ends."""

    FAILS = 7

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def infer(self, inputs: Inputs, call: Call) -> Any:
        self.entered.release()
        assert self.gate.acquire(timeout=SECONDS)
        if inputs["x"][0] == self.FAILS:
            raise InvalidArgument("told to fail")
        return {"y": inputs["x"] * 2}

    async def until_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=SECONDS)


def held() -> int:
    """Calls that are in memory."""
    gc.collect()
    return sum(type(tracked) is Call for tracked in gc.get_objects())


async def ends_well(server: Live, model: LoadLock) -> None:
    model.gate.release()
    await kserve_grpc(server, 1)
    await model.until_entered()


async def fails(server: Live, model: LoadLock) -> None:
    model.gate.release()
    await kserve_grpc(server, LoadLock.FAILS)
    await model.until_entered()


async def is_late(server: Live, model: LoadLock) -> None:
    for later in ever_later(SOON):
        await kserve_grpc(server, 1, timeout=later)
        if model.entered.acquire(blocking=False):
            break
    model.gate.release()


async def leaves(server: Live, model: LoadLock) -> None:
    task = asyncio.ensure_future(kserve_grpc(server, 1))
    await model.until_entered()
    task.cancel()
    await asyncio.wait([task])
    model.gate.release()


async def behind_another(server: Live, model: LoadLock, end: Callable[[], Awaitable[None]]) -> None:
    running = asyncio.ensure_future(kserve_grpc(server, 1))
    await model.until_entered()
    await end()
    model.gate.release()
    await running


async def is_late_in_the_queue(server: Live, model: LoadLock) -> None:
    async def late() -> None:
        await kserve_grpc(server, 1, timeout=0.05)

    await behind_another(server, model, late)


async def leaves_the_queue(server: Live, model: LoadLock) -> None:
    async def left() -> None:
        task = asyncio.ensure_future(kserve_grpc(server, 1))
        await until(lambda: server.leases() == 2)
        task.cancel()
        await until(lambda: server.leases() == 1)

    await behind_another(server, model, left)


ENDS = [ends_well, fails, is_late, leaves, is_late_in_the_queue, leaves_the_queue]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
async def test_a_request_that(end: Callable[[Live, LoadLock], Awaitable[None]]) -> None:
    model = LoadLock()
    before = held()
    async with live({MODEL: Plain(model.infer)}) as server:
        for _ in range(10):
            await end(server, model)
            await until(lambda: server.leases() == 0)
        # grpc.aio and the instance's thread keep the last one until the next.
        await until(lambda: held() <= before + 3)


# --- readers that do not read ---


class Flood:
    """Yield large answers without end."""

    def __init__(self) -> None:
        self.begun = False
        self.closed = threading.Event()

    def model(self, on_loop: bool) -> Plain:
        return Plain(self.on_loop if on_loop else self.on_thread)

    def on_thread(self, inputs: Inputs) -> Iterator[dict[str, Any]]:
        self.begun = True
        try:
            while True:
                yield {"y": np.zeros(LARGE, np.float32)}
        finally:
            self.closed.set()

    async def on_loop(self, inputs: Inputs) -> AsyncIterator[dict[str, Any]]:
        self.begun = True
        try:
            while True:
                yield {"y": np.zeros(LARGE, np.float32)}
        finally:
            self.closed.set()


ON_LOOP = pytest.mark.parametrize("on_loop", [False, True])


@ON_LOOP
async def test_unread_stream_over_http(on_loop: bool) -> None:
    for later in ever_later(SOON):
        flood = Flood()
        async with live({MODEL: flood.model(on_loop)}, default_timeout=later) as server:
            url = server.url.removesuffix("/v2") + "/grps/v1/infer/predict?streaming=true"
            async with server.session.post(url, json=grps_body(1)) as response:
                await until_released(server)
                if flood.begun:
                    assert response.status == 200
                    assert await asyncio.to_thread(flood.closed.wait, SECONDS)
                    break


@ON_LOOP
async def test_unread_stream_over_grpc(on_loop: bool) -> None:
    for later in ever_later(SOON):
        flood = Flood()
        async with live({MODEL: flood.model(on_loop)}, default_timeout=later) as server:
            call = server.channel.unary_stream(
                GRPS + "PredictStreaming", response_deserializer=grps_pb2.GrpsMessage.FromString
            )(grps_message(1).SerializeToString())
            answer = grps_pb2.GrpsMessage()
            with suppress(grpc.aio.AioRpcError):
                answer = await call.read()
            await until_released(server)
            assert not flood.begun or await asyncio.to_thread(flood.closed.wait, SECONDS)
            with suppress(grpc.aio.AioRpcError):
                while (following := await call.read()) is not grpc.aio.EOF:
                    answer = following
            # The last word is a message where one could still be sent, and otherwise the status.
            late = await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "default_timeout" in (await call.details() if late else answer.status.msg)
        if flood.begun:
            break
