"""What a client of gRPC sees is the same over either transport: codes, texts, metadata, and how calls end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.scheduling.scripted_models import Counting
from tests.transports.call_ends import Seen, seen
from tests.transports.h2_peers import PATH, SECONDS, Rows, row
from tests.transports.live import live, request
from triglot.config.options import GRPC_TRANSPORTS, Config
from triglot.core.call import Call
from triglot.core.errors import Code, NotFound, QueueFull, ServingError
from triglot.protocols.rows import Kind, Service
from triglot.telemetry.store import Telemetry
from triglot.transports.aio.server import GrpcServer
from triglot.transports.http2.server import H2Server

pytestmark = pytest.mark.both_event_loops

SOON = 0.05
LIMIT = 1_000_000
SMALL_LIMIT = 10_000


class MoreRows(Rows):
    """Beside the others: `Full`, `Long`, `Code` and `Breaks` fail, the last one after two answers."""

    async def full(self, _: Any, __: Call) -> bytes:
        raise QueueFull("later", retry_after=1.25)

    async def long(self, _: Any, __: Call) -> bytes:
        raise NotFound("ü" * 4096)

    async def code(self, data: Any, _: Call) -> bytes:
        raise ServingError("as told", code=Code(int(bytes(data))))

    async def breaks(self, data: Any, _: Call) -> AsyncIterator[bytes]:
        yield bytes(data)
        yield bytes(data)
        raise QueueFull("no more", retry_after=0.5)

    async def joined(self, requests: AsyncIterator[Any], _: Call) -> AsyncIterator[bytes]:
        yield b"+".join([bytes(data) async for data in requests])

    def service(self) -> Service:
        more = (
            row("Joined", Kind.BIDI_STREAM, self.joined),
            row("Full", Kind.UNARY, self.full),
            row("Long", Kind.UNARY, self.long),
            row("Code", Kind.UNARY, self.code),
            row("Breaks", Kind.SERVER_STREAM, self.breaks),
        )
        return Service("t.T", (*super().service().methods, *more))


@dataclass(frozen=True)
class Here:
    channel: grpc.aio.Channel
    rows: MoreRows
    server: GrpcServer | H2Server

    async def ask(self, name: str, data: bytes = b"1", *, with_details: bool = True, **options: Any) -> Seen:
        """One request, one answer. `with_details`: compare the text of an error, too."""
        path = name if "/" in name else PATH + name
        return await seen(
            self.channel.unary_unary(path)(data, **{"timeout": SECONDS, **options}), with_details=with_details
        )

    async def stream(self, name: str, *requests: bytes, with_details: bool = True, **options: Any) -> Seen:
        """So many requests, and all answers."""

        async def sending() -> AsyncIterator[bytes]:
            for body in requests:
                yield body

        call = self.channel.stream_stream(PATH + name)(sending(), **{"timeout": SECONDS, **options})
        return await seen(call, with_details=with_details)


@asynccontextmanager
async def serving(transport: str, **options: Any) -> AsyncIterator[Here]:
    """The rows, over a transport."""
    rows = MoreRows()
    config = Config(grpc_port=0, rest_port=-1, **{"max_message_size": LIMIT, "grace": 2 * SECONDS, **options})
    made: Any = H2Server if transport == "h2" else GrpcServer
    server = made([rows.service()], config, Telemetry())
    address = f"127.0.0.1:{await server.start()}"
    own = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    try:
        async with grpc.aio.insecure_channel(address, options=own) as channel:
            yield Here(channel, rows, server)
    finally:
        rows.gate.set()
        await asyncio.wait_for(server.stop(), SECONDS)


@pytest.fixture(params=GRPC_TRANSPORTS)
async def here(request: pytest.FixtureRequest) -> AsyncIterator[Here]:
    async with serving(request.param) as opened:
        yield opened


UNKNOWN = Seen("UNIMPLEMENTED", "Method not found!")
CALLS: dict[str, tuple[Seen, Callable[[Here], Awaitable[Seen]]]] = {
    "an answer": (Seen("OK", answers=(b"1",)), lambda here: here.ask("Echo")),
    "an empty one": (Seen("OK", answers=(b"",)), lambda here: here.ask("Echo", b"")),
    "a large one": (Seen("OK", answers=(bytes(LIMIT),)), lambda here: here.ask("Echo", bytes(LIMIT))),
    "a text": (Seen("NOT_FOUND", "100 % of ünïcode\nin two lines"), lambda here: here.ask("Wrong")),
    "a long text": (Seen("NOT_FOUND", "ü" * 682), lambda here: here.ask("Long")),
    "another time": (
        Seen("RESOURCE_EXHAUSTED", "later", trailing=(("grpc-retry-pushback-ms", "1250"),)),
        lambda here: here.ask("Full"),
    ),
    "no method": (UNKNOWN, lambda here: here.ask("None")),
    "no service": (UNKNOWN, lambda here: here.ask("/t.U/Echo")),
    "no name": (UNKNOWN, lambda here: here.ask("/")),
    "a deadline": (
        Seen("DEADLINE_EXCEEDED", None),
        lambda here: here.ask("Held", with_details=False, timeout=SOON),
    ),
    "no time": (Seen("DEADLINE_EXCEEDED", None), lambda here: here.ask("Echo", with_details=False, timeout=-1)),
    "a stream's deadline": (
        Seen("DEADLINE_EXCEEDED", None),
        lambda here: here.stream("Both", b"1", with_details=False, timeout=SOON),
    ),
    "many answers": (Seen("OK", answers=(b"1",) * 1000), lambda here: here.stream("Count", b"1")),
    "a stream that fails": (
        Seen("RESOURCE_EXHAUSTED", "no more", (b"1", b"1"), (("grpc-retry-pushback-ms", "500"),)),
        lambda here: here.stream("Breaks", b"1"),
    ),
    "requests in gzip": (
        Seen("OK", answers=(b"text" * 100_000,)),
        lambda here: here.ask("Echo", b"text" * 100_000, compression=grpc.Compression.Gzip),
    ),
    "requests in deflate": (
        Seen("OK", answers=(b"text" * 100_000,)),
        lambda here: here.ask("Echo", b"text" * 100_000, compression=grpc.Compression.Deflate),
    ),
}


@pytest.mark.parametrize("name", CALLS)
async def test_calls(here: Here, name: str) -> None:
    expected, call = CALLS[name]
    assert await call(here) == expected


@pytest.mark.parametrize("code", [code for code in Code if code])
async def test_codes(here: Here, code: Code) -> None:
    assert await here.ask("Code", str(int(code)).encode()) == Seen(code.name, "as told")


async def test_half_closed_streams(here: Here) -> None:
    here.rows.gate.set()
    assert await here.stream("Both", b"1", b"", b"3") == Seen("OK", answers=(b"1", b"", b"3"))
    assert await here.stream("Both") == Seen("OK")


async def test_a_cancellation_reaches_the_handler(here: Here) -> None:
    call = here.channel.unary_unary(PATH + "Held")(b"")
    await asyncio.wait_for(here.rows.held.wait(), SECONDS)
    call.cancel()
    assert await seen(call, with_details=False) == Seen("CANCELLED", None)
    await asyncio.wait_for(here.rows.cancelled.wait(), SECONDS)


@pytest.mark.parametrize("transport", GRPC_TRANSPORTS)
async def test_who_leaves_a_stream_is_no_error(transport: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Counting()
    async with live({"endless": model}, grpc_transport=transport) as server:
        call = server.stream_infer(timeout=SECONDS)
        await call.write(request("endless", bytes(4)))
        await call.read()
        call.cancel()
        assert await asyncio.to_thread(model.closed.wait, SECONDS)
    assert [record.getMessage() for record in caplog.records if record.levelname in ("ERROR", "WARNING")] == []


async def test_a_deadline_reaches_the_handler(here: Here) -> None:
    timeout = SOON
    while not here.rows.held.is_set():  # It may pass before the call is there.
        assert (await here.ask("Held", with_details=False, timeout=timeout)).code == "DEADLINE_EXCEEDED"
        timeout *= 2
    await asyncio.wait_for(here.rows.cancelled.wait(), SECONDS)


async def test_metadata_of_a_request(here: Here) -> None:
    sent = (
        ("a", "1"),
        ("a", "2"),
        ("b-bin", b"\0\xff,"),
        ("c", "x, y"),
        ("d-bin", b""),
        ("e", "~ !"),
        ("f", " x "),
        ("g", " "),
    )
    assert (await here.ask("Echo", metadata=sent)).code == "OK"
    got = dict(here.rows.metadata)
    assert str(got.pop("user-agent")).startswith("grpc-python-asyncio/")
    assert got == dict(sent)


@pytest.fixture(params=GRPC_TRANSPORTS)
async def strict(request: pytest.FixtureRequest) -> AsyncIterator[Here]:
    """A client has sent what is too large for it before it gets the error."""
    async with serving(request.param, max_message_size=SMALL_LIMIT) as opened:
        yield opened


@pytest.mark.parametrize("compressed", [False, True])
async def test_too_large_a_message_is_that_calls_fault_alone(strict: Here, compressed: bool) -> None:
    here, options = strict, {"compression": grpc.Compression.Gzip} if compressed else {}
    held = here.channel.unary_unary(PATH + "Held")(b"1", timeout=SECONDS)
    await asyncio.wait_for(here.rows.held.wait(), SECONDS)
    got = await here.ask("Echo", bytes(SMALL_LIMIT + 1), **options)
    assert got.code == "RESOURCE_EXHAUSTED"
    assert "larger than max" in str(got.details)
    here.rows.gate.set()
    got = await here.stream("Both", b"1", bytes(SMALL_LIMIT + 1), **options)
    assert got.code == "RESOURCE_EXHAUSTED"
    assert got.answers in ((), (b"1",))
    assert await seen(held) == Seen("OK", answers=(b"1",))


@pytest.mark.parametrize(("size", "fits"), [(7_000, True), (15_700, True), (20_000, False), (40_000, False)])
async def test_much_metadata_is_that_calls_fault_alone(here: Here, size: int, fits: bool) -> None:
    held = here.channel.unary_unary(PATH + "Held")(b"1", timeout=SECONDS)
    await asyncio.wait_for(here.rows.held.wait(), SECONDS)
    got = await here.ask("Echo", metadata=(("a", "x" * size),))
    assert got.code == ("OK" if fits else "RESOURCE_EXHAUSTED")
    assert fits or "metadata size exceeds" in str(got.details)
    here.rows.gate.set()
    assert await seen(held) == Seen("OK", answers=(b"1",))


async def test_calls_that_run_when_the_server_stops_are_finished(here: Here) -> None:
    held = here.channel.unary_unary(PATH + "Held")(b"1", timeout=SECONDS)
    await asyncio.wait_for(here.rows.held.wait(), SECONDS)
    stopping = asyncio.ensure_future(here.server.stop())
    async with asyncio.timeout(SECONDS):
        # It may have come before the server's word, or, with grpc's own server, be left unanswered just then.
        while (await here.ask("Echo", with_details=False, timeout=1)).code != "UNAVAILABLE":
            pass
    assert not stopping.done()
    here.rows.gate.set()
    assert await seen(held) == Seen("OK", answers=(b"1",))
    await asyncio.wait_for(stopping, SECONDS)
    assert (await here.ask("Echo", with_details=False)).code == "UNAVAILABLE"


async def test_a_client_that_streams_gets_its_one_answer(here: Here) -> None:
    """To a server, such a call is a stream both ways that has one answer."""

    async def sending() -> AsyncIterator[bytes]:
        for data in (b"1", b"2", b"3"):
            yield data

    call = here.channel.stream_unary(PATH + "Joined")(sending(), timeout=SECONDS)
    assert await seen(call) == Seen("OK", answers=(b"1+2+3",))


async def test_streams_are_ended_when_the_server_stops(here: Here) -> None:
    call = here.channel.stream_stream(PATH + "Both")(timeout=SECONDS)
    await asyncio.wait_for(here.rows.held.wait(), SECONDS)
    stopping = asyncio.ensure_future(here.server.stop())
    assert await seen(call) == Seen("UNAVAILABLE", "the server is shutting down")
    await asyncio.wait_for(stopping, SECONDS)


@pytest.mark.parametrize("transport", GRPC_TRANSPORTS)
async def test_calls_that_outlast_the_grace_period(transport: str) -> None:
    async with serving(transport, grace=SOON) as here:
        call = here.channel.unary_unary(PATH + "Held")(b"1", timeout=SECONDS)
        await asyncio.wait_for(here.rows.held.wait(), SECONDS)
        stopping = asyncio.ensure_future(here.server.stop())
        assert await seen(call, with_details=False) == Seen("UNAVAILABLE", None)
        await asyncio.wait_for(here.rows.cancelled.wait(), SECONDS)
        await asyncio.wait_for(stopping, SECONDS)


@pytest.mark.parametrize("transport", GRPC_TRANSPORTS)
async def test_more_calls_than_may_be(transport: str) -> None:
    async with serving(transport, max_connections=1) as here:
        held = here.channel.unary_unary(PATH + "Held")(b"1", timeout=SECONDS)
        await asyncio.wait_for(here.rows.held.wait(), SECONDS)
        hint = (("grpc-retry-pushback-ms", "1000"),)
        assert await here.ask("Echo") == Seen("RESOURCE_EXHAUSTED", "Concurrent RPC limit exceeded!", (), hint)
        here.rows.gate.set()
        assert await seen(held) == Seen("OK", answers=(b"1",))
        async with asyncio.timeout(SECONDS):
            while (await here.ask("Echo")).code != "OK":  # The answer is there before the call is over.
                pass
