"""The REST server on Triglot's own HTTP/1.1 implementation."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from triglot.config.options import Config
from triglot.transports.http1.connection import Connection, Connections
from triglot.transports.listening import IdleConnection
from triglot.transports.rest.calls import HttpCalls
from triglot.transports.rest.coroutines import CLEAN_UP_SECONDS
from triglot.transports.rest.server import HttpServer


class Http1Server(HttpServer):
    """See the base class."""

    def __init__(self, calls: HttpCalls, config: Config, *, bound: Sequence[socket.socket] = ()) -> None:
        super().__init__(calls, config, bound=bound)
        self.connections = Connections(calls, config.rest_keepalive_time)
        self._is_closed = False

    async def set_up(self) -> None:
        """See the base class."""

    def make(self, remote: str) -> Connection:
        return Connection(self.connections, remote)

    def protocol(self, remote: str) -> Connection | None:
        return None if self._is_closed else self.make(remote)

    def count_connections(self) -> int:
        return len(self.connections.open)

    def idle_connections(self) -> list[IdleConnection]:
        """See the base class."""
        return [connection for connection in self.connections.open if connection.is_idle]

    async def close(self) -> None:
        self._is_closed = True
        for connection in list(self.connections.open):
            connection.close_idle()
        await self._wait_until_closed()
        for connection in list(self.connections.open):
            connection.abort()
        await self._wait_until_closed()

    async def _wait_until_closed(self) -> None:
        try:
            async with asyncio.timeout(CLEAN_UP_SECONDS):
                while self.connections.open:
                    self.connections.all_closed.clear()
                    await self.connections.all_closed.wait()
        except TimeoutError:
            pass  # Some clients do not read their responses.
