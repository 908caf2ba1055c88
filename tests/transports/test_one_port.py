"""One port for gRPC and REST: the first bytes of a connection say what it speaks."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import termios
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest
import uvloop

from tests.process import is_listening, unused_ports
from tests.served_models import SECONDS, Gated, serving
from tests.transports.h2_peers import Client, Rows
from tests.transports.rest_routes import rest_server
from tests.transports.tls_server import HOST, TWICE, Authority, infer, rest, server
from tests.waiting import until, wait_until
from triglot.config.options import Config, ConfigError
from triglot.telemetry.store import Telemetry
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.limits import Limits
from triglot.transports.http2.server import H2Server

pytestmark = pytest.mark.both_transports

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
ONE: dict[str, Any] = {"grpc_transport": "h2", "rest_port": 0}


def on_each_loop(test: Callable[..., Awaitable[None]]) -> Any:
    """Connections change hands in each loop in its own way."""

    @pytest.mark.parametrize("loop", LOOPS)
    def run(loop: str, tmp_path: Path) -> None:
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(asyncio.wait_for(test(tmp_path), 2 * SECONDS))

    functools.update_wrapper(run, test)
    del run.__wrapped__  # type: ignore[attr-defined]  # Its arguments are not those of the test.
    return run


def insecure(port: int) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"{HOST}:{port}", options=[("grpc.use_local_subchannel_pool", 1)])


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """All that comes."""
    try:
        return await asyncio.wait_for(reader.read(), SECONDS)
    except ConnectionError:
        return b""


@on_each_loop
async def test_one_port_serves_all(folder: Path) -> None:
    port, _ = unused_ports()
    async with server(**{**ONE, "rest_port": port}, grpc_port=port) as here:
        assert here.rest_port == here.grpc_port == port
        async with insecure(here.grpc_port) as channel:
            for _again in range(3):
                assert await infer(channel) == TWICE
                assert await rest(here.grpc_port) == [42]


@on_each_loop
async def test_one_port_serves_all_with_tls(folder: Path) -> None:
    authority = Authority(folder)
    async with server(**ONE, **authority.server()) as here, authority.channel(here.grpc_port) as channel:
        for _again in range(3):
            assert await infer(channel) == TWICE
            assert await rest(here.grpc_port, authority.client("http/1.1")) == [42]


@on_each_loop
async def test_rest_port_besides_the_shared_one(folder: Path) -> None:
    async with server(grpc_transport="h2") as here:
        assert here.rest_port != here.grpc_port
        assert await rest(here.rest_port) == [42]
        assert await rest(here.grpc_port) == [42]


@on_each_loop
async def test_a_large_request_that_begins_with_the_greeting(folder: Path) -> None:
    """What came with the first bytes is not lost, nor what follows."""
    async with server(**ONE) as here:
        body = b'{"inputs":[{"name":"x","datatype":"INT32","shape":[100000],"data":[%s]}]}' % b",".join(
            [b"7"] * 100_000
        )
        reader, writer = await asyncio.open_connection(HOST, here.grpc_port, limit=2**22)
        head = b"POST /v2/models/twice/infer HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        answer = await until_closed(reader)
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert answer.count(b"14") >= 100_000
        writer.close()


@on_each_loop
async def test_first_bytes_that_come_one_by_one(folder: Path) -> None:
    async with server(**ONE) as here:
        reader, writer = await asyncio.open_connection(HOST, here.grpc_port)
        for at in range(len(LIVE)):
            writer.write(LIVE[at : at + 1])
            await asyncio.sleep(0)
        assert await asyncio.wait_for(reader.readline(), SECONDS) == b"HTTP/1.1 200 OK\r\n"
        writer.close()
        reader, writer = await asyncio.open_connection(HOST, here.grpc_port)
        client = Client(reader, writer)
        for at in range(len(frames.PREFACE)):
            await client.send(frames.PREFACE[at : at + 1])
        await client.send(frames.settings({}))
        await client.next(frames.SETTINGS)
        await client.send(frames.ping(b"12345678"))
        assert (await client.next(frames.PING)).payload == b"12345678"
        await client.close()


@pytest.mark.parametrize(
    "first_bytes", [b"PRI * HTTP/2.0\r\n\r\nSX\r\n\r\n", b"PRI * HTTP/1.1\r\n\r\n", b"\x16\x03\x01", b"\0" * 30]
)
async def test_what_is_neither(first_bytes: bytes) -> None:
    async with server(**ONE) as here:
        reader, writer = await asyncio.open_connection(HOST, here.grpc_port)
        writer.write(first_bytes)
        writer.write_eof()
        assert (await until_closed(reader))[:12] in (b"", b"HTTP/1.0 400", b"HTTP/1.1 400", b"HTTP/1.1 404")
        writer.close()
        async with insecure(here.grpc_port) as channel:
            assert await infer(channel) == TWICE


@pytest.mark.parametrize("first_bytes", [b"", b"PRI * HTTP/2.0\r\n"])
async def test_who_does_not_say_what_it_speaks_is_let_go(first_bytes: bytes) -> None:
    limits = Limits(settings_timeout=0.1)
    here = H2Server([Rows().service()], Config(grpc_port=0), Telemetry(), limits, rest=rest_server())
    port = await here.start()
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(first_bytes)
    assert await until_closed(reader) == b""
    assert not here.sniffers
    writer.close()
    await here.stop()


async def test_rest_over_the_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    async with (
        server(**ONE, grpc_socket=path),
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session,
        session.get("http://localhost/v2/health/ready") as response,
    ):
        assert response.status == 200
    async with server(**{**ONE, "grpc_port": -1}, grpc_socket=path):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(LIVE)
        assert await asyncio.wait_for(reader.readline(), SECONDS) == b"HTTP/1.1 200 OK\r\n"
        writer.close()


# --- REST's limits hold there, too ---


async def test_calls_that_may_be_open() -> None:
    model = Gated()
    async with serving({"gated": model}, **ONE, max_connections=1) as here:
        url = f"http://{HOST}:{here.server.grpc_port}/v2"
        body = {"inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}]}
        async with aiohttp.ClientSession() as session:
            first = asyncio.create_task(session.post(f"{url}/models/gated/infer", json=body))
            await model.until_at("infer")
            async with session.get(url) as refused:
                assert refused.status == 503
                assert "max_connections" in await refused.text()
            model.open_point("infer")
            async with await first as answered:
                assert answered.status == 200


async def test_headers_that_are_too_long() -> None:
    async with server(**ONE) as here:
        reader, writer = await asyncio.open_connection(HOST, here.grpc_port)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nLong: " + b"x" * 70_000 + b"\r\n\r\n")
        assert (await until_closed(reader))[8:12] == b" 431"
        writer.close()


# --- the end ---


@on_each_loop
async def test_running_calls_of_both_kinds_are_answered(folder: Path) -> None:
    model = Gated()
    async with serving({"twice": model}, **ONE, grace=SECONDS) as here:
        port = here.server.grpc_port
        async with insecure(port) as channel, aiohttp.ClientSession() as session:
            called = asyncio.create_task(infer(channel))
            await model.until_at("infer")
            body = {"inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": [21]}]}
            posted = asyncio.create_task(session.post(f"http://{HOST}:{port}/v2/models/twice/infer", json=body))
            await until(lambda: here.leases()["twice"] == 2)
            await here.server.drain(0)
            async with session.get(f"http://{HOST}:{port}/v2/health/ready") as ready:
                assert (ready.status, ready.headers["Connection"]) == (503, "close")
            stopping = asyncio.create_task(here.server.stop())
            await until(lambda: not is_listening(port))
            model.open_point("infer")
            assert await called == (21).to_bytes(4, "little")
            async with await posted as answer:
                assert (answer.status, answer.headers["Connection"]) == (200, "close")
            await asyncio.wait_for(stopping, SECONDS)


async def test_silent_connection_does_not_delay_the_stop() -> None:
    async with server(**ONE, grace=SECONDS) as here:
        reader, writer = await asyncio.open_connection(HOST, here.grpc_port)
        async with insecure(here.grpc_port) as channel:
            assert await infer(channel) == TWICE  # So the other one has been accepted as well.
        await asyncio.wait_for(here.stop(), SECONDS / 2)
        assert await until_closed(reader) == b""
        writer.close()


async def test_what_was_sent_before_the_end_is_answered() -> None:
    """A connection that is not accepted yet when the server stops."""
    async with server(**ONE) as here:
        reader, writer = await asyncio.open_connection(HOST, here.grpc_port)
        writer.write(LIVE)
        # All is with the server, whose loop does not run meanwhile.
        sent = writer.get_extra_info("socket").fileno()
        wait_until(lambda: not any(fcntl.ioctl(sent, termios.TIOCOUTQ, bytes(4))))
        await here.stop()
        assert (await until_closed(reader)).startswith(b"HTTP/1.1 ")
        writer.close()


@on_each_loop
async def test_no_rest_where_none_is_wanted(folder: Path) -> None:
    async with server(**{**ONE, "rest_port": -1}) as here:
        async with insecure(here.grpc_port) as channel:
            assert await infer(channel) == TWICE
        reader, writer = await asyncio.open_connection(HOST, here.grpc_port)
        writer.write(LIVE)
        assert not (await until_closed(reader)).startswith(b"HTTP/1.1")
        writer.close()


# --- options ---


def test_which_port_is_for_rest() -> None:
    assert Config(grpc_port=8080, rest_port=8080, grpc_transport="h2").rest_with_grpc
    assert not Config(grpc_port=8080, rest_port=-1, grpc_transport="h2").rest_with_grpc
    assert not Config(grpc_port=0, rest_port=0, grpc_transport="h2").rest_with_grpc
    assert not Config(grpc_port=-1, rest_port=-1, grpc_socket="/s", grpc_transport="h2").rest_with_grpc
    with pytest.raises(ConfigError, match="are both 9000; expected two ports, or grpc_transport h2"):
        Config(grpc_port=9000, rest_port=9000, grpc_transport="aio")
