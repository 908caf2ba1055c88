"""Makes spans of what the event loop notes when a call ends.

The loop notes one `Row` for each call. The exporter's thread turns many rows into protobuf at once: rows whose
variable-length fields have the same lengths become the rows of one array, so that ids and times are computed and
written by columns. A call has up to three spans: its own, its time in the queue, and its time on the model.
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
"""Bits of a span's `flags`."""
LOCAL = SAMPLED | HAS_IS_REMOTE
"""Flags of a span whose parent is in this process."""
CALL, QUEUE, COMPUTE = 1, 2, 3
"""The last two bits of the ids of a call's spans; the others are the same."""
REQUEST_ID = "triglot.request.id"

Row = tuple[
    bytes, bytes, bytes, bytes, str, str, int, int, float, float, float, float, float, float, float, float, int
]
"""What becomes the spans of one call, or the one span of a batch. Its fields, in their order:

- name, kind, attributes, status and links of the call's own span, encoded;
- the request's id;
- name, kind and attributes of the span on the model, encoded;
- the link of that span to its batch, encoded, or nothing;
- the trace's id and the parent's id in hex ("" without a parent), the own id, and the flags;
- instants of `time.perf_counter`: started, ended, entered the queue, began on the model (0.0: did not);
- seconds in the queue, making the model's input, on the model, and making the response;
- the number of spans.
"""
SPANS: Final = 16
"""The place of the number of spans in a row."""
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
_IN_QUEUE = constant("queue", INTERNAL)


def encode(rows: Iterable[Row], offset: int) -> bytes:
    """Returns the spans of all rows as fields `spans` of ScopeSpans.

    `offset` is what turns an instant of `time.perf_counter`, in nanoseconds, into one since the epoch.
    """
    alike: defaultdict[tuple[int, int, int, int, int, bool, bool], list[Row]] = defaultdict(list)
    for row in rows:
        own, request_id, model, link, _, parent, _, _, _, _, queued, began, *_ = row
        lengths = len(own), len(request_id), len(model), len(link), len(parent)
        alike[*lengths, queued > 0, began > 0].append(row)
    return b"".join([spans for some in alike.values() for spans in _encode_alike(some, offset)])


def _encode_alike(rows: Sequence[Row], offset: int) -> Iterator[bytes]:
    """Encodes rows that have the same spans, and whose fields have the same lengths."""
    owns, request_ids, models, links, traces, parents, ids, flags, *instants, _ = zip(*rows, strict=True)
    started, ended, queued, began, waited, joining, computing, splitting = map(np.array, instants)
    trace, number = _texts(map(bytes.fromhex, traces)), np.array(ids, np.uint64)
    parent = _texts(map(bytes.fromhex, parents))
    described = [_texts(owns), *_request_ids(request_ids)]
    yield _spans(trace, number, parent, described, (started, ended), np.array(flags, np.uint32), offset)
    below = _fixed(number, ">u8")
    # Code on a thread may say that it began after the loop has ended the call.
    left = np.minimum(began, ended) if began[0] else ended
    if queued[0]:
        entered = began - waited if began[0] else queued
        entered = np.minimum(np.maximum(entered, started), left)
        own = number ^ np.uint64(CALL ^ QUEUE)
        yield _spans(trace, own, below, [_IN_QUEUE], (entered, left), LOCAL, offset)
    if began[0]:
        # What was done to the inputs before the request waited is not part of its time on the model.
        joined = np.maximum(0.0, joining - np.maximum(0.0, began - waited - started))
        done = np.maximum(left, np.minimum(began + joined + computing + splitting, ended))
        own = number ^ np.uint64(CALL ^ COMPUTE)
        described = [_texts(models), _texts(links)]
        yield _spans(trace, own, below, described, (left, done), LOCAL, offset)


def _request_ids(values: Sequence[bytes]) -> list[bytes | Bytes]:
    """The attribute `REQUEST_ID` of each row; nothing where it is empty."""
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
    """One span of each row. `described`: its fields that need no more encoding."""
    start, end = [_fixed((one * 1e9).astype(np.int64) + offset, "<i8") for one in instants]
    pieces: list[bytes | Bytes] = [b"\x0a\x10", traces, b"\x12\x08", _fixed(ids, ">u8"), *described]
    if parents.shape[1]:
        pieces += [b"\x22\x08", parents]
    pieces += [b"\x39", start, b"\x41", end, b"\x85\x01"]
    pieces.append(flags.to_bytes(4, "little") if isinstance(flags, int) else _fixed(flags, "<u4"))
    size = sum([len(one) if isinstance(one, bytes) else one.shape[1] for one in pieces])
    columns = [_texts([one]) if isinstance(one, bytes) else one for one in (b"\x12" + varint(size), *pieces)]
    spans = np.empty((len(ids), sum([one.shape[1] for one in columns])), np.uint8)
    at = 0
    for column in columns:
        spans[:, at : at + column.shape[1]] = column
        at += column.shape[1]
    return spans.tobytes()


def _texts(values: Iterable[bytes]) -> Bytes:
    """Byte strings of one length, each a row."""
    some = list(values)
    return np.frombuffer(b"".join(some), np.uint8).reshape(len(some), len(some[0]))


def _fixed(numbers: Any, dtype: str) -> Bytes:
    """Numbers as bytes, each a row."""
    return np.asarray(numbers, dtype).view(np.uint8).reshape(len(numbers), -1)
