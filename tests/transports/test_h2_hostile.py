"""Clients that want to do harm: their connection ends with the right error, and others continue unharmed."""

from __future__ import annotations

import asyncio
import itertools

import grpc.aio
import hpack
import pytest
from h2_attacks import ATTACKS, hpack_bomb
from h2_peers import SECONDS, data, greeted, message, served

from triglot.transports.http2.core import frames
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.limits import Limits
from waiting import until

pytestmark = pytest.mark.both_event_loops


@pytest.mark.parametrize("name", ATTACKS)
async def test_only_the_hostile_connection_ends(name: str, caplog: pytest.LogCaptureFixture) -> None:
    code, made = ATTACKS[name]
    limits = Limits(connection_window=1_000_000, stream_window=2_000_000, linger=SECONDS)
    async with served(limits) as here, here.channel() as channel:
        finished = asyncio.Event()
        others = asyncio.create_task(calling(channel, finished))
        hostile = await here.client()
        await hostile.greet()
        sending = asyncio.create_task(hostile.send(made(hostile)))
        last = [got for got in await hostile.rest() if got.kind == frames.GOAWAY]
        await asyncio.wait_for(sending, SECONDS)
        assert [got.code for got in last] == [code]
        finished.set()
        assert await asyncio.wait_for(others, SECONDS) > 1
        await hostile.close()
        assert here.server.open_calls == 0
        assert here.server.request_bytes.held == 0
        if closing := [connection.closed for connection in here.server.connections if connection.connection.over]:
            await asyncio.wait(closing, timeout=SECONDS)
        assert here.server.unsent == 0
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def calling(channel: grpc.aio.Channel, finished: asyncio.Event) -> int:
    """Calls one after the other until then, and one more; how many were answered, each of them."""
    echo = channel.unary_unary("/t.T/Echo")
    for number in itertools.count(1):
        over = finished.is_set()
        body = str(number).encode()
        assert await echo(body, timeout=SECONDS) == body
        if over:
            return number
    raise AssertionError


@pytest.mark.parametrize("first_bytes", [b"", b"PRI * HT"], ids=["nothing", "half a preface"])
async def test_who_does_not_greet_is_let_go(first_bytes: bytes) -> None:
    async with served() as here, here.channel() as channel:
        assert await channel.unary_unary("/t.T/Echo")(b"0", timeout=SECONDS) == b"0"
        here.server.limits = Limits(settings_timeout=0.2)  # For those who come from now on.
        finished = asyncio.Event()
        others = asyncio.create_task(calling(channel, finished))
        client = await here.client()
        await client.send(first_bytes)
        assert [got.code for got in await client.rest() if got.kind == frames.GOAWAY] == [
            ErrorCode.SETTINGS_TIMEOUT
        ]
        await client.close()
        finished.set()
        assert await asyncio.wait_for(others, SECONDS) > 1


async def test_who_speaks_no_http2_is_let_go() -> None:
    async with served() as here:
        client = await here.client()
        await client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert [got.code for got in await client.rest() if got.kind == frames.GOAWAY] == [ErrorCode.PROTOCOL_ERROR]
        await client.close()


async def test_who_answers_no_ping_is_let_go_and_others_stay() -> None:
    async with served(Limits(idle=0.2, ping_timeout=3)) as here, here.channel() as channel:
        echo = channel.unary_unary("/t.T/Echo")
        assert await echo(b"1", timeout=SECONDS) == b"1"
        (kept,) = here.server.connections
        silent = await here.client()
        await silent.greet()
        assert [got.kind for got in await silent.rest()][-1] == frames.PING
        await silent.close()
        assert await echo(b"2", timeout=SECONDS) == b"2"
        if others := [connection.closed for connection in here.server.connections - {kept}]:
            await asyncio.wait(others, timeout=SECONDS)
        assert here.server.connections == {kept}


