"""The rows over HTTP/1.1, carried by aiohttp."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from aiohttp import web

from triglot.config import Config
from triglot.core.errors import Cancelled, Code, PayloadTooLarge, ServingError, as_serving_error
from triglot.core.types import Call
from triglot.protocols import HttpRequest, Route

OFF_LOOP_BYTES = 128 * 1024
"""Text larger than this is parsed and printed on a thread: it takes longer than the way there and back."""
KEEP_ALIVE_SECONDS = 75
"""Longer than the idle time of the usual proxies, so that they close first and no request is lost."""
CONTENT_CODINGS = ("gzip", "deflate", "identity")
_STATUS = {
    Code.CANCELLED: 400,
    Code.UNKNOWN: 400,
    Code.INVALID_ARGUMENT: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 400,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 400,
    Code.ABORTED: 409,
    Code.OUT_OF_RANGE: 400,
    Code.UNIMPLEMENTED: 501,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
    Code.DATA_LOSS: 500,
    Code.UNAUTHENTICATED: 401,
}


class HttpServer:
    """Serves rows on one port. `start` binds; `stop` waits for calls."""

    def __init__(self, routes: Iterable[Route], config: Config) -> None:
        self._host, self._port = config.host, config.rest_port
        self._max_body = config.max_message_size
        application = web.Application(
            client_max_size=config.max_message_size, middlewares=[web.middleware(_as_json)]
        )
        for route in routes:
            application.router.add_route(route.verb, route.path, partial(self._handle, route))
        # The task of a request whose client is gone is cancelled, and its work is not started.
        self._runner = web.AppRunner(
            application, handler_cancellation=True, keepalive_timeout=KEEP_ALIVE_SECONDS, access_log=None
        )

    async def start(self) -> int:
        """Bind and serve; the port. Raises `OSError` when the address cannot be bound."""
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        port: int = self._runner.addresses[0][1]
        return port

    async def stop(self, grace: float) -> None:
        """Refuse new connections, wait `grace` seconds for the calls that run."""
        self._runner._shutdown_timeout = grace
        await self._runner.cleanup()

    async def _handle(self, route: Route, http: web.Request) -> web.Response:
        try:
            request = await self._read(http)
            decoded = await _run(route.decode, request, size=route.text_size(request))
            answer = await route.call(decoded, Call(None, request.headers.items))
            response = await _run(route.encode, answer, decoded, size=route.answer_size(answer))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return _error(Cancelled("the model cancelled the call"))
        except Exception as error:
            return _error(as_serving_error(error, f"{route.verb} {route.path}"))
        return web.Response(
            body=response.body,
            status=response.status,
            content_type=response.content_type,
            headers=response.headers,
        )

    async def _read(self, http: web.Request) -> HttpRequest:
        coding = http.headers.get("Content-Encoding", "identity").lower()
        if coding not in CONTENT_CODINGS:
            raise web.HTTPNotImplemented(
                headers={"Accept-Encoding": "gzip, deflate"},
                text=f"Content-Encoding '{coding}' is not supported",
            )
        headers = {name.lower(): value for name, value in http.headers.items()}
        try:
            body = await http.read() if http.can_read_body else b""
        except web.HTTPRequestEntityTooLarge:
            raise PayloadTooLarge(
                f"the request body is larger than {self._max_body} bytes; the server's limit is its option "
                "max_message_size"
            ) from None
        return HttpRequest(http.match_info, headers, http.query, body)


async def _run(function: Callable[..., Any], *arguments: Any, size: int) -> Any:
    if size > OFF_LOOP_BYTES:
        return await asyncio.to_thread(function, *arguments)
    return function(*arguments)


def _json(status: int, error: str, headers: dict[str, str] | None = None) -> web.Response:
    # No charset: a stock client compares the content type to the letter (spec 0.3).
    body = json.dumps({"error": error}).encode()
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def _error(error: ServingError) -> web.Response:
    status = 413 if isinstance(error, PayloadTooLarge) else _STATUS[error.code]
    headers = {} if error.retry_after is None else {"Retry-After": str(max(1, round(error.retry_after)))}
    return _json(status, error.message, headers)


async def _as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """aiohttp's own refusals (no route, wrong method, bad coding) in the protocols' form."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        kept = {name: value for name, value in error.headers.items() if name in ("Allow", "Accept-Encoding")}
        text = error.text if error.status == 501 and error.text else error.reason
        return _json(error.status, text, kept)
