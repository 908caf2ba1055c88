"""The gRPC server on Triglot's own HTTP/2 implementation."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from triglot.config.options import NO_PORT, Config
from triglot.core.call import TimerWheel
from triglot.core.operation import Authorizer
from triglot.protocols.rows import Service
from triglot.telemetry.store import Telemetry
from triglot.transports.grpc_calls import GrpcCalls
from triglot.transports.http2.buffers import BufferPool
from triglot.transports.http2.compressing import CompressingRpc
from triglot.transports.http2.core.connection import read_buffer
from triglot.transports.http2.core.limits import DEFAULTS, MAX_FIELDS_BYTES, MAX_HEADER_BYTES, Limits
from triglot.transports.http2.protocol import BusyPoll
from triglot.transports.http2.protocol_sniffer import HTTP1, HTTP2, ProtocolSniffer
from triglot.transports.http2.roles import Connected, MakeRpc, Undecided
from triglot.transports.http2.rpc import Rpc
from triglot.transports.listening import IdleConnection, Listener, bind, bind_file, listen_on, max_sockets
from triglot.transports.request_bytes import RequestBytes
from triglot.transports.rest.server import HttpServer
from triglot.transports.tls import Tls

RELEASE_SECONDS = 10.0
"""Seconds without a large message, after which the memory for such messages is released."""
LATE_SECONDS = 1.0
"""Seconds for calls that are cancelled at the end of the grace period to send their status."""
STRANGERS_WINDOW = 64 * 1024
"""Initial window of streams where access is checked: bounds what rejected requests may send in vain."""
UNBOUNDED = 2**63


class H2Server:
    """Serves rows on a port and a Unix socket. `start` binds; `stop` ends streams, then waits for other calls.

    `limits` override those of the configuration. `request_bytes` is shared with the REST server, `rest`, which
    serves connections that speak HTTP/1.1, and requests over HTTP/2 that are not gRPC calls. `bound`: the
    port's sockets, if another process has bound them. `access` decides which calls a client may make; None:
    all. Raise `ConfigError` for a certificate that cannot be used.
    """

    def __init__(
        self,
        services: Iterable[Service],
        config: Config,
        telemetry: Telemetry,
        limits: Limits | None = None,
        request_bytes: RequestBytes | None = None,
        *,
        rest: HttpServer | None = None,
        access: Authorizer | None = None,
        bound: Sequence[socket.socket] = (),
    ) -> None:
        self.limits = limits or Limits(
            first_window=DEFAULTS.first_window if access is None else STRANGERS_WINDOW,
            idle=config.keepalive_time or math.inf,
            ping_timeout=config.keepalive_timeout,
            max_age=config.max_connection_age or math.inf,
            max_age_grace=config.max_connection_age_grace or math.inf,
            max_header_list=MAX_HEADER_BYTES if rest is None else MAX_FIELDS_BYTES,
        )
        self.max_message_size = config.max_message_size
        self.request_bytes = request_bytes or RequestBytes(config.total_queue_bytes(None))
        """Counts bytes of requests that have not arrived completely, or wait for a stream's handler."""
        self.buffers = BufferPool()
        self.read_buffer = read_buffer()
        """Shared by all connections: the bytes of one have been handled before another one reads."""
        self.timers = TimerWheel(asyncio.get_running_loop())
        """Timers of calls that do not end at their deadline on their own."""
        self._releasing: asyncio.TimerHandle | None = None
        self.open_calls = 0
        self.open_bytes = 0
        """Approximate memory of all open calls in bytes, without their bodies."""
        self.max_calls = config.max_connections or UNBOUNDED
        """Limit on open calls."""
        self._busy_poll = BusyPoll(asyncio.get_running_loop(), config.busy_poll)
        self.stopping = False
        self.connections: set[Connected] = set()
        self.sniffers: set[Undecided] = set()
        """Connections whose protocol is not known yet."""
        self.tasks: set[asyncio.Task[None]] = set()
        self._config = config
        self.compression = config.grpc_compression
        self.make_rpc: MakeRpc = Rpc if self.compression == "none" else CompressingRpc
        self._calls = calls = GrpcCalls(self.request_bytes, scatters=True)
        self.rows = calls.rows(services, telemetry)
        self.access = access
        self.rest = rest
        self._bound = bound
        protocols = [HTTP2] if rest is None else [HTTP2, HTTP1]
        self._tls = Tls(config, *protocols) if config.tls_certificate else None
        self._listener: Listener | None = None
        self._socket_file: tuple[Path, int] | None = None

    @property
    def unsent(self) -> int:
        """Bytes of responses that clients have not received."""
        return sum(connection.unsent for connection in self.connections)

    async def start(self) -> int:
        """Bind and serve; returns the port, or 0 without one. Raise `OSError` when an address cannot be bound."""
        config, port = self._config, 0
        sockets: list[socket.socket] = []
        if config.grpc_port != NO_PORT:
            sockets += listen_on(self._bound) or await bind(config.host, config.grpc_port)
            port = sockets[0].getsockname()[1]
        if config.grpc_socket:
            path = Path(config.grpc_socket)
            sockets.append(bind_file(path))
            self._socket_file = path, path.stat().st_ino  # noqa: ASYNC240 - it is there, and local.
        self._listener = Listener(
            sockets,
            lambda remote: ProtocolSniffer(self, self._busy_poll, self.rest, remote),
            max_connections=max_sockets(config),
            tls=self._tls,
            handshake_seconds=self.limits.settings_timeout,
            idle=self._idle_here,
            idle_of_other_port=tuple if config.rest_with_grpc else self._idle_rest,
        )
        self._listener.start()
        self._release_buffers()
        return port

    def idle_connections(self) -> list[IdleConnection]:
        """Return the connections that wait for a call, or for their first byte."""
        return [*self.sniffers, *(connection for connection in self.connections if connection.is_idle)]

    def _idle_here(self) -> list[IdleConnection]:
        """As `idle_connections`, with REST's if all of them are on this port."""
        rest = self._idle_rest() if self._config.rest_with_grpc else ()
        return [*self.idle_connections(), *rest]

    def _idle_rest(self) -> list[IdleConnection]:
        return [] if self.rest is None else self.rest.idle_connections()

    def _release_buffers(self) -> None:
        """Release unused buffers regularly, so that a burst of large messages does not hold memory for ever."""
        self.buffers.release_unused()
        self._releasing = asyncio.get_running_loop().call_later(RELEASE_SECONDS, self._release_buffers)

    async def retire(self) -> None:
        """Take no more connections, because another process does.

        All calls, streams too, have the grace period to end.
        """
        self.stopping = True
        if self._listener is not None:
            self._listener.stop()
            await self._listener.settle(LATE_SECONDS)
        for connection in self.connections:
            connection.drain()
        await self._wait_closed(self._config.grace)

    async def stop(self) -> None:
        """Take no new connections, end streams with UNAVAILABLE, and wait for other calls for the grace period."""
        self.stopping = True
        if self._releasing is not None:
            self._releasing.cancel()
        if self._listener is not None:
            self._listener.stop()
        self._remove_socket_file()
        for sniffer in self.sniffers:
            sniffer.shorten_wait()
        for connection in self.connections:
            connection.drain()
        await self._calls.stop(asyncio.ensure_future(self._finish()))

    def _remove_socket_file(self) -> None:
        if self._socket_file is None:
            return
        path, number = self._socket_file
        try:
            if path.stat().st_ino == number:  # Not the file of another server that has replaced it.
                path.unlink()
        except FileNotFoundError:
            pass  # It was removed already.

    async def _finish(self) -> None:
        if self._listener is not None:
            await self._listener.settle(LATE_SECONDS)
        await self._wait_closed(self._config.grace)
        for connection in self.connections:
            connection.cancel_calls()
        for task in list(self.tasks):
            if not task.cancelling():
                task.cancel()
        await self._wait_closed(LATE_SECONDS)
        for connection in list(self.connections):
            connection.close()
        await self._wait_closed(LATE_SECONDS)
        for left in self._open():
            left.abort()
        await self._wait_closed(LATE_SECONDS)

    async def _wait_closed(self, seconds: float) -> None:
        """Wait up to `seconds` until all connections are closed."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (connections := self._open()) and (left := end - loop.time()) > 0:
            await asyncio.wait([connection.closed for connection in connections], timeout=left)

    def _open(self) -> list[Connected | Undecided]:
        return [*self.connections, *self.sniffers]
