"""Clients that want to do harm: their connection ends with the right error, and others continue unharmed."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import hpack
import pytest

from tests.transports.h2_attacks import ATTACKS, hpack_bomb
from tests.transports.h2_peers import SECONDS, Client, Served, data, greeted, greeting, message, served
from tests.transports.tls_server import HOST, Authority
from tests.waiting import until
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.limits import Limits

pytestmark = pytest.mark.both_event_loops
Secured = Authority | None


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(params=["plain", "TLS"])
def secured(request: pytest.FixtureRequest) -> Secured:
    """Who vouches for the server's certificate, where it has one."""
    return request.getfixturevalue("authority") if request.param == "TLS" else None


@asynccontextmanager
async def hosting(
    secured: Secured = None, limits: Limits | None = None, **options: Any
) -> AsyncIterator[tuple[Served, grpc.aio.Channel]]:
    """The rows, and gRPC's own client, which is served before and after whatever happens."""
    async with (
        served(limits, **(secured.server() if secured else {}), **options) as here,
        secured.channel(here.port) if secured else here.channel() as channel,
    ):
        await echoes(channel)
        yield here, channel
        await echoes(channel)


async def echoes(channel: grpc.aio.Channel) -> None:
    assert await channel.unary_unary("/t.T/Echo")(b"1", timeout=SECONDS) == b"1"


async def connect(here: Served, secured: Secured, **settings: int) -> Client:
    """A connection that has sent its preface and settings."""
    context = secured.client("h2") if secured else None
    client = Client(*await asyncio.open_connection(HOST, here.port, ssl=context))
    await client.greet(**settings)
    return client


async def last_codes(client: Client) -> list[ErrorCode]:
    """The codes of the GOAWAY frames that come until the connection ends."""
    return [got.code for got in await client.rest() if got.kind == frames.GOAWAY]


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


async def attack(name: str, secured: Secured, caplog: pytest.LogCaptureFixture) -> None:
    code, made = ATTACKS[name]
    # With TLS, who does not leave is left, so that the test need not wait for longer.
    linger = 0.4 if secured else SECONDS
    limits = Limits(connection_window=1_000_000, stream_window=2_000_000, linger=linger)
    async with hosting(secured, limits) as (here, channel):
        (kept,) = here.server.connections
        finished = asyncio.Event()
        others = asyncio.create_task(calling(channel, finished))
        hostile = await connect(here, secured)
        sending = asyncio.create_task(hostile.send(made(hostile)))
        assert await last_codes(hostile) == [code]
        await asyncio.wait_for(sending, SECONDS)
        finished.set()
        assert await asyncio.wait_for(others, SECONDS) > 1
        await hostile.close()
        if closing := [connection.closed for connection in here.server.connections - {kept}]:
            await asyncio.wait(closing, timeout=SECONDS)
        assert here.server.connections == {kept}
        assert here.server.open_calls == here.server.request_bytes.held == here.server.unsent == 0
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("name", ATTACKS)
async def test_only_the_hostile_connection_ends(name: str, caplog: pytest.LogCaptureFixture) -> None:
    await attack(name, None, caplog)


