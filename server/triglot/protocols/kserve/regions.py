"""Regions of system shared memory that clients have registered (spec 2.6, 3.10).

Strategy: a region is a file that another process may make smaller at any time. The kernel copies small tensors
and says when there is less than there was. Large ones are copied through a mapping, or lent; where a part of that
was gone, the kernel is asked after all, and knows why. A region stays open as long as anybody refers to it: those
of requests that run outlive their unregistering, and are listed until then, as in Triton.
"""

from __future__ import annotations

import os
import stat
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from triglot.core.buffers import Buffers
from triglot.core.errors import Code, InvalidArgument, NotFound, PayloadTooLarge, ServingError
from triglot.core.tensor import LONG_BYTES
from triglot.core.types import RegionSlice
from triglot.protocols.kserve.guarded_memory import GuardedMemory

SHARED_MEMORY = Path("/dev/shm")
"""Where Linux has POSIX shared memory."""
RESERVED = ("/triton_python_backend_shm_region_", "/sem.")
"""What the keys of others' memory begin with: Triton's own, and POSIX semaphores."""
MAX_REGIONS = 512
"""Each is a file descriptor, of which many systems give a process 1024."""
LONGEST_NAME = 255
LARGEST = 2**64 - 1
"""What fits into the numbers of Triton's."""
QUICK_BYTES = 128 * 1024
"""From this size on copying through a mapping is quicker."""
REUSED_BYTES = 64 * 1024 * 1024
"""Memory for larger tensors is not kept for the next request."""
_BYTE = np.dtype(np.uint8)
# A lease of somebody else's must not hold the opening up, nor a pipe.
_FLAGS = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@dataclass(slots=True)
class Checkout:
    """A part of a region, which its owner may still change.

    `check` raises `InvalidArgument` when it is, or was, not there any more.
    """

    data: memoryview
    check: Callable[[], None]


class Region:
    """`size` bytes at `offset` of the object `key`. Any thread may read and write.

    `file` is the same for all regions of one object.
    """

    def __init__(self, name: str, key: str, offset: int, size: int, descriptor: int) -> None:
        self.name = name
        self.key = key
        self.offset = offset
        self.size = size
        status = os.fstat(descriptor)
        self.file = (status.st_dev, status.st_ino)
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._memory: GuardedMemory | None = None
        self._lends = True

    def _quick(self, size: int) -> GuardedMemory | None:
        """What copies so much sooner than a system call."""
        if size < QUICK_BYTES:
            return None
        if self._memory is None or self._memory.lost:
            self._memory = None
            with suppress(OSError):
                self._memory = GuardedMemory(self._descriptor, self.offset + self.size)
        return self._memory

    def check(self, offset: int, size: int) -> None:
        """Raises `InvalidArgument` for a place that is not in the region."""
        if offset >= self.size:
            raise InvalidArgument(
                f"Invalid offset for shared memory region: '{self.name}': it has {self.size} bytes, got "
                f"offset {offset}"
            )
        if offset + size > LARGEST:
            raise InvalidArgument(
                f"Integer overflow detected: byte_size ({size}) + offset ({offset}) exceeds maximum value "
                f"({LARGEST}) for region '{self.name}'"
            )
        if offset + size > self.size:
            raise InvalidArgument(
                f"Invalid offset + byte size for shared memory region: '{self.name}': it has {self.size} bytes, "
                f"got {size} at offset {offset}"
            )

    def lend(self, offset: int, size: int) -> Checkout | None:
        """What is at `offset`, which was checked, as it lies there; None where it is to be read."""
        memory = self._quick(size) if self._lends else None
        if memory is None or not memory.usable:
            return None
        return Checkout(memory.view(self.offset + offset, size), partial(self._check_range, memory, offset + size))

    def _check_range(self, memory: GuardedMemory, end: int) -> None:
        if self.offset + end > os.fstat(self._descriptor).st_size:
            raise self._has_shrunk(end)
        if memory.lost:
            # The kernel may still read what cannot be touched.
            self._lends = False
            raise InvalidArgument(
                f"shared memory region '{self.name}': expected {end} bytes, got fewer: its object was truncated, "
                "or the system has no memory for a part that was never written"
            )

    def read(self, into: memoryview, offset: int) -> None:
        """Fill `into` with what is at `offset`, which was checked.

        Raises `InvalidArgument` when the object has become too small.
        """
        place = self.offset + offset
        memory = self._quick(len(into))
        if memory is None or not memory.read(into, place):
            self._read_by_calls(into, offset)
        # The rest of its last page is there, too, as zeros.
        if place + len(into) > os.fstat(self._descriptor).st_size:
            raise self._has_shrunk(offset + len(into))

    def _read_by_calls(self, into: memoryview, offset: int) -> None:
        at = 0
        while at < len(into):
            # The system gives at most 2 GiB at a time.
            count = os.preadv(self._descriptor, [into[at:]], self.offset + offset + at)
            if not count:
                raise self._has_shrunk(offset + len(into))
            at += count

    def write(self, data: memoryview, offset: int) -> None:
        """Put `data` at `offset`, which was checked. Raises `ServingError` when it has no room there any more."""
        self._check_room(data, offset)
        memory = self._quick(len(data))
        if memory is None or not memory.write(data, self.offset + offset):
            self._check_room(data, offset)
            self._write_by_calls(data, offset)

    def _check_room(self, data: memoryview, offset: int) -> None:
        # Who makes it smaller from now on gets back what it had, at most.
        if self.offset + offset + len(data) > os.fstat(self._descriptor).st_size:
            raise self._has_shrunk(offset + len(data))

    def _write_by_calls(self, data: memoryview, offset: int) -> None:
        at = 0
        try:
            while at < len(data):
                at += os.pwrite(self._descriptor, data[at:], self.offset + offset + at)
        except OSError as error:  # There may be less memory than objects promise.
            raise ServingError(
                f"shared memory region '{self.name}' cannot be written: {error.strerror}",
                code=Code.RESOURCE_EXHAUSTED,
            ) from None

    def _has_shrunk(self, needed: int) -> InvalidArgument:
        return InvalidArgument(
            f"shared memory region '{self.name}': expected {needed} bytes, got fewer: its object was "
            f"truncated after "
            "it was registered"
        )


