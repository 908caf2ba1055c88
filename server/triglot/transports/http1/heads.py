"""Formats response heads and chunks for HTTP/1.1 (RFC 9112). No I/O."""

from __future__ import annotations

from functools import lru_cache
from http import HTTPStatus

from triglot.transports.rest.fields import FRAMING, Fields

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
BODILESS = (204, 304)
"""Statuses of responses without a body."""
MAX_CACHED_LINES = 256
"""Status lines, and lines of header fields, that are cached."""


@lru_cache(MAX_CACHED_LINES)
def status_line(status: int, *, is_http10: bool) -> bytes:
    """Returns the status line; `is_http10`: of HTTP/1.0."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.{0 if is_http10 else 1} {status} {phrase}\r\n".encode()


def lines(fields: Fields) -> bytes:
    """Returns the lines of a response's header fields, without framing."""
    own = [f"{name}: {value}\r\n" for name, value in fields if name.lower() not in FRAMING]
    return "".join(own).encode("utf-8", "surrogateescape")


@lru_cache(MAX_CACHED_LINES)
def _cached_lines(fields: tuple[tuple[str, str], ...]) -> bytes:
    return lines(fields)


def head(
    status: int, fields: Fields, date: str, *, length: int | None, is_http10: bool, keep_alive: bool
) -> bytes:
    """Returns the head of a response. `length`: of its body; None: it is chunked, or ends with the connection.

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


def chunk(data: bytes) -> bytes:
    """Returns a chunk of a chunked body; `data` must not be empty."""
    return b"%x\r\n%b\r\n" % (len(data), data)
