"""Makes calls with connectrpc, of which the protocol is gRPC's."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

from calls import pairs, request, response, result, run, text
from connectrpc.client import ConnectClient, ResponseMetadata
from connectrpc.code import Code
from connectrpc.compression.gzip import GzipCompression
from connectrpc.errors import ConnectError
from connectrpc.method import IdempotencyLevel, MethodInfo, StreamType
from connectrpc.protocol import ProtocolType
from pyqwest import Client, HTTPTransport, HTTPVersion

KINDS = {"unary": StreamType.UNARY, "server_stream": StreamType.SERVER_STREAM, "bidi": StreamType.BIDI_STREAM}
COMPRESSION = {"": None, "gzip": GzipCompression()}


class Bytes:
    """Messages as they are on the wire."""

    def name(self) -> str:
        return "proto"

    def encode(self, message: bytes) -> bytes:
        return message

    def decode(self, data: bytes | bytearray, message_class: type[bytes]) -> bytes:
        return bytes(data)


def clients(connection: dict[str, Any]) -> dict[str, ConnectClient]:
    """Return a client for each compression, over the same connection; none for a Unix socket."""
    if connection["address"].startswith("unix:"):
        return {}
    files = {
        option: Path(connection[name]).read_bytes()
        for option, name in (("tls_ca_cert", "ca"), ("tls_cert", "certificate"), ("tls_key", "key"))
        if connection[name]
    }
    http = Client(HTTPTransport(http_version=HTTPVersion.HTTP2, **files))
    address = f"{'https' if connection['ca'] else 'http'}://{connection['address']}"
    options: dict[str, Any] = {"codec": Bytes(), "protocol": ProtocolType.GRPC, "http_client": http}
    return {
        name: ConnectClient(address, send_compression=compression, **options)
        for name, compression in COMPRESSION.items()
    }


async def make(opened: dict[str, ConnectClient], call: dict[str, Any]) -> dict[str, Any]:
    """Make a call; returns its result."""
    client = opened.get(call.get("compression", ""))
    if client is None:
        return result("UNSUPPORTED", f"the package has no {call.get('compression', 'Unix sockets')}", [])
    service, _, name = call["method"][1:].rpartition("/")
    options: dict[str, Any] = {
        "method": MethodInfo(
            name=name,
            service_name=service,
            input=bytes,
            output=bytes,
            idempotency_level=IdempotencyLevel.UNKNOWN,
            stream_type=KINDS[call["kind"]],
        ),
        "headers": {name: text(value) for name, value in pairs(call)},
        "timeout_ms": call.get("timeout_ms"),
    }
    requests = [request(described) for described in call["requests"]]
    responses: list[dict[str, Any]] = []
    turn = asyncio.Semaphore(0)
    code, message = "OK", ""

    async def sent() -> AsyncIterator[bytes]:
        for message in requests:
            yield message
            if "turns" in call:
                await turn.acquire()

    async def receive(stream: AsyncGenerator[bytes]) -> str:
        async with aclosing(stream):
            async for message in stream:
                responses.append(response(message, call.get("tail", 0)))
                turn.release()
                if len(responses) == call.get("leave_after"):
                    return "LEFT"
                if len(responses) == call.get("cancel_after"):
                    return "CANCELLED"
        return "OK"

    with ResponseMetadata() as received:
        try:
            if call["kind"] == "unary":
                answer = await client.execute_unary(request=requests[0], **options)
                responses.append(response(answer, call.get("tail", 0)))
            elif call["kind"] == "bidi":
                code = await receive(client.execute_bidi_stream(request=sent(), **options))
            else:
                code = await receive(client.execute_server_stream(request=requests[0], **options))
        except ConnectError as error:
            code, message = "CANCELLED" if error.code is Code.CANCELED else error.code.name, error.message
    return result(code, message, responses, received.trailers.allitems())


async def main() -> None:
    await run(partial(make, clients(json.loads(sys.argv[1]))))


asyncio.run(main())
