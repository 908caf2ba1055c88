"""Memory of large messages, which is used again once nobody refers to it any more.

Strategy: what is lent is a view of a block. Whatever is laid over it, a model's array or a slice of one, keeps
that view alive, and when it dies, on whichever thread, its block comes back. So a model may keep what it was
given: it is never written to again, and the pool makes another block.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_KEPT_BYTES = 64 * 1024 * 1024
"""Of blocks that nobody uses; what has not been asked for longest goes first."""
ALIGNMENT = 64
"""What the fastest instructions of any processor like, and so do libraries."""
_SIZES_IN_AN_OCTAVE = 8

Bytes = NDArray[np.uint8]


class _Block:
    __slots__ = ("address", "memory", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        # Not filled with zeros: what does not come takes no memory.
        memory: Bytes = np.empty(size + ALIGNMENT, np.uint8)
        self.memory = memory.data
        self.address: int = memory.ctypes.data


class _Checkout(weakref.ref[Bytes]):
    """The view that is lent, and the block that it is of."""

    __slots__ = ("block",)
    block: _Block


class BufferPool:
    """Blocks of memory. Any thread may call it."""

    def __init__(self, most_kept: int = MOST_KEPT_BYTES) -> None:
        self.kept = 0
        """Bytes of blocks that wait to be used again."""
        self._most_kept = most_kept
        self._taken = False
        self._free: dict[int, list[_Block]] = {}
        """By size; the size that was asked for last is the last one."""
        self._checkouts: dict[int, _Checkout] = {}
        # The one that runs `_returned` may be in here already: the garbage collector comes by anywhere.
        self._lock = threading.RLock()

    @property
    def lent(self) -> int:
        """Blocks that somebody refers to."""
        return len(self._checkouts)

    def take(self, size: int, whole: int) -> tuple[memoryview, memoryview]:
        """Room for the first `size` of `whole` bytes, of whatever values, and the same to keep, for reading only.

        The last of all would end aligned: a message's tensor is the last of its fields, and begins aligned then.
        Raises `MemoryError`.
        """
        block = self._take(_rounded(size))
        start = -(block.address + whole) % ALIGNMENT
        room = block.memory[start : start + size]
        # An array over another array refers to what that one is a view of, unless that is no array.
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
        if block.size > self._most_kept:
            return
        with self._lock:
            self._free.setdefault(block.size, []).append(block)
            self.kept += block.size
            while self.kept > self._most_kept:
                size = next(iter(self._free))
                blocks = self._free[size]
                blocks.pop()
                self.kept -= size
                if not blocks:
                    del self._free[size]

    def rest(self) -> None:
        """Let go what nobody uses, if nothing was taken since this was called last."""
        with self._lock:
            if not self._taken:
                self._free.clear()
                self.kept = 0
            self._taken = False


def _rounded(size: int) -> int:
    """One of a few sizes, at most an eighth larger."""
    step = max(1, (1 << max(0, size - 1).bit_length()) // (2 * _SIZES_IN_AN_OCTAVE))
    return -(-size // step) * step
