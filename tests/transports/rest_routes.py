"""A REST server of any routes, in memory: for HTTP/2 servers that hand requests to it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from triglot.config.options import Config
from triglot.core.call import Call
from triglot.core.http import HttpRequest, HttpResponse
from triglot.core.operation import Operation
from triglot.protocols.rows import Route
from triglot.telemetry.store import Telemetry
from triglot.transports.http1.server import Http1Server
from triglot.transports.request_bytes import RequestBytes
from triglot.transports.rest.calls import HttpCalls


def rest_server(*routes: Route, config: Config | None = None) -> Http1Server:
    """On the loop."""
    config = config or Config()
    return Http1Server(HttpCalls(routes, config, Telemetry(), RequestBytes(0)), config)


def any_path(handle: Callable[[HttpRequest], Awaitable[None]]) -> Route:
    """Every request is handed to `handle`, and answered with nothing."""

    async def call(request: HttpRequest, _: Call) -> Any:
        await handle(request)

    return Route(
        "*",
        "/{path:.*}",
        Operation.METADATA,
        lambda http: http,
        call,
        lambda *_: HttpResponse(b""),
        protocol="test",
    )
