"""Memory mapped from a file that other processes may truncate at any time.

Strategy: reads and writes have the speed of memory. A copy during which a part of the file was missing is
discarded, and so is the mapping: by then it has zeros in place of that part.
"""

from __future__ import annotations

import ctypes
import weakref

import numpy as np

from triglot.platform.bus_errors import BusErrors, Guarded, bus_errors
from triglot.platform.mapping import map_file, unmap

_PIECE = 16 * 1024 * 1024
"""Bytes copied at a time: the most memory that a missing part may cost."""
_STRIDE = 768 * 1024
"""From 1 MiB on, glibc's `memmove` uses another method, which is slower on AMD processors."""


class GuardedMemory:
    """`size` bytes from the start of an open file. Any thread may use it.

    Raises `OSError` if the file cannot be mapped, or missing parts cannot be detected.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._errors = bus_errors()
        self._guarded = self._errors.guard(map_file(descriptor, size), size)
        # The kernel unmaps it at the process's exit, when a thread may still use it.
        weakref.finalize(self, _unmap, self._errors, self._guarded).atexit = False

    @property
    def lost(self) -> bool:
        """Whether a part was found missing: the mapping is then unusable."""
        return self._guarded.lost

    @property
    def usable(self) -> bool:
        """Whether it may be accessed: nothing was lost, and access to missing parts is handled."""
        return not self.lost and self._errors.in_place()

    def view(self, at: int, size: int) -> memoryview:
        """Returns the bytes at `at`, read-only, valid as long as anything refers to them.

        Missing parts read as zeros.

        Results from them are invalid if the memory is `lost` afterwards. Check `usable` before.
        """
        return np.asarray(_Part(self, self._guarded.address + at, size)).data

    def read(self, into: memoryview, at: int) -> bool:
        """Fill `into` from `at`; returns whether all was there. The file's last page counts as whole."""
        return self._copy(_address(into), self._guarded.address + at, len(into))

    def write(self, data: memoryview, at: int) -> bool:
        """Write `data` at `at`; returns whether all was there."""
        return self._copy(self._guarded.address + at, _address(data), len(data))

    def _copy(self, to: int, source: int, size: int) -> bool:
        for piece in range(0, size, _PIECE):
            if not self.usable:
                return False
            end = min(piece + _PIECE, size)
            for at in range(piece, end, _STRIDE):
                ctypes.memmove(to + at, source + at, min(_STRIDE, end - at))
            # Another thread may have lost a part meanwhile, which was then replaced by private memory.
            if self.lost:
                return False
        return True


class _Part:
    """Array interface for numpy that keeps the memory mapped as long as the array exists."""

    def __init__(self, memory: GuardedMemory, address: int, size: int) -> None:
        self._memory = memory
        self.__array_interface__ = {"version": 3, "data": (address, True), "typestr": "|u1", "shape": (size,)}


def _unmap(errors: BusErrors, guarded: Guarded) -> None:
    errors.forget(guarded)
    unmap(guarded.address, guarded.size)


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])
