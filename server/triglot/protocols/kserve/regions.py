"""Regions of system shared memory that clients register (spec 2.6, 3.10).

Strategy: a region is a file that another process may truncate at any time. Small tensors are copied by system
calls, which report how much there was. Large ones are copied through a mapping, or lent; if a part of that was
missing, a system call is made after all, for its error. A region stays open as long as anything refers to it:
those used by running requests outlive their unregistering, and are listed until then, as in Triton. A copy
during which a part of the file was missing is discarded, and so is the mapping: by then it has zeros in place of
that part.
"""

from __future__ import annotations

import ctypes
import os
import stat
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from triglot.core.errors import Code, InvalidArgument, NotFound, PayloadTooLarge, ServingError
from triglot.core.types import RegionSlice
from triglot.platform.bus_errors import BusErrors, Guarded, bus_errors
from triglot.platform.mapping import map_file, unmap

SHARED_MEMORY = Path("/dev/shm")
"""Linux's directory of POSIX shared memory."""
RESERVED = ("/triton_python_backend_shm_region_", "/sem.")
"""Prefixes of keys that are in use otherwise: Triton's own regions, and POSIX semaphores."""
MAX_REGIONS = 512
"""Each region is a file descriptor, of which many systems allow a process 1024."""
MAX_NAME = 255
LARGEST = 2**64 - 1
"""Largest value of Triton's uint64 fields."""
QUICK_BYTES = 128 * 1024
"""From this size on copying through a mapping is quicker."""
# Opening must not block, on another process's lease or on a pipe.
_FLAGS = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


_PIECE = 16 * 1024 * 1024
"""Bytes copied at a time: the most memory that a missing part may cost."""
_STRIDE = 768 * 1024
"""From 1 MiB on, glibc's `memmove` uses another method, which is slower on AMD processors."""


class GuardedMemory:
    """`size` bytes from the start of an open file. Any thread may use it.

    Raise `OSError` if the file cannot be mapped, or missing parts cannot be detected.
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
        """Return the bytes at `at`, read-only, valid as long as anything refers to them.

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


@dataclass(slots=True)
class Checkout:
    """A lent part of a region, which its client may still change.

    `check` raises `InvalidArgument` if the memory is, or was, missing.
    """

    data: memoryview
    check: Callable[[], None]


