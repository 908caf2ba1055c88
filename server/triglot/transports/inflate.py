"""Decompression of request bodies."""

from __future__ import annotations

import zlib
from collections.abc import Callable

from triglot.protocols.rows import DamagedBody, InflatedTooLarge
from triglot.transports.growing import GrowingBytes

WINDOW_BITS = {"identity": 0, "gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""zlib's window bits for each supported content coding; 0: no decompression."""
INFLATED_WORK = 32
"""Decompressing a byte takes as long as processing this many bytes of text."""
MAX_GZIP_MEMBERS = 16
"""Limit on gzip members: a request that is compressed in parts has few."""
PART_BYTES = 1024 * 1024
"""Bytes decompressed at a time, and counted before more are."""
INPUT_BYTES = 64 * 1024
"""Bytes passed to zlib at a time: it copies what it does not consume."""
Grow = Callable[[int], object]
"""Called with the size of each decompressed part; an exception from it ends the decompression."""


def inflate(body: bytes, window_bits: int, limit: int, grow: Grow) -> bytes:
    """Return the decompressed body.

    Raise `DamagedBody`, and `InflatedTooLarge` before it exceeds `limit` bytes.
    """
    inflated = GrowingBytes()
    members = 0
    rest = memoryview(body)
    while rest:
        if members == MAX_GZIP_MEMBERS:
            raise DamagedBody(f"the compressed request body has more than {MAX_GZIP_MEMBERS} members")
        try:
            rest, is_complete = inflate_stream(rest, window_bits, limit - len(inflated), grow, inflated)
        except zlib.error as error:
            raise DamagedBody(f"the compressed request body is damaged: {error}") from None
        members += 1
        if len(inflated) > limit:
            raise InflatedTooLarge(f"the compressed request body holds more than {limit} bytes")
        if not is_complete:
            raise DamagedBody("the compressed request body is damaged: it is truncated")
        if rest and window_bits == WINDOW_BITS["deflate"]:  # Only gzip may have several members.
            raise DamagedBody("the compressed request body is damaged: data follows its end")
    return inflated.take()


def inflate_stream(
    data: memoryview, window_bits: int, limit: int, grow: Grow, inflated: GrowingBytes
) -> tuple[memoryview, bool]:
    """Decompress one stream into `inflated`; returns the data after its end, and whether the end was reached.

    Stops with the first byte above `limit`. Raise `zlib.error`, and what `grow` raises.
    """
    inflater = zlib.decompressobj(window_bits)
    room = limit + 1
    for start in range(0, len(data), INPUT_BYTES):
        piece: bytes | memoryview = data[start : start + INPUT_BYTES]
        end = start + len(piece)
        while piece and room and not inflater.eof:
            part = inflater.decompress(piece, min(room, PART_BYTES))
            piece = inflater.unconsumed_tail
            if part:
                grow(len(part))
                inflated.add(part)
                room -= len(part)
        if inflater.eof or not room:
            return data[end - len(inflater.unused_data) :], inflater.eof
    return data[len(data) :], False
