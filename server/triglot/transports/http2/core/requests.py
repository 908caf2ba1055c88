"""gRPC's requests and statuses as HTTP/2 header fields (gRPC over HTTP/2: Requests, Responses)."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from triglot.transports.http2.core.fields import FIRST_REGULAR, MALFORMED, METADATA, TRACEPARENT, TRACESTATE, Field
from triglot.transports.http2.core.headers import MalformedRequest
from triglot.transports.http2.core.limits import MOST_HEADER_BYTES

Metadata = Sequence[tuple[str, str | bytes]]

CALL_BYTES = 16 * 1024
"""About what an open call takes beside its fields: 2 to 15 KiB, streams and REST the most."""
FIELDS_FACTOR = 10
"""How many bytes its fields take, for each that HTTP/2 counts."""
CODINGS = ("identity", "deflate", "gzip")
_DEFAULTS: Sequence[Any] = (None, None, None, None, None, False, None, "identity", "", None)
"""What a request without a field means, by kind."""
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


@dataclass(slots=True)
class RpcHead:
    """What the fields of a request say.

    `timeout` in seconds, None without one. `encoding` is the coding of its messages; `accepts` how answers may be
    compressed. `length`: bytes of the body, where it says so. `traceparent` and `tracestate` as they came, or "".
    `status`: the HTTP status of a request that is no gRPC call, or 0. `problem`: what is wrong with one that is,
    or nothing; `too_large`: it is that. `call_bytes`: memory that the call takes, about.
    """

    fields: Sequence[Field]
    path: str
    timeout: float | None
    encoding: str
    accepts: str
    length: int | None
    traceparent: str
    tracestate: str
    status: int
    problem: str
    too_large: bool
    call_bytes: int

    @property
    def metadata(self) -> Metadata:
        """The fields that neither HTTP/2 nor gRPC has a use for."""
        if self.problem:
            return ()
        return [pair for field in self.fields if field.kind >= METADATA for pair in field.metadata()]


def read_head(fields: Sequence[Field]) -> RpcHead:
    """Raises `MalformedRequest` for fields that HTTP/2 does not allow (RFC 9113, 8)."""
    meanings = list(_DEFAULTS)
    problem = parent = state = ""
    size = 0
    is_regular = False
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
            parent = field.meaning
        elif kind == TRACESTATE:
            state = f"{state},{field.meaning}" if state else field.meaning
    is_post, scheme, path, _, _, is_grpc, timeout, encoding, accepts, length = meanings
    if is_post is None or not scheme or not path:
        raise MalformedRequest("a pseudo-header is missing")
    status = 405 if not is_post else 415 if not is_grpc else 0
    too_large = size > MOST_HEADER_BYTES
    if too_large:
        problem = f"received metadata size exceeds the limit ({size} vs. {MOST_HEADER_BYTES})"
        fields = ()
    call_bytes = CALL_BYTES + FIELDS_FACTOR * size
    return RpcHead(
        fields, path, timeout, encoding, accepts, length, parent, state, status, problem, too_large, call_bytes
    )


# --- answers ---


def _literal(name: bytes, value: bytes) -> bytes:
    """A field that enters no table: what it means depends on nothing that was sent before."""
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def _length(count: int) -> bytes:
    """HPACK's integer with a prefix of seven bits (RFC 7541, 5.1)."""
    if count < 127:
        return bytes((count,))
    rest, encoded = count - 127, bytearray((127,))
    while rest >= 128:
        encoded.append(rest & 127 | 128)
        rest >>= 7
    encoded.append(rest)
    return bytes(encoded)


_STATUS_200 = b"\x88"
"""`:status: 200`, which HPACK's static table has."""
_CODINGS = _literal(b"grpc-accept-encoding", ",".join(CODINGS).encode())
_HEAD = _STATUS_200 + _literal(b"content-type", b"application/grpc") + _CODINGS
OK_TRAILERS = _literal(b"grpc-status", b"0")


def answer_head() -> bytes:
    """The header block before an answer's messages."""
    return _HEAD


def compressed_head(coding: str) -> bytes:
    """As `answer_head`, where messages may be compressed."""
    return _HEAD + _literal(b"grpc-encoding", coding.encode())


def trailers(code: int, message: str = "", metadata: Iterable[tuple[str, str | bytes]] = ()) -> bytes:
    """The header block that ends an answer."""
    if not code and not metadata:
        return OK_TRAILERS
    block = _literal(b"grpc-status", str(code).encode())
    if message:
        block += _literal(b"grpc-message", quote(message, safe=_PRINTABLE).encode())
    for name, value in metadata:
        text = base64.b64encode(value).rstrip(b"=") if isinstance(value, bytes) else value.encode("latin-1")
        block += _literal(name.encode("latin-1"), text)
    return block


def only_trailers(code: int, message: str, metadata: Iterable[tuple[str, str | bytes]] = ()) -> bytes:
    """The header block that is the whole answer: an error before any message."""
    return _HEAD + trailers(code, message, metadata)


def http_error(status: int) -> bytes:
    """The header block of the answer to what is no gRPC call."""
    return block_of(status, [(b"content-type", b"text/plain")])


def block_of(status: int, fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The header block of any answer; names in lower case."""
    return _literal(b":status", str(status).encode()) + b"".join(_literal(*field) for field in fields)