# Each attack over both loops is above; TLS has one of its own in each loop.
@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize("name", list(ATTACKS)[::2])
async def test_only_the_hostile_connection_ends_with_tls(
    name: str, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    await attack(name, authority, caplog)


@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.parametrize("name", list(ATTACKS)[1::2])
async def test_only_the_hostile_connection_ends_with_tls_and_uvloop(
    name: str, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    await attack(name, authority, caplog)


@pytest.mark.parametrize(
    ("first_bytes", "code"),
    [
        (b"", ErrorCode.SETTINGS_TIMEOUT),
        (b"PRI * HT", ErrorCode.SETTINGS_TIMEOUT),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", ErrorCode.PROTOCOL_ERROR),
    ],
    ids=["nothing", "half a preface", "HTTP/1.1"],
)
async def test_who_does_not_greet_is_let_go(first_bytes: bytes, code: ErrorCode, secured: Secured) -> None:
    async with hosting(secured) as (here, _):
        here.server.limits = Limits(settings_timeout=0.5)  # For those who come from now on.
        context = secured.client("h2") if secured else None
        client = Client(*await asyncio.open_connection(HOST, here.port, ssl=context))
        await client.send(first_bytes)
        assert await last_codes(client) == [code]
        await client.close()


async def test_who_answers_no_ping_is_let_go_and_others_stay() -> None:
    async with hosting(limits=Limits(idle=0.2, ping_timeout=3)) as (here, channel):
        (kept,) = here.server.connections
        silent = await greeted(here)
        assert [got.kind for got in await silent.rest()][-1] == frames.PING
        await silent.close()
        await echoes(channel)
        if others := [connection.closed for connection in here.server.connections - {kept}]:
            await asyncio.wait(others, timeout=SECONDS)
        assert here.server.connections == {kept}


async def test_who_reads_nothing_holds_the_stream_and_is_let_go(secured: Secured) -> None:
    async with hosting(secured, Limits(stall=0.5)) as (here, channel):
        (kept,) = here.server.connections
        slow = await connect(here, secured, initial_window_size=frames.LARGEST_WINDOW)
        await slow.next(frames.SETTINGS)
        (connection,) = here.server.connections - {kept}
        await slow.send(frames.window_update(0, frames.LARGEST_WINDOW - 65_535))
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]  # It is a socket's.
        await slow.send(slow.headers(1, "Count"), data(1, message(bytes(1_000_000))))
        await asyncio.wait_for(here.rows.cancelled.wait(), SECONDS)
        assert here.rows.call_count < 100
        await echoes(channel)
        await asyncio.wait_for(connection.closed, SECONDS)
        assert connection not in here.server.connections
        slow.writer.transport.abort()


async def test_who_asks_on_and_reads_nothing_is_let_go(secured: Secured) -> None:
    async with hosting(secured, Limits(max_unread=100_000, stall=0.5)) as (here, _):
        (kept,) = here.server.connections
        client = await connect(here, secured)
        await client.next(frames.SETTINGS)
        (connection,) = here.server.connections - {kept}
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # It is a socket's.
        stream = 1
        while not connection.closed.done():
            await client.send(*(client.headers(number, "/no") for number in range(stream, stream + 2000, 2)))
            stream += 2000
            assert stream < 4_000_000
            await asyncio.sleep(0)
        client.writer.transport.abort()


async def test_responses_without_a_window_are_abandoned() -> None:
    async with hosting(limits=Limits(stall=0.5)) as (here, channel):
        client = await greeted(here, initial_window_size=0)
        body = message(bytes(400_000))
        for stream in range(1, 7, 2):
            await client.send(client.headers(stream, "Echo"), data(stream, body))
        await echoes(channel)
        resets = [await client.next(frames.RST_STREAM) for _ in range(3)]
        assert [got.stream for got in resets] == [1, 3, 5]
        assert {got.code for got in resets} == {ErrorCode.ENHANCE_YOUR_CALM}
        assert here.server.unsent == 0
        await client.close()


async def test_requests_on_their_way_are_bounded() -> None:
    async with hosting(max_total_queue_bytes=100_000, max_queue_bytes=0) as (here, channel):
        client = await greeted(here, initial_window_size=1_000_000)
        await client.send(frames.window_update(0, 1_000_000))
        for stream in (1, 3):
            await client.send(
                client.headers(stream, "Echo"), data(stream, message(bytes(70_000), size=80_000), end=False)
            )
        refused = await client.status(3)
        assert refused["grpc-status"] == "8"
        await echoes(channel)  # A small one has room.
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
    async with hosting(authority) as (here, channel):
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
    async with hosting(authority) as (here, channel):
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
    async with hosting(authority) as (here, channel):
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
    async with hosting(authority) as (here, channel):
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
