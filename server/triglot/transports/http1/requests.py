"""Parses HTTP/1.1 requests, and formats the heads and chunks of responses (RFC 9112). No I/O.

Strategy: llhttp, in its strict mode, parses heads and chunked bodies, but would continue with pipelined
requests. So it is fed only up to the next blank line, which ends every head and every chunked body: no request
is read before its turn, and each request has a parser of its own. A body of known length is counted, and passed
on in the pieces in which it arrived. Heads that differ from an earlier one in plain values only are not parsed
again (`HeadLayouts`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from typing import Final

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from triglot.core.compiling import mypyc_attr
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
    TARGET_TOO_LONG,
    Fields,
    repetition,
)

BLANK_LINE: Final = b"\r\n\r\n"
MAX_LAYOUT_BYTES: Final = 2048
"""Longest head that is cached, in bytes."""
MAX_LAYOUTS: Final = 64
MAX_DIGITS: Final = 18
"""Digits of a Content-Length that certainly fits 64 bits."""
LENGTH: Final = "content-length"
_CONSTANT: Final = frozenset(("connection", "proxy-connection", "transfer-encoding", "upgrade"))
"""Fields whose values change how the head itself is parsed."""
_PLAIN: Final = re.compile(rb"[!-~](?:[ -~]*[!-~])?")
"""Values that are what is sent, without blanks around them."""


@dataclass(slots=True)
class RequestHead:
    """A request without its body. `length`: that of the body; None: it is chunked. `fields`: lower-case names."""

    verb: str
    target: str
    fields: list[tuple[str, str]]
    length: int | None
    is_http10: bool
    keep_alive: bool


class _Layout:
    """The lines of a head, and for each the beginning that a line with another value has; b"" if none may."""

    __slots__ = ("begins", "head", "lines")

    def __init__(self, lines: list[bytes], begins: list[bytes], head: RequestHead) -> None:
        self.lines = lines
        self.begins = begins
        self.head = head


class HeadLayouts:
    """A cache of heads by layout: a head's lines without the values that differ between requests.

    A client's requests to a target differ in few fields: Content-Length, ids, trace context. A head whose other
    lines are those of a head that was parsed differs from what was parsed in the same values only. There is one
    layout for each first line and number of lines; the first in is the first out.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, int], _Layout] = {}

    def read(self, text: bytes) -> RequestHead | None:
        """Return the head that a text is, by a known layout; None if there is none."""
        if len(text) > MAX_LAYOUT_BYTES or not text.endswith(BLANK_LINE):
            return None
        lines = text[:-4].split(b"\r\n")
        layout = self._known.get((lines[0], len(lines)))
        if layout is None:
            return None
        head = layout.head
        length = head.length
        fields = head.fields.copy()
        known = layout.lines
        for at, line in enumerate(lines):
            if line == known[at]:
                continue
            begin = layout.begins[at]
            if not begin or not line.startswith(begin):
                return None
            value = line[len(begin) :]
            if _PLAIN.fullmatch(value) is None:
                return None
            name, text_value = fields[at - 1][0], value.decode()
            if name == LENGTH:
                if len(value) > MAX_DIGITS or not value.isdigit():
                    return None
                length = int(value)
            fields[at - 1] = name, text_value
        return RequestHead(head.verb, head.target, fields, length, head.is_http10, head.keep_alive)

    def learn(self, text: bytes, head: RequestHead) -> None:
        """Cache the layout of a head's whole text, if each of its lines is a field as it was read."""
        if len(text) > MAX_LAYOUT_BYTES or len(dict(head.fields)) < len(head.fields):
            return
        lines = text[:-4].split(b"\r\n")
        first = f"{head.verb} {head.target} HTTP/1.{0 if head.is_http10 else 1}"
        if lines[0] != first.encode("latin-1") or len(lines) != len(head.fields) + 1:
            return
        begins = [b""]
        for line, (name, value) in zip(lines[1:], head.fields, strict=True):
            begin, colon, rest = line.partition(b": ")
            as_sent = rest.decode("utf-8", "surrogateescape")
            if not colon or begin.decode("latin-1").lower() != name or as_sent != value:
                return
            begins.append(b"" if name in _CONSTANT else begin + colon)
        key = lines[0], len(lines)
        if len(self._known) >= MAX_LAYOUTS and key not in self._known:
            del self._known[next(iter(self._known))]
        self._known[key] = _Layout(lines, begins, head)


PIECE_BYTES: Final = 16 * 1024
"""Pipelined bytes that are parsed at a time, because what is left of a piece is copied with each request."""
MAX_TEXT: Final = 200
"""Longest error text, and longest quotation in it, in characters."""
_BLANKS: Final = (b" ", b"\t")
_BEGIN: Final = re.compile(rb"[A-Z]+ /[^?\s]*|[!#$%&'*+.^_`|~\w-]*")
"""The beginning of a line: method and path, or the name of a field."""


