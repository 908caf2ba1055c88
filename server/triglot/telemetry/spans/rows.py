"""Encodes many spans at once.

The event loop records one `Row` when a call ends. The exporter's thread encodes many rows as protobuf at once:
rows whose variable-length fields have the same lengths become the rows of one array, so that ids and times are
computed and written column by column. A call has up to three spans: its own, its time in the queue, and its time
on the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from triglot.core.varint import varint
from triglot.telemetry.spans.otlp import INTERNAL, constant, text_field

SAMPLED, HAS_IS_REMOTE, IS_REMOTE = 0x001, 0x100, 0x200
"""Bits of a span's field `flags`."""
LOCAL = SAMPLED | HAS_IS_REMOTE
"""Flags of a span whose parent is in this process."""
CALL, QUEUE, COMPUTE = 1, 2, 3
"""Last two bits of the ids of a call's spans; the other bits are equal."""
REQUEST_ID = "triglot.request.id"

Row = tuple[
    bytes, bytes, bytes, bytes, str, str, int, int, float, float, float, float, float, float, float, float, int
]
"""The data of the spans of one call, or of the one span of a batch. Its fields, in order:

- name, kind, attributes, status and links of the call's own span, encoded;
- the request's id;
- name, kind and attributes of the COMPUTE span, encoded;
- the link of that span to its batch, encoded; empty without a batch;
- the trace id and the parent's span id in hex ("" without a parent), the call's span id, and its flags;
- instants of `time.perf_counter`: received, ended, queued, model started (the last two are 0.0 if that did not
  happen);
- seconds in the queue, making the model's input, in the model, and making the response;
- the number of spans.
"""
SPANS: Final = 16
"""Index of the number of spans in a row."""
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
_IN_QUEUE = constant("queue", INTERNAL)


def encode(rows: Iterable[Row], offset: int) -> bytes:
    """Return the spans of all rows as encoded fields `spans` of ScopeSpans.

    `offset`: nanoseconds to add to an instant of `time.perf_counter` to get nanoseconds since the epoch.
    """
    alike: defaultdict[tuple[int, int, int, int, int, bool, bool], list[Row]] = defaultdict(list)
    for row in rows:
        own, request_id, model, link, _, parent, _, _, _, _, queued, began, *_ = row
        lengths = len(own), len(request_id), len(model), len(link), len(parent)
        alike[*lengths, queued > 0, began > 0].append(row)
    return b"".join([spans for some in alike.values() for spans in _encode_alike(some, offset)])


def _encode_alike(rows: Sequence[Row], offset: int) -> Iterator[bytes]:
    """Yield the encoded spans of rows that have the same kinds of spans and fields of the same lengths."""
    owns, request_ids, models, links, traces, parents, ids, flags, *instants, _ = zip(*rows, strict=True)
    started, end_time, queued, began, waited, joining, computing, splitting = map(np.array, instants)
    trace, number = _texts(map(bytes.fromhex, traces)), np.array(ids, np.uint64)
    parent = _texts(map(bytes.fromhex, parents))
    described = [_texts(owns), *_request_ids(request_ids)]
    yield _spans(trace, number, parent, described, (started, end_time), np.array(flags, np.uint32), offset)
    below = _fixed(number, ">u8")
    # A thread may record the model's start after the event loop has ended the call.
    left = np.minimum(began, end_time) if began[0] else end_time
    if queued[0]:
        entered = began - waited if began[0] else queued
        entered = np.minimum(np.maximum(entered, started), left)
        own = number ^ np.uint64(CALL ^ QUEUE)
        yield _spans(trace, own, below, [_IN_QUEUE], (entered, left), LOCAL, offset)
    if began[0]:
        # Time spent on the inputs before the request was queued is not part of its time on the model.
        joined = np.maximum(0.0, joining - np.maximum(0.0, began - waited - started))
        done = np.maximum(left, np.minimum(began + joined + computing + splitting, end_time))
        own = number ^ np.uint64(CALL ^ COMPUTE)
        described = [_texts(models), _texts(links)]
        yield _spans(trace, own, below, described, (left, done), LOCAL, offset)


def _request_ids(values: Sequence[bytes]) -> list[bytes | Bytes]:
    """Return columns with the attribute `REQUEST_ID` of each row; none if the ids are empty."""
    size = len(values[0])
    if not size:
        return []
    value = b"\x0a" + varint(size)
    key = text_field(1, REQUEST_ID) + b"\x12" + varint(len(value) + size) + value
    return [b"\x4a" + varint(len(key) + size) + key, _texts(values)]


def _spans(
    traces: Bytes,
    ids: NDArray[np.uint64],
    parents: Bytes,
    described: Iterable[bytes | Bytes],
    instants: tuple[Floats, Floats],
    flags: int | NDArray[np.uint32],
    offset: int,
) -> bytes:
    """Return one encoded span per row. `described`: columns of fields that are already encoded.

    `traces` has shape [rows, 16]; `parents` has shape [rows, 8], or [rows, 0] for root spans.
    """
    start, end = [_fixed((instant * 1e9).astype(np.int64) + offset, "<i8") for instant in instants]
    pieces: list[bytes | Bytes] = [b"\x0a\x10", traces, b"\x12\x08", _fixed(ids, ">u8"), *described]
    if parents.shape[1]:
        pieces += [b"\x22\x08", parents]
    pieces += [b"\x39", start, b"\x41", end, b"\x85\x01"]
    pieces.append(flags.to_bytes(4, "little") if isinstance(flags, int) else _fixed(flags, "<u4"))
    size = sum([len(piece) if isinstance(piece, bytes) else piece.shape[1] for piece in pieces])
    columns = [
        _texts([piece]) if isinstance(piece, bytes) else piece for piece in (b"\x12" + varint(size), *pieces)
    ]
    spans = np.empty((len(ids), sum([column.shape[1] for column in columns])), np.uint8)
    at = 0
    for column in columns:
        spans[:, at : at + column.shape[1]] = column
        at += column.shape[1]
    return spans.tobytes()


def _texts(values: Iterable[bytes]) -> Bytes:
    """Return byte strings of equal length as an array of shape [strings, length]."""
    some = list(values)
    return np.frombuffer(b"".join(some), np.uint8).reshape(len(some), len(some[0]))


def _fixed(numbers: Any, dtype: str) -> Bytes:
    """Return the bytes of numbers as an array of shape [numbers, item size]."""
    return np.asarray(numbers, dtype).view(np.uint8).reshape(len(numbers), -1)
