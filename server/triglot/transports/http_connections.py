"""aiohttp's connections: what they say of a request that is no HTTP, and of clients that take, or send, no more.

The former has the form of every error (spec 0.3).

Strategy: a client that has sent its request may close its side of the connection and wait for the answer. On the
wire that looks as if it had left. The difference shows when something is sent to it: who has left answers with a
reset. So the client gets an interim answer, 100 Continue, which every client of HTTP/1.1 skips.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from aiohttp import HttpVersion11, web

from triglot.transports.http_ahead import ReadAhead
from triglot.transports.http_errors import error_body
from triglot.transports.unsent import buffered

log = logging.getLogger(__name__)

STALL_SECONDS = 120.0
"""For which a client may take nothing of what waits for it, as over HTTP/2."""
RESET_SECONDS = 0.25
"""Between two looks whether the client of a half-closed connection has left."""
LONGEST_TEXT = 200
"""Of what was wrong: aiohttp quotes what was sent."""


class Connections(web.Server):
    """Makes what serves one connection.

    `complete` adds headers to every answer; the other arguments are the base class's.
    """

    def __init__(
        self,
        handler: Any,
        complete: Callable[[web.BaseRequest, web.StreamResponse], None],
        *,
        handler_cancellation: bool,
        **options: Any,
    ) -> None:
        loop = asyncio.get_running_loop()

        class Request(web.BaseRequest):
            async def _prepare_hook(self, response: web.StreamResponse) -> None:
                # aiohttp calls it before it writes the head of any answer, errors among them.
                complete(self, response)

        super().__init__(
            handler,
            request_factory=partial(Request, loop=loop),
            handler_cancellation=handler_cancellation,
            **options,
        )
        self._options = options

    def __call__(self) -> web.RequestHandler:
        """See the base class."""
        return Connection(self, loop=asyncio.get_running_loop(), **self._options)


class Connection(ReadAhead):
    """Serves one connection."""

    __slots__ = ("_stalls", "_unsent", "half_closed")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.half_closed = False
        """Whether its client sends no more."""
        self._unsent = 0
        self._stalls: asyncio.TimerHandle | None = None

    @property
    def task(self) -> asyncio.Task[None] | None:
        """What answers requests; None when the connection is lost."""
        return self._task_handler

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

    # --- half-closed connections ---

    def eof_received(self) -> bool:  # type: ignore[override]  # aiohttp's has no need to say so.
        """See `asyncio.Protocol`: True where answers are still to be sent."""
        waiter = self._waiter
        is_idle = not self._request_count or (waiter is not None and not waiter.done())
        if is_idle or self.transport is None or self.transport.get_extra_info("ssl_object") is not None:
            return False
        self.half_closed = True
        self._loop.call_soon(self._stay_half_closed)  # What handles the request may be about to begin.
        return True

    def _stay_half_closed(self) -> None:
        """Answer what has come as a whole, and close the connection."""
        transport, request = self.transport, self._current_request
        if transport is None:
            return
        body = self._messages[-1][1] if self._messages else None if request is None else request.content
        begun = request is not None and request.writer.output_size > 0
        if begun or (body is not None and not body.is_eof()):
            transport.close()  # A stream's client cannot be asked any more, and is taken to have left.
            return
        self.close_when_answered()
        if request is not None and request.version >= HttpVersion11:
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._look_for_reset(transport)

    def close_when_answered(self) -> None:
        """Of a half-closed connection: let the request that is being answered be the last one, if it is."""
        if not self._messages:
            self.close()

    def _look_for_reset(self, transport: asyncio.Transport) -> None:
        if self.transport is None or transport.is_closing():
            return
        # Nobody reads any more, and so nobody is told of a reset.
        if transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            transport.abort()
        else:
            self._loop.call_later(RESET_SECONDS, self._look_for_reset, transport)

    # --- clients that take nothing ---

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
        elif message:
            text = message
        answer = web.Response(body=error_body(text), status=status, content_type="application/json")
        answer.force_close()
        return answer
