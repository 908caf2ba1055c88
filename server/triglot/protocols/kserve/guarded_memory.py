"""Memory that is mapped from a file which others may make smaller at any time.

Strategy: it is read and written as fast as memory is. Nothing is taken for good of which a part of the file was
gone, and a mapping of which a part was found gone is used no more: there are zeros in its place by then.
"""

from __future__ import annotations

import ctypes
import weakref

import numpy as np

from triglot.platform.bus_errors import BusErrors, Guarded, bus_errors
from triglot.platform.mapping import map_file, unmap

_PIECE = 16 * 1024 * 1024
"""So much is copied at a time, and is what a part that is gone may cost in memory."""
_STRIDE = 768 * 1024
"""From 1 MiB on, glibc's `memmove` takes another way, which is slower on AMD's processors."""


class GuardedMemory:
    """`size` bytes from the start of an open file. Any thread may use it.

    Raises `OSError` where the file cannot be mapped, or nobody can be told of a part that is gone.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._errors = bus_errors()
        self._guarded = self._errors.guard(map_file(descriptor, size), size)
        # At the process's end it goes by itself, and a thread may still use it.
        weakref.finalize(self, _let_go, self._errors, self._guarded).atexit = False

    @property
    def lost(self) -> bool:
        """Whether a part was found gone: it is of no use any more."""
        return self._guarded.lost

    @property
    def usable(self) -> bool:
        """Whether it can be touched: nothing was lost, and who touches what is gone lives on."""
        return not self.lost and self._errors.in_place()

    def view(self, at: int, size: int) -> memoryview:
        """What is at `at`, read-only, for as long as anybody refers to it; of what is gone there are zeros.

        What was done with it is worth nothing when the memory is `lost` by then. Look at `usable` before.
        """
        return np.asarray(_Part(self, self._guarded.address + at, size)).data

    def read(self, into: memoryview, at: int) -> bool:
        """Fill `into` with what is at `at`; whether all was there. Of the file's last page that is all."""
        return self._copy(_address(into), self._guarded.address + at, len(into))

    def write(self, data: memoryview, at: int) -> bool:
        """Put `data` at `at`; whether all was there."""
        return self._copy(self._guarded.address + at, _address(data), len(data))

    def _copy(self, to: int, source: int, size: int) -> bool:
        for piece in range(0, size, _PIECE):
            if not self.usable:
                return False
            end = min(piece + _PIECE, size)
            for at in range(piece, end, _STRIDE):
                ctypes.memmove(to + at, source + at, min(_STRIDE, end - at))
            # Another thread may have found out, and what was copied may be memory that is nobody's.
            if self.lost:
                return False
        return True


class _Part:
    """An array of bytes for numpy, which keeps the memory as long as the array is there."""

    def __init__(self, memory: GuardedMemory, address: int, size: int) -> None:
        self._memory = memory
        self.__array_interface__ = {"version": 3, "data": (address, True), "typestr": "|u1", "shape": (size,)}


def _let_go(errors: BusErrors, guarded: Guarded) -> None:
    errors.forget(guarded)
    unmap(guarded.address, guarded.size)


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])
