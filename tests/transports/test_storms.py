"""Storms, by gRPC's own client and as other stock clients were recorded: they cost no other call anything."""

from __future__ import annotations

import asyncio
import itertools
import lzma
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.transports.h2_core import joined
from tests.transports.h2_peers import PATH, SECONDS, Client, Frame, Served, opened, served
from tests.waiting import until
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.connection import Connection
from triglot.transports.http2.core.events import ConnectionEnded, StreamReset
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.receiving import CompleteRequest, RequestReceived

OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
DEADLINE_SECONDS = 0.5
LONG = 2 * SECONDS


class Healthy:
    """Calls one after the other, and a stream that is open all the time, beside a storm on the same channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._echo: Any = channel.unary_unary(f"{PATH}Echo")
        self._stream: Any = channel.stream_stream(f"{PATH}Both")(timeout=LONG)
        self._storm_over = asyncio.Event()
        self._calls: asyncio.Task[int] | None = None

    async def __aenter__(self) -> Healthy:
        await self._exchange(b"first")
        self._calls = asyncio.create_task(self._call())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Raise what a call ended with, if one has failed."""
        assert self._calls is not None
        self._storm_over.set()
        assert await asyncio.wait_for(self._calls, LONG) > 1
        await self._exchange(b"last")
        await self._stream.done_writing()
        assert await self._stream.read() is grpc.aio.EOF
        assert await self._stream.code() is grpc.StatusCode.OK

    async def _exchange(self, data: bytes) -> None:
        await self._stream.write(data)
        assert await asyncio.wait_for(self._stream.read(), SECONDS) == data

    async def _call(self) -> int:
        for number in itertools.count(1):
            over = self._storm_over.is_set()
            body = str(number).encode()
            assert await self._echo(body, timeout=LONG) == body
            if over:
                return number
        raise AssertionError


async def storm(channel: grpc.aio.Channel, count: int, how: str) -> Counter[grpc.StatusCode]:
    """So many unanswered calls end at once; with what."""
    held: Any = channel.unary_unary(f"{PATH}Held")
    loop = asyncio.get_running_loop()
    at = loop.time() + DEADLINE_SECONDS
    if how == "deadlines":
        calls = [held(b"1", timeout=at - loop.time()) for _ in range(count)]
    else:
        calls = [held(b"1") for _ in range(count)]
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
    return Counter(await asyncio.wait_for(asyncio.gather(*(call.code() for call in calls)), SECONDS))


ENDS = {"deadlines": grpc.StatusCode.DEADLINE_EXCEEDED, "cancels": grpc.StatusCode.CANCELLED}


@asynccontextmanager
async def channels(port: int, count: int) -> AsyncIterator[list[grpc.aio.Channel]]:
    """So many, each with a connection of its own."""
    async with AsyncExitStack() as ends:
        made = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) for _ in range(count)]
        yield [await ends.enter_async_context(channel) for channel in made]


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("count", [200, 360, 1000])
async def test_calls_that_end_together_on_one_channel(count: int, how: str) -> None:
    async with opened("h2") as (rows, port), channels(port, 1) as (channel,):
        rows.gate.set()
        async with Healthy(channel):
            rows.gate.clear()
            for _ in range(3):
                assert await storm(channel, count, how) == {ENDS[how]: count}
            rows.gate.set()


@pytest.mark.parametrize("how", ENDS)
async def test_calls_that_end_together_on_many_channels(how: str) -> None:
    async with opened("h2") as (rows, port), channels(port, 10) as made:
        rows.gate.set()
        async with AsyncExitStack() as ends:
            for channel in made:
                await ends.enter_async_context(Healthy(channel))
            rows.gate.clear()
            assert await asyncio.gather(*(storm(channel, 100, how) for channel in made)) == [{ENDS[how]: 100}] * 10
            rows.gate.set()


async def test_clients_that_leave_with_open_calls_and_come_again() -> None:
    async with opened("h2") as (rows, port), channels(port, 1) as (channel,):
        rows.gate.set()
        async with Healthy(channel):
            for _ in range(3):
                rows.gate.clear()
                async with channels(port, 20) as made:
                    calls = [channel.unary_unary(f"{PATH}Held")(b"1") for channel in made for _ in range(20)]
                    await asyncio.wait_for(rows.held.wait(), SECONDS)
                assert Counter([await call.code() for call in calls]) == {grpc.StatusCode.CANCELLED: 400}
                rows.gate.set()
                async with channels(port, 20) as made:
                    echoes = (channel.unary_unary(f"{PATH}Echo")(b"1", timeout=LONG) for channel in made)
                    assert await asyncio.gather(*echoes) == [b"1"] * 20


