"""REST over HTTP/2: requests that are no gRPC calls, handed to what serves HTTP/1.1.

Strategy: browsers speak HTTP/2 over TLS, and serverless platforms speak it to the containers that offer it. Each
of their REST calls becomes one of HTTP/1.1, on a connection of its own that exists in memory only, and what is
answered there becomes frames. So there is one REST server, and it need not know.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from triglot.core.errors import InvalidArgument, ServingError
from triglot.protocols import Kind
from triglot.transports.h2.body import Body
from triglot.transports.h2.events import RequestReceived
from triglot.transports.h2.fields import FIRST_REGULAR
from triglot.transports.h2.frames import ErrorCode
from triglot.transports.h2.http1_answers import AnswerHead, AnswerReader
from triglot.transports.h2.requests import RpcHead, block_of, http_error
from triglot.transports.h2.rpc import Rpc

if TYPE_CHECKING:
    from triglot.transports.grpc_calls import Trailing
    from triglot.transports.h2.protocol import H2Protocol

log = logging.getLogger(__name__)

LINGER_SECONDS = 1.0
"""For the REST server to leave a call of which all has been said."""
BAD_REQUEST, TOO_LARGE, UNAVAILABLE = 400, 431, 503
_METHOD = re.compile(rb"[A-Z]{1,32}")
_TARGET = re.compile(rb"[/*][\x21-\x7e\x80-\xff]*")
_NOT_HANDED_ON = {b"host", b"content-length", b"cookie", b"te"}


class RestCall(Rpc):
    """One request, and the connection in memory on which it is answered. On the loop."""

    __slots__ = ("_answer", "_handler", "_memory", "_waits")

    def __init__(
        self, protocol: H2Protocol, number: int, head: RpcHead, transport: asyncio.BaseTransport, *, ended: bool
    ) -> None:
        """`transport`: the client's. `ended`: there is no body."""
        super().__init__(protocol, number, head, Kind.BIDI_STREAM, None)
        self.body = RestBody(self, chunked=head.length is None and not ended)
        self._handler: asyncio.Protocol | None = None
        self._answer = AnswerReader(bodiless=_pseudo(head)[b":method"] == b"HEAD")
        self._memory = MemoryTransport(self, transport)
        self._waits = False

    def begin(self, handler: asyncio.Protocol) -> None:
        """Have the request answered."""
        assert isinstance(self.body, RestBody)
        text = request_text(self.head, chunked=self.body.chunked)
        if text is None:
            self._refuse(BAD_REQUEST)
            return
        self._handler = handler
        handler.connection_made(self._memory)
        self.hand_on(text)

    def hand_on(self, data: bytes) -> None:
        """More of the request."""
        if self._handler is not None:
            self._handler.data_received(data)

    def answer(self, data: Any) -> None:
        """A part of the answer, in HTTP/1.1."""
        if self.over:
            return
        out = self.protocol.connection.out
        try:
            parts = self._answer.feed(data)
        except (ValueError, IndexError):
            log.exception("%s: what was answered is no HTTP/1.1", self.head.path)
            self.break_off()
            return
        for part in parts:
            if isinstance(part, AnswerHead):
                out.headers(self.number, block_of(part.status, part.fields), end=part.ended)
                self._begun = True
            else:
                out.data(self.number, (part,))
        if self._answer.over:
            self._end()
        elif out.unfinished(self.number) and self._handler is not None and not self._waits:
            self._waits = True
            self._handler.pause_writing()
        self.protocol.wake()

    def _end(self) -> None:
        """All has been said."""
        if self.protocol.connection.out.has(self.number):
            self.protocol.connection.out.end(self.number)
        self._close()
        self.protocol.loop.call_later(LINGER_SECONDS, self.lose)

    def left(self) -> None:
        """The REST server has closed the connection."""
        if not self.over:
            if self._answer.closed():
                self._end()
            else:
                self.break_off()
        self.protocol.loop.call_soon(self.lose)

    def break_off(self) -> None:
        """There is no end of the answer."""
        if not self.over:
            self.protocol.connection.reset(self.number, ErrorCode.INTERNAL_ERROR)
            self.gone()
            self.protocol.wake()
        self.cancel()

    def lose(self) -> None:
        """Tell the REST server that the connection is gone."""
        handler, self._handler = self._handler, None
        if handler is not None:
            self._memory.closing = True
            handler.connection_lost(None)

    def drained(self) -> None:
        """All that was to be sent has left."""
        if self._handler is not None and self._waits:
            self._waits = False
            self._handler.resume_writing()

    def cancel(self) -> None:
        """The client has left; what answers it counts on the connection until it has ended."""
        self.protocol.loop.call_soon(self.lose)
        task = getattr(self._handler, "task", None)
        if task is not None:
            self.protocol.runs_on(task)

    def finish(self, code: int = 0, details: str = "", trailing: Trailing | None = None) -> None:
        """The request has come to its end before it was understood."""
        if not self.over:
            self._refuse(BAD_REQUEST)

    def fail(self, error: ServingError) -> None:
        """What was received is wrong."""
        self.finish()
        self.cancel()

    def _refuse(self, status: int) -> None:
        if self._begun:
            self.break_off()
        else:
            self.protocol.connection.out.headers(self.number, http_error(status), end=True)
            self._close()


