"""aiohttp's connections: error bodies for invalid HTTP, half-closed connections, a timer for stalled clients.

Error bodies have the form of every error (spec 0.3).

Strategy: a client may close its sending side after its request, and wait for the response, which looks like a
disconnect. Only sending something to it shows the difference: a client that has disconnected replies with a reset.
So the server sends an interim response, 100 Continue, which every HTTP/1.1 client ignores.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong

from triglot.transports.aiohttp.ahead import ReadAhead
from triglot.transports.rest.exchange import FIXED_FIELDS, error_body
from triglot.transports.rest.fields import (
    HEAD_TOO_LARGE,
    LONG_FIELD,
    LONG_TARGET,
    MANY_FIELDS,
    MAX_LINE_BYTES,
    TARGET_TOO_LONG,
)
from triglot.transports.unsent import StallTimer

LINGER_SECONDS = 10.0
"""Limit on the time for the client to close the connection after the response to an invalid request."""
RESET_SECONDS = 0.25
"""Seconds between two checks whether the client of a half-closed connection has disconnected."""
FIELD_LIMIT = MAX_LINE_BYTES + 1
"""aiohttp's limit on a field, which differs from that on the target."""
MAX_TEXT = 200
"""Longest error text in characters, because aiohttp quotes what was sent."""


class Connections(web.Server):
    """Makes the protocol of each connection; the arguments are those of the base class."""

    def __init__(self, handler: Any, *, handler_cancellation: bool, **options: Any) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(
            handler,
            request_factory=partial(web.BaseRequest, loop=loop),
            handler_cancellation=handler_cancellation,
            **options,
        )
        self._options = options

    def __call__(self, remote: str = "") -> web.RequestHandler:
        connection = Connection(self, loop=asyncio.get_running_loop(), **self._options)
        connection.remote = remote
        return connection


class Connection(ReadAhead):
    """One HTTP/1.1 connection."""

    __slots__ = ("_lost", "_stall", "half_closed", "remote")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.remote = ""
        """The client's address."""
        self.half_closed = False
        """Whether the client has closed its sending side."""
        self._stall = StallTimer()
        self._lost: asyncio.Future[None] | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.transport is not None:
            self._stall.start(self.transport)

    def resume_writing(self) -> None:
        self._stall.stop()
        super().resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stall.stop()
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(None)
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        """Whether the connection waits for a request."""
        closing = self.transport is None or self.transport.is_closing()
        return not closing and self._waiter is not None and not self._waiter.done()

    @property
    def is_used(self) -> bool:
        """Whether a request has arrived."""
        return self._request_count > 0

    @property
    def idle_since(self) -> float:
        """When the wait for a request began, in the loop's time."""
        return self._next_keepalive_close_time - self._keepalive_timeout

    def close_idle(self) -> None:
        """Close the connection."""
        self.force_close()

    # --- half-closed connections ---

    def eof_received(self) -> bool:  # type: ignore[override]  # aiohttp declares no result.
        """See `asyncio.Protocol`. Return True if responses are still to be sent."""
        done = self.discards or not self._request_count or self.is_idle
        if done or self.transport is None or self.transport.get_extra_info("ssl_object") is not None:
            return False
        self.half_closed = True
        self._loop.call_soon(self._stay_half_closed)  # The request's handler may be about to start.
        return True

    def _stay_half_closed(self) -> None:
        """Answer requests that are complete, and close the connection."""
        transport, request = self.transport, self._current_request
        if transport is None:
            return
        body = self._messages[-1][1] if self._messages else None if request is None else request.content
        begun = request is not None and request.writer.output_size > 0
        if begun or (body is not None and not body.is_eof()):
            transport.close()  # 100 (Continue) cannot be sent in a stream: its client counts as disconnected.
            return
        self.close_when_answered()
        if request is not None and request.version >= HttpVersion11:
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._check_reset(transport)

    def close_when_answered(self) -> None:
        """Close a half-closed connection after the current request, if no other follows."""
        if not self._messages:
            self.close()

    def _check_reset(self, transport: asyncio.Transport) -> None:
        if self.transport is None or transport.is_closing():
            return
        # Nothing is being read, so asyncio does not notice a reset.
        if transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            transport.abort()
        else:
            self._loop.call_later(RESET_SECONDS, self._check_reset, transport)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """See the base class, which logs the error. The connection is closed."""
        super().handle_error(request, status, exc, message)
        text = HTTPStatus(status).phrase
        if isinstance(exc, LineTooLong):
            # aiohttp does not say which line, only the limit.
            is_field = str(exc.args[1]) == str(FIELD_LIMIT)
            status, text = (HEAD_TOO_LARGE, LONG_FIELD) if is_field else (TARGET_TOO_LONG, LONG_TARGET)
        elif isinstance(exc, BadHttpMessage) and exc.message == "Too many headers received":
            status, text = HEAD_TOO_LARGE, MANY_FIELDS
        elif status == HTTPStatus.BAD_REQUEST:
            # aiohttp's text has several lines, and may end with a caret that points into the line above.
            wrong = " ".join((message or "").split())[:MAX_TEXT].rstrip(" ^")
            text = f"the request is not valid HTTP: {wrong}"
        elif message:
            text = message
        headers = {"Content-Type": "application/json", **dict(FIXED_FIELDS)}
        answer = _Refusal(body=error_body(text), status=status, headers=headers)
        answer.force_close()
        self.discards = True
        return answer

    async def linger(self) -> None:
        """Wait until the client, which has its last response, closes the connection.

        Meanwhile what it sends is discarded: unread bytes would reset the connection, and the response with it.
        """
        transport = self.transport
        if transport is None or not transport.can_write_eof():
            return
        with suppress(OSError):  # The client has disconnected.
            transport.write_eof()
            transport.resume_reading()
            self._lost = self._loop.create_future()
            await asyncio.wait([self._lost], timeout=LINGER_SECONDS)


class _Refusal(web.Response):
    """The answer to bytes that are no request, of which more may follow."""

    async def write_eof(self, data: bytes = b"") -> None:
        """See the base class."""
        connection = None if self._req is None else self._req.protocol
        await super().write_eof(data)
        if isinstance(connection, Connection):
            await connection.linger()
