"""Sockets that are bound, and connections that are accepted, one way or the other."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import uvloop

import triglot
from tests.transports.h2_peers import SECONDS
from tests.waiting import until
from triglot.transports.listening import Listener, bind, bind_file

HOST = "127.0.0.1"


class Echo(asyncio.Protocol):
    """Says what it hears."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)
        self.transport.close()


def listener(sockets: list[socket.socket], make: Callable[[], asyncio.Protocol] = Echo) -> Listener:
    return Listener(sockets, lambda _: make(), max_connections=1000)


async def echoed(port: int, text: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(text)
    answer = await asyncio.wait_for(reader.read(), SECONDS)
    writer.close()
    return answer


async def test_a_port_is_shared_only_where_that_is_meant() -> None:
    [first] = await bind(HOST, 0, shared=True)
    port = first.getsockname()[1]
    [second] = await bind(HOST, port, shared=True)
    with pytest.raises(OSError, match=f"cannot bind REST to {HOST} port {port}: Address already in use") as caught:
        await bind(HOST, port, "REST")
    assert caught.value.errno == errno.EADDRINUSE
    # Each connection goes to one of the two, and either answers.
    both = [listener([first]), listener([second])]
    for bound in both:
        bound.start()
    assert [await echoed(port, b"%d" % number) for number in range(20)] == [b"%d" % number for number in range(20)]
    for bound in both:
        bound.stop()


async def test_what_has_come_before_the_end_is_served() -> None:
    sockets = await bind(HOST, 0)
    port = sockets[0].getsockname()[1]
    clients = [socket.create_connection((HOST, port)) for _ in range(100)]
    for client in clients:
        client.sendall(b"hello")
    here = listener(sockets)
    here.start()
    here.stop()
    await here.settle(SECONDS)
    for client in clients:
        client.settimeout(SECONDS)
        assert await asyncio.to_thread(client.recv, 10) == b"hello"
        client.close()
    with pytest.raises(ConnectionRefusedError):
        await echoed(port, b"late")


async def test_no_more_files(caplog: pytest.LogCaptureFixture) -> None:
    """A client waits until there are some again."""
    sockets = await bind(HOST, 0)
    here = listener(sockets)
    here.start()
    asking = socket.create_connection((HOST, sockets[0].getsockname()[1]))
    asking.sendall(b"hello")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (asking.fileno(), hard))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(asking.fileno()))
        with caplog.at_level(logging.WARNING):
            await until(lambda: "no connections for" in caplog.text)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)
    asking.settimeout(SECONDS)
    assert await asyncio.to_thread(asking.recv, 10) == b"hello"
    asking.close()
    here.stop()


async def test_the_file_of_a_server_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    bind_file(path).close()  # Its file stays.
    again = listener([bind_file(path)])
    again.start()
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"hello")
    assert await asyncio.wait_for(reader.read(), SECONDS) == b"hello"
    writer.close()
    again.stop()
    path.unlink()
    path.write_text("somebody's")
    with pytest.raises(OSError, match=r"cannot bind gRPC to .*: Address already in use"):
        bind_file(path)
    assert path.read_text() == "somebody's"


def test_a_path_that_is_too_long_for_a_socket(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"^cannot bind gRPC to .*: AF_UNIX path too long$"):
        bind_file(tmp_path / ("a" * 120))


LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def accepted(client: socket.socket) -> list[int]:
    """The option's value on the other ends of a connection, of those that this process has."""
    found = []
    for name in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name.name)).st_mode):
                with socket.socket(fileno=os.dup(int(name.name))) as candidate:
                    # grpc's address is IPv6's of it.
                    if (
                        candidate.type == socket.SOCK_STREAM
                        and candidate.getpeername()[1:2] == client.getsockname()[1:2]
                    ):
                        found.append(candidate.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
    return found


async def nodelay(rest: bool, transport: str) -> list[int]:
    """The option of the server's end of a connection that has been served."""
    config = triglot.Config(grpc_port=0, rest_port=0, grpc_transport=transport)
    async with triglot.Server(models=[], config=config) as server:
        port = server.rest_port if rest else server.grpc_port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n" if rest else b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        )
        assert await reader.read(1)
        values = accepted(writer.get_extra_info("socket"))
        writer.close()
        await writer.wait_closed()
        return values


@pytest.mark.skipif(sys.platform != "linux", reason="finds sockets in /proc")
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("rest", "transport"), [(True, "h2"), (False, "h2"), (False, "aio")])
def test_what_is_accepted_does_not_wait(loop: str, rest: bool, transport: str) -> None:
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        assert [bool(value) for value in runner.run(nodelay(rest, transport))] == [True]
