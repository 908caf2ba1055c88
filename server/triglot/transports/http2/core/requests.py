"""gRPC requests and statuses as HTTP/2 header fields (gRPC over HTTP/2: Requests, Responses)."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote

from triglot.transports.http2.core.fields import (
    CREDENTIAL,
    FIRST_REGULAR,
    MALFORMED,
    METADATA,
    TRACEPARENT,
    TRACESTATE,
    Field,
    MalformedRequest,
)
from triglot.transports.http2.core.limits import MAX_HEADER_BYTES

Metadata = Sequence[tuple[str, str | bytes]]

CALL_BYTES = 16 * 1024
"""Approximate memory of an open call besides its fields: 2 to 15 KiB; streams and REST calls take the most."""
FIELDS_FACTOR = 10
"""Memory of fields, as a multiple of their size as HTTP/2 counts it."""
MAX_CACHED, MAX_CACHED_FIELDS = 200, 16
"""Limits on the cached starts of blocks, each of which is in one table of 4 KiB, and on their fields."""
CODINGS = ("identity", "deflate", "gzip")
_DEFAULTS: Sequence[Any] = (None, None, None, None, None, False, None, "identity", "", None)
"""The meaning of an absent field, by kind."""
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


@dataclass(slots=True)
class RpcHead:
    """The parsed header fields of a request.

    `timeout` in seconds, None without one. `encoding`: the compression of its messages; `accepts`: that
    accepted for responses. `length`: the content-length, if given. `traceparent` and `tracestate` are
    unchecked, "" if absent. `credentials`: names and values of the fields that access control asks for.
    `status`: the HTTP status that answers a request that is not a gRPC call, else 0. `problem`: what is wrong
    with a gRPC call, else ""; `too_large`: its fields are too large, and not kept. `call_bytes`: approximate
    memory of the call.
    """

    fields: Sequence[Field]
    path: str
    timeout: float | None
    encoding: str
    accepts: str
    length: int | None
    traceparent: str
    tracestate: str
    credentials: tuple[tuple[str, str], ...]
    status: int
    problem: str
    too_large: bool
    call_bytes: int

    def read_metadata(self) -> Metadata:
        """Return the fields that are not HTTP/2's or gRPC's own, as gRPC metadata."""
        if self.problem:
            return ()
        return [pair for field in self.fields if field.kind >= METADATA for pair in field.metadata()]


class _Parsed(NamedTuple):
    """What the first fields of a request say."""

    fields: tuple[Field, ...] = ()
    meanings: Sequence[Any] = _DEFAULTS
    traceparent: str = ""
    tracestate: str = ""
    credentials: tuple[tuple[str, str], ...] = ()
    problem: str = ""
    size: int = 0
    is_regular: bool = False
    """Whether a pseudo-header may no longer follow."""


_NOTHING = _Parsed()


def read_head(start: tuple[Field, ...], rest: Sequence[Field] = ()) -> RpcHead:
    """Returns the head of a request with these fields, given as `Decoder.decode` returns them.

    Most blocks begin with the same entries of the table: what these say is cached. Raises `MalformedRequest` for
    fields that HTTP/2 does not allow (RFC 9113, 8).
    """
    if len(start) > MAX_CACHED_FIELDS:
        return _head(_parse((*start, *rest)))
    return _head(_parse(rest, _cached_start(start))) if rest else _cached_head(start)


def _head(parsed: _Parsed) -> RpcHead:
    fields, meanings, traceparent, tracestate, credentials, problem, size, _ = parsed
    is_post, scheme, path, _, _, is_grpc, timeout, encoding, accepts, length = meanings
    if is_post is None or not scheme or not path:
        raise MalformedRequest("a pseudo-header is missing")
    status = 405 if not is_post else 415 if not is_grpc else 0
    too_large = size > MAX_HEADER_BYTES and not status
    if too_large:
        problem = f"received metadata size exceeds the limit ({size} vs. {MAX_HEADER_BYTES})"
        fields, size = (), 0
    return RpcHead(
        fields,
        path,
        timeout,
        encoding,
        accepts,
        length,
        traceparent,
        tracestate,
        credentials,
        status,
        problem,
        too_large,
        CALL_BYTES + FIELDS_FACTOR * size,
    )


def _parse(fields: Sequence[Field], before: _Parsed = _NOTHING) -> _Parsed:
    """Returns what the fields say, after those `before`. Raises as `read_head`."""
    meanings = list(before.meanings)
    _, _, traceparent, tracestate, credentials, problem, size, is_regular = before
    for field in fields:
        size += field.size
        kind = field.kind
        if kind >= FIRST_REGULAR:
            is_regular = True
            if kind == MALFORMED:
                raise MalformedRequest(f"field {field.name.value!r}")
            problem = problem or field.problem
        elif is_regular or meanings[kind] is not None:
            raise MalformedRequest(f"pseudo-header {field.name.value!r}")
        if kind < METADATA:
            meanings[kind] = field.meaning
        elif kind == TRACEPARENT:
            traceparent = field.meaning
        elif kind == TRACESTATE:
            tracestate = f"{tracestate},{field.meaning}" if tracestate else field.meaning
        elif kind == CREDENTIAL:
            credentials = (*credentials, (field.name.text, field.meaning))
    parsed = (*before.fields, *fields)
    return _Parsed(parsed, meanings, traceparent, tracestate, credentials, problem, size, is_regular)


@lru_cache(maxsize=MAX_CACHED)
def _cached_start(fields: tuple[Field, ...]) -> _Parsed:
    return _parse(fields)


@lru_cache(maxsize=MAX_CACHED)
def _cached_head(fields: tuple[Field, ...]) -> RpcHead:
    return _head(_cached_start(fields))


# --- responses ---


def _literal(name: bytes, value: bytes) -> bytes:
    """Returns a literal field without indexing, whose encoding does not depend on the dynamic table."""
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def _length(count: int) -> bytes:
    """Returns an HPACK integer with a prefix of seven bits (RFC 7541, 5.1)."""
    if count < 127:
        return bytes((count,))
    rest, encoded = count - 127, bytearray((127,))
    while rest >= 128:
        encoded.append(rest & 127 | 128)
        rest >>= 7
    encoded.append(rest)
    return bytes(encoded)


_STATUS_200 = b"\x88"
"""`:status: 200`, an index into HPACK's static table."""
_CODINGS = _literal(b"grpc-accept-encoding", ",".join(CODINGS).encode())
_HEAD = _STATUS_200 + _literal(b"content-type", b"application/grpc") + _CODINGS
OK_TRAILERS = _literal(b"grpc-status", b"0")


def response_head() -> bytes:
    """Returns the header block that precedes a response's messages."""
    return _HEAD


def compressed_head(coding: str) -> bytes:
    """As `response_head`, for messages compressed with `coding`."""
    return _HEAD + _literal(b"grpc-encoding", coding.encode())


def trailers(code: int, message: str = "", metadata: Iterable[tuple[str, str | bytes]] = ()) -> bytes:
    """Returns the header block that ends a response."""
    if not code and not metadata:
        return OK_TRAILERS
    block = _literal(b"grpc-status", str(code).encode())
    if message:
        block += _literal(b"grpc-message", quote(message, safe=_PRINTABLE).encode())
    for name, value in metadata:
        text = base64.b64encode(value).rstrip(b"=") if isinstance(value, bytes) else value.encode("latin-1")
        block += _literal(name.encode("latin-1"), text)
    return block


def trailers_only(code: int, message: str, metadata: Iterable[tuple[str, str | bytes]] = ()) -> bytes:
    """Returns the header block of a Trailers-Only response: an error before any message."""
    return _HEAD + trailers(code, message, metadata)


def block_of(status: int, fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Returns the header block of any response; names in lower case."""
    return _literal(b":status", str(status).encode()) + b"".join(_literal(*field) for field in fields)
