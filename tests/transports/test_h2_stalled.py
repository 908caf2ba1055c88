"""Clients that make no room for the answers of a stream: its model continues with other calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from tests.served_models import Served, serving
from tests.transports.h2_peers import Client, data, message
from tests.waiting import SECONDS, until
from triglot import Model, TensorSpec
from triglot.pb.kserve import inference_pb2 as pb
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.limits import Limits
from triglot.transports.http2.core.sending import Sender
from triglot.transports.http2.server import H2Server

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
REST = "/v2/models/endless/generate_stream"
STALL = 0.4
ANSWER = 100_000
"""Elements: more than a window takes."""


class Endless(Model):
    """Has one instance, which answers as long as it is read."""

    inputs = [TensorSpec("x", "FP32", [-1])]
    outputs = [TensorSpec("y", "FP32", [-1])]
    instances = 1

    def __init__(self) -> None:
        self.running = 0
        self.end_count = 0

    def infer(self, inputs: Any) -> Iterator[dict[str, Any]]:
        self.running += 1
        try:
            while True:
                yield {"y": np.zeros(ANSWER, np.float32)}
        finally:
            self.running -= 1
            self.end_count += 1


def request() -> bytes:
    request = pb.ModelInferRequest(model_name="endless")
    request.inputs.add(name="x", datatype="FP32", shape=[1])
    request.raw_input_contents.append(bytes(4))
    return request.SerializeToString()


@asynccontextmanager
async def stalling(stall: float = STALL) -> AsyncIterator[tuple[Served, Endless]]:
    model = Endless()
    async with serving({"endless": model}, grpc_transport="h2") as here:
        h2 = here.server._grpc
        assert isinstance(h2, H2Server)
        h2.limits = Limits(stall=stall)  # It is no option.
        yield here, model


@asynccontextmanager
async def client_of(here: Served, **settings: int) -> AsyncIterator[Client]:
    client = Client(*await asyncio.open_connection("127.0.0.1", here.server.grpc_port))
    await client.greet(**settings)
    try:
        yield client
    finally:
        await client.close()


async def begin(client: Client, kind: str) -> None:
    if kind == "grpc":
        await client.send(client.headers(1, STREAM), data(1, message(request()), end=False))
        return
    body = b'{"x": [1]}'
    fields = [(":method", "POST"), (":scheme", "http"), (":path", REST), (":authority", "localhost")]
    fields += [("content-type", "application/json"), ("content-length", str(len(body)))]
    await client.send(client.raw_headers(1, fields), data(1, body))


async def pinging(client: Client) -> None:
    """Show that the client is there, and grant a byte now and then."""
    while True:
        await client.send(frames.ping(bytes(8)), frames.window_update(1, 1))
        await asyncio.sleep(STALL / 20)


@pytest.mark.parametrize("kind", ["grpc", "rest"])
async def test_a_stream_whose_window_stays_closed_ends(kind: str) -> None:
    async with stalling() as (here, model), client_of(here, initial_window_size=0) as client:
        await begin(client, kind)
        await until(lambda: model.running)
        pings = asyncio.create_task(pinging(client))
        reset = await client.next(frames.RST_STREAM)
        assert (reset.stream, reset.code) == (1, ErrorCode.ENHANCE_YOUR_CALM)
        await until(lambda: not model.running)
        pings.cancel()
        await asyncio.wait([pings])
        # Only the stream ended, and the instance is free for another one.
        await client.send(client.headers(3, STREAM), data(3, message(request()), end=False))
        await until(lambda: model.running)


async def test_a_connection_whose_window_stays_closed() -> None:
    async with stalling() as (here, model), client_of(here, initial_window_size=frames.LARGEST_WINDOW) as client:
        await begin(client, "grpc")
        reset = await client.next(frames.RST_STREAM)
        assert (reset.stream, reset.code) == (1, ErrorCode.ENHANCE_YOUR_CALM)
        await until(lambda: not model.running)


async def test_a_slow_reader_keeps_its_stream() -> None:
    async with stalling() as (here, model), client_of(here, initial_window_size=0) as client:
        await begin(client, "grpc")
        await until(lambda: model.running)
        loop = asyncio.get_running_loop()
        end = loop.time() + 4 * STALL
        room = Limits().min_read
        while loop.time() < end:
            await client.send(frames.window_update(1, room), frames.window_update(0, room))
            got = await asyncio.wait_for(client.next(frames.DATA, frames.RST_STREAM), SECONDS)
            assert got.kind == frames.DATA
            await asyncio.sleep(STALL / 20)  # It is slow.
        assert model.running


# --- the rule itself ---

LEAST = 100


def waiting(size: int) -> Sender:
    """A stream of whose answer so many bytes wait for its window."""
    sender = Sender(lambda _: None, lambda _: None)
    sender.set_initial_window(0)
    sender.begin(1)
    sender.data(1, [bytes(size)])
    return sender


def test_nothing_left_for_so_long() -> None:
    sender = waiting(1000)
    assert sender.stalled(0.0, 10.0, LEAST) == []
    assert sender.stalled(9.9, 10.0, LEAST) == []
    assert sender.stalled(10.0, 10.0, LEAST) == [1]


def test_less_than_the_least_is_nothing() -> None:
    sender = waiting(1000)
    for second in range(10):
        assert sender.stalled(float(second), 10.0, LEAST) == []
        sender.window_opened(1, 1)
    assert sender.stalled(10.0, 10.0, LEAST) == [1]


def test_the_least_each_time_is_enough() -> None:
    sender = waiting(10_000)
    for second in range(50):
        assert sender.stalled(float(second), 10.0, LEAST) == []
        sender.window_opened(1, LEAST // 5)


def test_a_model_that_has_nothing_to_send_is_not_its_client() -> None:
    sender = waiting(50)
    assert sender.stalled(0.0, 10.0, LEAST) == []
    sender.window_opened(1, 50)
    assert sender.stalled(9.0, 10.0, LEAST) == []
    sender.data(1, [bytes(10)])
    assert sender.stalled(18.0, 10.0, LEAST) == []
    assert sender.stalled(27.0, 10.0, LEAST) == []
    assert sender.stalled(28.0, 10.0, LEAST) == [1]


def test_the_socket_is_no_stream() -> None:
    sender = waiting(1000)
    assert sender.stalled(0.0, 10.0, LEAST) == []
    sender.pause()
    assert sender.stalled(20.0, 10.0, LEAST) == []