async def test_who_reads_nothing_holds_the_stream_and_is_let_go() -> None:
    async with served(Limits(stall=0.5)) as here, here.channel() as channel:
        slow = await here.client()
        await slow.greet(initial_window_size=frames.LARGEST_WINDOW)
        await slow.next(frames.SETTINGS)
        (connection,) = here.server.connections
        await slow.send(frames.window_update(0, frames.LARGEST_WINDOW - 65_535))
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]  # It is a socket's.
        await slow.send(slow.headers(1, "Count"), data(1, message(bytes(1_000_000))))
        await asyncio.wait_for(here.rows.cancelled.wait(), SECONDS)
        assert here.rows.call_count < 100
        assert await channel.unary_unary("/t.T/Echo")(b"1", timeout=SECONDS) == b"1"
        await asyncio.wait_for(connection.closed, SECONDS)
        assert connection not in here.server.connections
        slow.writer.transport.abort()


async def test_who_asks_on_and_reads_nothing_is_let_go() -> None:
    async with served(Limits(max_unread=100_000, stall=0.5)) as here, here.channel() as channel:
        client = await here.client()
        await client.greet()
        await client.next(frames.SETTINGS)
        (connection,) = here.server.connections
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # It is a socket's.
        stream = 1
        while not connection.closed.done():
            await client.send(*(client.headers(number, "/no") for number in range(stream, stream + 2000, 2)))
            stream += 2000
            assert stream < 2_000_000
            await asyncio.sleep(0)
        assert await channel.unary_unary("/t.T/Echo")(b"1", timeout=SECONDS) == b"1"
        client.writer.transport.abort()


async def test_answers_that_no_window_takes_are_bounded() -> None:
    async with served(Limits(max_unsent=1_000_000)) as here, here.channel() as channel:
        client = await here.client()
        await client.greet(initial_window_size=0)
        body = message(bytes(400_000))
        for stream in range(1, 9, 2):
            await client.send(client.headers(stream, "Echo"), data(stream, body))
            if stream < 7:
                await client.next(frames.HEADERS)
        refused = await client.status(7)
        assert refused["grpc-status"] == "8"
        assert "the client has not read" in refused["grpc-message"]
        assert await channel.unary_unary("/t.T/Echo")(b"1", timeout=SECONDS) == b"1"
        await client.close()


async def test_responses_without_a_window_are_abandoned() -> None:
    async with served(Limits(stall=0.5)) as here, here.channel() as channel:
        client = await here.client()
        await client.greet(initial_window_size=0)
        body = message(bytes(400_000))
        for stream in range(1, 7, 2):
            await client.send(client.headers(stream, "Echo"), data(stream, body))
        assert await channel.unary_unary("/t.T/Echo")(b"1", timeout=SECONDS) == b"1"
        resets = [await client.next(frames.RST_STREAM) for _ in range(3)]
        assert [got.stream for got in resets] == [1, 3, 5]
        assert {got.code for got in resets} == {ErrorCode.ENHANCE_YOUR_CALM}
        assert here.server.unsent == 0
        await client.close()
        assert await channel.unary_unary("/t.T/Echo")(b"2", timeout=SECONDS) == b"2"


async def test_answers_that_no_window_takes_are_bounded_in_all() -> None:
    limits = Limits(max_unsent=10_000_000, max_unsent_in_all=1_000_000, fair_unsent=300_000)
    async with served(limits) as here, here.channel() as channel:
        body = message(bytes(400_000))
        clients = [await here.client() for _ in range(3)]
        for client in clients:
            await client.greet(initial_window_size=0)
            await client.send(client.headers(1, "Echo"), data(1, body))
            await client.next(frames.HEADERS)
        assert here.server.unsent >= 1_200_000
        for client in clients:
            await client.send(client.headers(3, "Echo"), data(3, message(b"")))
            refused = await client.status(3)
            assert refused["grpc-status"] == "8"
            assert "clients, including this one, have not read" in refused["grpc-message"]
        # Who has read everything is served.
        assert await channel.unary_unary("/t.T/Echo")(b"1", timeout=SECONDS) == b"1"
        # What one of them takes is room for the others.
        await clients[0].send(frames.window_update(1, 1_000_000), frames.window_update(0, 1_000_000))
        while not (await clients[0].next(frames.HEADERS, frames.DATA)).flags & frames.END_STREAM:
            pass
        await clients[1].send(clients[1].headers(5, "Echo"), data(5, message(b"")))
        assert not (await clients[1].next(frames.HEADERS)).flags & frames.END_STREAM
        for client in clients:
            await client.close()


