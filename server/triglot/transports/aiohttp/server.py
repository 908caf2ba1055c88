"""The REST server on aiohttp."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Sequence
from functools import partial

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from triglot.config.options import Config
from triglot.transports.aiohttp.connections import FIELD_LIMIT, Connection, Connections
from triglot.transports.aiohttp.exchange import AiohttpExchange
from triglot.transports.listening import IdleConnection
from triglot.transports.rest.calls import HttpCalls
from triglot.transports.rest.coroutines import CLEAN_UP_SECONDS
from triglot.transports.rest.exchange import READ_AHEAD
from triglot.transports.rest.fields import MAX_LINE_BYTES
from triglot.transports.rest.server import HttpServer
from triglot.transports.until_ended import wait_ended

MAX_TEXT = 200
"""Longest error text in characters."""
_QUOTED = re.compile(r""": b?['"]""")


def connection_log() -> logging.Logger:
    """Return the logger for aiohttp.

    It logs an invalid request in one line, as information, without a traceback.
    """
    log = logging.getLogger(__name__)
    log.addFilter(_one_line)
    return log


def _one_line(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args = "rejected a malformed HTTP request: %s", (_text(error),)
        record.exc_info = None
        return logging.getLogger(record.name).isEnabledFor(logging.INFO)
    return True


def _text(error: HttpProcessingError) -> str:
    """Return the error without the client's data, which aiohttp quotes: a credential must not be logged."""
    return _QUOTED.split(" ".join(error.message.split()), maxsplit=1)[0][:MAX_TEXT]


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
        return [
            connection for connection in connections if isinstance(connection, Connection) and connection.is_idle
        ]

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _respond(self, http: web.BaseRequest) -> web.StreamResponse:
        connection = http.protocol
        assert isinstance(connection, Connection)
        connection.begun(http)
        if connection.half_closed:
            connection.close_when_answered()
        exchange = AiohttpExchange(http, connection.remote)
        await wait_ended(partial(self.calls.start, exchange))
        assert exchange.answer is not None
        if self.calls.draining:
            exchange.answer.force_close()
        return exchange.answer
