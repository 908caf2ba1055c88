"""REST over HTTP/2: requests that are not gRPC calls.

Strategy: browsers speak HTTP/2 over TLS, and serverless platforms speak it to containers that offer it. Each of
their REST calls is passed to the rows as one over HTTP/1.1 is, and its response becomes frames.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from triglot.core.errors import InvalidArgument, ServingError
from triglot.core.tensor import Scattered
from triglot.protocols.rows import Kind
from triglot.transports.grpc_calls import Trailing
from triglot.transports.http2.body import Body
from triglot.transports.http2.core.fields import CONTENT_TYPE, FIELD_BYTES, FIRST_REGULAR, OMITTED, PATH
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.receiving import RequestReceived, RpcHead
from triglot.transports.http2.core.sending import block_of
from triglot.transports.http2.roles import Connected
from triglot.transports.http2.rpc import Rpc
from triglot.transports.rest.calls import HttpCalls
from triglot.transports.rest.exchange import FIXED_FIELDS, Exchange, IncomingBody, error_body, grpc_only
from triglot.transports.rest.fields import (
    BAD_REQUEST,
    FRAMING,
    HEAD_TOO_LARGE,
    LARGE_HEAD,
    LONG_FIELD,
    LONG_TARGET,
    MANY_FIELDS,
    MAX_FIELDS,
    MAX_HEAD_BYTES,
    MAX_LINE_BYTES,
    MAX_QUOTED,
    TARGET_TOO_LONG,
    Fields,
)

CONTINUE, UNAVAILABLE = 100, 503
BODILESS = (204, 304)
_METHOD = re.compile(rb"[A-Z]{1,32}")
_TARGET = re.compile(rb"[/*][\x21-\x7e\x80-\xff]*")
_NOT_PASSED_ON = {b"host", b"cookie", b"te"}
_ERROR_FIELDS = (("content-type", "application/json"), *FIXED_FIELDS)
_LINE_END = 4
"""Bytes of HTTP/1.1 per field besides its name and value."""


class RestCall(Rpc):
    """One REST request and its response. On the event loop."""

    __slots__ = ("_calls", "_writing")

    def __init__(
        self,
        protocol: Connected,
        number: int,
        head: RpcHead,
        calls: HttpCalls,
        *,
        end_stream: bool,
    ) -> None:
        """Begin a call; `end_stream`: its request has no body."""
        super().__init__(protocol, number, head, None)
        self.kind = Kind.BIDI_STREAM  # Its body is read as it arrives.
        self.body = RestBody(self, 0 if end_stream else head.length)
        self._calls = calls
        self._writing: asyncio.Future[None] | None = None

    def begin(self) -> None:
        """Start the call, unless the request is invalid."""
        if problem := _problem(self.head):
            self._refuse(problem)
        else:
            # Deferred, so that the part of the body that arrived with the headers is there.
            self.protocol.defer(self._start)

    def _start(self) -> None:
        if not self.over:
            assert isinstance(self.body, RestBody)
            exchange = RestExchange(self, self.body.incoming)
            self.task = self._calls.start(exchange, self._served)

    def _served(self, _: object) -> None:
        self.task = None

    def send_head(self, status: int, fields: Fields, length: int | None, *, end: bool = False) -> None:
        """Send the response's headers; `end`: there is no body."""
        self._begun = True
        block = _head(status, fields, length, self._calls.clock.date())
        self.protocol.connection.out.headers(self.number, block, end=end)

    def send_continue(self) -> None:
        """Send 100 (Continue) to a client that waits for it before it sends the body."""
        self.protocol.connection.out.headers(self.number, block_of(CONTINUE, ()))
        self.protocol.schedule_write()

    async def send_piece(self, piece: bytes) -> None:
        """Send a part of the body. Raise `ConnectionError` when the client no longer reads."""
        self.protocol.connection.out.data(self.number, (piece,))
        self.protocol.schedule_write()
        while not self.over and self.protocol.connection.out.is_blocked(self.number):
            self._writing = self.protocol.loop.create_future()
            await self._writing
        if self.over:
            raise ConnectionResetError

    def drained(self) -> None:
        """Resume `send_piece`: all data has been sent, or the call has ended."""
        if self._writing is not None and not self._writing.done():
            self._writing.set_result(None)

    def release(self) -> None:
        """See the base class."""
        super().release()
        self.drained()

    def end_response(self) -> None:
        """End the response."""
        if not self.over:
            if self.protocol.connection.out.has(self.number):
                self.protocol.connection.out.end(self.number)
            self._close()

    def close(self) -> None:
        """End the call, whose response has been sent with END_STREAM."""
        self._close()

    def reset_stream(self) -> None:
        """Reset the stream: the response ends prematurely."""
        if not self.over:
            self.protocol.connection.reset(self.number, ErrorCode.INTERNAL_ERROR)
            self.release()
            self.protocol.schedule_write()

    def finish(self, code: int = 0, details: str = "", trailing: Trailing | None = None) -> None:
        """Reject the request, which was invalid or incomplete."""
        if not self.over:
            self._refuse(details)

    def end_grace(self) -> None:
        """Do nothing: `HttpCalls` ends its calls itself, with a reason."""

    def fail(self, error: ServingError) -> None:
        """Reject a request because of an error in what was received, and cancel its call."""
        self.finish(details=error.message)
        self.cancel()

    def _refuse(self, problem: str) -> None:
        if self._begun:
            self.reset_stream()
        else:
            text = f"the request is not valid HTTP: {problem}"
            _send_error(self.protocol, self.number, self.head, BAD_REQUEST, text, self._calls.clock.date())
            self._close()


