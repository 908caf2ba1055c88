"""Pool of buffers that are reused for the inputs of one batch after another.

Strategy: a buffer is free when only its pool refers to it. Every view of an array keeps a reference to the array
that owns the memory, so whatever a model keeps or returns of its inputs keeps the buffer from being reused, and
CPython's reference counts show that at once. A pool is used by one thread.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from triglot.core.tensor import Array, element_count

MAX_BUFFERS = 16
"""Most buffers that a pool keeps; when all are in use, further ones serve one batch only."""
IDLE_TURNS = 64
"""Allocations after which an unused buffer is freed."""
SMALLEST = 4096


@dataclass(slots=True)
class _Buffer:
    owner: Array
    used: int


class Buffers:
    """A pool of buffers."""

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []
        self._turn = 0
        # Measured, since interpreters differ in how many references the call itself adds.
        self._unshared = _references(_Buffer(np.empty(0, np.uint8), 0))

    def __len__(self) -> int:
        return len(self._buffers)

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """Returns an uninitialised array that shares no memory with any other in use."""
        size = element_count(shape) * dtype.itemsize
        return self._owner(size)[:size].view(dtype).reshape(shape)

    def _owner(self, size: int) -> Array:
        self._turn += 1
        best: _Buffer | None = None
        for one in self._buffers:
            fits = size <= one.owner.size and (best is None or one.owner.size < best.owner.size)
            if fits and _references(one) == self._unshared:
                best = one
        # Small tensors would keep a buffer alive that is far too large for them.
        if best is None or best.owner.size > 4 * max(size, SMALLEST):
            best = self._make(size)
        best.used = self._turn
        return best.owner

    def _make(self, size: int) -> _Buffer:
        self._buffers = [one for one in self._buffers if self._turn - one.used <= IDLE_TURNS]
        made = _Buffer(np.empty(max(SMALLEST, 1 << max(0, size - 1).bit_length()), np.uint8), self._turn)
        if len(self._buffers) < MAX_BUFFERS:
            self._buffers.append(made)
        return made


def _references(buffer: _Buffer) -> int:
    return sys.getrefcount(buffer.owner)
