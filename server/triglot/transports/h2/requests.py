"""gRPC's requests and statuses as HTTP/2 header fields (gRPC over HTTP/2: Requests, Responses)."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from triglot.transports.h2.headers import Fields, MalformedRequest, header_list_size
from triglot.transports.h2.limits import MOST_HEADER_BYTES

Metadata = Sequence[tuple[str, str | bytes]]

CALL_BYTES = 16 * 1024
"""About what an open call takes beside its fields: 2 to 15 KiB, streams and REST the most."""
FIELDS_FACTOR = 3
"""How many bytes its fields take, for each that HTTP/2 counts."""
CODINGS = ("identity", "deflate", "gzip")
_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_OF_THE_CONNECTION = {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
_PSEUDO = {b":method", b":scheme", b":path", b":authority"}
_NOT_METADATA = {
    b"te",
    b"content-type",
    b"grpc-timeout",
    b"grpc-encoding",
    b"grpc-accept-encoding",
    b"content-length",
}
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


_NAME = re.compile(rb"[0-9a-z_.\-!#$%&'*+^`|~]+")
_VALUE = re.compile(rb"(?![ \t])[^\x00\r\n]*(?<![ \t])")
"""Matched as a whole: to search for what it must not have takes ten times as long."""
_LENGTH = re.compile(rb"[0-9]{1,18}")
_GRPC_TYPE = re.compile(rb"application/grpc([+;].*)?")


@dataclass(frozen=True, slots=True)
class RpcHead:
    """What the fields of a request say.

    `timeout` in seconds, None without one. `status`: the HTTP status of a request that is no gRPC call, or 0.
    `problem`: what is wrong with one that is, or nothing; `too_large`: it is that. `length`: bytes of the body,
    where it says so. `simple`: nothing is wrong. `accepts`: how answers may be compressed.
    `fields`: all of them, for what is no gRPC call. `call_bytes`: memory that the call takes, about.
    """

    path: str
    timeout: float | None
    encoding: str
    metadata: Metadata
    status: int = 0
    problem: str = ""
    length: int | None = None
    simple: bool = False
    too_large: bool = False
    accepts: str = ""
    fields: Sequence[tuple[bytes, bytes]] = ()
    call_bytes: int = CALL_BYTES


def read_head(fields: Fields) -> RpcHead:
    """Raises `MalformedRequest` for fields that HTTP/2 does not allow (RFC 9113, 8)."""
    pseudo, own, others = _sorted(fields)
    size = header_list_size(fields)
    if own.get(b"te", b"trailers") != b"trailers":
        raise MalformedRequest("te is not 'trailers'")
    if not pseudo.get(b":path") or b":method" not in pseudo or not pseudo.get(b":scheme"):
        raise MalformedRequest("a pseudo-header is missing")
    length = own.get(b"content-length")
    if length is not None and not _LENGTH.fullmatch(length):
        raise MalformedRequest("content-length is no number")
    status = 0
    if pseudo[b":method"] != b"POST":
        status = 405
    elif not _GRPC_TYPE.fullmatch(own.get(b"content-type", b"")):
        status = 415
    timeout: float | None = None
    metadata: Metadata = ()
    problem = ""
    too_large = size > MOST_HEADER_BYTES
    try:
        timeout = _timeout(own.get(b"grpc-timeout"))
        if not too_large and not status:
            metadata = tuple(pair for name, value in others for pair in _metadata(name, value))
    except ValueError as error:
        problem = str(error)
    if too_large:
        problem = f"received metadata size exceeds the limit ({size} vs. {MOST_HEADER_BYTES})"
    path = pseudo[b":path"].decode("latin-1")
    encoding = own.get(b"grpc-encoding", b"identity").decode("latin-1")
    simple = not status and not problem
    return RpcHead(
        path,
        timeout,
        encoding,
        metadata,
        status,
        problem,
        None if length is None else int(length),
        simple,
        too_large,
        own.get(b"grpc-accept-encoding", b"").decode("latin-1"),
        fields if status and not too_large else (),
        CALL_BYTES + FIELDS_FACTOR * size,
    )


def _sorted(fields: Fields) -> tuple[dict[bytes, bytes], dict[bytes, bytes], Fields]:
    """Pseudo-headers, those that HTTP/2 and gRPC know, and metadata. Raises `MalformedRequest`."""
    pseudo: dict[bytes, bytes] = {}
    own: dict[bytes, bytes] = {}
    others: Fields = []
    for name, value in fields:
        if not _VALUE.fullmatch(value):
            raise MalformedRequest(f"the value of {name!r}")
        if name[:1] == b":":
            if name not in _PSEUDO or name in pseudo or own or others:
                raise MalformedRequest(f"pseudo-header {name!r}")
            pseudo[name] = value
        elif not _NAME.fullmatch(name) or name in _OF_THE_CONNECTION:
            raise MalformedRequest(f"field {name!r}")
        elif name in _NOT_METADATA:
            own[name] = value
        else:
            others.append((name, value))
    return pseudo, own, others


def _timeout(text: bytes | None) -> float | None:
    """Seconds. Raises `ValueError`."""
    if text is None:
        return None
    digits, unit = text[:-1], text[-1:]
    if not digits.isdigit() or len(digits) > 8 or unit not in _SECONDS:
        raise ValueError(f"grpc-timeout: expected up to eight digits and one of HMSmun, got {text!r}")
    return int(digits) * _SECONDS[unit]


def _metadata(name: bytes, value: bytes) -> Iterable[tuple[str, str | bytes]]:
    """A field as metadata; one with binary values may hold several. Raises `ValueError`."""
    key = name.decode("latin-1")
    if not key.endswith("-bin"):
        return ((key, value.decode("latin-1")),)
    try:
        # The padding may be left out.
        return [(key, base64.b64decode(one + b"=" * (-len(one) % 4), validate=True)) for one in value.split(b",")]
    except binascii.Error:
        raise ValueError(f"{key}: expected base64") from None


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
_OK = _literal(b"grpc-status", b"0")


def answer_head() -> bytes:
    """The header block before an answer's messages."""
    return _HEAD


def compressed_head(coding: str) -> bytes:
    """As `answer_head`, where messages may be compressed."""
    return _HEAD + _literal(b"grpc-encoding", coding.encode())


def trailers(code: int, message: str = "", metadata: Iterable[tuple[str, str | bytes]] = ()) -> bytes:
    """The header block that ends an answer."""
    if not code and not metadata:
        return _OK
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