def _lower(name: bytes) -> str:
    return name.decode("latin-1").lower()


_KNOWN_NAMES: Final = {
    name: _lower(name)
    for known in (
        "Accept",
        "Accept-Encoding",
        "Authorization",
        "Connection",
        "Content-Length",
        "Content-Type",
        "Host",
        "Inference-Header-Content-Length",
        "Traceparent",
        "User-Agent",
    )
    for name in (known.encode(), known.lower().encode())
}
"""Common field names in lower case, by the spellings of most clients."""
_CHUNKED_HEAD: Final = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass(slots=True)
class BodyPart:
    """A part of the body, not empty."""

    data: bytes


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The end of a request; nothing more is read until `next_request`."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """An invalid request or body. The beginning of a next request is unknown, so nothing more is read."""

    text: str
    status: int = BAD_REQUEST


Event = RequestHead | BodyPart | RequestEnded | Malformed
ENDED: Final = RequestEnded()


@mypyc_attr(native_class=False)
class _MalformedRequest(Exception):
    def __init__(self, text: str, status: int = BAD_REQUEST) -> None:
        super().__init__(text)
        self.status = status


class RequestReader:
    """Turns bytes into events, one request at a time; none after `Malformed`.

    `layouts` are those of requests that were read before.
    """

    __slots__ = ("_at", "_body", "_head", "_is_over", "_kept", "_layouts", "_left", "kept", "waits")

    def __init__(self, layouts: HeadLayouts) -> None:
        self._layouts = layouts
        self._kept = b""
        """Received bytes that are not parsed yet, from `_at` on."""
        self._at = 0
        self.kept = 0
        """Number of bytes that wait for `next_request`."""
        self.waits = True
        """Whether nothing is read until `next_request`."""
        self._is_over = False
        self._head: _Head | None = None
        """The head that is being parsed."""
        self._left = 0
        """Bytes of a body of known length that have not arrived."""
        self._body: _ChunkedBody | None = None

    def close(self) -> None:
        """Read nothing more."""
        self.waits = True
        if self._head is not None:
            self._head.close()
        self._head = self._body = None
        self._kept, self._at, self.kept, self._left = b"", 0, 0, 0

    def receive(self, data: bytes) -> list[Event]:
        """Return the events of these bytes; bytes of later requests are kept."""
        events: list[Event] = []
        rest = data if self.waits else self._read(data, events)
        if rest and not self._is_over:
            self._kept = self._kept[self._at :] + rest if self.kept else rest
            self._at, self.kept = 0, len(self._kept)
        return events

    def next_request(self) -> list[Event]:
        """Return the events of the next request, as far as it has arrived."""
        self.waits = False
        events: list[Event] = []
        kept, at = self._kept, self._at
        while at < len(kept) and not self.waits:
            piece = kept[at : at + PIECE_BYTES]
            at += len(piece) - len(self._read(piece, events))
        if self._is_over or at == len(kept):
            self._kept, self._at, self.kept = b"", 0, 0
        else:
            self._at, self.kept = at, len(kept) - at
        return events

    def _read(self, data: bytes, events: list[Event]) -> bytes:
        """Parse up to the end of the request; returns the bytes after it."""
        try:
            if not self._left and self._body is None:
                data = self._read_head(data, events)
            if data and self._left:
                return self._read_sized(data, events)
            if data and self._body is not None:
                return self._read_chunked(self._body, data, events)
        except _MalformedRequest as error:
            events.append(Malformed(str(error), error.status))
            self.close()
            self._is_over = True
            return b""
        return data

    def _read_head(self, data: bytes, events: list[Event]) -> bytes:
        """Parse up to the end of the head; returns the bytes after it."""
        if self._head is None:
            end = blank_line(b"", data)
            head = self._layouts.read(data[:end])
            if head is not None:
                return self._read_on(head, data[end:], events)
            self._head = _Head(self._layouts)
        while data:
            end = blank_line(self._head.tail, data)
            head = self._head.feed(data if end == len(data) else data[:end])
            data = data[end:]
            if head is not None:
                self._head = None
                return self._read_on(head, data, events)
        return b""

    def _read_on(self, head: RequestHead, data: bytes, events: list[Event]) -> bytes:
        """Note what follows the head, and return it."""
        events.append(head)
        if head.length is None:
            self._body = _ChunkedBody()
        elif head.length:
            self._left = head.length
        else:
            events.append(ENDED)
            self.waits = True
        return data

    def _read_sized(self, data: bytes, events: list[Event]) -> bytes:
        size = self._left
        if len(data) < size:
            self._left = size - len(data)
            events.append(BodyPart(data))
            return b""
        self._left = 0
        self.waits = True
        events.append(BodyPart(data[:size]))
        events.append(ENDED)
        return data[size:]

    def _read_chunked(self, body: _ChunkedBody, data: bytes, events: list[Event]) -> bytes:
        try:
            rest = body.feed(data)
        except HttpParserError as error:
            raise _MalformedRequest(f"{error}, in a chunked body") from None
        finally:
            if parts := body.take():
                events.append(BodyPart(parts))
        if body.is_complete:
            self._body = None
            self.waits = True
            events.append(ENDED)
        elif body.overhead > MAX_HEAD_BYTES:
            raise _MalformedRequest(
                f"a chunked body has more than {MAX_HEAD_BYTES} bytes of chunk headers", HEAD_TOO_LARGE
            )
        return rest


class _Head:
    """Parses a head, which may arrive in pieces."""

    __slots__ = (
        "_fields",
        "_is_complete",
        "_keep_alive",
        "_layouts",
        "_line",
        "_parser",
        "_size",
        "_target",
        "tail",
    )

    def __init__(self, layouts: HeadLayouts) -> None:
        self._layouts = layouts
        self._parser: HttpRequestParser | None = HttpRequestParser(self)
        self._target = b""
        self._fields: list[tuple[str, str]] = []
        self._is_complete = self._keep_alive = False
        self._size = 0
        self.tail = b""
        """The last bytes that were parsed, which may be part of a blank line."""
        self._line = b""
        """The incomplete last line."""

    def feed(self, piece: bytes) -> RequestHead | None:
        """Parse a piece, which ends with the head or continues; returns it once it is complete.

        Raise `_MalformedRequest`.
        """
        parser = self._parser
        assert parser is not None
        self._parse(parser, piece)
        self._size += len(piece)
        if self._size > MAX_HEAD_BYTES:
            raise _MalformedRequest(LARGE_HEAD, HEAD_TOO_LARGE)
        if self._is_complete:
            if not piece.endswith(BLANK_LINE) and not (self.tail + piece).endswith(BLANK_LINE):
                raise _MalformedRequest("the head does not end with an empty line")
            head = self._head_of(parser)
            self.close()
            if self._size == len(piece):
                self._layouts.learn(piece, head)
            return head
        self.tail = (self.tail + piece)[-3:]
        self._line = piece[piece.rfind(b"\n") + 1 :] if b"\n" in piece else self._line + piece
        if len(self._line) > MAX_LINE_BYTES:
            raise _MalformedRequest(f"{LONG_FIELD}: {_named(self._line)}", HEAD_TOO_LARGE)
        return None

    def close(self) -> None:
        """Parse nothing more."""
        self._parser = None  # It refers to this object.

    def _parse(self, parser: HttpRequestParser, piece: bytes) -> None:
        is_first = self._size == 0
        try:
            parser.feed_data(piece)
        except HttpParserUpgrade:
            pass  # The client offers another protocol, which is ignored.
        except HttpParserError as error:
            if isinstance(error.__context__, _MalformedRequest):
                raise error.__context__ from None
            where = f": {_named(_first_wrong_line(piece))}" if is_first else ""
            raise _MalformedRequest(f"{error}{where}") from None

    # Callbacks of llhttp, which may pass parts of a line.

    def on_url(self, url: bytes) -> None:
        """Handle the target, or a part of it."""
        self._target += url
        if len(self._target) > MAX_LINE_BYTES:
            raise _MalformedRequest(f"{LONG_TARGET}: {_quoted(self._target)}", TARGET_TOO_LONG)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handle a header field."""
        if len(name) + len(value) > MAX_LINE_BYTES:
            raise _MalformedRequest(f"{LONG_FIELD}: {_quoted(name)}", HEAD_TOO_LARGE)
        if len(self._fields) == MAX_FIELDS:
            raise _MalformedRequest(MANY_FIELDS, HEAD_TOO_LARGE)
        if value[-1:] in _BLANKS:  # llhttp keeps trailing blanks.
            value = value.rstrip(b" \t")
        self._fields.append((_KNOWN_NAMES.get(name) or _lower(name), value.decode("utf-8", "surrogateescape")))

    def on_headers_complete(self) -> None:
        """Handle the end of the head."""
        self._is_complete = True
        assert self._parser is not None
        self._keep_alive = bool(self._parser.should_keep_alive())

    def _head_of(self, parser: HttpRequestParser) -> RequestHead:
        fields = self._fields
        headers = dict(fields)
        if len(headers) < len(fields) and (problem := repetition(fields)):
            raise _MalformedRequest(problem)
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise _MalformedRequest(f"HTTP version {version} is not supported")
        is_http10 = version == "1.0"
        if not is_http10 and "host" not in headers:
            raise _MalformedRequest("Missing 'Host' header in request.")
        length: int | None = int(headers.get("content-length", 0))
        if (coding := headers.get("transfer-encoding")) is not None:
            if is_http10 or coding.lower() != "chunked":
                raise _MalformedRequest(f"Transfer-Encoding {coding[:MAX_TEXT]!r}, expected chunked")
            length = None
        verb, target = parser.get_method().decode(), self._target.decode("latin-1")
        return RequestHead(verb, target, fields, length, is_http10, self._keep_alive)


