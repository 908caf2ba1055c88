"""aiohttp's connections: what they say of a request that is no HTTP, and of clients that take no answer.

The former has the form of every error (spec 0.3).
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

from aiohttp import web

from triglot.transports.http_errors import error_body
from triglot.transports.unsent import buffered

log = logging.getLogger(__name__)

STALL_SECONDS = 120.0
"""For which a client may take nothing of what waits for it, as over HTTP/2."""
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
    __slots__ = ("_stalls", "_unsent")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._unsent = 0
        self._stalls: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """See the base class."""
        super().pause_writing()
        # Over HTTP/2 there is none, and whoever has the socket looks after it.
        if self.transport is not None and self.transport.get_extra_info("socket") is not None:
            self._look_later(self.transport)

    def resume_writing(self) -> None:
        """See the base class."""
        self._look_no_more()
        super().resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        """See the base class."""
        self._look_no_more()
        super().connection_lost(exc)

    def _look_later(self, transport: asyncio.Transport) -> None:
        self._unsent = buffered(transport)
        self._stalls = self._loop.call_later(STALL_SECONDS, self._look, transport)

    def _look_no_more(self) -> None:
        if self._stalls is not None:
            self._stalls.cancel()
            self._stalls = None

    def _look(self, transport: asyncio.Transport) -> None:
        if buffered(transport) != self._unsent:
            self._look_later(transport)
            return
        log.info("a connection ends: for %.0f s its client took nothing of what waits for it", STALL_SECONDS)
        transport.abort()

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
