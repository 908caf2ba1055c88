"""Clients that want to do harm, over TLS: what plain ones do, and what only TLS lets them do."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc.aio
import pytest
from h2_attacks import ATTACKS
from h2_peers import SECONDS, Client, Served, data, greeting, message, served
from tls_server import HOST, Authority

from triglot.transports.http2.core import frames
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.limits import Limits

pytestmark = pytest.mark.both_event_loops


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@asynccontextmanager
async def secured(
    authority: Authority, limits: Limits | None = None
) -> AsyncIterator[tuple[Served, grpc.aio.Channel]]:
    """The rows behind TLS, and gRPC's own client, which is served before and after whatever happens."""
    async with served(limits, **authority.server()) as here, authority.channel(here.port) as channel:
        await echoes(channel)
        yield here, channel
        await echoes(channel)


async def echoes(channel: grpc.aio.Channel) -> None:
    assert await channel.unary_unary("/t.T/Echo")(b"1", timeout=SECONDS) == b"1"


async def connect(here: Served, authority: Authority) -> Client:
    """A connection on which TLS has been agreed on, and nothing else said."""
    return Client(*await asyncio.open_connection(HOST, here.port, ssl=authority.client("h2")))


# --- what plain ones do ---


async def attack(name: str, authority: Authority) -> None:
    code, made = ATTACKS[name]
    # Who does not leave is left, so that the test need not wait for longer.
    limits = Limits(connection_window=1_000_000, stream_window=2_000_000, linger=0.4)
    async with secured(authority, limits) as (here, channel):
        (kept,) = here.server.connections
        hostile = await connect(here, authority)
        await hostile.greet()
        sending = asyncio.create_task(hostile.send(made(hostile)))
        last = [got.code for got in await hostile.rest() if got.kind == frames.GOAWAY]
        await asyncio.wait_for(sending, SECONDS)
        assert last == [code]
        await echoes(channel)
        await hostile.close()
        if closing := [connection.closed for connection in here.server.connections - {kept}]:
            await asyncio.wait(closing, timeout=SECONDS)
        assert here.server.connections == {kept}
        assert here.server.open_calls == here.server.request_bytes.held == here.server.unsent == 0


# Each attack over both loops is in test_h2_hostile; TLS has one of its own in each loop.
@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize("name", list(ATTACKS)[::2])
async def test_only_the_hostile_connection_ends(name: str, authority: Authority) -> None:
    await attack(name, authority)


@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.parametrize("name", list(ATTACKS)[1::2])
async def test_only_the_hostile_connection_ends_with_uvloop(name: str, authority: Authority) -> None:
    await attack(name, authority)


@pytest.mark.parametrize("first_bytes", [b"", b"PRI * HT"], ids=["nothing", "half a preface"])
async def test_who_does_not_greet_is_let_go(first_bytes: bytes, authority: Authority) -> None:
    async with secured(authority) as (here, _):
        here.server.limits = Limits(settings_timeout=0.5)  # For those who come from now on.
        silent = await connect(here, authority)
        await silent.send(first_bytes)
        last = [got.code for got in await silent.rest() if got.kind == frames.GOAWAY]
        assert last == [ErrorCode.SETTINGS_TIMEOUT]
        await silent.close()


async def test_who_reads_nothing_holds_the_stream_and_is_let_go(authority: Authority) -> None:
    async with secured(authority, Limits(stall=0.5)) as (here, channel):
        (kept,) = here.server.connections
        slow = await connect(here, authority)
        await slow.greet(initial_window_size=frames.LARGEST_WINDOW)
        await slow.next(frames.SETTINGS)
        (connection,) = here.server.connections - {kept}
        await slow.send(frames.window_update(0, frames.LARGEST_WINDOW - 65_535))
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]  # It is a socket's.
        await slow.send(slow.headers(1, "Count"), data(1, message(bytes(1_000_000))))
        await asyncio.wait_for(here.rows.cancelled.wait(), SECONDS)
        assert here.rows.call_count < 100
        await echoes(channel)
        await asyncio.wait_for(connection.closed, SECONDS)
        slow.writer.transport.abort()


async def test_who_asks_on_and_reads_nothing_is_let_go(authority: Authority) -> None:
    async with secured(authority, Limits(max_unread=100_000, stall=0.5)) as (here, channel):
        (kept,) = here.server.connections
        hostile = await connect(here, authority)
        await hostile.greet()
        await hostile.next(frames.SETTINGS)
        (connection,) = here.server.connections - {kept}
        hostile.writer.transport.pause_reading()  # type: ignore[attr-defined]  # It is a socket's.
        stream = 1
        while not connection.closed.done():
            await hostile.send(*(hostile.headers(number, "/no") for number in range(stream, stream + 2000, 2)))
            stream += 2000
            assert stream < 4_000_000
            await asyncio.sleep(0)
        await echoes(channel)
        hostile.writer.transport.abort()


# --- what only TLS lets them do ---