class _ChunkedBody:
    """Decodes a chunked body."""

    def __init__(self) -> None:
        self.is_complete = False
        self.overhead = 0
        """Approximate number of bytes since the last data."""
        self._parts: list[bytes] = []
        self._tail = b""
        self._parser: HttpRequestParser | None = HttpRequestParser(self)
        self._parser.feed_data(_CHUNKED_HEAD)

    def feed(self, data: bytes) -> bytes:
        """Parse up to the end of the body; returns the bytes after it. Raise `HttpParserError`."""
        assert self._parser is not None
        while data and not self.is_complete:
            end = blank_line(self._tail, data)
            piece = data if end == len(data) else data[:end]
            data = data[end:]
            self.overhead += len(piece)
            self._parser.feed_data(piece)
            self._tail = (self._tail + piece)[-3:]
        if self.is_complete:
            self._parser = None  # It refers to this object.
        return data

    def take(self) -> bytes:
        """Return the data that has arrived since the last call."""
        parts, self._parts = self._parts, []
        return b"".join(parts)

    def on_body(self, data: bytes) -> None:
        """Handle data. Called by llhttp."""
        self._parts.append(data)
        self.overhead = 0

    def on_message_complete(self) -> None:
        """Handle the end. Called by llhttp."""
        self.is_complete = True


