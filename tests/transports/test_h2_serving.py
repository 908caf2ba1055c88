"""Ports, sockets, and how the server over our HTTP/2 stops."""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path

import grpc.aio
import pytest

import triglot
from tests.transports.h2_peers import SECONDS, Client, data, greeted, message, served
from triglot.config.options import Config
from triglot.telemetry.store import Telemetry
from triglot.transports.http2.core import frames
from triglot.transports.http2.server import H2Server


async def test_goaway_is_sent_in_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triglot.transports.http2.protocol.LAST_STREAM_SECONDS", SECONDS)
    async with served() as here:
        client = await greeted(here)
        await client.send(client.headers(1, "Held"), data(1, message(b"1")))
        await asyncio.wait_for(here.rows.held.wait(), SECONDS)
        stopping = asyncio.create_task(here.server.stop())
        first = await client.next(frames.GOAWAY)
        assert int.from_bytes(first.payload[:4]) == frames.LARGEST_WINDOW
        ping = await client.next(frames.PING)
        # On its way before the client knew.
        await client.send(client.headers(3, "Echo"), data(3, message(b"2")))
        assert (await client.status(3))["grpc-status"] == "0"
        await client.send(frames.ping(ping.payload, ack=True))
        second = await client.next(frames.GOAWAY)
        assert int.from_bytes(second.payload[:4]) == 3
        here.rows.gate.set()
        assert (await client.status(1))["grpc-status"] == "0"
        assert {got.kind for got in await client.rest()} == {frames.GOAWAY}
        await client.close()
        await asyncio.wait_for(stopping, SECONDS)


async def test_a_used_port_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = H2Server([], Config(grpc_port=taken.getsockname()[1]), Telemetry())
        with pytest.raises(OSError, match=r"cannot bind gRPC to 127\.0\.0\.1 port") as caught:
            await server.start()
        assert caught.value.errno == errno.EADDRINUSE
    async with served() as here:
        again = H2Server([], Config(grpc_port=here.port), Telemetry())
        with pytest.raises(OSError, match="cannot bind gRPC"):
            await again.start()


async def test_localhost_is_one_port_on_every_address() -> None:
    async with served(host="localhost") as here:
        for family, _, _, _, address in socket.getaddrinfo("localhost", here.port, type=socket.SOCK_STREAM):
            with socket.socket(family) as client:
                client.connect(address)


async def test_unix_socket_is_created_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with (
        served(grpc_socket=str(path)),
        grpc.aio.insecure_channel(f"unix:{path}") as channel,
    ):
        assert await channel.unary_unary("/t.T/Echo")(b"1", timeout=SECONDS) == b"1"
    assert not path.exists()


async def test_the_server_chooses_by_the_option() -> None:
    async with triglot.Server(models=[], config=Config(grpc_port=0, rest_port=-1, grpc_transport="h2")) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.grpc_port)
        client = Client(reader, writer)
        await client.greet()
        first = await client.next(frames.SETTINGS)
        assert frames.Setting.MAX_CONCURRENT_STREAMS in dict(frames.read_settings(memoryview(first.payload)))
        await client.close()