class RestExchange(Exchange):
    """The `Exchange` of a REST call over HTTP/2."""

    __slots__ = ("_call",)

    def __init__(self, call: RestCall, body: IncomingBody) -> None:
        pseudo = _pseudo(call.head)
        verb, target = pseudo[b":method"].decode(), pseudo[b":path"].decode("latin-1")
        super().__init__(verb, target, rest_fields(call.head), body)
        self._call = call

    @property
    def remote(self) -> str:
        return self._call.protocol.remote

    def certificate_names(self) -> Sequence[str]:
        return self._call.protocol.certificate_names()

    def respond(self, status: int, fields: Fields, body: bytes | Scattered) -> None:
        call, size = self._call, len(body)
        if call.over:
            return
        self.begun = True
        if not size or self.verb == "HEAD" or status in BODILESS:
            call.send_head(status, fields, size, end=True)
            call.close()
            return
        call.send_head(status, fields, size)
        pieces = body.pieces if isinstance(body, Scattered) else (body,)
        call.protocol.connection.out.data(call.number, pieces)
        call.end_response()

    async def begin(self, status: int, fields: Fields) -> None:
        if self._call.over:
            raise ConnectionResetError
        self.begun = True
        self._call.send_head(status, fields, None)
        self._call.protocol.schedule_write()

    async def write(self, chunk: bytes) -> None:
        if self.verb != "HEAD":
            await self._call.send_piece(chunk)

    async def finish(self) -> None:
        self._call.end_response()

    def abort(self) -> None:
        self._call.reset_stream()


class RestBody(Body):
    """The body of a REST request, passed on as it arrives."""

    __slots__ = ("_call", "incoming")

    def __init__(self, call: RestCall, length: int | None) -> None:
        super().__init__(call)
        self._call = call
        expected = length != 0 and any(field.name.value == b"expect" for field in call.head.fields)
        self.incoming = _Incoming(self, length, expected=expected)

    def feed(self, parts: Sequence[memoryview]) -> None:
        """Pass on parts of the body. Raise `InvalidArgument` if it is longer than its content-length."""
        for part in parts:
            self._pass_on(part)
        self.open_window()

    def _pass_on(self, data: memoryview) -> None:
        self._received += len(data)
        self._unopened += len(data)
        length = self._call.head.length
        if length is not None and self._received > length:
            raise InvalidArgument("the body is longer than its content-length")
        self.incoming.expected = False
        self.incoming.feed(bytes(data))

    def mark_ended(self) -> None:
        """Note that the client has ended its request."""
        super().mark_ended()
        self.incoming.end()

    def drop(self) -> None:
        """Discard the rest."""
        super().drop()
        self.incoming.fail("the call has ended")

    def send_continue(self) -> None:
        """See `RestCall`."""
        self._call.send_continue()

    def open_window(self) -> None:
        """Open the window for as much as has arrived, unless too much of it waits to be read."""
        if self._unopened and not self.incoming.paused and not self._call.over:
            self._call.protocol.connection.consumed(self._call.number, self._unopened)
            self._unopened = 0
            self._call.protocol.schedule_write()


class _Incoming(IncomingBody):
    """The readable side of a `RestBody`."""

    __slots__ = ("_body", "expected")

    def __init__(self, body: RestBody, length: int | None, *, expected: bool) -> None:
        super().__init__(length)
        self.expected = expected
        """Whether the client waits for 100 (Continue)."""
        self._body = body

    def want(self, *, more: bool) -> None:
        if more:
            self._body.open_window()

    async def read(self) -> bytes:
        if self.expected and not self.has_ended:
            self.expected = False
            self._body.send_continue()
        return await super().read()


