"""The REST server on aiohttp."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from functools import partial

from aiohttp import web

from triglot.config.options import Config
from triglot.transports.aiohttp.connections import FIELD_LIMIT, Connection, Connections
from triglot.transports.aiohttp.exchange import AiohttpExchange
from triglot.transports.aiohttp.log import connection_log
from triglot.transports.listening import IdleConnection
from triglot.transports.rest.calls import CLEAN_UP_SECONDS, HttpCalls
from triglot.transports.rest.exchange import READ_AHEAD
from triglot.transports.rest.fields import MAX_LINE_BYTES
from triglot.transports.rest.server import HttpServer
from triglot.transports.until_ended import ended


class AiohttpServer(HttpServer):
    """See the base class."""

    def __init__(self, calls: HttpCalls, config: Config, *, bound: Sequence[socket.socket] = ()) -> None:
        super().__init__(calls, config, bound=bound)
        # aiohttp's low-level server: the overhead of an application per request is not needed.
        # The task of a request whose client disconnects is cancelled, so that its work is not started.
        self._connections = Connections(
            self._respond,
            handler_cancellation=True,
            keepalive_timeout=self.keep_alive,
            access_log=None,
            logger=connection_log(),
            # Decompressed here: limited by the result's size, off the loop, and with Triglot's own errors.
            auto_decompress=False,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=FIELD_LIMIT,
            read_bufsize=READ_AHEAD,
        )
        # `HttpCalls` keeps the grace period: aiohttp would wait for it a second time.
        self._runner = web.ServerRunner(self._connections, shutdown_timeout=CLEAN_UP_SECONDS)

    async def set_up(self) -> None:
        if self._runner.server is None:
            await self._runner.setup()

    def make(self, remote: str) -> asyncio.Protocol:
        return self._connections(remote)

    def protocol(self, remote: str) -> asyncio.Protocol | None:
        return None if self._runner.server is None else self.make(remote)

    def count_connections(self) -> int:
        return 0 if self._runner.server is None else len(self._runner.server.connections)

    def idle_connections(self) -> list[IdleConnection]:
        """See the base class."""
        connections = [] if self._runner.server is None else self._runner.server.connections
        return [one for one in connections if isinstance(one, Connection) and one.is_idle]

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _respond(self, http: web.BaseRequest) -> web.StreamResponse:
        connection = http.protocol
        assert isinstance(connection, Connection)
        connection.begun(http)
        if connection.half_closed:
            connection.close_when_answered()
        exchange = AiohttpExchange(http, connection.remote)
        await ended(partial(self.calls.start, exchange))
        assert exchange.answer is not None
        if self.calls.draining:
            exchange.answer.force_close()
        return exchange.answer
