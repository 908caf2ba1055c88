"""Clients that send large bodies until they are stopped: strangers have no credentials."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import Event, ResponseReceived, StreamEnded, StreamReset, TrailersReceived

from tests.transports.tls_server import HOST

MIB = 2**20
BODY_BYTES = 16 * MIB
PIECE = bytes(64 * 1024)
INFER = "/v2/models/identity_fp32/infer"
MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
GRPC_FIELDS = (("content-type", "application/grpc"), ("te", "trailers"))
REST_FIELDS = (("content-length", str(BODY_BYTES)),)

Stranger = Callable[[int], Awaitable[str]]
"""Comes once to a port; what it was answered: the status of gRPC or of HTTP."""


async def over_http1(port: int) -> str:
    """Sends all of its body, unless the connection is closed."""
    reader, writer = await asyncio.open_connection(HOST, port)
    head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {BODY_BYTES}\r\n\r\n"
    answer = asyncio.create_task(reader.readline())
    with suppress(ConnectionError):
        writer.write(head.encode())
        for _ in range(BODY_BYTES // len(PIECE)):
            writer.write(PIECE)
            await writer.drain()
            await asyncio.sleep(0)
    status = (await answer).decode().split()[1]
    await _close(writer)
    return status


async def over_grpc(port: int) -> str:
    """See `_over_http2`."""
    return await _over_http2(port, MODEL_INFER, GRPC_FIELDS)


async def over_rest_of_http2(port: int, *credentials: tuple[str, str]) -> str:
    """See `_over_http2`."""
    return await _over_http2(port, INFER, (*REST_FIELDS, *credentials))


async def _over_http2(port: int, path: str, fields: Sequence[tuple[str, str]]) -> str:
    """Sends all of its body as the windows allow, unless the stream is reset or the connection closed."""
    reader, writer = await asyncio.open_connection(HOST, port)
    peer = H2Connection(H2Configuration(header_encoding="utf-8"))
    peer.initiate_connection()
    begin = ((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost"))
    peer.send_headers(1, (*begin, *fields))
    status, left, open_ = "none", BODY_BYTES, True
    while open_:
        while room := min(left, peer.local_flow_control_window(1), peer.max_outbound_frame_size, len(PIECE)):
            peer.send_data(1, PIECE[:room], end_stream=room == left)
            left -= room
        got = b""
        with suppress(ConnectionError):
            writer.write(peer.data_to_send())
            await writer.drain()
            got = await reader.read(65536)
        events = peer.receive_data(got) if got else []
        status = _status(events) or status
        open_ = bool(got) and not any(isinstance(event, StreamReset | StreamEnded) for event in events)
    await _close(writer)
    return status


def _status(events: Sequence[Event]) -> str:
    ends = [event for event in events if isinstance(event, ResponseReceived | TrailersReceived)]
    fields = {str(name): str(value) for event in ends for name, value in event.headers or ()}
    return fields.get("grpc-status") or fields.get(":status") or ""


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
