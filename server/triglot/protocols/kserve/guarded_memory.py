"""Memory that is mapped from a file which others may make smaller at any time.

Strategy: to touch mapped memory that is gone ends a process (SIGBUS). The kernel, when it copies for us from one
part of our memory to another, only copies less, or says EFAULT. `process_vm_writev` and `process_vm_readv`, asked
to do so within one process, are as safe as `preadv` and `pwrite`, and take half as long for large tensors.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable

import numpy as np


class _Span(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class GuardedMemory:
    """`size` bytes from the start of an open file. Any thread may copy.

    Raises `OSError` where a process may not copy so, or the file cannot be mapped.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._copies_out = _function(libc, "process_vm_writev")
        self._copies_in = _function(libc, "process_vm_readv")
        # Not Python's own, which keeps a descriptor.
        map_file = _function(libc, "mmap")
        kind = mmap.PROT_READ | mmap.PROT_WRITE
        self._address = map_file(None, ctypes.c_size_t(size), kind, mmap.MAP_SHARED, descriptor, ctypes.c_long(0))
        if self._address == -1:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        unmap = _function(libc, "munmap")
        weakref.finalize(self, unmap, ctypes.c_void_p(self._address), ctypes.c_size_t(size))
        self.read(np.empty(1, np.uint8).data, 0)

    def read(self, into: memoryview, at: int) -> int:
        """Fill `into` with what is at `at`; how many bytes there were. Of the file's last page that is all."""
        # Ours is the "other" process's side: that one is pinned, the mapped one may be gone.
        return self._copy(self._copies_out, into, at)

    def write(self, data: memoryview, at: int) -> int:
        """Put `data` at `at`; how many bytes there was room for."""
        return self._copy(self._copies_in, data, at)

    def _copy(self, function: Callable[..., int], ours: memoryview, at: int) -> int:
        array = np.frombuffer(ours, np.uint8)
        mapped = _Span(self._address + at, array.size)
        own = _Span(array.ctypes.data, array.size)
        one, flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
        count = function(os.getpid(), ctypes.byref(mapped), one, ctypes.byref(own), one, flags)
        if count >= 0:
            return count
        code = ctypes.get_errno()
        if code == errno.EFAULT:
            return 0
        raise OSError(code, os.strerror(code))


def _function(libc: ctypes.CDLL, name: str) -> Callable[..., int]:
    try:
        function = libc[name]
    except AttributeError:
        raise OSError(errno.ENOSYS, f"the C library has no {name}") from None
    function.restype = ctypes.c_ssize_t
    return function
