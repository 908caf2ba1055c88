"""The rows over HTTP/1.1, carried by aiohttp."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial

from aiohttp import hdrs, web

from triglot.config import Config
from triglot.protocols import Operation, Route
from triglot.telemetry.store import Telemetry
from triglot.transports.http_bodies import READ_AHEAD
from triglot.transports.http_calls import CLEAN_UP_SECONDS, HttpCalls
from triglot.transports.http_connections import Connection, Connections
from triglot.transports.http_log import connection_log
from triglot.transports.http_origins import Origins
from triglot.transports.http_routes import Refused, Router, go_on
from triglot.transports.listening import Listener, bind, most_sockets, take_over
from triglot.transports.request_bytes import RequestBytes
from triglot.transports.tls import Tls

KEEP_ALIVE_SECONDS = 75
"""Longer than the idle time of the usual proxies, so that they close first and no request is lost."""
RETIRE_SECONDS = 0.05
"""Between two looks for connections that are left."""
LONGEST_LINE = 64 * 1024
"""Bytes of a request's path, and of a header."""


class HttpServer:
    """Serves rows on one port. `start` binds; `stop` waits for calls.

    `request_bytes` counts the bodies of requests, those of the gRPC server beside this one too.
    `bound`: the port's sockets, where somebody else has bound them. Raises `ConfigError` for a certificate that
    cannot be used.
    """

    def __init__(
        self,
        routes: Iterable[Route],
        config: Config,
        telemetry: Telemetry,
        request_bytes: RequestBytes,
        *,
        bound: Sequence[socket.socket] = (),
    ) -> None:
        self._config, self._bound = config, bound
        self._tls = Tls(config, "http/1.1") if config.tls_certificate else None
        self._origins = Origins(config)
        self._calls = HttpCalls(config, request_bytes, self._origins)
        self._router = Router()
        for route in routes:
            endpoint = telemetry.endpoint(
                route.protocol, "REST", route.method, inference=route.operation is Operation.INFER
            )
            self._router.add(route.verb, route.path, partial(self._calls.respond, route, endpoint))
        # aiohttp's bare server: what an application adds to it for each request, nobody needs here.
        # The task of a request whose client is gone is cancelled, and its work is not started.
        server = Connections(
            self._respond,
            self._origins.complete,
            handler_cancellation=True,
            keepalive_timeout=KEEP_ALIVE_SECONDS,
            access_log=None,
            logger=connection_log(),
            # Inflated here: bounded by the result's size, off the loop, and with our own errors.
            auto_decompress=False,
            max_line_size=LONGEST_LINE,
            max_field_size=LONGEST_LINE,
            read_bufsize=READ_AHEAD,
        )
        # The grace period is kept here: aiohttp would give it twice.
        self._runner = web.ServerRunner(server, shutdown_timeout=CLEAN_UP_SECONDS)
        self._grace = config.grace
        self._listener: Listener | None = None

    async def start(self) -> int:
        """Bind and serve; the port. Raises `OSError` when the address cannot be bound."""
        config = self._config
        sockets = take_over(self._bound) or await bind(config.host, config.rest_port, "REST")
        await self.set_up()
        port: int = sockets[0].getsockname()[1]
        self._listener = Listener(sockets, self._protocol, most=most_sockets(config), tls=self._tls)
        self._listener.start()
        return port

    async def set_up(self) -> None:
        """Be ready for connections that somebody else accepts, and hands over to `protocol`."""
        if self._runner.server is None:
            await self._runner.setup()

    def protocol(self) -> asyncio.Protocol | None:
        """What serves one connection; None when none is served any more."""
        return None if self._runner.server is None else self._runner.server()

    def _protocol(self) -> asyncio.Protocol:
        assert self._runner.server is not None
        return self._runner.server()

    def _count_connections(self) -> int:
        return 0 if self._runner.server is None else len(self._runner.server.connections)

    def drain(self) -> None:
        """Have each connection closed with its next answer, so that clients go elsewhere."""
        self._calls.drain()

    async def retire(self, seconds: float) -> None:
        """Take no more connections, since another process does; wait for the others, `seconds` at most."""
        self.drain()
        await self._stop_listening()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                # aiohttp tells nobody of a connection's end.
                while self._count_connections():  # noqa: ASYNC110
                    await asyncio.sleep(RETIRE_SECONDS)

    async def stop(self) -> None:
        """Refuse new calls, wait for the others as long as the grace period, answer the rest with 503."""
        self._calls.refuse()
        await self._stop_listening()
        await self._calls.finish(self._grace)
        await self._runner.cleanup()

    async def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.stop()
            await self._listener.settle(CLEAN_UP_SECONDS)
        for _ in range(3):
            await asyncio.sleep(0)  # What has come on new connections is still answered.

    async def _respond(self, http: web.BaseRequest) -> web.StreamResponse:
        connection = http.protocol
        assert isinstance(connection, Connection)
        connection.begun(http)
        if connection.half_closed:
            connection.close_when_answered()
        if http.method == hdrs.METH_OPTIONS and (preflight := self._origins.preflight(http)) is not None:
            return preflight
        try:
            handler, variables = self._router.known(http) or await self._router.find(http)
            if expected := http.headers.get(hdrs.EXPECT):
                await go_on(http, expected)
        except Refused as refused:
            return refused.answer
        return await handler(variables, http)
