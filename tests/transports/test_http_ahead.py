"""What a client of HTTP/1.1 sends ahead of its answers, and how large a request's head may be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest

from tests.scheduling.scripted_models import Plain, Scripted
from tests.transports.h2_peers import SECONDS
from tests.transports.live import live
from tests.transports.test_half_closed import INFER, post
from tests.transports.test_http_requests import TINY
from tests.waiting import until
from triglot.transports.aiohttp.connections import Connection as AiohttpConnection
from triglot.transports.aiohttp.server import AiohttpServer
from triglot.transports.http1.connection import Connection
from triglot.transports.http1.server import Http1Server
from triglot.transports.rest.fields import MAX_HEAD_BYTES

GET = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n"
SAME = "/v2/models/same/infer"
READ_BYTES = 256 * 1024
"""What is read from a socket at once."""


@pytest.fixture(params=[("h1", "rest_port"), ("h1", "grpc_port"), ("aiohttp", "rest_port")], ids="-".join)
def way(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The transport, and the port that it is reached by."""
    return cast("tuple[str, str]", request.param)


class Served:
    """A connection, as far as tests look into it."""

    def __init__(self, server: Http1Server | AiohttpServer) -> None:
        self.connection: Connection | AiohttpConnection
        if isinstance(server, Http1Server):
            (self.connection,) = server.connections.open
        else:
            assert server._runner.server is not None
            (connection,) = server._runner.server.connections
            assert isinstance(connection, AiohttpConnection)
            self.connection = connection

    @property
    def transport(self) -> asyncio.Transport:
        assert self.connection.transport is not None
        return self.connection.transport

    @property
    def held(self) -> int:
        """Bytes that have come, and have not been looked at."""
        if isinstance(self.connection, Connection):
            return self.connection._reader.kept
        return len(self.connection._kept)

    @property
    def parsed(self) -> int:
        """Requests that have been looked at, if that are more than the one that is answered."""
        return 0 if isinstance(self.connection, Connection) else self.connection._request_count


@asynccontextmanager
async def peer(
    way: tuple[str, str], first: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, Served, Scripted]]:
    """A client that has sent `first`, its connection, and the model that does not answer yet."""
    transport, port = way
    scripted = Scripted(open_gate=False)
    same = Plain(lambda inputs: {"y": inputs["x"]})
    options = {"grpc_transport": "h2", "http_transport": transport}
    async with live({"scripted": scripted, "same": same}, **options) as here:
        http = here.server._http
        assert isinstance(http, Http1Server | AiohttpServer)
        reader, writer = await asyncio.open_connection("127.0.0.1", getattr(here.server, port))
        writer.write(first[:4])
        await until(http.count_connections)
        connection = Served(http)
        writer.write(first[4:])
        yield reader, writer, connection, scripted
        scripted.open_point("infer")
        writer.close()


async def test_one_request_at_most_waits_for_the_one_before_it(way: tuple[str, str]) -> None:
    async with peer(way, post(INFER)) as (reader, writer, connection, scripted):
        await scripted.until_at("infer")
        count, sent = 1000, 0
        more = post(SAME, f"X-Filling: {'x' * 8000}")

        async def send() -> None:
            nonlocal sent
            for _ in range(count):
                writer.write(more)
                sent += 1
                await writer.drain()

        sending = asyncio.create_task(send())
        transport = connection.transport
        await until(lambda: not transport.is_reading())
        assert connection.parsed <= 2
        assert connection.held <= 2 * READ_BYTES
        scripted.open_point("infer")
        for _ in range(count + 1):  # All are answered, in their order.
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS)
            assert b" 200 OK" in head
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            assert b"outputs" in await asyncio.wait_for(reader.readexactly(length), SECONDS)
        await sending
        await until(transport.is_reading)
        assert not connection.held


async def test_many_small_requests_at_once(way: tuple[str, str]) -> None:
    async with peer(way, post(INFER) + (GET + b"\r\n") * 1000) as (reader, _, connection, scripted):
        await scripted.until_at("infer")
        assert connection.parsed < 100
        assert connection.held
        scripted.open_point("infer")
        got = b""
        while got.count(b"HTTP/1.1 200 OK") < 1001:
            got += await asyncio.wait_for(reader.read(65_536), SECONDS)


async def test_a_body_waits_with_its_request(way: tuple[str, str]) -> None:
    large = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[' + b" " * 2_000_000 + b"3]}]}"
    head = f"POST {SAME} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(large)}\r\n\r\n".encode()
    async with peer(way, post(INFER) + head + large) as (reader, _, connection, scripted):
        await scripted.until_at("infer")
        transport = connection.transport
        await until(lambda: not transport.is_reading())
        assert connection.held <= 2 * READ_BYTES
        scripted.open_point("infer")
        got = b""
        while got.count(b'"outputs"') < 2:
            got += await asyncio.wait_for(reader.read(65_536), SECONDS)


@pytest.mark.parametrize("size", [1, 100, 60_000])
async def test_a_chunked_body(way: tuple[str, str], size: int) -> None:
    body = TINY + b" " * 200_000
    parts = [body[at : at + size] for at in range(0, len(TINY), size)] if size == 1 else []
    rest = body[len(TINY) if size == 1 else 0 :]
    parts += [rest[at : at + max(size, 100)] for at in range(0, len(rest), max(size, 100))]
    chunked = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    head = f"POST {SAME} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    async with peer(way, (head + chunked) * 2 + GET + b"\r\n") as (reader, _, _, _):
        got = b""
        while got.count(b"HTTP/1.1 200 OK") < 3:
            got += await asyncio.wait_for(reader.read(65_536), SECONDS)
        assert got.count(b'"outputs"') == 2


@pytest.mark.parametrize("size", [4000, 60_000])
async def test_a_head_that_is_too_large(way: tuple[str, str], size: int) -> None:
    count = MAX_HEAD_BYTES // size
    fields = b"".join(b"X-%d: %b\r\n" % (number, b"x" * size) for number in range(count + 1))
    async with peer(way, (GET + fields)[: MAX_HEAD_BYTES + 1]) as (reader, _, connection, _):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS)
        assert b" 431 " in head
        error = json.loads(await asyncio.wait_for(reader.read(), SECONDS))["error"]
        assert str(MAX_HEAD_BYTES) in error
        assert connection.parsed <= 1


async def test_a_large_head_is_taken(way: tuple[str, str]) -> None:
    fields = b"".join(b"X-%d: %b\r\n" % (number, b"x" * 60_000) for number in range(2))
    async with peer(way, GET + fields + b"\r\n") as (reader, _, _, _):
        assert b" 200 OK" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS)
