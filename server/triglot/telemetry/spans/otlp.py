"""Spans as protobuf bytes (OTLP 1: opentelemetry/proto/trace/v1/trace.proto, collector/trace/v1).

What is the same for many spans is encoded once: each function gives the bytes of a part of a message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache

INTERNAL, SERVER = 1, 2
"""Kinds of spans."""
SAMPLED, HAS_IS_REMOTE, IS_REMOTE = 0x001, 0x100, 0x200
ERROR = b"\x7a\x02\x18\x02"
"""The field `status` with the code ERROR."""
SCHEMA = "https://opentelemetry.io/schemas/1.45.0"
_TIMES_AND_FLAGS = struct.Struct("<BQBQ2sI")

MASK = 2**64 - 1
"""Negative numbers are varints of 64 bits."""
Value = str | int
LONGEST_TEXT = 256
"""Bytes of a text that clients choose."""


def varint(number: int) -> bytes:
    """A number of at least 0."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


_SHORT = [varint(number) for number in range(1024)]


def sized(data: bytes) -> bytes:
    """The length, and the data."""
    size = len(data)
    return (_SHORT[size] if size < 1024 else varint(size)) + data


def text_field(number: int, text: str) -> bytes:
    """A field with a number up to 15."""
    return bytes((number << 3 | 2,)) + sized(text.encode(errors="replace"))


def attribute(key: str, value: Value) -> bytes:
    """A KeyValue."""
    any_value = text_field(1, value) if isinstance(value, str) else b"\x18" + varint(value & MASK)
    return text_field(1, key) + b"\x12" + sized(any_value)


def attributes(pairs: Mapping[str, Value] | Iterable[tuple[str, Value]]) -> bytes:
    """The field `attributes` of a span, once for each pair."""
    items = pairs.items() if isinstance(pairs, Mapping) else pairs
    return b"".join([b"\x4a" + sized(attribute(key, value)) for key, value in items])


@lru_cache(maxsize=4096)
def constant(name: str, kind: int, *pairs: tuple[str, Value]) -> bytes:
    """The fields `name`, `kind` and `attributes`."""
    return text_field(5, name) + bytes((0x30, kind)) + attributes(pairs)


def link(trace_id: bytes, span_id: bytes) -> bytes:
    """A field `links`."""
    return b"\x6a" + sized(b"\x0a\x10" + trace_id + b"\x12\x08" + span_id)


def text_attribute(key: str) -> Callable[[str], bytes]:
    """Makes the field `attributes` with this key and a text."""
    head = text_field(1, key) + b"\x12"
    size = len(head)

    def made(text: str) -> bytes:
        data = text.encode(errors="replace")[:LONGEST_TEXT]
        count = len(data)
        value = _SHORT[count + 1 + len(_SHORT[count])] + b"\x0a" + _SHORT[count] + data
        return b"\x4a" + _SHORT[size + len(value)] + head + value

    return made


def trace_field(trace_id: bytes) -> bytes:
    """The field `trace_id`, of 16 bytes, and how the next one begins: see `span`."""
    return b"\x0a\x10" + trace_id + b"\x12\x08"


def parent_field(span_id: bytes) -> bytes:
    """The field `parent_span_id`; nothing for an empty id."""
    return b"\x22\x08" + span_id if span_id else b""


def span(trace: bytes, span_id: bytes, parent: bytes, rest: bytes, start: int, end: int, flags: int) -> bytes:
    """A field `spans` of ScopeSpans: an id of 8 bytes, times in ns since the epoch.

    `trace` and `parent`: see `trace_field` and `parent_field`; `rest`: other fields, `constant` among them.
    `flags`: of the parent, and SAMPLED.
    """
    body = trace + span_id + parent + rest + _TIMES_AND_FLAGS.pack(0x39, start, 0x41, end, b"\x85\x01", flags)
    size = len(body)
    return b"\x12" + (_SHORT[size] if size < 1024 else varint(size)) + body


class Envelope:
    """Makes an ExportTraceServiceRequest of spans, which have the same resource and scope."""

    def __init__(self, resource: Mapping[str, Value], scope: str, version: str) -> None:
        of_resource = b"".join([b"\x0a" + sized(attribute(key, value)) for key, value in resource.items()])
        self._resource = b"\x0a" + sized(of_resource)
        self._scope = b"\x0a" + sized(text_field(1, scope) + text_field(2, version))
        self._schema = text_field(3, SCHEMA)

    def request(self, spans: bytes) -> bytes:
        """The message."""
        scope_spans = b"\x12" + sized(self._scope + spans + self._schema)
        return b"\x0a" + sized(self._resource + scope_spans + self._schema)


def rejected_spans(response: bytes) -> int:
    """Of an ExportTraceServiceResponse: `partial_success.rejected_spans`; 0 where it is not said, or damaged."""
    for number, value in fields(response):
        if number == 1 and isinstance(value, bytes):
            for inner, count in fields(value):
                if inner == 1 and isinstance(count, int):
                    return count
    return 0


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message, until one that is cut off: numbers, and the bytes of length-delimited ones."""
    at = 0
    try:
        while at < len(message):
            tag, at = _read_varint(message, at)
            wire_type, size = tag & 7, 0
            if wire_type == 0:
                value, at = _read_varint(message, at)
                yield tag >> 3, value
                continue
            if wire_type == 2:
                size, at = _read_varint(message, at)
                yield tag >> 3, message[at : at + size]
            else:
                size = 8 if wire_type == 1 else 4
                yield tag >> 3, int.from_bytes(message[at : at + size], "little")
            at += size
    except IndexError:
        return


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