async def test_requests_on_their_way_are_bounded() -> None:
    async with served(max_total_queue_bytes=100_000, max_queue_bytes=0) as here, here.channel() as channel:
        client = await here.client()
        await client.greet(initial_window_size=1_000_000)
        await client.send(frames.window_update(0, 1_000_000))
        for stream in (1, 3):
            await client.send(
                client.headers(stream, "Echo"), data(stream, message(bytes(70_000), size=80_000), end=False)
            )
        refused = await client.status(3)
        assert refused["grpc-status"] == "8"
        # A small one has room.
        assert await channel.unary_unary("/t.T/Echo")(b"1", timeout=SECONDS) == b"1"
        await client.send(data(1, bytes(10_000)))
        assert (await client.status(1))["grpc-status"] == "0"
        assert here.server.request_bytes.held == 0
        await client.close()


async def test_a_call_that_is_reset_together_with_its_request_does_not_run() -> None:
    async with served() as here:
        client = await greeted(here)
        numbers = range(1, 601, 2)
        await client.send(
            *(
                client.headers(at, "Echo") + data(at, message(b"1")) + frames.rst_stream(at, ErrorCode.CANCEL)
                for at in numbers
            ),
            client.headers(601, "Echo") + data(601, message(b"2")),
        )
        assert (await client.status(601))["grpc-status"] == "0"
        assert here.rows.echoed[b"2"] == 1
        # But for one whose frames came in two pieces.
        assert here.rows.echoed[b"1"] <= 2
        await client.close()


async def test_handlers_that_run_on_after_a_reset_are_bounded() -> None:
    """Streams are refused until the handlers have ended, and the connection stays."""
    async with served(Limits(max_reset_running=10)) as here, here.channel() as channel:
        client = await greeted(here)
        for at in range(1, 61, 2):
            await client.send(client.headers(at, "Stubborn") + data(at, message(b"1")))
            await client.wait_until_processed()
            await client.send(frames.rst_stream(at, ErrorCode.CANCEL))
            await client.wait_until_processed()
        assert here.rows.stubborn_calls == 10
        await client.send(client.headers(61, "Echo") + data(61, message(b"2")))
        refused = await client.next(frames.RST_STREAM)
        assert (refused.stream, refused.code) == (61, ErrorCode.REFUSED_STREAM)
        assert await channel.unary_unary("/t.T/Echo")(b"3", timeout=SECONDS) == b"3"
        here.rows.gate.set()
        await until(lambda: not here.rows.stubborn_calls)
        await client.send(client.headers(63, "Echo") + data(63, message(b"4")))
        assert (await client.next(frames.HEADERS)).stream == 63
        await client.close()


async def test_a_bomb_ends_its_call_only() -> None:
    async with served() as here:
        client = await greeted(here)
        await client.send(hpack_bomb())
        assert (await client.status(1))["grpc-status"] == "8"
        await client.send(client.headers(3, "Echo"), data(3, message(b"1")))
        assert (await client.status(3))["grpc-status"] == "0"
        await client.close()


def test_the_bomb_is_one() -> None:
    bomb = hpack_bomb()[frames.HEAD_BYTES :]
    assert sum(map(len, hpack.Decoder(10**9).decode(bomb))) > 0
    assert sum(len(value) for _, value in hpack.Decoder(10**9).decode(bomb)) > 1000 * len(bomb)