FOLDER = Path(__file__).parent / "recordings"
RECORDED = sorted(path.name for path in FOLDER.glob("*.xz"))
CLIENTS = ("c-core", "go", "java", "nghttp2")
STORMS = ("deadlines", "cancels", "reconnects")
REFUSED = ErrorCode.REFUSED_STREAM.to_bytes(4)
TOGETHER = 10
"""Connections, where many clients reconnect at once."""


def pieces_of(name: str) -> list[bytes]:
    """What one connection's client sent, as it came."""
    packed = lzma.decompress((FOLDER / name).read_bytes())
    pieces, at = [], 0
    while at < len(packed):
        start = at + 4
        at = start + int.from_bytes(packed[at:start])
        pieces.append(packed[start:at])
    return pieces


class Core:
    """A connection without a socket, whose owner answers healthy calls at once, and no others."""

    def __init__(self) -> None:
        self.connection = Connection()
        self.healthy: list[int] = []
        self.held = self.resets = 0
        self.sent = b""

    def feed(self, data: bytes) -> None:
        for event in joined(self.connection.feed(data)):
            assert not isinstance(event, ConnectionEnded), event
            if isinstance(event, StreamReset):
                assert not event.by_us
                self.resets += 1
            elif isinstance(event, RequestReceived | CompleteRequest):
                if event.headers.path == f"{PATH}Echo":
                    self.healthy.append(event.stream)
                    self.connection.out.headers(event.stream, b"\x88", end=True)
                else:
                    self.held += 1
        self.sent += b"".join(self.connection.out.take())

    def refused(self) -> list[int]:
        """The streams that were."""
        numbers, at = [], 0
        while at < len(self.sent):
            start = at + frames.HEAD_BYTES
            length, kind = int.from_bytes(self.sent[at : at + 3]), self.sent[at + 3]
            if kind == frames.RST_STREAM and self.sent[start : start + 4] == REFUSED:
                numbers.append(int.from_bytes(self.sent[at + 5 : start]))
            at = start + length
        return numbers


def test_every_client_has_been_recorded_in_every_storm() -> None:
    assert {name.removesuffix(".xz") for name in RECORDED} == {
        f"{client}-{storm}" for client in CLIENTS for storm in STORMS
    }


@pytest.mark.parametrize("name", RECORDED)
def test_the_core_takes_all_of_a_storm(name: str) -> None:
    core = Core()
    for piece in pieces_of(name):
        core.feed(piece)
    assert core.refused() == []
    assert core.healthy
    assert core.held > 800
    if "reconnects" not in name:
        assert core.resets == core.held
        assert not core.connection.streams


def _parts_of(name: str) -> tuple[list[bytes], bytes, list[int]]:
    """What its client sent until its first call, and all of the rest; and the healthy calls."""
    core, pieces, first = Core(), iter(pieces_of(name)), []
    while not core.healthy:
        first.append(next(pieces))
        core.feed(first[-1])
    rest = b"".join(pieces)
    core.feed(rest)
    return first, rest, core.healthy


async def _replay(here: Served, first: list[bytes], rest: bytes, count: int) -> tuple[Client, list[Frame]]:
    """Send it: until the first call is answered, as its client did, and then all of the rest at once."""
    client = await here.client()
    for piece in first:
        await client.send(piece)
    got = [await client.next(frames.DATA)]
    sending = asyncio.create_task(client.send(rest))
    while sum(frame.kind == frames.DATA for frame in got) < count:
        frame = await client.frame()
        assert frame is not None
        got.append(frame)
    await asyncio.wait_for(sending, SECONDS)
    return client, got


@pytest.mark.parametrize("name", RECORDED)
async def test_a_storm_ends_neither_its_connection_nor_healthy_calls(name: str) -> None:
    async with served() as here, here.channel() as channel:
        echo = channel.unary_unary(f"{PATH}Echo")
        assert await echo(b"1", timeout=SECONDS) == b"1"
        count = TOGETHER if "reconnects" in name else 2
        first, rest, healthy = _parts_of(name)
        replayed = await asyncio.gather(*(_replay(here, first, rest, len(healthy)) for _ in range(count)))
        for _, got in replayed:
            answered = [frame.stream for frame in got if frame.kind == frames.DATA]
            assert sorted(answered) == healthy
            assert not [frame for frame in got if frame.kind == frames.GOAWAY]
            codes = {frame.code for frame in got if frame.kind == frames.RST_STREAM}
            assert ErrorCode.REFUSED_STREAM not in codes
        assert len(here.server.connections) == count + 1
        assert await echo(b"2", timeout=SECONDS) == b"2"
        for client, _ in replayed:
            await client.close()
        await until(lambda: here.server.open_calls == 0)
        assert await echo(b"3", timeout=SECONDS) == b"3"
