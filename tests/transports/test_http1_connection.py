"""Raw connections of HTTP/1.1: which get 100-continue, which are waited for, and which are closed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.scheduling.scripted_models import Plain
from tests.transports.live import Live, live
from tests.transports.rest_routes import rest_server
from tests.transports.test_http_requests import PATH, SECONDS, TINY, Wire, sized
from tests.waiting import until
from triglot.config.options import Config
from triglot.core.call import Call
from triglot.core.http import HttpResponse
from triglot.core.operation import Operation
from triglot.protocols.rows import Route
from triglot.transports.http1.connection import MAX_AHEAD_BYTES, Connections
from triglot.transports.http1.server import Http1Server

LIMIT = 100_000
GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"
HEALTH = "/v2/health/live"


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[tuple[Live, Wire]]:
    same = Plain(lambda inputs: {"y": inputs["x"]})
    async with (
        live({"same": same}, http_transport="h1", max_message_size=LIMIT, **options) as here,
        Wire(*await asyncio.open_connection("127.0.0.1", here.server.rest_port)) as wire,
    ):
        yield here, wire


def connections(here: Live) -> int:
    http = here.server._http
    assert http is not None
    return http.count_connections()


def shared(here: Live) -> Connections:
    """What all connections of the server have, with their time limits, which are no options."""
    http = here.server._http
    assert isinstance(http, Http1Server)
    return http.connections


async def rest(wire: Wire) -> bytes:
    """All that comes until the server closes the connection, which it does."""
    return await asyncio.wait_for(wire.reader.read(), SECONDS)


@pytest.mark.parametrize(
    ("path", "length", "lines", "status"),
    [
        ("/nothing", 10, [], 404),
        (PATH, LIMIT + 1, [], 413),
        (PATH, 10, ["Content-Encoding: br"], 501),
        (PATH, 10, ["Origin: http://evil.example"], 403),
    ],
)
async def test_no_one_sends_a_body_for_nothing(path: str, length: int, lines: list[str], status: int) -> None:
    async with served() as (_, wire):
        wire.send("POST", path, b"", f"Content-Length: {length}", "Expect: 100-continue", *lines)
        answer = await wire.answer()
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert await rest(wire) == b""


async def test_the_rest_of_a_body_is_not_the_next_request() -> None:
    body = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100
    async with served() as (_, wire):
        wire.send("POST", "/nothing", b"", sized(body))
        assert (await wire.answer()).status == 404
        wire.writer.write(body)
        assert (await wire.ask("GET", HEALTH)).status == 200


async def test_the_rest_of_a_body_is_not_waited_for_long() -> None:
    async with served() as (here, wire):
        shared(here).linger_seconds = 0.1
        wire.send("POST", "/nothing", b"x", "Content-Length: 100")
        assert (await wire.answer()).status == 404
        assert await rest(wire) == b""
        await until(lambda: not connections(here))


@pytest.mark.parametrize("first", [b"", b"\r\n", b"GET /v2 HTTP/1.1\r\nHost: loc"])
async def test_a_head_is_not_waited_for_long(first: bytes) -> None:
    async with served(rest_keepalive_time=650.0 if first else 0.1) as (here, wire):
        shared(here).head_seconds = 0.1
        wire.writer.write(first)
        if first:
            answer = await wire.answer()
            assert (answer.status, answer.headers["connection"]) == (408, "close")
            assert answer.text == "the head of the request is incomplete after 0.1 seconds"
        assert await rest(wire) == b""
        wire.writer.close()
        await until(lambda: not connections(here))


async def test_a_head_that_trickles_has_no_more_time() -> None:
    async with served() as (here, wire):
        shared(here).head_seconds = 0.2
        answering = asyncio.create_task(wire.answer())
        wire.writer.write(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n")
        while not answering.done():
            wire.writer.write(b"X: 1\r\n")
            await asyncio.wait([answering], timeout=0.02)
        assert (await answering).status in (400, 408)  # On a fast machine it is too many fields by then.


async def test_an_idle_connection_is_closed() -> None:
    async with served(rest_keepalive_time=0.2) as (here, wire):
        wire.send("GET", HEALTH)
        assert b" 200 OK" in await rest(wire)
        await until(lambda: not connections(here))


async def test_a_call_may_take_longer_than_a_head() -> None:
    async with served(rest_keepalive_time=0.1) as (here, wire):
        shared(here).head_seconds = 0.1
        wire.send("POST", PATH, TINY[:5], sized(TINY))
        await asyncio.sleep(0.5)  # The client is slow.
        wire.writer.write(TINY[5:])
        assert (await wire.answer()).status == 200


async def test_another_protocol_is_not_taken_up() -> None:
    upgrade = ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"]
    async with served() as (_, wire):
        assert (await wire.ask("GET", HEALTH, b"", *upgrade)).status == 200
        assert (await wire.ask("POST", PATH, TINY, sized(TINY), *upgrade)).status == 200
        chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(TINY), TINY)
        assert (await wire.ask("POST", PATH, chunks, "Transfer-Encoding: chunked", *upgrade)).status == 200


async def test_who_asks_to_close_gets_the_answer_and_the_end() -> None:
    async with served() as (_, wire):
        wire.send("POST", PATH, TINY, sized(TINY), "Connection: close")
        answer = await wire.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await rest(wire) == b""


async def test_what_is_no_request_any_more_is_answered_after_what_was() -> None:
    async with served() as (_, wire):
        wire.send("GET", HEALTH)
        wire.send("GET", HEALTH)
        wire.writer.write(b"junk\r\n\r\n" + b"x" * 500_000)
        assert [(await wire.answer()).status for _ in range(3)] == [200, 200, 400]
        assert await rest(wire) == b""


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_head_has_no_body(version: str) -> None:
    async with served() as (_, wire):
        for _ in range(2):
            lines = [
                f"HEAD /grps/v1/health/live HTTP/{version}",
                "Host: localhost",
                "Connection: keep-alive",
                "",
                "",
            ]
            wire.writer.write("\r\n".join(lines).encode())
            head = (await asyncio.wait_for(wire.reader.readuntil(b"\r\n\r\n"), SECONDS)).lower()
            assert head.startswith(f"http/{version} 200 ".encode())
            assert b"content-length: " in head
            assert (b"connection: keep-alive" in head) == (version == "1.0")


async def test_who_sends_faster_than_it_reads_is_not_read_from() -> None:
    """One request is answered, and what follows waits in the socket until its client takes the answers."""
    large = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[8000],"data":[%b]}]}' % b",".join([b"1.5"] * 8000)
    count = 400
    async with served() as (here, wire):
        wire.writer.transport.set_write_buffer_limits(2**30)
        for _ in range(count):
            wire.send("POST", PATH, large, sized(large))
        (connection,) = shared(here).open
        transport = connection.transport
        assert transport is not None
        await until(lambda: connection._is_paused or not transport.is_reading())
        assert connection._reader.kept <= MAX_AHEAD_BYTES + 2**18
        for _ in range(count):
            assert (await wire.answer()).status == 200


# --- answers that models make ---


def route(response: HttpResponse) -> Route:
    async def call(_: object, __: Call) -> None:
        pass

    return Route("GET", "/own", Operation.METADATA, lambda _: None, call, lambda *_: response, protocol="test")


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ([("X-A", "b"), ("X-A", "é")], 200),
        ([("X-A", "b\r\nX-B: c")], 500),
        ([("X-A: b\r\nX-B", "c")], 500),
        ([("X-A", "b\0")], 500),
    ],
)
async def test_no_field_begins_another(fields: list[tuple[str, str]], status: int) -> None:
    config = Config(grpc_port=-1, rest_port=0)
    server = rest_server(route(HttpResponse(b"body", headers=fields)), config=config)
    port = await server.start()
    try:
        async with Wire(*await asyncio.open_connection("127.0.0.1", port)) as wire:
            answer = await wire.ask("GET", "/own")
            assert answer.status == status
            assert "x-b" not in answer.headers
            assert answer.body == b"body" or "error" in json.loads(answer.body)
            assert (await wire.ask("GET", "/own")).status == status
    finally:
        await server.stop()
