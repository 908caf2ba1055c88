"""Callers that leave while they send, and streams whose deadlines pass, whether they are read or not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from tests.e2e.busy_servers import SOON, ask, until_released
from tests.process import SECONDS
from tests.protocol_clients.every_protocol import (
    GRPS,
    MODEL,
    STREAMS,
    Interface,
    grps_body,
    grps_message,
    kserve_rest,
)
from tests.scheduling.scripted_models import Inputs, Plain, Scripted
from tests.transports.live import Live, live
from tests.waiting import ever_later
from triglot.core.errors import Code
from triglot.pb.grps import grps_pb2

pytestmark = pytest.mark.both_transports

LARGE = 1 << 20
ON_LOOP = pytest.mark.parametrize("on_loop", [False, True])


async def test_a_client_that_leaves_while_it_sends() -> None:
    async with live({MODEL: Scripted()}, max_connections=1) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.server.rest_port)
        writer.write(b"POST /v2/models/scripted/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        await until_code(server, Code.UNAVAILABLE)  # It is the one call that may be open.
        writer.close()
        await until_code(server, Code.OK)


async def until_code(server: Live, code: Code) -> None:
    async with asyncio.timeout(SECONDS):
        while (await kserve_rest(server, 1)).code is not code:
            pass


# --- streams ---


class Steps:
    """A generator's body: one answer for each time that the test lets it continue; knows when it is closed."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(1)
        self.yields = 0
        self.closed = threading.Event()

    def on_thread(self, inputs: Inputs) -> Iterator[dict[str, Any]]:
        try:
            while self.go.acquire(timeout=SECONDS):
                self.yields += 1
                yield {"y": inputs["x"]}
        finally:
            self.closed.set()

    async def on_loop(self, inputs: Inputs) -> AsyncIterator[dict[str, Any]]:
        try:
            while await asyncio.to_thread(self.go.acquire, timeout=SECONDS):
                self.yields += 1
                yield {"y": inputs["x"]}
        finally:
            self.closed.set()


@ON_LOOP
@pytest.mark.parametrize("interface", STREAMS.values(), ids=STREAMS)
async def test_a_streaming_model_is_closed_at_its_next_answer(interface: Interface, on_loop: bool) -> None:
    for later in ever_later(SOON):
        steps = Steps()
        model = Plain(steps.on_loop if on_loop else steps.on_thread)
        async with live({MODEL: model}, default_timeout=later) as server:
            outcome = await ask(server, interface)
            assert outcome.code is Code.DEADLINE_EXCEEDED
            assert "default_timeout" in outcome.text
            await until_released(server)
            if not steps.yields:
                continue
            assert "passed while the model was streaming" in outcome.text
            steps.go.release(2)
            assert await asyncio.to_thread(steps.closed.wait, SECONDS)
            assert steps.yields <= 2
            break


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
