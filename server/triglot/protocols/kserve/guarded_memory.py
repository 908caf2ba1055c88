"""Memory that is mapped from a file which others may make smaller at any time.

Strategy: C code copies, as fast as memory is. No copy is taken for good in which a part of the file was gone, and
a mapping of which a part was found gone is used no more: there is other memory in its place by then.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator
from functools import partial

import numpy as np

from triglot.core.bus_errors import bus_errors

_MAP_FIXED = 0x10
"""Python's mmap has no name for it."""
_FAILED = ctypes.c_void_p(-1).value
_PIECE = 16 * 1024 * 1024
"""So much is copied at a time, and is what a part that is gone may cost in memory."""


class GuardedMemory:
    """`size` bytes from the start of an open file. Any thread may copy.

    Raises `OSError` where the file cannot be mapped, or nobody can be told of a part that is gone.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.lost = False
        """Whether a part was found gone: it is of no use any more."""
        self._errors = bus_errors()
        self._size = size
        # Not Python's own, which keeps a descriptor.
        libc = ctypes.CDLL(None, use_errno=True)
        self._map = libc.mmap
        self._map.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        self._map.restype = ctypes.c_void_p
        self._access = mmap.PROT_READ | mmap.PROT_WRITE
        address = self._map(None, size, self._access, mmap.MAP_SHARED, descriptor, 0)
        if address is None or address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._address: int = address
        unmap = libc.munmap
        unmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        # At the process's end it goes by itself, and a thread may still copy.
        weakref.finalize(self, unmap, address, size).atexit = False

    def read(self, into: memoryview, at: int) -> bool:
        """Fill `into` with what is at `at`; whether all was there. Of the file's last page that is all."""
        ours = np.frombuffer(into, np.uint8)
        return all(
            self._copy(ours.ctypes.data + done, self._address + at + done, at + done, size)
            for done, size in _pieces(ours.size)
        )

    def write(self, data: memoryview, at: int) -> bool:
        """Put `data` at `at`; whether all was there."""
        ours = np.frombuffer(data, np.uint8)
        return all(
            self._copy(self._address + at + done, ours.ctypes.data + done, at + done, size)
            for done, size in _pieces(ours.size)
        )

    def _copy(self, to: int, source: int, at: int, size: int) -> bool:
        if self.lost or not self._errors.in_place():
            return False
        with self._errors.mended(partial(self._lose, at, size)):
            ctypes.memmove(to, source, size)
        # Another thread may have found out, and what was copied may be memory that is nobody's.
        return not self.lost

    def _lose(self, at: int, size: int) -> bool:
        """Let who copies this go on, with memory of its own."""
        self.lost = True
        first = at - at % mmap.PAGESIZE
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        place = self._address + first
        return bool(self._map(place, at + size - first, self._access, kind, -1, 0) == place)


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    """Where each begins, and its size."""
    return ((done, min(_PIECE, size - done)) for done in range(0, size, _PIECE))