class RestBody(Body):
    """The body of a request, handed on as it comes."""

    __slots__ = ("_call", "_paused", "chunked")

    def __init__(self, call: RestCall, *, chunked: bool) -> None:
        super().__init__(call)
        self.chunked = chunked
        self._call = call
        self._paused = False

    def feed(self, parts: Sequence[memoryview]) -> None:
        """Parts of the body. Raises `InvalidArgument` for more than was promised."""
        for part in parts:
            self._hand_on(part)
        self._take()

    def _hand_on(self, data: memoryview) -> None:
        self._came += len(data)
        self._owed += len(data)
        length = self._call.head.length
        if self.chunked:
            self._call.hand_on(b"%x\r\n%b\r\n" % (len(data), bytes(data)))
        elif length is not None and self._came > length:
            raise InvalidArgument("the body is longer than its content-length")  # It would be another request.
        else:
            self._call.hand_on(bytes(data))

    def all_came(self) -> None:
        """The client has sent everything."""
        super().all_came()
        if self.chunked:
            self._call.hand_on(b"0\r\n\r\n")

    def pause(self, paused: bool) -> None:
        """Whether the REST server wants no more for now."""
        self._paused = paused
        self._take()

    def _take(self) -> None:
        if self._owed and not self._paused and not self._call.over:
            self._call.protocol.connection.consumed(self._call.number, self._owed)
            self._owed = 0
            self._call.protocol.wake()


class MemoryTransport(asyncio.Transport):
    """What the REST server takes for its connection."""

    def __init__(self, call: RestCall, transport: asyncio.BaseTransport) -> None:
        super().__init__()
        self.closing = False
        self._call = call
        self._transport = transport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What is known of the client; its socket is not this one's."""
        return default if name == "socket" else self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """Whether nothing more is sent."""
        return self.closing or self._call.over

    def write(self, data: Any) -> None:
        """See the base class."""
        self._call.answer(data)

    def writelines(self, list_of_data: Any) -> None:
        """See the base class."""
        for data in list_of_data:
            self._call.answer(data)

    def get_write_buffer_size(self) -> int:
        """Whether something waits is all that is known."""
        return int(self._call.protocol.connection.out.unfinished(self._call.number))

    def close(self) -> None:
        """See the base class."""
        if not self.closing:
            self.closing = True
            self._call.left()

    def abort(self) -> None:
        """See the base class."""
        self.closing = True
        self._call.break_off()

    def pause_reading(self) -> None:
        """See the base class."""
        self._pause(True)

    def resume_reading(self) -> None:
        """See the base class."""
        self._pause(False)

    def _pause(self, paused: bool) -> None:
        body = self._call.body
        if isinstance(body, RestBody):
            body.pause(paused)


def begin_rest(
    protocol: H2Protocol, event: RequestReceived[RpcHead], transport: asyncio.BaseTransport | None
) -> None:
    """Have a request that is no gRPC call answered by REST, where that is served."""
    head, number, connection, server = event.headers, event.stream, protocol.connection, protocol.server
    refused = head.status if server.rest is None else TOO_LARGE if head.too_large else 0
    if not refused and (transport is None or protocol.backlog() is not None):
        refused = UNAVAILABLE
    # Made for what is answered only: it costs more than a refusal.
    handler = None if refused or server.rest is None else server.rest()
    if handler is None or transport is None:
        connection.out.headers(number, http_error(refused or head.status), end=True)
        connection.reset_when_sent(number, ErrorCode.NO_ERROR)
        return
    call = RestCall(protocol, number, head, transport, ended=event.ended)
    protocol.begun(call)
    call.begin(handler)
    if event.ended:
        protocol.ended(call)


def _pseudo(head: RpcHead) -> dict[bytes, bytes]:
    return {field.name.value: field.value for field in head.fields if field.kind < FIRST_REGULAR}


def request_text(head: RpcHead, *, chunked: bool) -> bytes | None:
    """The request's head in HTTP/1.1; None for one that it cannot say. `chunked`: the body's length is unknown."""
    pseudo = _pseudo(head)
    method, target = pseudo[b":method"], pseudo[b":path"]
    if not _METHOD.fullmatch(method) or not _TARGET.fullmatch(target):
        return None
    fields = [(field.name.value, field.value) for field in head.fields if field.kind >= FIRST_REGULAR]
    hosts = [value for name, value in fields if name == b"host"]
    cookies = [value for name, value in fields if name == b"cookie"]
    lines = [b"%b %b HTTP/1.1" % (method, target), b"host: " + pseudo.get(b":authority", (hosts or [b""])[0])]
    lines += [b"%b: %b" % field for field in fields if field[0] not in _NOT_HANDED_ON]
    if cookies:
        lines.append(b"cookie: " + b"; ".join(cookies))
    if head.length is not None:
        lines.append(b"content-length: %d" % head.length)
    elif chunked:
        lines.append(b"transfer-encoding: chunked")
    return b"\r\n".join([*lines, b"connection: close", b"", b""])
