"""Memory that a client shares with servers of its machine, so that tensors need not be sent."""

from __future__ import annotations

import math
import mmap
import operator
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, SupportsIndex

import numpy as np

from triglot.core.tensor import Array, datatype_name
from triglot.core.types import RegionSlice

if TYPE_CHECKING:
    from multiprocessing import shared_memory

PREFIX: Final = "/triglot_client_"
ALIGNMENT: Final = 64
"""Alignment of arrays in a region, in bytes."""
_FOLDER: Final = Path("/dev/shm")


class SharedMemory:
    """Memory for the arrays of calls, from `Client.shared_memory`; `size` is in bytes. Threads may share it.

    Its arrays, and parts of them that are contiguous, are sent by reference: as inputs of a call, and as what its
    outputs are written to. They can be used as long as anything refers to them; after the end of the block they
    are sent as any other array.
    """

    def __init__(self, size: int, prefix: str) -> None:
        """Raise `ValueError` for a size below 1 or a wrong prefix, `MemoryError` if there is no room."""
        from multiprocessing import shared_memory  # noqa: PLC0415 - it takes a tenth of the client's import.

        if size < 1:
            raise ValueError(f"shared memory: expected a size of at least 1 byte, got {size}")
        if not prefix.startswith("/") or "/" in prefix[1:]:
            raise ValueError(f"prefix: expected / and a name, got {prefix!r}")
        self.key = f"{prefix}{os.getpid()}_{os.urandom(8).hex()}"
        self.name = self.key[1:]
        self.size = size
        # Python's own object is removed by a process of its own if this one is killed. Its mapping cannot be
        # closed while arrays refer to it, so they have another one, and it has one byte.
        made = shared_memory.SharedMemory(self.name, create=True, size=1)
        self.close = weakref.finalize(self, _unlink, made, os.getpid())
        try:
            made.close()
            self._memory = _mapped(self.name, size)
        except BaseException:
            self.close()
            raise
        self._address = _address(np.frombuffer(self._memory, np.uint8))
        self._used = 0
        self._lock = threading.Lock()

    def array(self, shape: SupportsIndex | Sequence[SupportsIndex], dtype: Any) -> Array:
        """Return a new array in memory that no other array has, zeros at first.

        Raise `ValueError` if there is not as much left, or after the end of the block, `TypeError` for a dtype
        without a size, such as text.
        """
        dtype = np.dtype(dtype)
        if datatype_name(dtype) == "BYTES":
            raise TypeError(f"shared memory: expected a dtype of numbers, which have one size, got {dtype}")
        dims = list(map(operator.index, [shape] if isinstance(shape, SupportsIndex) else shape))
        size = math.prod(dims) * dtype.itemsize
        if not self.close.alive:
            raise ValueError("the shared memory is closed")
        with self._lock:
            start = min(-(-self._used // ALIGNMENT) * ALIGNMENT, self.size)
            if size > self.size - start:
                raise ValueError(
                    f"shared memory: expected at most {self.size - start} bytes, left of {self.size}, got "
                    f"{size} for {dtype} {dims}"
                )
            array: Array = np.ndarray(dims, dtype, self._memory, start)
            self._used = start + size
        return array

    def slice_of(self, array: Array) -> RegionSlice | None:
        """Return where an array is, None if it is not here, or not as it is to be sent."""
        at = _address(array) - self._address
        if at < 0 or at + array.nbytes > self.size or not array.nbytes:
            return None
        if not (array.flags.c_contiguous and array.dtype.isnative):
            return None
        return RegionSlice(self.name, at, array.nbytes)


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _mapped(name: str, size: int) -> mmap.mmap:
    descriptor = os.open(_FOLDER / name, os.O_RDWR | os.O_CLOEXEC)
    try:
        # Without memory for it, the system would kill the process at the first write.
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    except OSError as error:
        raise MemoryError(f"shared memory: {_FOLDER} has no room for {size} bytes: {error.strerror}") from None
    finally:
        os.close(descriptor)


def _unlink(made: shared_memory.SharedMemory, process: int) -> None:
    if os.getpid() == process:  # Not at the exit of a process that was forked from it.
        with suppress(FileNotFoundError):  # Someone else may have removed it.
            made.unlink()
