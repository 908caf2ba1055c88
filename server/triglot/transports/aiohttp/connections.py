"""aiohttp's connections: what they say of a request that is no HTTP, and of clients that take, or send, no more.

The former has the form of every error (spec 0.3).

Strategy: a client that has sent its request may close its side of the connection and wait for the answer. On the
wire that looks as if it had left. The difference shows when something is sent to it: who has left answers with a
reset. So the client gets an interim answer, 100 Continue, which every client of HTTP/1.1 skips.
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from http import HTTPStatus
from typing import Any

from aiohttp import HttpVersion11, web

from triglot.transports.aiohttp.ahead import ReadAhead
from triglot.transports.rest.answers import FIXED_FIELDS
from triglot.transports.rest.errors import error_body
from triglot.transports.unsent import StallTimer

RESET_SECONDS = 0.25
"""Between two looks whether the client of a half-closed connection has left."""
LONGEST_TEXT = 200
"""Of what was wrong: aiohttp quotes what was sent."""


class Connections(web.Server):
    """Makes what serves one connection; the arguments are the base class's."""

    def __init__(self, handler: Any, *, handler_cancellation: bool, **options: Any) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(
            handler,
            request_factory=partial(web.BaseRequest, loop=loop),
            handler_cancellation=handler_cancellation,
            **options,
        )
        self._options = options

    def __call__(self) -> web.RequestHandler:
        """See the base class."""
        return Connection(self, loop=asyncio.get_running_loop(), **self._options)


class Connection(ReadAhead):
    """Serves one connection."""

    __slots__ = ("_stall", "half_closed")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.half_closed = False
        """Whether its client sends no more."""
        self._stall = StallTimer()

    def pause_writing(self) -> None:
        """See the base class."""
        super().pause_writing()
        if self.transport is not None:
            self._stall.start(self.transport)

    def resume_writing(self) -> None:
        """See the base class."""
        self._stall.stop()
        super().resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        """See the base class."""
        self._stall.stop()
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
        headers = {"Content-Type": "application/json", **dict(FIXED_FIELDS)}
        answer = web.Response(body=error_body(text), status=status, headers=headers)
        answer.force_close()
        return answer
