"""Collects bytes that arrive in pieces without copying them twice.

Strategy: `BytesIO` returns its content without a copy, and writes in place into bytes that nothing else refers
to. Large zeroed bytes occupy no memory until they are written, since the C library takes them from the kernel;
it also enlarges them without a copy. So long content is written into such a block: joining its pieces would
take twice the memory, and would hold the interpreter's lock meanwhile. A few short pieces are joined.
"""

from __future__ import annotations

from io import BytesIO

LONG_BYTES = 1024 * 1024
LONG_UNKNOWN = 8 * LONG_BYTES
"""Size from which content of unknown length gets a block; the C library does not keep pages that stay unused."""
MAX_PIECES = 16
MAX_RESERVED = 64 * LONG_BYTES
"""Largest block reserved for a declared length; a longer one grows."""


class GrowingBytes:
    """`length`: the declared length, if known; the actual one may be smaller or larger."""

    __slots__ = ("_bytes", "_pieces", "_reserved", "_short", "_size")

    def __init__(self, length: int | None = None) -> None:
        self._pieces: list[bytes] = []
        self._bytes: BytesIO | None = None
        self._size = 0
        self._short = LONG_BYTES if length else LONG_UNKNOWN
        self._reserved = min(length or MAX_RESERVED, MAX_RESERVED)

    def __len__(self) -> int:
        return self._size

    def add(self, piece: bytes) -> None:
        """Append a piece."""
        self._size += len(piece)
        is_long = self._size > self._short
        if self._bytes is None:
            self._pieces.append(piece)
            if not is_long and len(self._pieces) < MAX_PIECES:
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
        """Return all bytes; no more can be added."""
        if self._bytes is None:
            return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._bytes.truncate()
        taken = self._bytes.getvalue()
        self._bytes.close()
        return taken
