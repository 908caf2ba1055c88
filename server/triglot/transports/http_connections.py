"""aiohttp's connections; what they say of a request that is no HTTP has the form of every error (spec 0.3)."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from aiohttp import web

from triglot.transports.http_errors import error_body

LONGEST_TEXT = 200
"""Of what was wrong: aiohttp quotes what was sent."""


class Connections(web.Server):
    """Makes what serves one connection; the arguments are the base class's."""

    def __init__(self, handler: Any, *, handler_cancellation: bool, **options: Any) -> None:
        super().__init__(handler, handler_cancellation=handler_cancellation, **options)
        self._options = options

    def __call__(self) -> web.RequestHandler:
        """See the base class."""
        return _Connection(self, loop=asyncio.get_running_loop(), **self._options)


class _Connection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """See the base class, which logs it; the connection is closed."""
        super().handle_error(request, status, exc, message)
        text = HTTPStatus(status).phrase
        if status == HTTPStatus.BAD_REQUEST:
            # aiohttp's text has lines, and may end with a caret that points into the one above.
            wrong = " ".join((message or "").split())[:LONGEST_TEXT].rstrip(" ^")
            text = f"the request is not valid HTTP: {wrong}"
        answer = web.Response(body=error_body(text), status=status, content_type="application/json")
        answer.force_close()
        return answer
