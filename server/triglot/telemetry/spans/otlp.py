"""Encodes and decodes OTLP's protobuf messages (OTLP 1: opentelemetry/proto/trace/v1/trace.proto,
collector/trace/v1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from triglot.core.varint import varint

INTERNAL, SERVER = 1, 2
"""Span kinds."""
ERROR = b"\x7a\x02\x18\x02"
"""Encoded field `status` of a span with STATUS_CODE_ERROR."""
SCHEMA = "https://opentelemetry.io/schemas/1.45.0"

MASK = 2**64 - 1
"""Protobuf encodes negative integers as varints of their 64-bit two's complement."""
Value = str | int


def sized(data: bytes) -> bytes:
    """Return the data with its length as a varint before it."""
    return varint(len(data)) + data


def text_field(number: int, text: str) -> bytes:
    """Return an encoded string field; `number` is at most 15, so that the tag takes one byte."""
    return bytes((number << 3 | 2,)) + sized(text.encode(errors="replace"))


def attribute(key: str, value: Value) -> bytes:
    """Return an encoded KeyValue message."""
    any_value = text_field(1, value) if isinstance(value, str) else b"\x18" + varint(value & MASK)
    return text_field(1, key) + b"\x12" + sized(any_value)


def attributes(pairs: Mapping[str, Value] | Iterable[tuple[str, Value]]) -> bytes:
    """Return the repeated field `attributes` of a span, one entry per pair."""
    items = pairs.items() if isinstance(pairs, Mapping) else pairs
    return b"".join([b"\x4a" + sized(attribute(key, value)) for key, value in items])


def constant(name: str, kind: int, *pairs: tuple[str, Value]) -> bytes:
    """Return the fields `name`, `kind` and `attributes` of a span."""
    return text_field(5, name) + bytes((0x30, kind)) + attributes(pairs)


def link(trace_id: str, span_id: int) -> bytes:
    """Return one entry of a span's field `links`; `trace_id` is in hex."""
    return b"\x6a" + sized(b"\x0a\x10" + bytes.fromhex(trace_id) + b"\x12\x08" + span_id.to_bytes(8))


class ExportFailed(Exception):
    """The collector did not accept the spans.

    `again`: the request may be retried. `pause`: seconds until then, as requested by the collector; 0 if it
    requested none.
    """

    def __init__(self, message: str, *, again: bool, pause: float = 0.0) -> None:
        super().__init__(message)
        self.again = again
        self.pause = pause


class Envelope:
    """Makes ExportTraceServiceRequests; all spans have the same resource and instrumentation scope."""

    def __init__(self, resource: Mapping[str, Value], scope: str, version: str) -> None:
        of_resource = b"".join([b"\x0a" + sized(attribute(key, value)) for key, value in resource.items()])
        self._resource = b"\x0a" + sized(of_resource)
        self._scope = b"\x0a" + sized(text_field(1, scope) + text_field(2, version))
        self._schema = text_field(3, SCHEMA)

    def request(self, spans: bytes) -> bytes:
        """Return the request with these encoded fields `spans` of ScopeSpans."""
        scope_spans = b"\x12" + sized(self._scope + spans + self._schema)
        return b"\x0a" + sized(self._resource + scope_spans + self._schema)


def rejected_spans(response: bytes) -> int:
    """Return `partial_success.rejected_spans` of an ExportTraceServiceResponse; 0 if missing or malformed."""
    for number, value in fields(response):
        if number == 1 and isinstance(value, bytes):
            for inner, count in fields(value):
                if inner == 1 and isinstance(count, int):
                    return count
    return 0


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield each field's number and its value, bytes if length-delimited; stops where the message is cut off."""
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
