"""A channel to a server, and the calls on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

SERVICE = "/inference.GRPCInferenceService/"


@contextmanager
def grpc_channel(port: int) -> Iterator[grpc.Channel]:
    """A channel of its own connection: grpc shares those of equal channels otherwise."""
    with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


def rpc(channel: grpc.Channel, method: str, reply: Any) -> Any:
    """The callable of a unary RPC; `method` alone means KServe's service."""
    return channel.unary_unary(
        method if "/" in method else SERVICE + method,
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=reply.FromString,
    )