class Region:
    """`size` bytes at `offset` of the shared-memory object `key`. Any thread may read and write.

    `file` (device and inode) is the same for all regions of one object.
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

    def _mapping_for(self, size: int) -> GuardedMemory | None:
        """Return the mapping if it copies this size faster than a system call does, else None."""
        if size < QUICK_BYTES:
            return None
        if self._memory is None or self._memory.lost:
            self._memory = None
            with suppress(OSError):
                self._memory = GuardedMemory(self._descriptor, self.offset + self.size)
        return self._memory

    def check(self, offset: int, size: int) -> None:
        """Raise `InvalidArgument` for a slice that is not within the region."""
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
        """Return the checked slice in place, or None if it has to be read."""
        memory = self._mapping_for(size) if self._lends else None
        if memory is None or not memory.usable:
            return None
        return Checkout(memory.view(self.offset + offset, size), partial(self._check_range, memory, offset + size))

    def _check_range(self, memory: GuardedMemory, end: int) -> None:
        if self.offset + end > os.fstat(self._descriptor).st_size:
            raise self._too_small(end)
        if memory.lost:
            # The kernel may still be able to read pages that cannot be mapped.
            self._lends = False
            raise InvalidArgument(
                f"shared memory region '{self.name}': expected {end} bytes, got fewer: its object was truncated, "
                "or the system has no memory for a part that was never written"
            )

    def read(self, into: memoryview, offset: int) -> None:
        """Fill `into` from `offset`, which was checked.

        Raise `InvalidArgument` if the object has become too small.
        """
        place = self.offset + offset
        memory = self._mapping_for(len(into))
        if memory is None or not memory.read(into, place):
            self._read_by_calls(into, offset)
        # In a mapping the rest of the last page is readable, too, as zeros.
        if place + len(into) > os.fstat(self._descriptor).st_size:
            raise self._too_small(offset + len(into))

    def _read_by_calls(self, into: memoryview, offset: int) -> None:
        at = 0
        while at < len(into):
            # A system call transfers at most 2 GiB.
            count = os.preadv(self._descriptor, [into[at:]], self.offset + offset + at)
            if not count:
                raise self._too_small(offset + len(into))
            at += count

    def write(self, data: memoryview, offset: int) -> None:
        """Write `data` at `offset`, which was checked.

        Raise `ServingError` if there is no room for it any longer.
        """
        self._check_room(data, offset)
        memory = self._mapping_for(len(data))
        if memory is None or not memory.write(data, self.offset + offset):
            self._check_room(data, offset)
            self._write_by_calls(data, offset)

    def _check_room(self, data: memoryview, offset: int) -> None:
        # If a client truncates the object from here on, it gets back at most what it had.
        if self.offset + offset + len(data) > os.fstat(self._descriptor).st_size:
            raise self._too_small(offset + len(data))

    def _write_by_calls(self, data: memoryview, offset: int) -> None:
        at = 0
        try:
            while at < len(data):
                at += os.pwrite(self._descriptor, data[at:], self.offset + offset + at)
        except OSError as error:  # The file system may have less memory than the files' sizes promise.
            raise ServingError(
                f"shared memory region '{self.name}' cannot be written: {error.strerror}",
                code=Code.RESOURCE_EXHAUSTED,
            ) from None

    def _too_small(self, needed: int) -> InvalidArgument:
        return InvalidArgument(
            f"shared memory region '{self.name}': expected {needed} bytes, got fewer: its object was "
            f"truncated after "
            "it was registered"
        )


class Regions:
    """All regions by name. On the event loop.

    `prefix`: the prefix that keys must have; "/" allows every key, "" disables shared memory. `most_bytes`: the
    limit on one request's inputs in shared memory.
    """

    def __init__(self, prefix: str = "", most_bytes: int = 2**31 - 1) -> None:
        self.prefix = prefix
        self.most_bytes = most_bytes
        self._regions: dict[str, Region] = {}
        self._unregistered = weakref.WeakValueDictionary[str, Region]()
        """Unregistered regions that requests still use."""

    def register(self, name: str, key: str, offset: int, size: int) -> None:
        """Register a region. Raise `ServingError` for a name in use, and for an object that may not be used."""
        if name in self._regions:
            raise ServingError(f"shared memory region '{name}' already in manager", code=Code.ALREADY_EXISTS)
        if not 0 < len(name) <= MAX_NAME:
            raise _refusal(name[:MAX_NAME], f"expected a name of 1 to {MAX_NAME} characters")
        if len(self._regions) >= MAX_REGIONS:
            text = f"{MAX_REGIONS} regions are registered, which is the limit"
            raise _refusal(name, text, Code.RESOURCE_EXHAUSTED)
        if size < 1:
            raise _refusal(name, "invalid args: byte_size: expected at least 1, got 0")
        path = self._path(name, key)
        try:
            descriptor = os.open(path, _FLAGS)
        except (OSError, ValueError):
            # No reason is given: the client may not be allowed to know which files exist.
            raise _refusal(name, f"Unable to open shared memory region: '{key}'") from None
        try:
            _check(descriptor, name, key, offset, size)
        except ServingError:
            os.close(descriptor)
            raise
        self._regions[name] = Region(name, key, offset, size, descriptor)

    def _path(self, name: str, key: str) -> Path:
        # As in glibc's `shm_open`: many clients omit the slash.
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

    def find(self, part: RegionSlice) -> Region:
        """Return the region of a slice. Raise `NotFound`, and `InvalidArgument` for a slice not within it."""
        # As in Triton, an unregistered region can be used as long as other requests use it.
        region = self._regions.get(part.region) or self._unregistered.get(part.region)
        if region is None:
            raise NotFound(f"Unable to find shared memory region: '{part.region}'")
        region.check(part.offset, part.size)
        return region

    def check_total(self, size: int) -> None:
        """Raise `PayloadTooLarge` for inputs that together exceed a request's limit."""
        if size > self.most_bytes:
            raise PayloadTooLarge(
                f"the request's inputs in shared memory have {size} bytes, the limit is {self.most_bytes}; see "
                "the server's option max_message_size"
            )

    def registered(self, name: str = "") -> list[Region]:
        """Return the region of this name, or all, including those that requests still use. Raise `NotFound`."""
        by_name = {**self._unregistered, **self._regions}
        if not name:
            return list(by_name.values())
        if name not in by_name:
            raise NotFound(f"Unable to find system shared memory region: '{name}'")
        return [by_name[name]]

    def unregister(self, name: str = "") -> None:
        """Unregister the region of this name, if there is one, or all regions."""
        for each in [name] if name else list(self._regions):
            if (region := self._regions.pop(each, None)) is not None:
                self._unregistered[each] = region


def _check(descriptor: int, name: str, key: str, offset: int, size: int) -> None:
    """Raise `ServingError` for a file that is not shared memory, or too small."""
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
