"""The rows over gRPC, on HTTP/2 spoken by ourselves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from triglot.config import NO_PORT, Config
from triglot.core.errors import Code
from triglot.protocols import Kind, Service
from triglot.telemetry.store import Telemetry
from triglot.transports.grpc_calls import Calls, Trailing, endpoint_of
from triglot.transports.h2.limits import DEFAULTS, Limits
from triglot.transports.h2.listening import bind
from triglot.transports.h2.protocol import H2Protocol
from triglot.transports.h2.rpc import Rpc, StreamGone

LATE_SECONDS = 1.0
"""For what is cancelled at the end of the grace period to say so."""
UNBOUNDED = 2**63


class H2Server:
    """Serves rows on one port. `start` binds; `stop` ends streams, then waits for calls."""

    def __init__(
        self, services: Iterable[Service], config: Config, telemetry: Telemetry, limits: Limits = DEFAULTS
    ) -> None:
        self.limits = limits
        self.most_bytes = config.max_message_size
        self.most_held_bytes = config.max_total_queue_bytes or UNBOUNDED
        self.held_bytes = 0
        """Of requests that have not come as a whole, or wait for a stream's handler."""
        self.open_calls = 0
        self.stopping = False
        self.connections: set[H2Protocol] = set()
        self.tasks: set[asyncio.Task[Any]] = set()
        self._config = config
        self._calls = calls = Calls(_abort, StreamGone)
        makers: dict[Kind, Any] = {
            Kind.UNARY: calls.unary,
            Kind.SERVER_STREAM: calls.server_stream,
            Kind.BIDI_STREAM: calls.bidi_stream,
        }
        self.rows: dict[str, tuple[Kind, Any]] = {
            f"/{service.name}/{method.name}": (
                method.kind,
                makers[method.kind](method, endpoint_of(telemetry, service, method)),
            )
            for service in services
            for method in service.methods
        }
        self._listening: list[asyncio.Server] = []
        self._socket_file: tuple[Path, int] | None = None

    @property
    def is_full(self) -> bool:
        """Whether more calls are open than may be."""
        return 0 < self._config.max_connections < self.open_calls

    async def start(self) -> int:
        """Bind and serve; the port, if there is one. Raises `OSError` when an address cannot be bound."""
        loop = asyncio.get_running_loop()
        config, port = self._config, 0
        if config.grpc_port != NO_PORT:
            sockets = await bind(config.host, config.grpc_port)
            port = sockets[0].getsockname()[1]
            for one in sockets:
                self._listening.append(await loop.create_server(lambda: H2Protocol(self), sock=one))
        if config.grpc_socket:
            path = Path(config.grpc_socket)
            self._listening.append(await loop.create_unix_server(lambda: H2Protocol(self), path))
            self._socket_file = path, path.stat().st_ino  # noqa: ASYNC240 - it is there, and local.
        return port

    async def stop(self) -> None:
        """Take no new connections, end streams with UNAVAILABLE, wait for other calls for the grace period."""
        self.stopping = True
        for server in self._listening:
            server.close()
        self._remove_socket_file()
        for connection in self.connections:
            connection.drain()
        await self._calls.stop(asyncio.ensure_future(self._finish()))

    def _remove_socket_file(self) -> None:
        if self._socket_file is None:
            return
        path, number = self._socket_file
        try:
            if path.stat().st_ino == number:  # Not another server's, which has taken its place.
                path.unlink()
        except FileNotFoundError:
            pass  # From Python 3.13 on, asyncio has removed it.

    async def _finish(self) -> None:
        await self._lost(self._config.grace)
        late = [task for task in self.tasks if not task.cancelling()]
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=LATE_SECONDS)
        for connection in list(self.connections):
            connection.close()
        await self._lost(LATE_SECONDS)
        for connection in list(self.connections):
            connection.abort()
        await self._lost(LATE_SECONDS)

    async def _lost(self, seconds: float) -> None:
        """Wait until there is no connection any more, but no longer than that."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self.connections and (left := end - loop.time()) > 0:
            await asyncio.wait([connection.lost for connection in self.connections], timeout=left)


async def _abort(context: Rpc, code: Code, details: str, trailing: Trailing) -> None:
    context.finish(int(code), details, trailing)
