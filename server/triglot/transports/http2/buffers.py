"""A pool of buffers for large messages; a buffer is reused once nothing refers to it any longer.

Strategy: the pool lends a view of a block. Any array over it, or slice of one, keeps this view alive; when the
view is freed, on whichever thread, its block returns to the pool. So a model may keep its inputs: their memory
is not written to again, and the pool makes another block.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Limit on unused blocks; the size used least recently is freed first."""
ALIGNMENT = 64
"""Alignment in bytes that the widest vector instructions prefer, and libraries too."""
_SIZES_IN_AN_OCTAVE = 8

Bytes = NDArray[np.uint8]


class _Block:
    __slots__ = ("address", "memory", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        # Not filled with zeros: pages that are never written take no memory.
        memory: Bytes = np.empty(size + ALIGNMENT, np.uint8)
        self.memory = memory.data
        self.address: int = memory.ctypes.data


class _Checkout(weakref.ref[Bytes]):
    """A weak reference to a lent view, with the block of the view."""

    __slots__ = ("block",)
    block: _Block


class BufferPool:
    """Blocks of memory. Thread-safe."""

    def __init__(self, max_kept: int = MAX_KEPT_BYTES) -> None:
        self.kept = 0
        """Bytes of unused blocks."""
        self._max_kept = max_kept
        self._taken = False
        self._free: dict[int, list[_Block]] = {}
        """Unused blocks by size; the size used last comes last."""
        self._checkouts: dict[int, _Checkout] = {}
        # Reentrant, because the garbage collector may call `_returned` on a thread that holds the lock.
        self._lock = threading.RLock()

    @property
    def lent(self) -> int:
        """Number of blocks in use."""
        return len(self._checkouts)

    def take(self, size: int, total: int) -> tuple[memoryview, memoryview]:
        """Return an uninitialized buffer for the first `size` of `total` bytes, and a read-only view of it to
        keep.

        The last of the `total` bytes would end aligned: a message's tensor is its last field, and so begins
        aligned. Raise `MemoryError`.
        """
        block = self._take(_rounded(size))
        start = -(block.address + total) % ALIGNMENT
        room = block.memory[start : start + size]
        # Arrays over `view` refer to `view`: NumPy refers to the innermost base that is an array.
        view = np.frombuffer(room.toreadonly(), np.uint8)
        checkout = _Checkout(view, self._returned)
        checkout.block = block
        self._checkouts[id(checkout)] = checkout
        return room, view.data

    def _take(self, size: int) -> _Block:
        with self._lock:
            self._taken = True
            blocks = self._free.pop(size, None)
            if blocks:
                block = blocks.pop()
                self.kept -= size
                if blocks:
                    self._free[size] = blocks
                return block
        return _Block(size)

    def _returned(self, checkout: Any) -> None:
        del self._checkouts[id(checkout)]
        block: _Block = checkout.block
        if block.size > self._max_kept:
            return
        with self._lock:
            self._free.setdefault(block.size, []).append(block)
            self.kept += block.size
            while self.kept > self._max_kept:
                size = next(iter(self._free))
                blocks = self._free[size]
                blocks.pop()
                self.kept -= size
                if not blocks:
                    del self._free[size]

    def release_unused(self) -> None:
        """Free all unused blocks if none was taken since the last call."""
        with self._lock:
            if not self._taken:
                self._free.clear()
                self.kept = 0
            self._taken = False


def _rounded(size: int) -> int:
    """Return a size of a limited set that is at most an eighth larger."""
    step = max(1, (1 << max(0, size - 1).bit_length()) // (2 * _SIZES_IN_AN_OCTAVE))
    return -(-size // step) * step
