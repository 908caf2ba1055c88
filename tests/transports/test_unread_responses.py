"""Clients that do not read their answers: queued data is bounded, and over grpc.aio they are disconnected.

What else such clients get over our own HTTP/2 is in test_h2_hostile and test_h2_stalled.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from tests.scheduling.scripted_models import Counting
from tests.transports.h2_peers import (
    SECONDS,
    Client,
    Frame,
    data,
    frame,
    greeting,
    message,
    opened,
    request_fields,
)
from tests.transports.live import METHOD, live, request
from tests.waiting import until
from triglot.transports.aio.server import GrpcServer
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.limits import Limits

SIZE = 15_000
HELD = 2 * SIZE
"""What an answer of so many bytes is counted as over grpc.aio."""
over_both = pytest.mark.parametrize("transport", ["aio", "h2"])


@asynccontextmanager
async def client_of(port: int, window: int = 0) -> AsyncIterator[Client]:
    """One that opens no window for its answers, or a small one."""
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    await client.send(greeting(initial_window_size=window))
    # Without it grpc's core takes a thousand calls.
    await client.send(frame(frames.SETTINGS, frames.ACK, 0))
    try:
        yield client
    finally:
        await client.close()


async def ask(client: Client, stream: int, name: str, payload: bytes) -> None:
    """A call with one message; grpc's core takes none without an authority."""
    fields = [(":authority", "here"), *request_fields(name)]
    await client.send(client.raw_headers(stream, fields), data(stream, message(payload)))


async def answer(client: Client) -> Frame:
    """The next HEADERS frame; its fields are needed to read those of the following ones."""
    got = await client.next(frames.HEADERS)
    client.fields(got.payload)
    return got


async def answered(client: Client, stream: int) -> None:
    """Wait for the end of a call."""
    while True:
        got = await answer(client)
        if got.stream == stream and got.flags & frames.END_STREAM:
            return


@asynccontextmanager
async def echo(port: int) -> AsyncIterator[Any]:
    """Of a client that reads."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield channel.unary_unary("/t.T/Echo")


@pytest.mark.both_event_loops
@over_both
async def test_answers_that_no_window_takes_are_bounded(transport: str) -> None:
    async with (
        opened(transport, Limits(max_unsent=HELD, fair_unsent=0)) as (rows, port),
        client_of(port) as client,
        echo(port) as healthy,
    ):
        for stream in (1, 3, 5):
            await ask(client, stream, "Echo", bytes(SIZE))
            if stream < 5:
                await answer(client)
        refused = await client.status(5)
        assert refused["grpc-status"] == "8"
        assert refused["grpc-retry-pushback-ms"] == "1000"
        unread = 2 * SIZE if transport == "aio" else 2 * len(message(bytes(SIZE)))
        assert refused["grpc-message"] == f"the client has not read {unread} bytes of responses on this connection"
        assert sum(rows.echoed.values()) == 2  # The call was not begun.
        assert await healthy(b"1", timeout=SECONDS) == b"1"


async def test_answers_that_came_together_are_bounded() -> None:
    async with opened("aio", Limits(max_unsent=HELD, fair_unsent=0)) as (rows, port), client_of(port) as client:
        for stream in range(1, 11, 2):
            await ask(client, stream, "Held", bytes(SIZE))
        await asyncio.wait_for(rows.held.wait(), SECONDS)
        rows.gate.set()
        refused = [await client.next(frames.HEADERS) for _ in range(5)]
        assert sum(bool(got.flags & frames.END_STREAM) for got in refused) == 3


@pytest.mark.both_event_loops
@over_both
async def test_answers_that_no_window_takes_are_bounded_in_all(transport: str) -> None:
    held = HELD if transport == "aio" else SIZE
    limits = Limits(max_unsent=100 * held, max_unsent_in_all=5 * held // 2, fair_unsent=held // 2)
    async with (
        opened(transport, limits) as (_, port),
        client_of(port) as first,
        client_of(port) as second,
        client_of(port) as third,
        echo(port) as healthy,
    ):
        clients = (first, second, third)
        for client in clients:
            await ask(client, 1, "Echo", bytes(SIZE))
            await answer(client)
        for client in clients:
            await ask(client, 3, "Echo", b"x")
            refused = await client.status(3)
            assert refused["grpc-status"] == "8"
            assert "clients, including this one, have not read" in refused["grpc-message"]
        # A client that has read everything is served.
        assert await healthy(b"1", timeout=SECONDS) == b"1"
        # What one of them takes is room for the others.
        await first.send(frames.window_update(1, 1_000_000))
        await answered(first, 1)
        for stream in itertools.count(5, 2):  # The server hears of it a little later.
            await ask(second, stream, "Echo", b"x")
            if not (await answer(second)).flags & frames.END_STREAM:
                break


async def test_a_client_that_takes_nothing_is_let_go_and_others_stay() -> None:
    async with opened("aio", Limits(stall=0.5)) as (_, port), client_of(port) as client, echo(port) as healthy:
        assert await healthy(b"1", timeout=SECONDS) == b"1"
        await ask(client, 1, "Echo", bytes(SIZE))
        await answer(client)
        assert not {got.kind for got in await client.rest()} & {frames.HEADERS, frames.DATA}
        assert await healthy(b"2", timeout=SECONDS) == b"2"


async def test_a_client_that_takes_its_answers_slowly_stays() -> None:
    limits = Limits(stall=1.0)
    async with opened("aio", limits) as (_, port), client_of(port, window=1000) as client:
        await ask(client, 1, "Echo", bytes(SIZE))
        got = 0
        while got < SIZE:
            got += len((await client.next(frames.DATA)).payload)
            await client.send(frames.window_update(1, 1000))
        assert (await client.status(1))["grpc-status"] == "0"


async def test_a_stream_that_is_not_read_ends_and_the_connection_stays_while_others_are() -> None:
    async with opened("aio", Limits(stall=0.5)) as (rows, port), client_of(port) as client:
        await ask(client, 1, "Count", bytes(SIZE))
        number = 1
        while not rows.cancelled.is_set():
            number += 2
            await ask(client, number, "Echo", b"x")
            await client.send(frames.window_update(number, 1000))
            await answered(client, number)
        assert rows.call_count < 10
        # What the core had taken is followed by the status.
        await client.send(frames.window_update(1, 10_000_000), frames.window_update(0, 10_000_000))
        status = await client.status(1)
        assert status["grpc-status"] == "4"
        assert "the client read nothing of a response of 15000 bytes" in status["grpc-message"]


async def test_a_decoupled_model_whose_client_does_not_read_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triglot.transports.aio.server.DEFAULTS", Limits(stall=0.5))  # It is no option.
    model = Counting()
    async with (
        live({"endless": model}, grpc_transport="aio") as here,
        client_of(here.server.grpc_port) as client,
    ):
        grpc_server = here.server._grpc
        assert isinstance(grpc_server, GrpcServer)
        await ask(client, 1, METHOD + "ModelStreamInfer", request("endless", bytes(4)))
        await client.next(frames.HEADERS)
        assert here.leases() == 1
        # Longer than the limit, with a client that answers PINGs and moves nothing.
        await until(lambda: model.closed.is_set() and not here.leases())
        # Its connection goes, too, and nothing is left of it.
        await client.rest()
        await until(lambda: not grpc_server._unsent.bytes)
