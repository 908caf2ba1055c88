"""Clients of REST over HTTP/1.1 that do not take their answers."""

from __future__ import annotations

import asyncio
import socket

import numpy as np
import pytest

from tests.served_models import Function, Served, serving
from tests.transports.h2_peers import SECONDS
from tests.transports.test_tls_slow_readers import BODY, LARGE
from tests.waiting import ever_later, until

pytestmark = pytest.mark.both_transports

STALL = "triglot.transports.unsent.STALL_SECONDS"
PIECE = 2_000_000
"""Bytes that a slow client takes before it pauses."""

both = pytest.mark.parametrize("port", ["rest_port", "grpc_port"])


def large() -> dict[str, Function]:
    return {"large": Function(lambda inputs: {"y": np.zeros(LARGE // 4, np.int32)})}


async def asked(here: Served, port: str) -> socket.socket:
    """The connection of a client that has asked for an answer, and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", getattr(here.server, port)))
    head = b"POST /v2/models/large/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    await loop.sock_sendall(client, head + BODY)
    return client


@both
async def test_who_takes_nothing_is_let_go(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STALL, 0.3)  # It is no option.
    async with serving(large(), grpc_transport="h2") as here:
        client = await asked(here, port)
        http = here.server._http
        assert http is not None
        await until(http.count_connections)
        await until(lambda: not http.count_connections())
        client.close()


@both
async def test_who_takes_a_little_at_a_time_gets_everything(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    for later in ever_later(0.2):
        monkeypatch.setattr(STALL, later)  # As above.
        async with serving(large(), grpc_transport="h2") as here:
            client = await asked(here, port)
            taken = 0
            try:
                while taken < LARGE:
                    next_pause = min(taken + PIECE, LARGE)
                    while taken < next_pause:
                        got = await asyncio.wait_for(loop.sock_recv(client, PIECE), SECONDS)
                        if not got:
                            raise ConnectionError
                        taken += len(got)
                    await asyncio.sleep(later / 3)  # The client is slow.
            except ConnectionError:
                continue  # Slower than it meant to be.
            finally:
                client.close()
            break
