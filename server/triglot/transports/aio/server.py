"""The gRPC server on grpc.aio.

Strategy: handlers are registered without (de)serializers, so that requests arrive as bytes, and all errors are
mapped by `grpc_calls`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, cast

import grpc
import grpc.aio

from triglot.config.options import NO_PORT, Config
from triglot.core.call import Call
from triglot.core.errors import (
    RETRY_AFTER_SECONDS,
    QueueFull,
    ServingError,
    Unimplemented,
)
from triglot.core.operation import EVERYTHING, GRPC, Authorizer, Permission
from triglot.protocols.rows import Kind, Service
from triglot.telemetry.store import Telemetry
from triglot.transports.aio.calls import answer, answer_stream, converse, refuse
from triglot.transports.aio.gathering import Gathering
from triglot.transports.aio.unsent import UnsentAnswers, host_of
from triglot.transports.certificates import names_of_context
from triglot.transports.grpc_calls import GrpcCalls, GrpcRow
from triglot.transports.http2.core.limits import DEFAULTS, MAX_HEADER_BYTES, Limits
from triglot.transports.listening import IdleConnection, max_sockets
from triglot.transports.off_loop import OFF_LOOP_BYTES
from triglot.transports.request_bytes import RequestBytes
from triglot.transports.tls import Tls

log = logging.getLogger(__name__)

MAX_MS = MAX_SECONDS = MAX_WAITING = 2**31 - 1
MAX_OPEN_CALLS = 65_536
"""Limit on open calls without `max_connections`: each takes some 15 KB in grpc.aio, however small."""
COMPRESSION_LEVELS = {"none": 0, "gzip": 1, "deflate": 3}
"""The first or last coding that the client accepts. (grpc's `compression` argument ignores what it accepts.)"""


class GrpcServer:
    """Serves gRPC rows on a port and a Unix socket. `start` binds; `stop` ends streams, then waits for other
    calls.

    `limits`: of HTTP/2, as far as grpc's core has options for them. `request_bytes` is shared with the REST
    server. `access` decides which calls a client may make; None: all. `shared`: other processes listen on the
    port too. Raise `ConfigError` for a certificate that cannot be used.
    """

    def __init__(
        self,
        services: Iterable[Service],
        config: Config,
        telemetry: Telemetry,
        limits: Limits | None = None,
        *,
        request_bytes: RequestBytes | None = None,
        access: Authorizer | None = None,
        shared: bool = False,
    ) -> None:
        limits = limits or DEFAULTS
        self._config = config
        self._tls = Tls(config) if config.tls_certificate else None
        self._grace = config.grace
        self._server = grpc.aio.server(options=_options(config, limits, shared))
        self._calls = calls = GrpcCalls(request_bytes or RequestBytes(config.total_queue_bytes(None)))
        self._unsent = unsent = UnsentAnswers(limits)
        gathering = Gathering()
        rows = {
            path: _handler(row, unsent, gathering) if access is None else _checked(row, unsent, gathering, access)
            for path, row in calls.rows(services, telemetry).items()
        }
        max_calls = config.max_connections or MAX_OPEN_CALLS
        self._server.add_generic_rpc_handlers((_Rows(rows, unsent, max_calls),))

    async def start(self) -> int:
        """Bind and serve; returns the port, or 0 without one. Raise `OSError` when an address cannot be bound."""
        config, port = self._config, 0
        if config.grpc_port != NO_PORT:
            port = self._bind(config.address(config.grpc_port), self._tls)
        if config.grpc_socket:
            self._bind(f"unix:{config.grpc_socket}", None)
        await self._server.start()
        self._unsent.start(port)
        return port

    def _bind(self, address: str, tls: Tls | None) -> int:
        try:
            if tls is not None:
                return cast("int", self._server.add_secure_port(address, _credentials(tls)))
            return cast("int", self._server.add_insecure_port(address))
        except RuntimeError as error:
            raise OSError(f"cannot bind gRPC to {address}: {error}") from None

    def idle_connections(self) -> list[IdleConnection]:
        """Return none: grpc.aio does not show its connections."""
        return []

    async def retire(self) -> None:
        """Do nothing: grpc.aio closes its port, and makes clients connect elsewhere, only when it stops."""

    async def stop(self) -> None:
        """Reject new calls, end streams with UNAVAILABLE, and wait for other calls for the grace period."""
        await self._calls.stop(asyncio.ensure_future(self._server.stop(self._grace)))
        self._unsent.close()


def _handler(row: GrpcRow, unsent: UnsentAnswers, gathering: Gathering) -> grpc.RpcMethodHandler:
    """Return the handler of a row without access control: every client may make the call."""
    if row.kind is Kind.UNARY:

        async def unary(data: bytes, context: Any) -> bytes:
            return await _answer(row, data, context, EVERYTHING, unsent, gathering)

        return grpc.unary_unary_rpc_method_handler(unary)
    if row.kind is Kind.SERVER_STREAM:

        async def stream(data: bytes, context: Any) -> None:
            await answer_stream(row, data, context, EVERYTHING, unsent)

        return grpc.unary_stream_rpc_method_handler(stream)

    async def conversation(_: object, context: Any) -> None:
        await converse(row, context, EVERYTHING, unsent)

    return grpc.stream_stream_rpc_method_handler(conversation)


def _checked(
    row: GrpcRow, unsent: UnsentAnswers, gathering: Gathering, access: Authorizer
) -> grpc.RpcMethodHandler:
    """Return the handler of a row with access control, which is checked before the request is read.

    All rows are registered as streams, which are the same on the wire: for other calls grpc.aio reads the
    request first.
    """

    async def handle(_: object, context: Any) -> None:
        call = Call(read_metadata=context.invocation_metadata, peer=host_of(context.peer()))
        try:
            permission = call.permission = _permission(row, context, access)
            limits = permission.enter()
        except ServingError as error:
            row.count_refusal(call, error)
            await refuse(context, error)
            return
        try:
            if row.kind is Kind.BIDI_STREAM:
                await converse(row, context, permission, unsent)
                return
            data = await context.read()
            if data is grpc.aio.EOF:
                await refuse(context, Unimplemented("the method takes one request, got none"))
            elif row.kind is Kind.UNARY:
                message = await _answer(row, data, context, permission, unsent, gathering)
                if not context.code():  # Otherwise the call has ended with a status.
                    await context.write(message)
            else:
                await answer_stream(row, data, context, permission, unsent)
        finally:
            if limits is not None:
                limits.leave()

    return grpc.stream_stream_rpc_method_handler(handle)


def _permission(row: GrpcRow, context: Any, access: Authorizer) -> Permission:
    """Return the permission of a call's client. Raise `ServingError` if the client may not make the call."""
    names = access.fields[GRPC]
    fields = [(name, value) for name, value in context.invocation_metadata() if name in names]
    return access.permission(row.method.operation, GRPC, fields, partial(names_of_context, context))


async def _answer(
    row: GrpcRow, data: bytes, context: Any, permission: Permission, unsent: UnsentAnswers, gathering: Gathering
) -> bytes:
    """Answer a unary call unless its client has too many unread responses."""
    if unsent.bytes and (refused := unsent.backlog(context.peer())) is not None:
        await refuse(context, refused)
        return b""
    # A large message takes longer than what waiting saves.
    if len(data) <= OFF_LOOP_BYTES and (turn := gathering.join()) is not None:
        await turn
    message = await answer(row, data, context, permission)
    if message:
        peer = context.peer()
        # Meanwhile more responses to this client may be waiting.
        if (refused := unsent.backlog(peer)) is not None:
            await refuse(context, refused)
        else:
            unsent.add_last(peer, len(message))
    return message


class _Rows(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types.
    """Finds the handler of a call by its path, and rejects calls when `max_calls` are open."""

    def __init__(
        self,
        rows: Mapping[str, grpc.RpcMethodHandler],
        unsent: UnsentAnswers,
        max_calls: int,
    ) -> None:
        self._rows = rows
        self._unsent = unsent
        self._max_calls = max_calls
        self._open = 0
        # A stream, so that the status does not wait for the request.
        self._refusal = grpc.stream_stream_rpc_method_handler(self._refuse)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Return the handler; None for an unknown path."""
        row = self._rows.get(handler_call_details.method)
        if row is not None and self._open >= self._max_calls:
            return self._refusal
        task = asyncio.current_task()
        assert task is not None  # grpc.aio looks a handler up in the call's own task.
        self._open += 1
        task.add_done_callback(partial(self._done, handler_call_details.method))
        return row

    def _done(self, method: str, task: asyncio.Task[Any]) -> None:
        self._open -= 1
        self._unsent.done(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, grpc.aio.InternalError):
            # grpc.aio ignores this only if it knows already that the client has ended the call.
            log.info("%s: the client took no response: it refused its size, or disconnected", method)
        else:
            log.error("%s: unexpected error", method, exc_info=error)

    async def _refuse(self, _: object, context: Any) -> None:
        full = QueueFull("Concurrent RPC limit exceeded!", retry_after=RETRY_AFTER_SECONDS)
        await refuse(context, full)


def _options(config: Config, limits: Limits, shared: bool) -> list[tuple[str, int]]:
    # grpc's default is no limit.
    times = {
        "grpc.max_connection_age_ms": config.max_connection_age,
        "grpc.max_connection_age_grace_ms": config.max_connection_age_grace,
        "grpc.keepalive_time_ms": config.keepalive_time,
        "grpc.keepalive_timeout_ms": config.keepalive_timeout,
        # Newer grpc versions wait this long for the reply, whatever the option above says.
        "grpc.http2.ping_timeout_ms": config.keepalive_timeout,
    }
    return [
        # A second server on a used port must be an error, and not get half of the calls, unless `shared`.
        ("grpc.so_reuseport", int(shared)),
        ("grpc.default_compression_level", COMPRESSION_LEVELS[config.grpc_compression]),
        ("grpc.max_allowed_incoming_connections", max_sockets(config)),
        *((name, round(min(1000 * seconds, MAX_MS))) for name, seconds in times.items() if seconds),
        ("grpc.max_receive_message_length", config.max_message_size),
        # grpc answers CANCELLED to calls beyond 1,000 that wait to be accepted, and after 30 s. Here the number of
        # streams is limited instead, and clients queue further calls.
        ("grpc.server.max_pending_requests", MAX_WAITING),
        ("grpc.server.max_pending_requests_hard_limit", MAX_WAITING),
        ("grpc.server_max_unrequested_time_in_server", MAX_SECONDS),
        ("grpc.max_concurrent_streams", limits.max_streams),
        # It counts ended calls that are not released yet, and resets calls of clients that keep within the limit.
        ("grpc.http.overload_protection", 0),
        ("grpc.max_send_message_length", -1),
        # Above the first, 8 KiB by gRPC's default, it refuses calls at random.
        ("grpc.max_metadata_size", MAX_HEADER_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_HEADER_BYTES),
        # Clients behind load balancers ping every 10 to 30 seconds; gRPC's own default would cut them off.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    def configuration() -> grpc.ServerCertificateConfiguration:
        pem = tls.pem()
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.client_ca or None)

    lock = threading.Lock()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Return a new configuration, None for no change. grpc calls it before each connection, on its threads."""
        with lock:
            return configuration() if tls.renew() else None

    mutual = bool(tls.pem().client_ca)
    return grpc.dynamic_ssl_server_credentials(configuration(), renewed, require_client_authentication=mutual)
