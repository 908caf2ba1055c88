"""Maps and unmaps memory through the C library: Python's own `mmap` keeps a file descriptor per mapping."""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from typing import Any

_FAILED = ctypes.c_void_p(-1).value
_FIXED = 0x10
"""MAP_FIXED, which Python does not define."""
ACCESS = mmap.PROT_READ | mmap.PROT_WRITE


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


def map_file(descriptor: int, size: int) -> int:
    """Return the address of the file's first `size` bytes, mapped as shared. Raise `OSError`."""
    return _map(None, size, mmap.MAP_SHARED, descriptor)


def map_nothing(address: int, size: int) -> None:
    """Replace the mapping at `address` with private memory of zeros. Raise `OSError`."""
    _map(address, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED, -1)


def unmap(address: int, size: int) -> None:
    """Unmap memory."""
    _libc().munmap(address, size)


def _map(address: int | None, size: int, kind: int, descriptor: int) -> int:
    try:
        found = _libc().mmap(address, size, ACCESS, kind, descriptor, 0)
    except (AttributeError, TypeError) as error:  # The C library lacks the function.
        raise OSError(f"memory cannot be mapped: {error}") from None
    if found is None or found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)
