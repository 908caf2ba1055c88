"""Opens a gRPC channel to a server, and makes the callables of its methods."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

SERVICE = "/inference.GRPCInferenceService/"


@contextmanager
def grpc_channel(port: int) -> Iterator[grpc.Channel]:
    """Yield a channel with a connection of its own; by default, equal channels share a connection in grpc."""
    with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


def rpc(channel: grpc.Channel, method: str, reply: Any) -> Any:
    """Return the callable of a unary RPC with responses of class `reply`; `method` without "/" is KServe's."""
    return channel.unary_unary(
        method if "/" in method else SERVICE + method,
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=reply.FromString,
    )
