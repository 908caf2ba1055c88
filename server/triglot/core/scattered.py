"""`Scattered`, a large response as pieces that are sent one after the other, without joining them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from triglot.core.tensor import byte_length

SCATTER_BYTES = 64 * 1024
"""Smaller arrays are quicker to copy than to send as a piece."""
SMALL_BYTES = 4 * 1024
"""Up to this total size of a response, one more copy costs nothing."""


class Scattered:
    """Bytes in pieces: `bytes`, and views of memory that is not written to."""

    __slots__ = ("pieces", "size")

    def __init__(self, pieces: Iterable[Any]) -> None:
        self.pieces: list[bytes | memoryview] = []
        small: list[Any] = []
        for piece in pieces:
            if byte_length(piece) < SCATTER_BYTES:
                small.append(piece)
                continue
            # Not cast from the array's own type: memoryview supports few of them.
            view = piece.reshape(-1).view(np.uint8).data if isinstance(piece, np.ndarray) else piece
            self.pieces += b"".join(small), view
            small = []
        self.pieces.append(b"".join(small))
        self.size = sum(map(len, self.pieces))

    def __len__(self) -> int:
        return self.size

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces)
