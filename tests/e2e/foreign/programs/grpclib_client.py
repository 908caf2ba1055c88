"""Makes calls with grpclib."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from functools import partial
from typing import Any

from calls import pairs, request, response, result, run
from grpclib.client import Channel, Stream
from grpclib.config import Configuration
from grpclib.const import Cardinality
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError, StreamTerminatedError

KINDS = {
    "unary": Cardinality.UNARY_UNARY,
    "server_stream": Cardinality.UNARY_STREAM,
    "bidi": Cardinality.STREAM_STREAM,
}


class Bytes(CodecBase):
    """Messages as they are on the wire."""

    __content_subtype__ = "proto"

    def encode(self, message: bytes, message_type: object) -> bytes:
        return message

    def decode(self, data: bytes, message_type: object) -> bytes:
        return data


def open_channel(connection: dict[str, Any]) -> Channel:
    tls = None
    if connection["ca"]:
        tls = ssl.create_default_context(cafile=connection["ca"])
        tls.set_alpn_protocols(["h2"])
        if connection["certificate"]:
            tls.load_cert_chain(connection["certificate"], connection["key"])
    options: dict[str, Any] = {"codec": Bytes(), "ssl": tls}
    if connection["keepalive_ms"]:  # There is no public name for it.
        options["config"] = Configuration(_keepalive_time=connection["keepalive_ms"] / 1000)
    host, _, port = connection["address"].rpartition(":")
    return Channel(path=port, **options) if host == "unix" else Channel(host, int(port), **options)


async def make(channel: Channel, call: dict[str, Any]) -> dict[str, Any]:
    """Make a call; returns its result."""
    if "compression" in call:
        return result("UNSUPPORTED", "the package has no compression", [])
    timeout = call["timeout_ms"] / 1000 if "timeout_ms" in call else None
    stream = channel.request(
        call["method"], KINDS[call["kind"]], bytes, bytes, timeout=timeout, metadata=pairs(call)
    )
    responses: list[dict[str, Any]] = []
    code, message = "OK", ""
    try:
        async with stream:
            code = await exchange(stream, call, responses)
    except GRPCError as error:
        code, message = error.status.name, error.message or ""
    except (TimeoutError, StreamTerminatedError, OSError) as error:
        code = "DEADLINE_EXCEEDED" if isinstance(error, TimeoutError) else type(error).__name__
        message = str(error)
    return result(code, message, responses, (stream.trailing_metadata or {}).items())


async def exchange(stream: Stream[bytes, bytes], call: dict[str, Any], responses: list[dict[str, Any]]) -> str:
    """Send the requests, all or each after a response, and add to the responses; returns how that ended."""
    requests = [request(described) for described in call["requests"]]
    left = iter(requests)

    async def send() -> None:
        message = next(left, None)
        await (stream.end() if message is None else stream.send_message(message))

    await stream.send_request()
    for _ in range(1 if "turns" in call else len(requests) + 1):
        await send()
    async for message in stream:
        responses.append(response(message, call.get("tail", 0)))
        if "turns" in call:
            await send()
        if len(responses) == call.get("leave_after"):
            return "LEFT"
        if len(responses) == call.get("cancel_after"):
            await stream.cancel()
            return "CANCELLED"
    return "OK"


async def main() -> None:
    async with open_channel(json.loads(sys.argv[1])) as channel:
        await run(partial(make, channel))


asyncio.run(main())
