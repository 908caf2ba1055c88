"""The rows over gRPC, carried by grpc.aio.

Strategy: handlers are registered without (de)serializers, so requests arrive as bytes and every error is ours
to map; see `grpc_calls`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, cast

import grpc
import grpc.aio

from triglot.config import NO_PORT, Config
from triglot.core.errors import Code
from triglot.protocols import Kind, Method, Service
from triglot.telemetry.store import Endpoint, Telemetry
from triglot.transports.grpc_calls import Calls, Trailing, endpoint_of

_STATUS = {status.value[0]: status for status in grpc.StatusCode}


class GrpcServer:
    """Serves rows on one port. `start` binds; `stop` ends streams, then waits for calls."""

    def __init__(self, services: Iterable[Service], config: Config, telemetry: Telemetry) -> None:
        self._addresses = [config.address(config.grpc_port)] if config.grpc_port != NO_PORT else []
        if config.grpc_socket:
            self._addresses.append(f"unix:{config.grpc_socket}")
        self._grace = config.grace
        self._server = grpc.aio.server(
            options=_options(config), maximum_concurrent_rpcs=config.max_connections or None
        )
        self._calls = calls = Calls(_abort, grpc.aio.InternalError)
        makers: dict[Kind, Callable[[Method, Endpoint], grpc.RpcMethodHandler]] = {
            Kind.UNARY: lambda *row: grpc.unary_unary_rpc_method_handler(calls.unary(*row)),
            Kind.SERVER_STREAM: lambda *row: grpc.unary_stream_rpc_method_handler(calls.server_stream(*row)),
            Kind.BIDI_STREAM: lambda *row: grpc.stream_stream_rpc_method_handler(calls.bidi_stream(*row)),
        }
        for service in services:
            handlers = {
                method.name: makers[method.kind](method, endpoint_of(telemetry, service, method))
                for method in service.methods
            }
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.name, handlers),))

    async def start(self) -> int:
        """Bind and serve; the port, if there is one. Raises `OSError` when an address cannot be bound."""
        ports = [self._bind(address) for address in self._addresses]
        await self._server.start()
        return ports[0]

    def _bind(self, address: str) -> int:
        try:
            return cast("int", self._server.add_insecure_port(address))
        except RuntimeError as error:
            raise OSError(f"cannot bind gRPC to {address}: {error}") from None

    async def stop(self) -> None:
        """Refuse new calls, end streams with UNAVAILABLE, wait for the rest as long as the grace period."""
        await self._calls.stop(asyncio.ensure_future(self._server.stop(self._grace)))


def _options(config: Config) -> list[tuple[str, int]]:
    return [
        # A second server on a used port must be an error, not half of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.max_message_size),
        ("grpc.max_send_message_length", -1),
        # Clients behind load balancers ping every 10 to 30 seconds; gRPC's own default would cut them off.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


async def _abort(context: Any, code: Code, details: str, trailing: Trailing) -> None:
    try:
        await context.abort(_STATUS[code], details, trailing)
    except grpc.aio.AbortError as aborted:
        # The context has it, and its frames have the context. grpc.aio raises it again when the handler returns.
        aborted.__traceback__ = aborted.__context__ = None
