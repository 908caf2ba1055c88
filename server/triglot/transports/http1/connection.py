"""The asyncio protocol of one HTTP/1.1 connection; its requests are answered one after the other.

Strategy: a request starts as soon as its head has arrived, as a call of `HttpCalls`. Pipelined requests wait as
bytes, and above a limit nothing is read. A client may close its sending side after its request, and wait for
the response, which looks like a disconnect. Only sending something to it shows the difference: a client that
has disconnected replies with a reset. So the server sends an interim response, 100 Continue, which every
HTTP/1.1 client ignores.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Coroutine, Sequence
from typing import Any, Final, cast

from triglot.core.roles import RunningCall
from triglot.core.tensor import Scattered
from triglot.transports.certificates import names_of
from triglot.transports.http1.requests import (
    BODILESS,
    CONTINUE,
    LAST_CHUNK,
    BodyPart,
    Event,
    HeadLayouts,
    Malformed,
    RequestHead,
    RequestReader,
    encode_chunk,
    response_head,
)
from triglot.transports.off_loop import unchanged, wait_while
from triglot.transports.rest.calls import HttpCalls
from triglot.transports.rest.exchange import FIXED_FIELDS, Exchange, IncomingBody, error_body
from triglot.transports.rest.fields import BAD_REQUEST, Fields
from triglot.transports.unsent import StallTimer, write_pieces

log = logging.getLogger(__name__)

HEAD_SECONDS: Final = 30.0
"""Limit on the time for a request's head, from its first byte."""
LINGER_SECONDS: Final = 10.0
"""Limit on the time for the rest of a body after its response, or for the client to close the connection."""
MAX_AHEAD_BYTES: Final = 64 * 1024
"""Bytes received before a request is answered; above this, nothing is read until it is."""
RESET_SECONDS: Final = 0.25
"""Seconds between two checks whether the client of a half-closed connection has disconnected."""
JOINED_BYTES: Final = 64 * 1024
"""Below this size, a copy is faster than another write."""
MAX_IN_A_ROW: Final = 16
"""Pipelined requests, or chunks of a stream, after which other tasks get a turn."""
REQUEST_TIMEOUT: Final = 408


