"""Memory that is used again for one batch's inputs after the other.

Strategy: a buffer is free when nothing but its pool refers to it. Every view of an array keeps a reference to the
array that owns the memory, so whatever a model keeps or returns of its inputs keeps the buffer from being used
again, and CPython's count of references says so at once. One thread uses a pool.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from triglot.core.tensor import Array, element_count

MOST_BUFFERS = 16
"""Buffers that a pool keeps; when all are in use, others are made for one batch only."""
IDLE_TURNS = 64
"""A buffer that was passed over so often is given back to the system."""
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
        # Measured, since interpreters differ in what they count for the measuring itself.
        self._unshared = _references(_Buffer(np.empty(0, np.uint8), 0))

    def __len__(self) -> int:
        return len(self._buffers)

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """An array that nobody else has, of whatever values."""
        size = element_count(shape) * dtype.itemsize
        return self._owner(size)[:size].view(dtype).reshape(shape)

    def _owner(self, size: int) -> Array:
        self._turn += 1
        best: _Buffer | None = None
        for one in self._buffers:
            fits = size <= one.owner.size and (best is None or one.owner.size < best.owner.size)
            if fits and _references(one) == self._unshared:
                best = one
        # A buffer that is much too large would be kept alive by small tensors.
        if best is None or best.owner.size > 4 * max(size, SMALLEST):
            best = self._make(size)
        best.used = self._turn
        return best.owner

    def _make(self, size: int) -> _Buffer:
        self._buffers = [one for one in self._buffers if self._turn - one.used <= IDLE_TURNS]
        made = _Buffer(np.empty(max(SMALLEST, 1 << max(0, size - 1).bit_length()), np.uint8), self._turn)
        if len(self._buffers) < MOST_BUFFERS:
            self._buffers.append(made)
        return made


def _references(buffer: _Buffer) -> int:
    return sys.getrefcount(buffer.owner)
