"""Bytes that come in pieces, held once.

Strategy: `BytesIO` gives what it holds without a copy, and writes into bytes that nobody else has. Bytes of zeros
are none in memory yet where the C library takes them from the kernel, as it does for large ones; those it also
moves, when they have to become larger, without a copy. So what is long goes on in such a block: joining the pieces
would take memory twice, and hold the interpreter meanwhile.
"""

from __future__ import annotations

from io import BytesIO

LONG = 1024 * 1024
LONG_UNKNOWN = 8 * LONG
"""From here on there is a block; pages of one that is larger than need be are not kept by the C library."""
LARGEST_RESERVED = 64 * LONG
"""What says that it is longer has its block grow."""


class GrowingBytes:
    """`length`: how many there will be, if it is known; fewer may come, or more."""

    __slots__ = ("_bytes", "_reserved", "_short")

    def __init__(self, length: int | None = None) -> None:
        self._bytes = BytesIO()
        self._short = LONG if length else LONG_UNKNOWN
        self._reserved = min(length or LARGEST_RESERVED, LARGEST_RESERVED)

    def __len__(self) -> int:
        return self._bytes.tell()

    def add(self, piece: bytes) -> None:
        """The next ones."""
        size = len(self) + len(piece)
        if self._short < size <= self._reserved:
            block = BytesIO(bytes(self._reserved))
            block.write(self._bytes.getbuffer())
            self._bytes = block
            self._reserved = 0
        self._bytes.write(piece)

    def take(self) -> bytes:
        """All of them; no more can be added."""
        self._bytes.truncate()
        taken = self._bytes.getvalue()
        self._bytes.close()
        return taken