def blank_line(tail: bytes, data: bytes) -> int:
    """Return where the first blank line of `data`, which may begin in `tail`, ends.

    Its length if there is none.
    """
    if tail:
        early = (tail + data[:3]).find(BLANK_LINE)
        if early >= 0:
            return early + 4 - len(tail)
    end = data.find(BLANK_LINE)
    return len(data) if end < 0 else end + 4


def _first_wrong_line(piece: bytes) -> bytes:
    """Return the line of a rejected head that is invalid."""
    parser = HttpRequestParser(object())
    for line in piece.splitlines(keepends=True):
        try:
            parser.feed_data(line)
        except HttpParserError:
            return line.rstrip(b"\r\n")
    return piece


def _named(line: bytes) -> str:
    """Return the beginning of a line, quoted: the rest may be a credential, which must not be logged."""
    begin = _BEGIN.match(line)
    assert begin is not None
    return _quoted(begin[0])


def _quoted(line: bytes) -> str:
    return ascii(line[:MAX_TEXT].decode("latin-1"))[:MAX_TEXT]


# --- responses ---

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"
BODILESS: Final = (204, 304)
"""Statuses of responses without a body."""
MAX_CACHED_LINES: Final = 256
"""Status lines, and lines of header fields, that are cached."""


@lru_cache(MAX_CACHED_LINES)
def status_line(status: int, *, is_http10: bool) -> bytes:
    """Return the status line; `is_http10`: of HTTP/1.0."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.{0 if is_http10 else 1} {status} {phrase}\r\n".encode()


def lines(fields: Fields) -> bytes:
    """Return the lines of a response's header fields, without framing."""
    own = [f"{name}: {value}\r\n" for name, value in fields if name.lower() not in FRAMING]
    return "".join(own).encode("utf-8", "surrogateescape")


@lru_cache(MAX_CACHED_LINES)
def _cached_lines(fields: tuple[tuple[str, str], ...]) -> bytes:
    return lines(fields)


def response_head(
    status: int, fields: Fields, date: str, *, length: int | None, is_http10: bool, keep_alive: bool
) -> bytes:
    """Return the head of a response. `length`: of its body; None: it is chunked, or ends with the connection.

    The lines of `fields` that are a tuple are cached.
    """
    own = _cached_lines(fields) if type(fields) is tuple else lines(fields)
    if status in BODILESS:
        framing = b""
    elif length is not None:
        framing = b"Content-Length: %d\r\n" % length
    else:
        framing = b"" if is_http10 else b"Transfer-Encoding: chunked\r\n"
    connection = b""
    if keep_alive == is_http10:
        connection = b"Connection: keep-alive\r\n" if keep_alive else b"Connection: close\r\n"
    dated = b"Date: %b\r\n" % date.encode()
    return b"".join((status_line(status, is_http10=is_http10), own, dated, framing, connection, b"\r\n"))


def encode_chunk(data: bytes) -> bytes:
    """Return a chunk of a chunked body; `data` must not be empty."""
    return b"%x\r\n%b\r\n" % (len(data), data)
