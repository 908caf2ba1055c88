"""How many connections may be open, and for how long: over either transport."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from typing import cast

import grpc.aio
import pytest

from tests.served_models import Gated, serving
from tests.transports.h2_peers import SECONDS, Client, data, greeted, greeting, message, opened, served
from tests.transports.test_h2_rest import BODY, INFER, ONE, fields
from tests.waiting import until
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.limits import Limits
from triglot.transports.http2.protocol import H2Protocol

pytestmark = pytest.mark.both_transports

both = pytest.mark.parametrize("transport", ["aio", "h2"])


async def connected(port: int) -> Client:
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    await client.send(greeting())
    return client


async def is_served(client: Client) -> bool:
    """Whether it answers."""
    await client.send(frames.ping(b"12345678"))
    while (got := await client.frame()) is not None:
        if got.kind == frames.PING and got.flags & frames.ACK:
            return True
    return False


@pytest.mark.parametrize(
    "transport", ["h2", pytest.param("aio", marks=pytest.mark.newest)]
)  # grpcio before 1.69 has no such limit.
async def test_one_connection_too_many_is_closed(transport: str, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(transport, max_sockets=2) as (rows, port):
        first, second = await connected(port), await connected(port)
        for client in (first, second):
            assert await is_served(client)
            if transport == "h2":  # Its idle connections make room.
                rows.held.clear()
                await client.send(client.headers(1, "Held"), data(1, message(b"1")))
                await asyncio.wait_for(rows.held.wait(), SECONDS)
        with caplog.at_level(logging.WARNING):
            for _again in range(3):
                third = await connected(port)
                assert not await is_served(third)
                await third.close()
        if transport == "h2":
            assert caplog.text.count("2 connections are open, the most allowed") == 1
        assert await is_served(first)
        rows.gate.set()
        await first.close()
        async with asyncio.timeout(SECONDS):
            while True:
                fourth = await connected(port)
                if await is_served(fourth):
                    break
                await fourth.close()
        await fourth.close()
        await second.close()


async def test_the_idlest_connection_makes_room_for_another_without_a_failed_call() -> None:
    """One without a call first."""
    async with opened("h2", max_sockets=3) as (rows, port):
        used, unused, kept = await connected(port), await connected(port), await connected(port)
        await used.send(used.headers(1, "Echo"), data(1, message(b"1")))
        for client in (used, unused, kept):
            assert await is_served(client)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert await channel.unary_unary("/t.T/Echo")(b"2", timeout=SECONDS) == b"2"
            assert (await unused.next(frames.GOAWAY)).code is frames.ErrorCode.NO_ERROR
            # What it had sent already runs.
            await unused.send(unused.headers(1, "Echo"), data(1, message(b"3")))
            await until(lambda: rows.echoed == Counter((b"1", b"2", b"3")))
            for client in (used, kept):
                assert await is_served(client)
        for client in (used, unused, kept):
            await client.close()


async def test_connections_of_another_port_and_calls_are_no_connections() -> None:
    gated = Gated()
    async with serving({"gated": gated}, **ONE, max_sockets=2) as here:
        others = [await asyncio.open_connection("127.0.0.1", here.server.rest_port) for _ in range(2)]
        for reader, writer in others:
            writer.write(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await asyncio.wait_for(reader.readline(), SECONDS)).startswith(b"HTTP/1.1 200 ")
        first = await connected(here.server.grpc_port)
        for number in range(1, 11, 2):
            await first.send(
                first.raw_headers(number, fields("POST", INFER.replace("twice", "gated"))), data(number, BODY)
            )
        await until(lambda: here.leases() == {"gated": 5})
        second = await connected(here.server.grpc_port)
        await second.send(second.raw_headers(1, fields("POST", INFER.replace("twice", "gated"))), data(1, BODY))
        await until(lambda: here.leases() == {"gated": 6})
        third = await connected(here.server.grpc_port)
        assert not await is_served(third)
        gated.open_point("infer")
        for client in (first, second, third):
            await client.close()
        for _, writer in others:
            writer.close()


# --- REST over HTTP/1.1 ---

LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
http = pytest.mark.parametrize("transport", ["h1", "aiohttp"])
Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def answers(wire: Wire) -> bool:
    """Whether a request is answered, and not the connection closed."""
    reader, writer = wire
    with suppress(ConnectionError):
        writer.write(LIVE)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS)
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
        return head.startswith(b"HTTP/1.1 200 ")
    return False


@http
async def test_the_idlest_rest_connection_makes_room_for_another(transport: str) -> None:
    """One without a request first: a client that sends requests loses nothing to others that only connect."""
    async with serving({}, http_transport=transport, max_sockets=3) as here:
        used, unused, kept = [await asyncio.open_connection("127.0.0.1", here.server.rest_port) for _ in range(3)]
        assert await answers(used)
        await until(lambda: here.server._http is not None and here.server._http.count_connections() == 3)
        further = await asyncio.open_connection("127.0.0.1", here.server.rest_port)
        assert await answers(further)
        assert await asyncio.wait_for(unused[0].read(), SECONDS) == b""
        for wire in (used, kept):
            assert await answers(wire)
        for _, writer in (used, unused, kept, further):
            writer.close()


@http
async def test_a_rest_connection_with_a_call_makes_no_room(transport: str) -> None:
    gated = Gated()
    async with serving({"gated": gated}, http_transport=transport, max_sockets=1) as here:
        reader, writer = await asyncio.open_connection("127.0.0.1", here.server.rest_port)
        body = b'{"inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}]}'
        head = b"POST /v2/models/gated/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        await until(lambda: here.leases() == {"gated": 1})
        further, other = await asyncio.open_connection("127.0.0.1", here.server.rest_port)
        assert await asyncio.wait_for(further.read(), SECONDS) == b""
        gated.open_point("infer")
        assert (await asyncio.wait_for(reader.readline(), SECONDS)).startswith(b"HTTP/1.1 200 ")
        for stream in (writer, other):
            stream.close()


@http
async def test_an_idle_rest_connection_is_kept_as_long_as_the_option_says(transport: str) -> None:
    async with serving({}, http_transport=transport, rest_keepalive_time=0.3) as here:
        wire = await asyncio.open_connection("127.0.0.1", here.server.rest_port)
        for _ in range(3):
            assert await answers(wire)
        assert await asyncio.wait_for(wire[0].read(), SECONDS) == b""
        wire[1].close()


@both
async def test_an_old_connection_ends_without_a_failed_call(transport: str) -> None:
    async with (
        opened(transport, max_connection_age=0.2) as (rows, port),
        # With the retries of every client: a call that meets GOAWAY on its way was not taken, and is sent again.
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        old = await connected(port)
        echo = channel.unary_unary("/t.T/Echo")
        sent = Counter[bytes]()
        goaway = asyncio.create_task(old.next(frames.GOAWAY))
        # Until one connection has become old, and as long again.
        for _ in range(2):
            while not goaway.done():
                texts = [b"%d" % number for number in range(len(sent), len(sent) + 8)]
                sent.update(texts)
                assert await asyncio.gather(*(echo(text, timeout=SECONDS) for text in texts)) == texts
            assert (await goaway).code is frames.ErrorCode.NO_ERROR
            await old.close()
            old = await connected(port)
            goaway = asyncio.create_task(old.next(frames.GOAWAY))
        assert (await goaway).code is frames.ErrorCode.NO_ERROR
        await old.close()
        assert rows.echoed == sent


async def test_an_old_connection_takes_calls_until_the_last_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triglot.transports.http2.protocol.LAST_STREAM_SECONDS", SECONDS)
    async with opened("h2", max_connection_age=0.2) as (rows, port):
        client = await connected(port)
        await client.send(client.headers(1, "Held"), data(1, message(b"1")))
        first = await client.next(frames.GOAWAY)
        assert int.from_bytes(first.payload[:4]) == frames.LARGEST_WINDOW
        for number in (3, 5, 7):
            await client.send(client.headers(number, "Echo"), data(number, message(b"%d" % number)))
        rows.gate.set()
        named, answered = list[int](), dict[int, str]()
        while (got := await client.frame()) is not None:
            if got.kind == frames.PING:
                # A stream too late, and the connection's end is known.
                await client.send(frames.ping(got.payload, ack=True), client.headers(9, "Echo"))
                await client.send(data(9, message(b"9")))
            elif got.kind == frames.HEADERS and got.flags & frames.END_STREAM:
                answered[got.stream] = client.fields(got.payload)["grpc-status"]
            elif got.kind == frames.HEADERS:
                client.fields(got.payload)  # The next ones are read with what it leaves in the table.
            elif got.kind == frames.GOAWAY:
                named.append(int.from_bytes(got.payload[:4]))
        assert answered == dict.fromkeys((1, 3, 5, 7), "0")
        assert set(named) == {7}  # Not more at the end: who sent the ninth is to know that it did not run.
        assert rows.echoed == Counter((b"3", b"5", b"7"))
        await client.close()


@both
async def test_calls_may_outlive_their_connections_age(transport: str) -> None:
    async with (
        opened(transport, max_connection_age=0.2) as (rows, port),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        held = channel.unary_unary("/t.T/Held")(b"1", timeout=SECONDS)
        await asyncio.wait_for(rows.held.wait(), SECONDS)
        client = await connected(port)
        await client.next(frames.GOAWAY)  # As old as the other one, or younger.
        await client.close()
        rows.gate.set()
        assert await held == b"1"


@both
async def test_but_no_longer_than_the_grace(transport: str) -> None:
    async with (
        opened(transport, max_connection_age=0.2, max_connection_age_grace=0.2) as (rows, port),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.enable_retries", 0)]) as channel,
    ):
        while not rows.held.is_set():  # The connection may be too old before the call is there.
            held = channel.unary_unary("/t.T/Held")(b"1", timeout=SECONDS)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await held
            assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        await asyncio.wait_for(rows.cancelled.wait(), SECONDS)


async def test_ages_are_spread() -> None:
    """Those who connect together do not all retry together."""
    limits = Limits(max_age=1000.0)
    async with served(limits) as here:
        clients = [await greeted(here) for _ in range(20)]
        for client in clients:
            assert await is_served(client)
        ages = [cast("H2Protocol", connection)._timers._age for connection in here.server.connections]
        assert len(set(ages)) == len(clients)
        assert 900 <= min(ages) < max(ages) <= 1100
        for client in clients:
            await client.close()


@both
async def test_silent_client_is_pinged(transport: str) -> None:
    async with opened(transport, keepalive_time=1.0, keepalive_timeout=2.0) as (_, port):
        client = await connected(port)
        first = await client.next(frames.PING)
        await client.send(frames.ping(first.payload, ack=True))
        second = await client.next(frames.PING)
        assert not second.flags & frames.ACK
        assert {got.kind for got in await client.rest()} <= {frames.GOAWAY}  # It is not answered.
        await client.close()
