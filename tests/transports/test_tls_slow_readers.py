"""TLS, and clients that are slow to take the last answer of a connection: they get all of it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.served_models import SECONDS, Function, serving
from tests.transports.h2_peers import Client, data, message, served
from tests.transports.tls_server import HOST, Authority
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.limits import Limits

pytestmark = [pytest.mark.both_transports, pytest.mark.both_event_loops]

LARGE = 30_000_000
"""Bytes, of which the system takes some for the client."""
LONG = 1.5
"""Seconds for which the client takes nothing; TLS is not told to give up sooner, though it could be."""


@pytest.fixture
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


async def test_the_last_answer_before_a_connection_is_drained(authority: Authority) -> None:
    async with served(Limits(linger=0.2), **authority.server()) as here:
        slow = Client(*await asyncio.open_connection(HOST, here.port, ssl=authority.client("h2")))
        await slow.greet(initial_window_size=frames.LARGEST_WINDOW)
        await slow.next(frames.SETTINGS)
        (connection,) = here.server.connections
        await slow.send(frames.window_update(0, frames.LARGEST_WINDOW - 65_535))
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]  # It is a socket's.
        body = message(bytes(LARGE))
        await slow.send(slow.headers(1, "Held"))
        for at in range(0, len(body), 1_000_000):
            part = body[at : at + 1_000_000]
            await slow.send(data(1, part, end=at + len(part) == len(body)))
        await asyncio.wait_for(here.rows.held.wait(), SECONDS)
        connection.drain()
        here.rows.gate.set()
        await asyncio.wait([connection.closed], timeout=LONG)
        slow.writer.transport.resume_reading()  # type: ignore[attr-defined]  # It is a socket's.
        got = await slow.rest()
        assert sum(
            len(received_frame.payload) for received_frame in got if received_frame.kind == frames.DATA
        ) == len(body)
        assert [received_frame.code for received_frame in got if received_frame.kind == frames.GOAWAY][
            -1
        ] == ErrorCode.NO_ERROR
        await slow.close()


BODY = b"""{"inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}],
"parameters": {"binary_data_output": true}}"""


@pytest.mark.parametrize("transport", ["aio", "h2"])
async def test_the_answer_after_which_rest_closes(transport: str, authority: Authority) -> None:
    large = Function(lambda inputs: {"y": np.zeros(LARGE // 4, np.int32)})
    async with serving({"large": large}, grpc_transport=transport, **authority.server()) as here:
        for port in {here.server.rest_port, *([here.server.grpc_port] if transport == "h2" else [])}:
            reader, writer = await asyncio.open_connection(HOST, port, ssl=authority.client("http/1.1"))
            writer.transport.pause_reading()  # type: ignore[attr-defined]  # It is a socket's.
            writer.write(b"POST /v2/models/large/infer HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n")
            writer.write(b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
            await asyncio.sleep(LONG)
            writer.transport.resume_reading()  # type: ignore[attr-defined]  # It is a socket's.
            answer = await asyncio.wait_for(reader.read(), SECONDS)
            assert answer.startswith(b"HTTP/1.1 200 OK")
            assert len(answer.partition(b"\r\n\r\n")[2]) > LARGE
            writer.close()
