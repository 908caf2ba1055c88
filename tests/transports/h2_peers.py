"""Our HTTP/2 behind a real port with rows of its own, and scripted clients, right or wrong."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc.aio
import hpack

from triglot.config.options import Config
from triglot.core.call import Call
from triglot.core.errors import NotFound
from triglot.core.operation import Operation
from triglot.protocols.rows import Kind, Method, Service
from triglot.telemetry.store import Telemetry
from triglot.transports.aio.server import GrpcServer
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.fields import Field, Name
from triglot.transports.http2.core.hpack import Decoder
from triglot.transports.http2.core.limits import Limits
from triglot.transports.http2.server import H2Server

SECONDS = 20
"""How long anything may take; only a test that fails waits so long."""
PATH = "/t.T/"


def row(name: str, kind: Kind, call: Any) -> Method:
    """A method whose messages are bytes."""
    if kind is Kind.UNARY:
        return Method(name, kind, Operation.INFER, bytes, call, bytes)
    return Method(name, kind, Operation.INFER, bytes, None, bytes, iterate=call)


class Rows:
    """What is served: `Count` and `Both` are streams, the others take one request."""

    def __init__(self) -> None:
        self.echoed: Counter[bytes] = Counter()
        """How often `Echo` ran, by what it was sent."""
        self.made = 0
        """Answers of `Large`."""
        self.call_count = 0
        """Answers that `Count` was asked for."""
        self.stubborn_calls = 0
        """Those of `Stubborn` that have begun, which no cancellation ends."""
        self.held = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.gate = asyncio.Event()
        self.metadata: Mapping[str, Any] = {}
        self.remaining: float | None = None
        """What the last call of `Held` had until its deadline, in seconds."""

    async def echo(self, data: Any, call: Call) -> bytes:
        self.metadata = dict(call.metadata)
        self.echoed[bytes(data)] += 1
        return bytes(data)

    async def large(self, data: Any, _: Call) -> bytes:
        self.made += 1
        return bytes(int(bytes(data)))

    async def wrong(self, _: Any, __: Call) -> bytes:
        raise NotFound("100 % of ünïcode\nin two lines")

    async def hold(self, data: Any, call: Call) -> bytes:
        self.remaining = call.remaining
        self.held.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return bytes(data)

    async def stubborn(self, data: Any, _: Call) -> bytes:
        self.stubborn_calls += 1
        while not self.gate.is_set():
            with suppress(asyncio.CancelledError):
                await self.gate.wait()
        self.stubborn_calls -= 1
        return bytes(data)

    async def count(self, data: Any, _: Call) -> AsyncIterator[bytes]:
        try:
            for _number in range(1000):
                self.call_count += 1
                yield bytes(data)
        finally:
            self.cancelled.set()

    async def both(self, requests: AsyncIterator[Any], _: Call) -> AsyncIterator[bytes]:
        self.held.set()
        await self.gate.wait()
        async for data in requests:
            yield bytes(data)

    def service(self) -> Service:
        return Service(
            "t.T",
            (
                row("Echo", Kind.UNARY, self.echo),
                row("Large", Kind.UNARY, self.large),
                row("Wrong", Kind.UNARY, self.wrong),
                row("Held", Kind.UNARY, self.hold),
                row("Stubborn", Kind.UNARY, self.stubborn),
                row("Count", Kind.SERVER_STREAM, self.count),
                row("Both", Kind.BIDI_STREAM, self.both),
            ),
        )


@dataclass
class Served:
    server: H2Server
    rows: Rows
    port: int

    async def client(self) -> Client:
        """A connection on which nothing has been said."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        return Client(reader, writer)

    def channel(self) -> grpc.aio.Channel:
        """gRPC's own client."""
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=[("grpc.use_local_subchannel_pool", 1)])


@asynccontextmanager
async def served(limits: Limits | None = None, **options: Any) -> AsyncIterator[Served]:
    """Serve the rows."""
    rows = Rows()
    config = Config(grpc_port=0, rest_port=-1, **{"grace": 5.0, **options})
    server = H2Server([rows.service()], config, Telemetry(), limits or Limits())
    async with _running(server, rows) as port:
        yield Served(server, rows, port)


@asynccontextmanager
async def opened(transport: str, limits: Limits | None = None, **options: Any) -> AsyncIterator[tuple[Rows, int]]:
    """The rows, served over either transport as the options say; and the port."""
    rows = Rows()
    config = Config(grpc_port=0, rest_port=0, grpc_transport=transport, **{"grace": 5.0, **options})
    server = (H2Server if transport == "h2" else GrpcServer)([rows.service()], config, Telemetry(), limits)
    async with _running(server, rows) as port:
        yield rows, port


