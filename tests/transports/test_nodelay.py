"""No answer waits for a client's delayed acknowledgement: TCP_NODELAY is set on accepted connections."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import uvloop

import triglot

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
