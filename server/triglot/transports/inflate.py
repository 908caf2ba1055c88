"""Compressed request bodies."""

from __future__ import annotations

import zlib
from collections.abc import Callable

from triglot.protocols.rows import DamagedBody, InflatedTooLarge
from triglot.transports.growing import GrowingBytes

WINDOW_BITS = {"identity": 0, "gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""zlib's parameter for each content coding that is taken; 0: none is needed."""
INFLATED_WORK = 32
"""A compressed byte takes as long as so many bytes of text."""
MAX_GZIP_MEMBERS = 16
"""A request that is compressed by parts has few."""
PART_BYTES = 1024 * 1024
"""Inflated at a time, and counted before there is more."""
INPUT_BYTES = 64 * 1024
"""Handed to zlib at a time: it copies what it leaves."""
Grow = Callable[[int], object]
"""Called with the size of each part; what it raises ends the inflating."""


def inflate(body: bytes, window_bits: int, limit: int, grow: Grow) -> bytes:
    """The body inflated. Raises `DamagedBody`, and `InflatedTooLarge` before more than `limit` bytes are made."""
    inflated = GrowingBytes()
    members = 0
    rest = memoryview(body)
    while rest:
        if members == MAX_GZIP_MEMBERS:
            raise DamagedBody(f"the compressed request body has more than {MAX_GZIP_MEMBERS} members")
        try:
            rest, ended = inflate_stream(rest, window_bits, limit - len(inflated), grow, inflated)
        except zlib.error as error:
            raise DamagedBody(f"the compressed request body is damaged: {error}") from None
        members += 1
        if len(inflated) > limit:
            raise InflatedTooLarge(f"the compressed request body holds more than {limit} bytes")
        if not ended:
            raise DamagedBody("the compressed request body is damaged: it is truncated")
        if rest and window_bits == WINDOW_BITS["deflate"]:  # gzip may come in several members.
            raise DamagedBody("the compressed request body is damaged: data follows its end")
    return inflated.take()


def inflate_stream(
    data: memoryview, window_bits: int, limit: int, grow: Grow, inflated: GrowingBytes
) -> tuple[memoryview, bool]:
    """Inflate one compressed stream: the data behind its end, and whether that was reached.

    What it holds is added to `inflated`. Stops with the first byte above `limit`. Raises `zlib.error`, and what
    `grow` raises.
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
