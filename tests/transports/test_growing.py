"""Bytes that come in pieces: what they are, and that memory is taken for them once."""

from __future__ import annotations

import tracemalloc

import pytest

from triglot.transports.growing import LARGEST_RESERVED, LONG, LONG_UNKNOWN, GrowingBytes

PIECE = LONG // 4


def pieces(size: int) -> list[bytes]:
    return [bytes([at % 251]) * min(PIECE, size - at * PIECE) for at in range(-(-size // PIECE))]


@pytest.mark.parametrize("size", [0, 1, PIECE, LONG - 1, LONG, LONG + 1, LONG_UNKNOWN, LONG_UNKNOWN + 1])
@pytest.mark.parametrize("more", [None, -1, 0, 1, LONG])
def test_what_is_added_is_taken(size: int, more: int | None) -> None:
    growing = GrowingBytes(None if more is None else max(0, size + more))
    for piece in pieces(size):
        growing.add(piece)
    assert len(growing) == size
    assert growing.take() == b"".join(pieces(size))


@pytest.mark.parametrize("piece", [3 * LONG, LARGEST_RESERVED + 1])
@pytest.mark.parametrize("length", [None, LONG, LARGEST_RESERVED + 2])
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
        growing = GrowingBytes(size * LONG if is_known else None)
        for _ in range(size * LONG // PIECE):
            growing.add(piece)
        taken = growing.take()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(taken) == size * LONG
    # The short part is copied into the long one.
    most = size * LONG + 2 * LONG if is_known else LARGEST_RESERVED + 2 * LONG_UNKNOWN
    assert peak < most
