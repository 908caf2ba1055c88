"""Bytes that come in pieces: what they are, and that memory is taken for them once."""

from __future__ import annotations

import tracemalloc

import pytest

from triglot.transports.growing import LONG_BYTES, LONG_UNKNOWN, MAX_RESERVED, GrowingBytes

PIECE = LONG_BYTES // 4


def pieces(size: int) -> list[bytes]:
    return [bytes([at % 251]) * min(PIECE, size - at * PIECE) for at in range(-(-size // PIECE))]


@pytest.mark.parametrize(
    "size", [0, 1, PIECE, LONG_BYTES - 1, LONG_BYTES, LONG_BYTES + 1, LONG_UNKNOWN, LONG_UNKNOWN + 1]
)
@pytest.mark.parametrize("more", [None, -1, 0, 1, LONG_BYTES])
def test_what_is_added_is_taken(size: int, more: int | None) -> None:
    growing = GrowingBytes(None if more is None else max(0, size + more))
    for piece in pieces(size):
        growing.add(piece)
    assert len(growing) == size
    assert growing.take() == b"".join(pieces(size))


@pytest.mark.parametrize("piece", [3 * LONG_BYTES, MAX_RESERVED + 1])
@pytest.mark.parametrize("length", [None, LONG_BYTES, MAX_RESERVED + 2])
def test_large_pieces(piece: int, length: int | None) -> None:
    growing = GrowingBytes(length)
    growing.add(b"a")
    growing.add(b"b" * piece)
    assert growing.take() == b"a" + b"b" * piece


@pytest.mark.parametrize(("size", "is_known"), [(40, True), (60, True), (60, False)])
def test_memory_is_taken_once(size: int, is_known: bool) -> None:
    """Tracemalloc counts what is reserved, too, of which nothing is in memory before it comes."""
    piece = b"x" * PIECE
    tracemalloc.start()
    try:
        growing = GrowingBytes(size * LONG_BYTES if is_known else None)
        for _ in range(size * LONG_BYTES // PIECE):
            growing.add(piece)
        taken = growing.take()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(taken) == size * LONG_BYTES
    # The short part is copied into the long one.
    most = size * LONG_BYTES + 2 * LONG_BYTES if is_known else MAX_RESERVED + 2 * LONG_UNKNOWN
    assert peak < most
