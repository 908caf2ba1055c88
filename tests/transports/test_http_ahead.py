"""What a client of HTTP/1.1 sends ahead of its answers, and how large a request's head may be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from h2_peers import SECONDS
from live import live
from scripted_models import Plain, Scripted
from test_half_closed import INFER, post
from test_http_requests import TINY

from triglot.transports.http_ahead import MOST_HEAD_BYTES
from triglot.transports.http_connections import Connection
from waiting import until

GET = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n"
SAME = "/v2/models/same/infer"
READ_BYTES = 256 * 1024
"""What is read from a socket at once."""
both = pytest.mark.parametrize("port", ["rest_port", "grpc_port"])


@asynccontextmanager
async def peer(
    port: str, first: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, Connection, Scripted]]:
    """A client that has sent `first`, its connection, and the model that does not answer yet."""
    scripted = Scripted(open_gate=False)
    same = Plain(lambda inputs: {"y": inputs["x"]})
    async with live({"scripted": scripted, "same": same}, grpc_transport="h2") as here:
        http = here.server._http
        assert http is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", getattr(here.server, port))
        writer.write(first[:4])
        await until(http._count_connections)
        assert http._runner.server is not None
        (connection,) = http._runner.server.connections
        assert isinstance(connection, Connection)
        writer.write(first[4:])
        yield reader, writer, connection, scripted
        scripted.gate.set()
        writer.close()


def held(connection: Connection) -> int:
    """Bytes that have come, and have not been looked at."""
    return len(connection._kept)


@both
async def test_one_request_at_most_waits_for_the_one_before_it(port: str) -> None:
    async with peer(port, post(INFER)) as (reader, writer, connection, scripted):
        await scripted.wait_until_entered()
        count, sent = 2000, 0
        more = post(SAME, f"X-Filling: {'x' * 4000}")

        async def send() -> None:
            nonlocal sent
            for _ in range(count):
                writer.write(more)
                sent += 1
                await writer.drain()

        sending = asyncio.create_task(send())
        transport = connection.transport
        assert transport is not None
        await until(lambda: not transport.is_reading())
        assert connection._request_count == 2
        assert held(connection) <= 2 * READ_BYTES
        scripted.gate.set()
        for _ in range(count + 1):  # All are answered, in their order.
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS)
            assert b" 200 OK" in head
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            assert b"outputs" in await asyncio.wait_for(reader.readexactly(length), SECONDS)
        await sending
        await until(transport.is_reading)
        assert not held(connection)


@both
async def test_many_small_requests_at_once(port: str) -> None:
    async with peer(port, post(INFER) + (GET + b"\r\n") * 1000) as (reader, _, connection, scripted):
        await scripted.wait_until_entered()
        assert connection._request_count < 100
        scripted.gate.set()
        got = b""
        while got.count(b"HTTP/1.1 200 OK") < 1001:
            got += await asyncio.wait_for(reader.read(65_536), SECONDS)


@both
async def test_a_body_waits_with_its_request(port: str) -> None:
    large = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[' + b" " * 2_000_000 + b"3]}]}"
    head = f"POST {SAME} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(large)}\r\n\r\n".encode()
    async with peer(port, post(INFER) + head + large) as (reader, _, connection, scripted):
        await scripted.wait_until_entered()
        transport = connection.transport
        assert transport is not None
        await until(lambda: not transport.is_reading())
        assert connection._messages[0][1].total_bytes < 10_000
        scripted.gate.set()
        got = b""
        while got.count(b'"outputs"') < 2:
            got += await asyncio.wait_for(reader.read(65_536), SECONDS)


@both
@pytest.mark.parametrize("size", [1, 100, 60_000])
async def test_a_chunked_body(port: str, size: int) -> None:
    body = TINY + b" " * 200_000
    parts = [body[at : at + size] for at in range(0, len(TINY), size)] if size == 1 else []
    rest = body[len(TINY) if size == 1 else 0 :]
    parts += [rest[at : at + max(size, 100)] for at in range(0, len(rest), max(size, 100))]
    chunked = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    head = f"POST {SAME} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    async with peer(port, (head + chunked) * 2 + GET + b"\r\n") as (reader, _, _, _):
        got = b""
        while got.count(b"HTTP/1.1 200 OK") < 3:
            got += await asyncio.wait_for(reader.read(65_536), SECONDS)
        assert got.count(b'"outputs"') == 2


@both
@pytest.mark.parametrize("size", [4000, 60_000])
async def test_a_head_that_is_too_large(port: str, size: int) -> None:
    count = MOST_HEAD_BYTES // size
    fields = b"".join(b"X-%d: %b\r\n" % (number, b"x" * size) for number in range(count + 1))
    async with peer(port, (GET + fields)[: MOST_HEAD_BYTES + 1]) as (reader, _, connection, _):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS)
        assert b" 431 " in head
        error = json.loads(await asyncio.wait_for(reader.read(), SECONDS))["error"]
        assert str(MOST_HEAD_BYTES) in error
        assert connection._request_count == 1


@both
async def test_a_large_head_is_taken(port: str) -> None:
    fields = b"".join(b"X-%d: %b\r\n" % (number, b"x" * 60_000) for number in range(2))
    async with peer(port, GET + fields + b"\r\n") as (reader, _, _, _):
        assert b" 200 OK" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS)