class Regions:
    """All regions, by name. Belongs to the event loop.

    `prefix`: what keys must begin with; "/" allows every key, and "" none at all. `most_bytes`: of one request.
    """

    def __init__(self, prefix: str = "", most_bytes: int = 2**31 - 1) -> None:
        self.prefix = prefix
        self.most_bytes = most_bytes
        self._regions: dict[str, Region] = {}
        self._unregistered = weakref.WeakValueDictionary[str, Region]()
        """Those that requests still use."""
        self._buffers = Buffers()

    def register(self, name: str, key: str, offset: int, size: int) -> None:
        """Raises `ServingError` for a name that is taken, and for what is no memory that may be had."""
        if name in self._regions:
            raise ServingError(f"shared memory region '{name}' already in manager", code=Code.ALREADY_EXISTS)
        if not 0 < len(name) <= LONGEST_NAME:
            raise _refusal(name[:LONGEST_NAME], f"expected a name of 1 to {LONGEST_NAME} characters")
        if len(self._regions) >= MAX_REGIONS:
            text = f"{MAX_REGIONS} regions are registered, which is the limit"
            raise _refusal(name, text, Code.RESOURCE_EXHAUSTED)
        if size < 1:
            raise _refusal(name, "invalid args: byte_size: expected at least 1, got 0")
        path = self._path(name, key)
        try:
            descriptor = os.open(path, _FLAGS)
        except (OSError, ValueError):
            # No more is said: who asks may not be allowed to know what there is.
            raise _refusal(name, f"Unable to open shared memory region: '{key}'") from None
        try:
            _check(descriptor, name, key, offset, size)
        except ServingError:
            os.close(descriptor)
            raise
        self._regions[name] = Region(name, key, offset, size, descriptor)

    def _path(self, name: str, key: str) -> Path:
        # glibc's shm_open does the same: many clients leave the slash out.
        slashed = "/" + key.removeprefix("/")
        if "/" in key[1:] or key in ("", "/") or slashed in ("/.", "/.."):
            raise _refusal(name, f"key: expected '/NAME', got '{key}'")
        for prefix in RESERVED:
            if slashed.startswith(prefix):
                raise InvalidArgument(
                    f"cannot register shared memory region '{name}' with key '{key}' as the key contains the "
                    f"reserved prefix '{prefix[1:]}'"
                )
        if not slashed.startswith(self.prefix):
            expected = f"expected one that begins with '{self.prefix}', the server's shared_memory_prefix"
            raise _refusal(name, f"key: {expected}, got '{key}'")
        return SHARED_MEMORY / slashed[1:]

    def find(self, place: RegionSlice) -> Region:
        """The region of a place. Raises `NotFound`, and `InvalidArgument` for a place that is not in it."""
        # As in Triton, one that is used may be used by more.
        region = self._regions.get(place.region) or self._unregistered.get(place.region)
        if region is None:
            raise NotFound(f"Unable to find shared memory region: '{place.region}'")
        region.check(place.offset, place.size)
        return region

    def check_total(self, size: int) -> None:
        """Raises `PayloadTooLarge` for inputs that are together larger than a request may be."""
        if size > self.most_bytes:
            raise PayloadTooLarge(
                f"the request's inputs in shared memory have {size} bytes, the limit is {self.most_bytes}; see "
                "the server's option max_message_size"
            )

    def registered(self, name: str = "") -> list[Region]:
        """The region of this name, or all of them, with those that requests still use. Raises `NotFound`."""
        there = {**self._unregistered, **self._regions}
        if not name:
            return list(there.values())
        if name not in there:
            raise NotFound(f"Unable to find system shared memory region: '{name}'")
        return [there[name]]

    def unregister(self, name: str = "") -> None:
        """Forget the region of this name, if there is one, or all of them."""
        for gone in [name] if name else list(self._regions):
            if (region := self._regions.pop(gone, None)) is not None:
                self._unregistered[gone] = region
        if not self._regions:
            self._buffers = Buffers()

    def memory(self, size: int) -> memoryview:
        """So many bytes, of whatever values, to read into; kept for others as long as there are regions."""
        if LONG_BYTES <= size <= REUSED_BYTES:
            return self._buffers.empty((size,), _BYTE).data
        return np.empty(size, _BYTE).data


def _check(descriptor: int, name: str, key: str, offset: int, size: int) -> None:
    """Raises `ServingError` for what is no memory, or too little."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise _refusal(name, f"Unable to open shared memory region: '{key}'")
    if offset + size > status.st_size:
        raise _refusal(
            name,
            f"invalid args: byte_size {size} at offset {offset} exceeds the end of '{key}', which has "
            f"{status.st_size} bytes",
        )


def _refusal(name: str, why: str, code: Code = Code.INVALID_ARGUMENT) -> ServingError:
    return ServingError(f"failed to register shared memory region '{name}': {why}", code=code)