class Records:
    """TLS by hand on a plain connection: each piece is a record, and anything else can be sent besides."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext
    ) -> None:
        self._reader, self._writer = reader, writer
        self._came, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._came, self._out, server_hostname=HOST)

    def hello(self) -> bytes:
        """The first thing that a client says."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return self._out.read()
        raise AssertionError

    async def agree(self) -> None:
        """Agree on keys."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self.send(self._out.read())
                self._came.write(await asyncio.wait_for(self._reader.read(100_000), SECONDS))
            else:
                return await self.send(self._out.read())

    def records(self, text: bytes, size: int) -> bytes:
        """It in records of so many bytes."""
        for at in range(0, len(text), size):
            self._tls.write(text[at : at + size])
        return self._out.read()

    async def send(self, text: bytes) -> None:
        """These bytes, as they are."""
        try:
            self._writer.write(text)
            await self._writer.drain()
        except ConnectionError:
            pass

    async def read(self) -> bytes:
        """What is said next; nothing at the end."""
        while True:
            try:
                return self._tls.read(100_000)
            except ssl.SSLWantReadError:
                came = await asyncio.wait_for(self._reader.read(100_000), SECONDS)
                if not came:
                    return b""
                self._came.write(came)

    async def until_the_end(self) -> None:
        """Read on, whatever comes."""
        try:
            while await asyncio.wait_for(self._reader.read(100_000), SECONDS):
                pass
        except ConnectionError:
            pass

    def leave(self, *, reset: bool = False) -> None:
        """Without any TLS."""
        if reset:
            self._writer.transport.abort()
        else:
            self._writer.close()


async def by_hand(here: Served, context: ssl.SSLContext) -> Records:
    return Records(*await asyncio.open_connection(HOST, here.port), context)


FIRST: dict[str, Callable[[Records], bytes]] = {
    "nothing": lambda _: b"",
    "half a hello": lambda records: records.hello()[:100],
    "a hello": lambda records: records.hello(),
    "no TLS": lambda _: b"\xff" * 10_000,
    "HTTP/1.1": lambda _: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "HTTP/2": lambda _: greeting(),
    "a record of another kind": lambda _: b"\x17\x03\x03\x40\x00" + bytes(0x4000),
    "a record that is too large": lambda _: b"\x16\x03\x01\xff\xff" + bytes(0xFFFF),
    "a hello and then none": lambda records: records.hello() + b"\x16\x03\x01\x00\x04" + bytes(4),
}


@pytest.mark.parametrize("name", FIRST)
async def test_who_does_not_agree_on_keys_is_let_go(name: str, authority: Authority) -> None:
    async with secured(authority) as (here, channel):
        (kept,) = here.server.connections
        assert here.server._listener is not None
        here.server._listener._handshake_seconds = 1.0  # For those who come from now on.
        context = authority.client("h2")
        for client in (hostile := [await by_hand(here, context) for _ in range(20)]):
            await client.send(FIRST[name](client))
        await echoes(channel)
        for client in hostile:
            await client.until_the_end()
            client.leave()
        assert here.server.connections == {kept}


async def test_nonsense_after_the_keys(authority: Authority) -> None:
    async with secured(authority) as (here, channel):
        (kept,) = here.server.connections
        hostile = await by_hand(here, authority.client("h2"))
        await hostile.agree()
        await hostile.send(hostile.records(greeting() + client().headers(1, "Held"), 1000))
        await hostile.send(b"\x17\x03\x03\x01\x00" + bytes(256))
        await hostile.until_the_end()
        hostile.leave()
        await echoes(channel)
        assert here.server.connections == {kept}
        assert here.server.open_calls == 0


@pytest.mark.parametrize("reset", [False, True])
async def test_who_leaves_without_a_word_leaves_nothing(reset: bool, authority: Authority) -> None:
    async with secured(authority) as (here, channel):
        (kept,) = here.server.connections
        hostile = await by_hand(here, authority.client("h2"))
        await hostile.agree()
        peer = client()
        calls = peer.headers(1, "Held") + data(1, message(b"1")) + peer.headers(3, "Echo")
        await hostile.send(
            hostile.records(greeting() + calls + data(3, message(bytes(9000), size=10_000)), 16_000)
        )
        await asyncio.wait_for(here.rows.held.wait(), SECONDS)
        (connection,) = here.server.connections - {kept}
        hostile.leave(reset=reset)
        await asyncio.wait_for(here.rows.cancelled.wait(), SECONDS)
        await asyncio.wait_for(connection.closed, SECONDS)
        await echoes(channel)
        assert here.server.open_calls == here.server.request_bytes.held == 0


async def test_records_of_one_byte(authority: Authority) -> None:
    async with secured(authority) as (here, channel):
        small = await by_hand(here, authority.client("h2"))
        await small.agree()
        text = greeting() + client().headers(1, "Echo") + data(1, message(b"x" * 5000))
        sending = asyncio.create_task(small.send(small.records(text, 1)))
        await echoes(channel)
        got = b""
        while b"x" * 5000 not in got:
            got += (came := await small.read())
            assert came
        await sending
        small.leave()


def client() -> Client:
    """Makes frames, and sends none."""
    return Client(None, None)  # type: ignore[arg-type]  # It sends nothing.
