"""Clients that want to do harm: their connection ends with the right error, and others go on unharmed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import hpack
import pytest
from h2_peers import SECONDS, Client, data, frame, message, served

from triglot.transports.h2 import frames
from triglot.transports.h2.frames import ErrorCode
from triglot.transports.h2.limits import Limits

MANY = 6000
Attack = Callable[[Client], bytes]
ATTACKS: dict[str, tuple[ErrorCode, Attack]] = {}


def attack(code: ErrorCode) -> Callable[[Attack], Attack]:
    def add(made: Attack) -> Attack:
        ATTACKS[made.__name__] = code, made
        return made

    return add


calm = attack(ErrorCode.ENHANCE_YOUR_CALM)
fields = frames.END_HEADERS | frames.END_STREAM


@calm
def rapid_reset(client: Client) -> bytes:
    return b"".join(
        client.headers(stream, "Held") + frames.rst_stream(stream, ErrorCode.CANCEL)
        for stream in range(1, MANY, 2)
    )


@calm
def reset_by_the_server(client: Client) -> bytes:
    return b"".join(
        client.headers(stream, "Held") + frames.window_update(stream, 0) for stream in range(1, MANY, 2)
    )


@calm
def more_streams_than_may_be(client: Client) -> bytes:
    return b"".join(client.headers(stream, "Held") for stream in range(1, 2 * MANY, 2))


@calm
def empty_continuations(client: Client) -> bytes:
    return client.headers(1, "Echo", flags=0) + frame(frames.CONTINUATION, 0, 1) * 1000


@calm
def large_continuations(client: Client) -> bytes:
    return client.headers(1, "Echo", flags=0) + frame(frames.CONTINUATION, 0, 1, bytes(16_000)) * 10


@calm
def hpack_bomb(client: Client) -> bytes:
    large = b"\x40\x01a\x7f\xa1\x1e" + b"b" * 4000 + b"\xbe" * 10_000
    return frame(frames.HEADERS, fields, 1, large)


@calm
def many_fields(client: Client) -> bytes:
    block = b"\x00\x01a\x01b" * 3000
    return frame(frames.HEADERS, fields, 1, block)


@calm
def settings_flood(client: Client) -> bytes:
    return frames.settings({}) * MANY


@calm
def settings_at_once(client: Client) -> bytes:
    return frame(frames.SETTINGS, 0, 0, b"\x00\x04\x00\x00\x00\x01" * 1000)


@calm
def acknowledgements(client: Client) -> bytes:
    return frame(frames.SETTINGS, frames.ACK, 0) * MANY


@calm
def ping_flood(client: Client) -> bytes:
    return frames.ping(bytes(8)) * MANY


@calm
def pong_flood(client: Client) -> bytes:
    return frames.ping(bytes(8), ack=True) * MANY


@calm
def priority_flood(client: Client) -> bytes:
    return frame(frames.PRIORITY, 0, 3, bytes(5)) * MANY


@calm
def window_update_flood(client: Client) -> bytes:
    return frames.window_update(0, 1) * MANY


@calm
def unknown_flood(client: Client) -> bytes:
    return frame(0xEE, 0, 0) * MANY


@calm
def goaway_flood(client: Client) -> bytes:
    return frames.goaway(0, ErrorCode.NO_ERROR) * MANY


@calm
def empty_data(client: Client) -> bytes:
    return client.headers(1, "Echo") + data(1, b"", end=False) * MANY


@calm
def padding_only(client: Client) -> bytes:
    return client.headers(1, "Echo") + frame(frames.DATA, frames.PADDED, 1, b"\xff" + bytes(255)) * MANY


@calm
def data_after_the_end(client: Client) -> bytes:
    return b"".join(
        client.headers(stream, "Held") + data(stream, message(b"")) + data(stream, b"x")
        for stream in range(1, MANY, 2)
    )


@calm
def late_resets(client: Client) -> bytes:
    return client.headers(1, "Echo") + data(1, message(b"")) + frames.rst_stream(1, ErrorCode.CANCEL) * MANY


@attack(ErrorCode.FLOW_CONTROL_ERROR)
def window_overflow(client: Client) -> bytes:
    return frames.window_update(0, frames.LARGEST_WINDOW)


@attack(ErrorCode.FLOW_CONTROL_ERROR)
def more_than_the_window(client: Client) -> bytes:
    return client.headers(1, "Both") + data(1, bytes(900_000), end=False) * 20


@attack(ErrorCode.FRAME_SIZE_ERROR)
def large_frame(client: Client) -> bytes:
    return frames.head(2**24 - 1, frames.DATA, 0, 1)


@calm
def large_frame_of_another_kind(client: Client) -> bytes:
    return frames.head(500_000, 0xEE, 0, 1)


@attack(ErrorCode.COMPRESSION_ERROR)
def wrong_headers(client: Client) -> bytes:
    return frame(frames.HEADERS, fields, 1, b"\xff\xff\xff\xff")


@attack(ErrorCode.COMPRESSION_ERROR)
def endless_number(client: Client) -> bytes:
    return frame(frames.HEADERS, fields, 1, b"\xff" * 60_000)


@pytest.mark.parametrize("name", ATTACKS)
async def test_only_the_hostile_connection_ends(name: str) -> None:
    code, made = ATTACKS[name]
    limits = Limits(connection_window=1_000_000, stream_window=2_000_000)
    async with served(limits) as here, here.channel() as channel:
        echo = channel.unary_unary("/t.T/Echo")
        assert await echo(b"before", timeout=SECONDS) == b"before"
        hostile = await here.client()
        await hostile.greet()
        sending = asyncio.create_task(hostile.send(made(hostile)))
        assert await echo(b"meanwhile", timeout=SECONDS) == b"meanwhile"
        last = [got for got in await hostile.rest() if got.kind == frames.GOAWAY]
        await asyncio.wait_for(sending, SECONDS)
        assert [got.code for got in last] == [code]
        assert await echo(b"after", timeout=SECONDS) == b"after"
        await hostile.close()
        assert here.server.open_calls == 0
        assert here.server.held_bytes == 0


@pytest.mark.parametrize("said", [b"", b"PRI * HT"], ids=["nothing", "half a preface"])
async def test_who_does_not_greet_is_let_go(said: bytes) -> None:
    async with served(Limits(greeting=0.2)) as here:
        client = await here.client()
        await client.send(said)
        assert [got.code for got in await client.rest() if got.kind == frames.GOAWAY] == [
            ErrorCode.SETTINGS_TIMEOUT
        ]
        await client.close()


async def test_who_speaks_no_http2_is_let_go() -> None:
    async with served() as here:
        client = await here.client()
        await client.send(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        assert [got.code for got in await client.rest() if got.kind == frames.GOAWAY] == [ErrorCode.PROTOCOL_ERROR]
        await client.close()


async def test_who_answers_no_ping_is_let_go_and_others_stay() -> None:
    async with served(Limits(idle=0.2, answer_to_ping=0.4)) as here, here.channel() as channel:
        echo = channel.unary_unary("/t.T/Echo")
        assert await echo(b"1", timeout=SECONDS) == b"1"
        (kept,) = here.server.connections
        silent = await here.client()
        await silent.greet()
        assert [got.kind for got in await silent.rest()][-1] == frames.PING
        await silent.close()
        assert await echo(b"2", timeout=SECONDS) == b"2"
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
        assert here.rows.counted < 100
        assert await channel.unary_unary("/t.T/Echo")(b"1", timeout=SECONDS) == b"1"
        await asyncio.wait_for(connection.lost, SECONDS)
        assert connection not in here.server.connections
        slow.writer.transport.abort()


async def test_who_asks_on_and_reads_nothing_is_let_go() -> None:
    async with served(Limits(max_unread=100_000)) as here, here.channel() as channel:
        client = await here.client()
        await client.greet()
        await client.next(frames.SETTINGS)
        (connection,) = here.server.connections
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # It is a socket's.
        stream = 1
        while not connection.lost.done():
            await client.send(*(client.headers(number, "/no") for number in range(stream, stream + 2000, 2)))
            stream += 2000
            assert stream < 2_000_000
            await asyncio.sleep(0)
        assert await channel.unary_unary("/t.T/Echo")(b"1", timeout=SECONDS) == b"1"
        client.writer.transport.abort()


async def test_answers_that_no_window_takes_are_bounded() -> None:
    async with served(Limits(max_unsent=1_000_000, stall=0.5)) as here:
        client = await here.client()
        await client.greet(initial_window_size=0)
        body = message(bytes(400_000))
        for stream in range(1, 9, 2):
            await client.send(client.headers(stream, "Echo"), data(stream, body))
            if stream < 7:
                await client.next(frames.HEADERS)
        refused = await client.status(7)
        assert refused["grpc-status"] == "8"
        assert "that its client has not read" in refused["grpc-message"]
        # It takes nothing of the first ones either.
        last = [got.code for got in await client.rest() if got.kind == frames.GOAWAY]
        assert last == [ErrorCode.ENHANCE_YOUR_CALM]
        await client.close()


async def test_requests_on_their_way_are_bounded() -> None:
    async with served(max_total_queue_bytes=100_000, max_queue_bytes=0) as here:
        client = await here.client()
        await client.greet(initial_window_size=1_000_000)
        await client.send(frames.window_update(0, 1_000_000))
        for stream in (1, 3):
            await client.send(
                client.headers(stream, "Echo"), data(stream, message(bytes(70_000), size=80_000), end=False)
            )
        refused = await client.status(3)
        assert refused["grpc-status"] == "8"
        await client.send(data(1, bytes(10_000)))
        assert (await client.status(1))["grpc-status"] == "0"
        assert here.server.held_bytes == 0
        await client.close()


def test_the_bomb_is_one() -> None:
    client = Client(None, None)  # type: ignore[arg-type]  # It sends nothing.
    bomb = hpack_bomb(client)[frames.HEAD_BYTES :]
    assert sum(map(len, hpack.Decoder(10**9).decode(bomb))) > 0
    assert sum(len(value) for _, value in hpack.Decoder(10**9).decode(bomb)) > 1000 * len(bomb)