@asynccontextmanager
async def _running(server: GrpcServer | H2Server, rows: Rows) -> AsyncIterator[int]:
    port = await server.start()
    try:
        yield port
    finally:
        rows.gate.set()
        await asyncio.wait_for(server.stop(), SECONDS)


@dataclass(frozen=True)
class Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def code(self) -> frames.ErrorCode:
        """Of RST_STREAM or GOAWAY."""
        return frames.ErrorCode(int.from_bytes(self.payload[4:8] if self.kind == frames.GOAWAY else self.payload))


class Client:
    """Sends the bytes that it gets, and reads frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._encoder = hpack.Encoder()
        self._decoder = hpack.Decoder()

    async def send(self, *parts: bytes) -> None:
        """Whatever it is; that the other side has closed is no error."""
        try:
            self.writer.write(b"".join(parts))
            await self.writer.drain()
        except ConnectionError:
            pass

    async def greet(self, **settings: int) -> None:
        """The preface, and the settings of these names."""
        await self.send(greeting(**settings))

    def block(self, fields: Sequence[tuple[str, str] | tuple[bytes, bytes]]) -> bytes:
        """A header block with any fields."""
        return self._encoder.encode(fields, huffman=False)  # In Python, to code takes long.

    def raw_headers(
        self, stream: int, fields: Sequence[tuple[str, str]], flags: int = frames.END_HEADERS
    ) -> bytes:
        """A HEADERS frame with any fields."""
        return frame(frames.HEADERS, flags, stream, self.block(fields))

    def headers(self, stream: int, name: str, *fields: tuple[str, str], flags: int = frames.END_HEADERS) -> bytes:
        """A request's HEADERS frame."""
        return self.raw_headers(stream, [*request_fields(name), *fields], flags)

    def fields(self, block: bytes) -> dict[str, str]:
        """The fields of an answer's header block; to be asked for all of them, in their order."""
        return {str(name): str(value) for name, value in self._decoder.decode(block)}

    async def frame(self) -> Frame | None:
        """The next one; None at the end."""
        try:
            head = await asyncio.wait_for(self.reader.readexactly(frames.HEAD_BYTES), SECONDS)
            payload = await asyncio.wait_for(self.reader.readexactly(int.from_bytes(head[:3])), SECONDS)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return Frame(head[3], head[4], int.from_bytes(head[5:]), payload)

    async def next(self, *kinds: int) -> Frame:
        """The next one of these kinds."""
        while (got := await self.frame()) is not None:
            if got.kind in kinds:
                return got
        raise AssertionError(f"the connection ended without a frame of the kinds {kinds}")

    async def wait_until_processed(self) -> None:
        """Wait until the other side has read everything that was sent; frames that come meanwhile are lost."""
        await self.send(frames.ping(bytes(8)))
        while not (await self.next(frames.PING)).flags & frames.ACK:
            pass

    async def rest(self) -> list[Frame]:
        """All until the end."""
        got = []
        while (received_frame := await self.frame()) is not None:
            got.append(received_frame)
        return got

    async def status(self, stream: int) -> dict[str, str]:
        """The fields that end a stream's answer."""
        while True:
            got = await self.next(frames.HEADERS)
            fields = self.fields(got.payload)
            if got.stream == stream and got.flags & frames.END_STREAM:
                return fields

    async def close(self) -> None:
        """Leave."""
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            pass


async def greeted(here: Served, **settings: int) -> Client:
    """A client that has sent its preface and settings."""
    client = await here.client()
    await client.greet(**settings)
    return client


def classified(pairs: Iterable[tuple[bytes, bytes]]) -> tuple[Field, ...]:
    """Fields as the decoder of header blocks makes them."""
    return tuple(Field(Name(name), value) for name, value in pairs)


def decoded(decoder: Decoder, block: bytes) -> list[Field]:
    """All fields of a block."""
    start, rest = decoder.decode(block)
    return [*start, *rest]


def pairs_of(fields: Iterable[Field]) -> list[tuple[bytes, bytes]]:
    """Their names and values."""
    return [(field.name.value, field.value) for field in fields]


def request_fields(name: str) -> list[tuple[str, str]]:
    """What every call begins with."""
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", name if "/" in name else PATH + name),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame."""
    return frames.head(len(payload), kind, flags, stream) + payload


def data(stream: int, payload: bytes, *, end: bool = True) -> bytes:
    """A DATA frame."""
    return frame(frames.DATA, frames.END_STREAM if end else 0, stream, payload)


def message(payload: bytes, *, packed: int = 0, size: int | None = None) -> bytes:
    """gRPC's framing."""
    return bytes([packed]) + (len(payload) if size is None else size).to_bytes(4) + payload


def greeting(**settings: int) -> bytes:
    """What a client says first."""
    values = {frames.Setting[name.upper()]: value for name, value in settings.items()}
    return frames.PREFACE + frames.settings(values)
