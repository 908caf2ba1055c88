"""Encodes OTLP's messages (OTLP 1: opentelemetry/proto/trace/v1/trace.proto, collector/trace/v1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from triglot.core.varint import varint

INTERNAL, SERVER = 1, 2
"""Kinds of spans."""
ERROR = b"\x7a\x02\x18\x02"
"""The field `status` with the code ERROR."""
SCHEMA = "https://opentelemetry.io/schemas/1.45.0"

MASK = 2**64 - 1
"""Negative numbers are varints of 64 bits."""
Value = str | int


def sized(data: bytes) -> bytes:
    """The length, and the data."""
    return varint(len(data)) + data


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


def constant(name: str, kind: int, *pairs: tuple[str, Value]) -> bytes:
    """The fields `name`, `kind` and `attributes`."""
    return text_field(5, name) + bytes((0x30, kind)) + attributes(pairs)


def link(trace_id: str, span_id: int) -> bytes:
    """A field `links`; the trace's id in hex."""
    return b"\x6a" + sized(b"\x0a\x10" + bytes.fromhex(trace_id) + b"\x12\x08" + span_id.to_bytes(8))


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
