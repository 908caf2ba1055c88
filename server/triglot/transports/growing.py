"""Bytes that come in pieces, held once.

Strategy: `BytesIO` gives what it holds without a copy, and writes into bytes that nobody else has. Bytes of zeros
are none in memory yet where the C library takes them from the kernel, as it does for large ones; those it also
moves, when they have to become larger, without a copy. So what is long goes on in such a block: joining the pieces
would take memory twice, and hold the interpreter meanwhile. A few short pieces are joined.
"""

from __future__ import annotations

from io import BytesIO

LONG = 1024 * 1024
LONG_UNKNOWN = 8 * LONG
"""From here on there is a block; pages of one that is larger than need be are not kept by the C library."""
MOST_PIECES = 16
LARGEST_RESERVED = 64 * LONG
"""What says that it is longer has its block grow."""


class GrowingBytes:
    """`length`: how many there will be, if it is known; fewer may come, or more."""

    __slots__ = ("_bytes", "_pieces", "_reserved", "_short", "_size")

    def __init__(self, length: int | None = None) -> None:
        self._pieces: list[bytes] = []
        self._bytes: BytesIO | None = None
        self._size = 0
        self._short = LONG if length else LONG_UNKNOWN
        self._reserved = min(length or LARGEST_RESERVED, LARGEST_RESERVED)

    def __len__(self) -> int:
        return self._size

    def add(self, piece: bytes) -> None:
        """The next ones."""
        self._size += len(piece)
        is_long = self._size > self._short
        if self._bytes is None:
            self._pieces.append(piece)
            if not is_long and len(self._pieces) < MOST_PIECES:
                return
            piece = b"".join(self._pieces)
            self._pieces.clear()
            self._bytes = BytesIO()
        if is_long and self._size <= self._reserved:
            block = BytesIO(bytes(self._reserved))
            block.write(self._bytes.getbuffer())
            self._bytes = block
            self._reserved = 0
        self._bytes.write(piece)

    def take(self) -> bytes:
        """All of them; no more can be added."""
        if self._bytes is None:
            return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._bytes.truncate()
        taken = self._bytes.getvalue()
        self._bytes.close()
        return taken