def begin_rest(protocol: Connected, event: RequestReceived, transport: asyncio.BaseTransport | None) -> None:
    """Answer a request that is not a gRPC call by REST, if that is served on this port."""
    head, number, rest = event.headers, event.stream, protocol.server.rest
    if transport is None:
        return
    # Before a call is created, which would cost more than a rejection.
    if (refused := _refusal(protocol, head)) is not None:
        _send_error(protocol, number, head, *refused, "" if rest is None else rest.calls.clock.date())
        protocol.connection.reset_when_sent(number, ErrorCode.NO_ERROR)
        return
    assert rest is not None  # Otherwise the request is refused.
    call = RestCall(protocol, number, head, rest.calls, end_stream=event.end_stream)
    protocol.add_call(call)
    call.begin()
    if event.end_stream:
        protocol.request_ended(call)


def _refusal(protocol: Connected, head: RpcHead) -> tuple[int, str] | None:
    """Return the status and the text that reject a request by its head and what the server holds, or None."""
    if (too_large := _too_large(head)) is not None:
        return too_large
    if protocol.server.rest is None:
        kinds = [field.text for field in head.fields if field.kind == CONTENT_TYPE]
        return head.status, grpc_only("this port", _pseudo(head)[b":method"].decode("latin-1"), ", ".join(kinds))
    backlog = protocol.backlog()
    return None if backlog is None else (UNAVAILABLE, backlog.message)


def _too_large(head: RpcHead) -> tuple[int, str] | None:
    """Return the status and the text for a head beyond the limits, which are those over HTTP/1.1; else None."""
    count = size = 0
    for field in head.fields:
        if field.kind == PATH and field.size - field.name.size > MAX_LINE_BYTES:
            return TARGET_TOO_LONG, f"{LONG_TARGET}: {_quoted(field.value)}"
        if field.kind == OMITTED:
            count += field.meaning
            size += field.size
            continue
        line = field.size - FIELD_BYTES
        if line > MAX_LINE_BYTES:
            return HEAD_TOO_LARGE, f"{LONG_FIELD}: {_quoted(field.name.value)}"
        count += field.kind >= FIRST_REGULAR
        size += line + _LINE_END
    if count > MAX_FIELDS:
        return HEAD_TOO_LARGE, MANY_FIELDS
    return (HEAD_TOO_LARGE, LARGE_HEAD) if size > MAX_HEAD_BYTES else None


def _problem(head: RpcHead) -> str:
    """Return what is wrong with a request that HTTP/1.1 could not say, or servers could misread; or ""."""
    pseudo = _pseudo(head)
    if not _METHOD.fullmatch(pseudo[b":method"]):
        return f"expected a method of up to 32 capital letters, got {_quoted(pseudo[b':method'])}"
    if not _TARGET.fullmatch(pseudo[b":path"]):
        return f"expected a path that begins with /, got {_quoted(pseudo[b':path'])}"
    hosts = [field.value for field in head.fields if field.name.value in (b"host", b":authority")]
    if len({host.lower() for host in hosts}) > 1:
        return f"the fields :authority and host differ: {' and '.join(map(_quoted, hosts))}"
    return ""


def _head(status: int, fields: Fields, length: int | None, date: str) -> bytes:
    """Return the header block of a response. `length`: of its body, if known."""
    named = [(name.lower(), value) for name, value in fields]
    named = [field for field in named if field[0] not in FRAMING]
    if length is not None and status not in BODILESS:
        named.append(("content-length", str(length)))
    if date:
        named.append(("date", date))
    return block_of(status, ((name.encode(), value.encode("utf-8", "surrogateescape")) for name, value in named))


def _send_error(protocol: Connected, number: int, head: RpcHead, status: int, text: str, date: str) -> None:
    """Answer a request that is not passed on."""
    out, body = protocol.connection.out, error_body(text)
    has_body = _pseudo(head)[b":method"] != b"HEAD"
    out.headers(number, _head(status, _ERROR_FIELDS, len(body), date), end=not has_body)
    if has_body:
        out.data(number, (body,))
        out.end(number)


def _quoted(value: bytes) -> str:
    return ascii(value[:MAX_QUOTED].decode("latin-1"))[:MAX_QUOTED]


def _pseudo(head: RpcHead) -> dict[bytes, bytes]:
    return {field.name.value: field.value for field in head.fields if field.kind < FIRST_REGULAR}


def rest_fields(head: RpcHead) -> list[tuple[str, str]]:
    """Return the header fields as HTTP/1.1 would have them."""
    fields = [(field.name.value, field.value) for field in head.fields if field.kind >= FIRST_REGULAR]
    hosts = [value for name, value in fields if name == b"host"]
    cookies = [value for name, value in fields if name == b"cookie"]
    named = [(b"host", _pseudo(head).get(b":authority", (hosts or [b""])[0]))]
    named += [field for field in fields if field[0] not in _NOT_PASSED_ON]
    if cookies:
        named.append((b"cookie", b"; ".join(cookies)))
    return [(name.decode("latin-1"), value.decode("utf-8", "surrogateescape")) for name, value in named]
