"""Makes calls with grpcio, without asyncio."""

from __future__ import annotations

import asyncio
import json
import queue
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from calls import pairs, request, response, result, run

COMPRESSION = {"gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}
RETRIES = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}


def open_channel(connection: dict[str, Any]) -> grpc.Channel:
    """Return the channel."""
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        # The default of 16 KiB is for the text of an error, too.
        ("grpc.max_metadata_size", 65536),
    ]
    if connection["keepalive_ms"]:
        options += [
            ("grpc.keepalive_time_ms", connection["keepalive_ms"]),
            ("grpc.http2.max_pings_without_data", 0),
        ]
    if connection["retries"]:
        options.append(("grpc.service_config", json.dumps(RETRIES)))
    if not connection["ca"]:
        return grpc.insecure_channel(connection["address"], options)
    files = [
        Path(connection[name]).read_bytes() if connection[name] else None for name in ("ca", "key", "certificate")
    ]
    return grpc.secure_channel(connection["address"], grpc.ssl_channel_credentials(*files), options)


def make(channel: grpc.Channel, call: dict[str, Any]) -> dict[str, Any]:
    """Make a call; returns its result."""
    requests = [request(described) for described in call["requests"]]
    options: dict[str, Any] = {
        "metadata": pairs(call),
        "timeout": call["timeout_ms"] / 1000 if "timeout_ms" in call else None,
        "compression": COMPRESSION.get(call.get("compression", "")),
    }
    responses: list[dict[str, Any]] = []
    stop = call.get("cancel_after", 0) or call.get("leave_after", 0)
    turns: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def in_turns() -> Iterator[bytes]:
        while (message := turns.get()) is not None:
            yield message

    kind, method = call["kind"], call["method"]
    try:
        if kind == "unary":
            message, rpc = channel.unary_unary(method).with_call(requests[0], **options)
            responses.append(response(message, call.get("tail", 0)))
            return result("OK", "", responses, rpc.trailing_metadata())
        if kind == "server_stream":
            rpc = channel.unary_stream(method)(requests[0], **options)
        else:
            left = iter([*requests, None])
            if "turns" in call:
                turns.put(next(left))
            rpc = channel.stream_stream(method)(in_turns() if "turns" in call else iter(requests), **options)
        for message in rpc:
            responses.append(response(message, call.get("tail", 0)))
            if "turns" in call:
                turns.put(next(left))
            if len(responses) == stop:
                if "leave_after" in call:
                    break
                rpc.cancel()
        else:
            return result("OK", "", responses, rpc.trailing_metadata())
        del rpc
        return result("LEFT", "", responses)
    except grpc.RpcError as error:
        turns.put(None)
        return result(error.code().name, error.details(), responses, error.trailing_metadata())


async def main() -> None:
    with open_channel(json.loads(sys.argv[1])) as channel:
        await run(partial(make, channel))


asyncio.run(main())
