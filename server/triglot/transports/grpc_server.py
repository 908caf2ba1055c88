"""The rows over gRPC, carried by grpc.aio.

Strategy: handlers are registered without (de)serializers, so requests arrive as bytes and every error is ours
to map; see `grpc_calls`, and `gathering` for what makes them cheaper here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

import grpc
import grpc.aio

from triglot.config import NO_PORT, Config
from triglot.core.errors import Code
from triglot.protocols import Kind, Method, Service
from triglot.telemetry.store import Endpoint, Telemetry
from triglot.transports.aio_repeats import answer_repeated
from triglot.transports.aio_requests import AioRequests
from triglot.transports.gathering import Gathering, gathered
from triglot.transports.grpc_calls import BidiStream, Calls, Trailing, endpoint_of
from triglot.transports.tls import Tls

LONGEST_MS = 2**31 - 1
COMPRESSION_LEVELS = {"none": 0, "gzip": 1, "deflate": 3}
"""Of the codings that the client accepts, the first or the last. grpc's `compression` argument asks nobody."""
_STATUS = {status.value[0]: status for status in grpc.StatusCode}


class GrpcServer:
    """Serves rows on one port. `start` binds; `stop` ends streams, then waits for calls.

    `shared`: other processes listen on the port, too. Raises `ConfigError` for a certificate that cannot be used.
    """

    def __init__(
        self, services: Iterable[Service], config: Config, telemetry: Telemetry, *, shared: bool = False
    ) -> None:
        self._config = config
        self._tls = Tls(config) if config.tls_certificate else None
        self._grace = config.grace
        self._server = grpc.aio.server(
            options=_options(config, shared),
            maximum_concurrent_rpcs=config.max_connections or None,
        )
        self._calls = calls = Calls(_abort, grpc.aio.InternalError)
        self._gathering = gathering = Gathering()
        makers: dict[Kind, Callable[[Method, Endpoint], grpc.RpcMethodHandler]] = {
            Kind.UNARY: lambda *row: grpc.unary_unary_rpc_method_handler(
                gathered(partial(answer_repeated, calls.unary(*row)), gathering)
            ),
            Kind.SERVER_STREAM: lambda *row: grpc.unary_stream_rpc_method_handler(calls.server_stream(*row)),
            Kind.BIDI_STREAM: lambda *row: grpc.stream_stream_rpc_method_handler(
                _gathered_stream(calls.bidi_stream(*row), gathering)
            ),
        }
        rows = {
            f"/{service.name}/{method.name}": makers[method.kind](method, endpoint_of(telemetry, service, method))
            for service in services
            for method in service.methods
        }
        self._server.add_generic_rpc_handlers((_Rows(rows, gathering),))

    async def start(self) -> int:
        """Bind and serve; the port, if there is one. Raises `OSError` when an address cannot be bound."""
        config, port = self._config, 0
        if config.grpc_port != NO_PORT:
            port = self._bind(config.address(config.grpc_port), self._tls)
        if config.grpc_socket:
            self._bind(f"unix:{config.grpc_socket}", None)
        await self._server.start()
        self._gathering.open()
        return port

    def _bind(self, address: str, tls: Tls | None) -> int:
        try:
            if tls is not None:
                return cast("int", self._server.add_secure_port(address, _credentials(tls)))
            return cast("int", self._server.add_insecure_port(address))
        except RuntimeError as error:
            raise OSError(f"cannot bind gRPC to {address}: {error}") from None

    async def retire(self) -> None:
        """Nothing: grpc.aio closes its port, and has connections go elsewhere, only when it stops."""

    async def stop(self) -> None:
        """Refuse new calls, end streams with UNAVAILABLE, wait for the rest as long as the grace period."""
        await self._calls.stop(asyncio.ensure_future(self._server.stop(self._grace)))
        self._gathering.close()


def _gathered_stream(stream: BidiStream, gathering: Gathering) -> BidiStream:
    async def handle(requests: AsyncIterable[bytes], context: Any) -> None:
        await stream(AioRequests(requests, context.read, grpc.aio.EOF, gathering), context)

    return handle


class _Rows(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types.
    """Finds the row of a call that has come, by its path."""

    def __init__(self, rows: Mapping[str, grpc.RpcMethodHandler], gathering: Gathering) -> None:
        self._rows = rows
        self._gathering = gathering

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """None: there is no such row."""
        self._gathering.taken()
        return self._rows.get(handler_call_details.method)


def _options(config: Config, shared: bool) -> list[tuple[str, int]]:
    # Times without limit are grpc's defaults.
    times = {
        "grpc.max_connection_age_ms": config.max_connection_age,
        "grpc.max_connection_age_grace_ms": config.max_connection_age_grace,
        "grpc.keepalive_time_ms": config.keepalive_time,
        "grpc.keepalive_timeout_ms": config.keepalive_timeout,
        # Newer ones wait so long for the answer, whatever the option above says.
        "grpc.http2.ping_timeout_ms": config.keepalive_timeout,
    }
    return [
        # A second server on a used port must be an error, not half of the calls, unless it is meant.
        ("grpc.so_reuseport", int(shared)),
        ("grpc.default_compression_level", COMPRESSION_LEVELS[config.grpc_compression]),
        ("grpc.max_allowed_incoming_connections", config.max_sockets),
        *((name, round(min(1000 * seconds, LONGEST_MS))) for name, seconds in times.items() if seconds),
        ("grpc.max_receive_message_length", config.max_message_size),
        ("grpc.max_send_message_length", -1),
        # Clients behind load balancers ping every 10 to 30 seconds; gRPC's own default would cut them off.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    def configuration() -> grpc.ServerCertificateConfiguration:
        pem = tls.pem()
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.client_ca or None)

    one_at_a_time = threading.Lock()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """grpc asks before each connection, on threads of its own; None: as before."""
        with one_at_a_time:
            return configuration() if tls.renew() else None

    mutual = bool(tls.pem().client_ca)
    return grpc.dynamic_ssl_server_credentials(configuration(), renewed, require_client_authentication=mutual)


async def _abort(context: Any, code: Code, details: str, trailing: Trailing) -> None:
    try:
        await context.abort(_STATUS[code], details, trailing)
    except grpc.aio.AbortError as aborted:
        # The context has it, and its frames have the context. grpc.aio raises it again when the handler returns.
        aborted.__traceback__ = aborted.__context__ = None
