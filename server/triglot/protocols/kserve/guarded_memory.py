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
        try:
            self._out, self._in = libc.process_vm_writev, libc.process_vm_readv
        except AttributeError:
            raise OSError(errno.ENOSYS, "the C library has no process_vm_writev") from None
        self._out.restype = self._in.restype = ctypes.c_ssize_t
        # It must not be closed while the array is there, and goes with it.
        self._bytes = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        self._address = self._bytes.ctypes.data
        probe = np.empty(1, np.uint8)
        if self.read(probe.data, 0) != 1:
            raise OSError(errno.EFAULT, "the file is empty")

    def read(self, into: memoryview, at: int) -> int:
        """Fill `into` with what is at `at`; how many bytes there were."""
        # Ours is the "other" process's side: that one is pinned, the mapped one may be gone.
        return self._copy(self._out, into, at)

    def write(self, data: memoryview, at: int) -> int:
        """Put `data` at `at`; how many bytes there was room for."""
        return self._copy(self._in, data, at)

    def _copy(self, function: Callable[..., int], ours: memoryview, at: int) -> int:
        array = np.frombuffer(ours, np.uint8)
        mapped = _Span(self._address + at, array.size)
        own = _Span(array.ctypes.data, array.size)
        count: int = function(
            os.getpid(),
            ctypes.byref(mapped),
            ctypes.c_ulong(1),
            ctypes.byref(own),
            ctypes.c_ulong(1),
            ctypes.c_ulong(0),
        )
        if count >= 0:
            return count
        code = ctypes.get_errno()
        if code == errno.EFAULT:
            return 0
        raise OSError(code, os.strerror(code))
