"""Spans as protobuf bytes (OTLP 1: opentelemetry/proto/trace/v1/trace.proto, collector/trace/v1).

What is the same for many spans, names and attributes, is encoded once. The rest, ids and times, has the same size
in each of them, so that spans which differ in nothing else are the rows of one array.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

INTERNAL, SERVER = 1, 2
"""Kinds of spans."""
SAMPLED, HAS_IS_REMOTE, IS_REMOTE = 0x001, 0x100, 0x200
ERROR = b"\x7a\x02\x18\x02"
"""The field `status` with the code ERROR."""
SCHEMA = "https://opentelemetry.io/schemas/1.45.0"

MASK = 2**64 - 1
"""Negative numbers are varints of 64 bits."""
Value = str | int
Row = tuple[bytes, bytes, str, int, int, int, float, float]
"""A span: its constant fields (see `constant`), a text or nothing for the attribute `TEXT`, the trace's id in hex,
its own id and its parent's (0: none), flags, start and end as instants of `time.perf_counter`."""
TEXT = "triglot.request.id"
Bytes = NDArray[np.uint8]


def varint(number: int) -> bytes:
    """A number of at least 0."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


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


def encode(rows: Iterable[Row], offset: int) -> bytes:
    """Fields `spans` of ScopeSpans. `offset`: ns from the instants' zero to that of the epoch."""
    alike: defaultdict[tuple[bytes, int, bool], list[Row]] = defaultdict(list)
    for row in rows:
        alike[row[0], len(row[1]), row[4] != 0].append(row)
    return b"".join([_encode_alike(some, offset) for some in alike.values()])


def _encode_alike(rows: Sequence[Row], offset: int) -> bytes:
    """Of those that have the same constant fields, texts of the same length, and a parent or none."""
    (rest, *_), texts, traces, ids, parents, flags, starts, ends = zip(*rows, strict=True)
    pieces = [b"\x0a\x10", _from_hex(traces), b"\x12\x08", _fixed(ids, ">u8"), rest]
    if parents[0]:
        pieces += [b"\x22\x08", _fixed(parents, ">u8")]
    if texts[0]:
        # A KeyValue, as `attribute` makes it.
        size = len(texts[0])
        value = b"\x0a" + varint(size)
        key = text_field(1, TEXT) + b"\x12" + varint(len(value) + size) + value
        pieces += [b"\x4a" + varint(len(key) + size) + key, _rows(b"".join(texts), len(rows))]
    pieces += [b"\x39", _nanoseconds(starts, offset), b"\x41", _nanoseconds(ends, offset)]
    pieces += [b"\x85\x01", _fixed(flags, "<u4")]
    size = sum([len(one) if isinstance(one, bytes) else one.shape[1] for one in pieces])
    return _joined([b"\x12" + varint(size), *pieces], len(rows))


def _joined(pieces: Sequence[bytes | Bytes], count: int) -> bytes:
    """So many rows, each of these pieces: bytes that are the same in all of them, or bytes of each."""
    columns = [_rows(one, 1) if isinstance(one, bytes) else one for one in pieces]
    joined = np.empty((count, sum([one.shape[1] for one in columns])), np.uint8)
    at = 0
    for column in columns:
        joined[:, at : at + column.shape[1]] = column
        at += column.shape[1]
    return joined.tobytes()


def _rows(data: bytes, count: int) -> Bytes:
    return np.frombuffer(data, np.uint8).reshape(count, -1)


def _from_hex(texts: Sequence[str]) -> Bytes:
    return _rows(bytes.fromhex("".join(texts)), len(texts))


def _fixed(numbers: Any, dtype: str) -> Bytes:
    return np.array(numbers, dtype).view(np.uint8).reshape(len(numbers), -1)


def _nanoseconds(instants: Sequence[float], offset: int) -> Bytes:
    return _fixed((np.array(instants) * 1e9).astype(np.int64) + offset, "<i8")


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