class Connections:
    """What a server's connections share, and the open ones. Idle ones are closed after `keep_alive` seconds."""

    __slots__ = ("all_closed", "calls", "head_seconds", "heads", "keep_alive", "linger_seconds", "open")

    def __init__(self, calls: HttpCalls, keep_alive: float) -> None:
        self.calls = calls
        self.heads = HeadLayouts()
        self.keep_alive = keep_alive
        self.head_seconds = HEAD_SECONDS
        self.linger_seconds = LINGER_SECONDS
        self.open: set[Connection] = set()
        self.all_closed = asyncio.Event()
        """Set when the last one closes."""

    def remove(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self.open.discard(connection)
        if not self.open:
            self.all_closed.set()


class _Body(IncomingBody):
    """A request's body, received by its connection."""

    __slots__ = ("_connection", "expected")

    def __init__(self, connection: Connection, length: int | None) -> None:
        super().__init__(length)
        self.expected = False
        """Whether the client waits for 100 (Continue)."""
        self._connection = connection

    def want(self, *, more: bool) -> None:
        self._connection.update_reading()

    def read(self) -> Coroutine[Any, Any, bytes]:
        if self.expected:
            self.expected = False
            self._connection.write(CONTINUE)
        return super().read()


class _Request(Exchange):
    """The `Exchange` of one request on a connection."""

    __slots__ = ("_connection", "_incoming", "_is_head", "keep_alive", "task")

    def __init__(self, connection: Connection, head: RequestHead, body: _Body) -> None:
        super().__init__(head.verb, head.target, head.fields, body, is_http10=head.is_http10)
        self._connection = connection
        self._incoming = body
        body.expected = head.length != 0 and not head.is_http10 and "expect" in self.headers
        self._is_head = head.verb == "HEAD"
        self.keep_alive = head.keep_alive
        self.task: RunningCall | None = None

    @property
    def remote(self) -> str:
        return self._connection.remote

    def certificate_names(self) -> Sequence[str]:
        return self._connection.certificate_names()

    def respond(self, status: int, fields: Fields, body: bytes | Scattered) -> None:
        head = self._head(status, fields, len(body))
        if self._is_head or status in BODILESS:
            self._connection.write(head)
        elif isinstance(body, Scattered):
            self._connection.write(head, *body.pieces)
        else:
            self._connection.write(head, body)

    def _head(self, status: int, fields: Fields, length: int | None) -> bytes:
        self.begun = True
        connection = self._connection
        # A client that was not sent 100 (Continue) may send the body or not.
        if connection.is_last or self._incoming.expected or ("Connection", "close") in fields:
            self.keep_alive = False
        elif length is None and self.is_http10:
            self.keep_alive = False  # The end of the connection is the end of the body.
        date = connection.server.calls.clock.date()
        return response_head(
            status, fields, date, length=length, is_http10=self.is_http10, keep_alive=self.keep_alive
        )

    def begin(self, status: int, fields: Fields) -> Coroutine[Any, Any, None]:
        self._connection.write(self._head(status, fields, None))
        return self._connection.drained()

    def write(self, chunk: bytes) -> Coroutine[Any, Any, None]:
        if not self._is_head:
            self._connection.write(chunk if self.is_http10 else encode_chunk(chunk))
        return self._connection.drained()

    def finish(self) -> Coroutine[Any, Any, None]:
        if not self.is_http10 and not self._is_head:
            self._connection.write(LAST_CHUNK)
        return unchanged(None)

    def abort(self) -> None:
        self._connection.abort()


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection."""

    def __init__(self, server: Connections, remote: str = "") -> None:
        self.server = server
        self.remote = remote
        """The client's address; "" where it has none."""
        self.transport: asyncio.Transport | None = None
        self.half_closed = False
        """Whether the client has closed its sending side."""
        self.is_used = False
        """Whether a request has been answered."""
        self._loop = asyncio.get_running_loop()
        self._reader = RequestReader(server.heads)
        self._request: _Request | None = None
        """The request that is being answered."""
        self._body: _Body | None = None
        """The body being received; None if there is none, or if the rest of it is discarded."""
        self._is_incoming = False
        """Whether a body is being received."""
        self._is_handling = False
        self._is_closing = False
        """Whether received bytes are discarded, because the last response has been written."""
        self._out_of_sync = False
        """Whether the stream of bytes is out of sync: no further request can be found in it."""
        self._is_paused = False
        """Whether the socket's buffer is full."""
        self._writable: asyncio.Future[None] | None = None
        self._is_head_begun = False
        self._stall = StallTimer()
        self.deadline = math.inf
        """When the client's current step times out, in the loop's time."""
        self._timer: asyncio.TimerHandle | None = None
        self._certificate_names: Sequence[str] | None = None

    def certificate_names(self) -> Sequence[str]:
        """Return the names in the client's certificate; none without one."""
        if self._certificate_names is None:
            self._certificate_names = () if self.transport is None else names_of(self.transport)
        return self._certificate_names

    @property
    def is_last(self) -> bool:
        """Whether the connection closes after the current request."""
        return self._out_of_sync or self.server.calls.draining or (self.half_closed and not self._reader.kept)

    @property
    def is_idle(self) -> bool:
        """Whether the connection waits for a request, of which nothing has arrived."""
        return (
            self.transport is not None
            and not self.transport.is_closing()
            and self._request is None
            and not (self._is_closing or self._out_of_sync or self._is_incoming or self._is_head_begun)
        )

    @property
    def idle_since(self) -> float:
        """When the wait for a request began, in the loop's time."""
        return self.deadline - self.server.keep_alive

    # --- asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass.
        self.server.open.add(self)
        self._set_deadline(self.server.keep_alive)

    def data_received(self, data: bytes) -> None:
        if self._is_closing or self._out_of_sync:
            return
        reader = self._reader
        self._is_handling = True
        self._handle(reader.receive(data))
        self._is_handling = False
        self._start_next()
        if reader.kept > MAX_AHEAD_BYTES:
            self.update_reading()

    def eof_received(self) -> bool:
        """See the base class. Return True if responses are still to be sent."""
        transport, request = self.transport, self._request
        if transport is None or transport.get_extra_info("ssl_object") is not None:
            return False
        # Once a stream has begun, 100 (Continue) cannot be sent: its client counts as disconnected.
        begun = request is not None and request.begun
        if self._is_closing or self._is_incoming or begun or (request is None and not self._reader.kept):
            return False
        self.half_closed = True
        if request is not None and not request.is_http10:
            transport.write(CONTINUE)
            self._check_reset()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._is_closing = True
        self._stall.stop()
        if self._timer is not None:
            self._timer.cancel()
        self._reader.close()
        request, self._request = self._request, None
        self._body = None
        if request is not None and request.task is not None:
            request.task.cancel()
        self._wake()
        self.server.remove(self)

    def pause_writing(self) -> None:
        self._is_paused = True
        if self.transport is not None:
            self._stall.start(self.transport)

    def resume_writing(self) -> None:
        self._is_paused = False
        self._stall.stop()
        self._wake()
        self._start_next()

    # --- requests ---

    def _start_next(self) -> None:
        """Start the next pipelined request if the previous one has been answered."""
        if self._is_handling:
            return
        self._is_handling = True
        count = 0
        while self._reader.kept and self._is_ready():
            count += 1
            if count > MAX_IN_A_ROW:
                self._loop.call_soon(self._start_next)  # Other tasks get a turn.
                break
            self._handle(self._reader.next_request())
        self._is_handling = False
        if count:
            self.update_reading()
        if self.half_closed and not self._is_closing and (self._is_incoming or not self._reader.waits):
            self.close_idle()  # The rest of the request will not arrive.

    def _is_ready(self) -> bool:
        return self._request is None and not (
            self._is_incoming or self._is_paused or self._is_closing or not self._reader.waits
        )

    def _handle(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, RequestHead):
                self._body = _Body(self, event.length)
                self._request = _Request(self, event, self._body)
                self._is_incoming = True
            elif isinstance(event, BodyPart):
                if self._body is not None:
                    self._body.expected = False
                    self._body.feed(event.data)
            elif isinstance(event, Malformed):
                self._refuse(event)
            else:
                self._is_incoming = False
                if self._body is not None:
                    self._body.end()
                    self._body = None
                elif self._request is None:
                    self._set_deadline(self.server.keep_alive)
        request = self._request
        if request is None or self._is_closing:
            if not self._is_closing and not self._reader.waits and not self._is_incoming:
                self._set_deadline(self.server.head_seconds, begun=True)
        elif request.task is None:
            self.deadline = math.inf
            request.task = self.server.calls.start(request, self._answered)

    def _answered(self, _: object) -> None:
        """Continue after the current request has been answered."""
        request, self._request = self._request, None
        if request is None:
            return  # The connection is closed.
        request.task = None
        self.is_used = True
        self._body = None
        if self.is_last or not request.keep_alive:
            self._close()
        elif self._is_incoming:
            # The rest of the body is discarded: unread bytes would reset the connection, and the response with it.
            self._set_deadline(self.server.linger_seconds)
            self.update_reading()
        else:
            self._set_deadline(self.server.keep_alive)
            self._start_next()

    def _refuse(self, error: Malformed) -> None:
        """Reject bytes that are not a valid request or body."""
        self._out_of_sync = True
        if self._body is not None:
            self._body.fail(error.text)
        elif self._is_incoming:
            self._close()
        else:
            log.info("rejected a malformed HTTP request: %s", error.text)
            text = f"the request is not valid HTTP: {error.text}" if error.status == BAD_REQUEST else error.text
            self._answer_error(error.status, text)

    def _answer_error(self, status: int, text: str) -> None:
        """Answer an invalid request, and close the connection."""
        body = error_body(text)
        fields = [("Content-Type", "application/json"), *FIXED_FIELDS]
        date = self.server.calls.clock.date()
        head = response_head(status, fields, date, length=len(body), is_http10=False, keep_alive=False)
        self.write(head, body)
        self._close()

    # --- writing ---

    def write(self, *pieces: bytes | memoryview) -> None:
        """Send these pieces."""
        if self.transport is None:
            return
        if len(pieces) == 1:
            self.transport.write(pieces[0])
        elif sum(map(len, pieces)) < JOINED_BYTES:
            self.transport.write(b"".join(pieces))
        else:
            write_pieces(self.transport, pieces)

    def drained(self) -> Coroutine[Any, Any, None]:
        """Wait while the socket's buffer is full. Raise `ConnectionError` when the connection is closed."""
        return wait_while(self._is_full, self._new_writable)

    def _is_full(self) -> bool:
        if self.transport is None:
            raise ConnectionResetError
        return self._is_paused

    def _new_writable(self) -> asyncio.Future[None]:
        self._writable = self._loop.create_future()
        return self._writable

    def _wake(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    # --- reading ---

    def update_reading(self) -> None:
        """Pause or resume reading, depending on the room for received bytes."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        body = self._body
        wanted = self._reader.kept <= MAX_AHEAD_BYTES and (body is None or not body.paused)
        if wanted != transport.is_reading():
            (transport.resume_reading if wanted else transport.pause_reading)()

    def _check_reset(self) -> None:
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        # Nothing is being read, so asyncio does not notice a reset.
        if transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            transport.abort()
        else:
            self._loop.call_later(RESET_SECONDS, self._check_reset)

    # --- time ---

    def _set_deadline(self, seconds: float, *, begun: bool = False) -> None:
        """Set a time limit on the client's next step. `begun`: keep the limit if this step has begun already."""
        if begun and self._is_head_begun:
            return
        self._is_head_begun = begun
        self.deadline = self._loop.time() + seconds
        # A timer that fires too early is set again then, so most requests need no timer of their own.
        if self._timer is None or self._timer.when() > self.deadline:
            self._set_timer(self.deadline)

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        now = self._loop.time()
        if now < self.deadline:
            self._timer = None
            self._set_timer(min(self.deadline, now + self.server.keep_alive))
        elif self._is_head_begun and not self._is_closing:
            self._out_of_sync = True
            text = f"the head of the request is incomplete after {self.server.head_seconds:g} seconds"
            self._answer_error(REQUEST_TIMEOUT, text)
        elif self.transport is not None:
            self.transport.close()

    # --- ends ---

    def _close(self) -> None:
        """Send what has been written, and nothing more; further received bytes are discarded."""
        self._is_closing = True
        self._body = None
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        clean = not (self._out_of_sync or self._is_incoming or self._reader.kept)
        if clean or not transport.can_write_eof():
            transport.close()
            return
        # If the socket were closed with unread bytes, the connection would be reset, and the response lost.
        self._reader.close()
        self.update_reading()
        try:
            transport.write_eof()
        except OSError:
            transport.abort()  # The client has disconnected.
        else:
            self._set_deadline(self.server.linger_seconds)

    def close_idle(self) -> None:
        """Close the connection; written data is still sent."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Close the socket; unsent data is lost."""
        if self.transport is not None:
            self.transport.abort()
