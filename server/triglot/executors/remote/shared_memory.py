"""Tensors in shared memory: each side of a channel writes into regions of its own, which the other side reads.

Strategy: a region holds the tensors of one frame at a time. Its owner (`Arena`) reuses it once the reader
(`Mirror`) has released it: all arrays over a region refer to one array, their base, whose end releases the region.
Small tensors are copied at once, so that a model that keeps them keeps no region in use. Regions that have not
been used for a while return their memory to the system, but stay mapped.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from triglot.core.tensor import (
    DATATYPES,
    Array,
    BytesFramingError,
    array_over,
    bytes_elements,
    datatype_name,
    element_count,
    object_array,
    pack_bytes,
    unpack_bytes,
)
from triglot.executors.joining import Stack
from triglot.executors.remote.frames import FrameError, Place

ALIGNMENT = 64
"""Alignment of tensors in a region, in bytes."""
MIN_REGION = 64 * 1024
"""Smallest size of a region, in bytes; sizes are powers of two."""
MAX_BYTES = 1 << 34
"""Limit on the bytes of one frame's tensors, however much memory is available."""
_LARGE = 1 << 28
"""Bytes from which the available memory is checked."""
IDLE_SECONDS = 10.0
"""Seconds without use after which a region returns its memory to the system."""
COPIED = 16 * 1024
"""Largest size in bytes of a frame's tensors that are copied: it costs less than to keep track of a region."""
MAX_HELD = 16
"""Limit on regions in use, each of which has a file descriptor; tensors in further regions are copied."""
NOTHING = np.frombuffer(b"", np.uint8)
BEHIND = 1
"""Region number of tensors that follow their frame."""
Named = list[tuple[str, Array]]
"""Tensors with their names, which need not be unique."""


def shared_memory(size: int) -> int:
    """Return the file descriptor of `size` bytes of shared memory, zeroed and anonymous. Raise `OSError`."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("triglot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        descriptor, path = tempfile.mkstemp(prefix="triglot-")
        os.unlink(path)  # noqa: PTH108 - it has just been made by its name.
    try:
        os.ftruncate(descriptor, size)
        if hasattr(os, "memfd_create"):
            # A reader must not find the memory shrunk while it reads: the system would kill it.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        elif hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_room(size: int) -> None:
    """Raise `MemoryError` when `size` bytes are not available.

    The system kills some process when more memory is written than there is.
    """
    room = min(MAX_BYTES, _available())
    if size > room:
        raise MemoryError(f"tensors of {size} bytes do not fit into shared memory: {room} bytes are available")


def _available() -> int:
    """Return the bytes of available memory; `MAX_BYTES` where the system does not report them."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return MAX_BYTES


def mapped(descriptor: int, size: int, *, writable: bool) -> mmap.mmap:
    """Return the mapped memory, which outlives the file descriptor. Raise `ValueError` if it is smaller."""
    access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    return mmap.mmap(descriptor, size, mmap.MAP_SHARED, access)


@dataclass(slots=True, eq=False)
class _Region:
    """A region: `busy` while its frame is written or read, `used` when it was last made or released.

    `empty`: its memory has been returned to the system.
    """

    number: int
    size: int
    memory: mmap.mmap
    busy: bool = True
    used: float = field(default_factory=time.monotonic)
    empty: bool = False


@dataclass(slots=True)
class Placed:
    """Tensors in a region, ready to be sent.

    For a region that is new to the reader, `region_size` is its size in bytes, `descriptor` its file descriptor.
    `parts`: tensors that follow their frame instead, as buffers with padding.
    """

    places: tuple[Place, ...] | None
    region: int = 0
    region_size: int = 0
    descriptor: int | None = None
    parts: Sequence[Any] = ()


Contents = Array | Stack | bytes
Row = tuple[str, str, tuple[int, ...], Contents]
"""A tensor's name, datatype, shape, and the contents to copy into a region."""


def packed(tensors: Mapping[Any, Any]) -> list[Row]:
    """Return the tensors as rows for `Arena.place`.

    Raise `TypeError` for a dtype that is no datatype's, and `MemoryError` when there is not enough memory.
    """
    rows: list[Row] = []
    size = 0
    for name, value in tensors.items():
        array = value if isinstance(value, np.ndarray | Stack) else np.asarray(value)
        try:
            datatype = datatype_name(array.dtype)
        except TypeError as error:
            raise TypeError(f"'{name}': {error}") from None
        # A broadcast array takes less memory than its shape says; a packed BYTES element has four bytes or more.
        size += 4 * element_count(array.shape) if datatype == "BYTES" else array.nbytes
        if size >= _LARGE:
            _check_room(size)
        data: Contents = array
        if datatype == "BYTES":
            assert isinstance(array, np.ndarray)  # `stacked` makes no `Stack` of BYTES tensors.
            data = pack_bytes(bytes_elements(array))
        rows.append((str(name), datatype, array.shape, data))
    return rows


def _laid_out(rows: Iterable[Row]) -> tuple[tuple[Place, ...], list[Contents], int]:
    """Return the places of the tensors, their contents, and the number of bytes that they take with padding."""
    places: list[Place] = []
    contents: list[Contents] = []
    end = 0
    for name, datatype, shape, data in rows:
        size = len(data) if isinstance(data, bytes) else data.nbytes
        start = -(-end // ALIGNMENT) * ALIGNMENT
        places.append(Place(name, datatype, shape, start, size))
        contents.append(data)
        end = start + size
    return tuple(places), contents, end


def placed_behind(rows: Iterable[Row]) -> Placed:
    """Return the tensors as buffers that follow their frame, for a reader that shares no memory.

    Arrays are not copied if they are contiguous: they are read while they are sent.
    """
    places, contents, size = _laid_out(rows)
    if not size:
        return Placed(places)
    parts: list[Any] = []
    end = 0
    for place, data in zip(places, contents, strict=True):
        parts += [bytes(place.offset - end), data if isinstance(data, bytes) else _bytes_of(data, place.datatype)]
        end = place.offset + place.size
    return Placed(places, BEHIND, size, None, [part for part in parts if len(part)])


def _bytes_of(data: Array | Stack, datatype: str) -> Array:
    """Return the elements' bytes in C order, without a copy for a contiguous array of this dtype."""
    if isinstance(data, Stack):
        joined = np.empty(data.shape, DATATYPES[datatype].dtype)
        data.copy_to(joined)
        data = joined
    array = np.ascontiguousarray(data, DATATYPES[datatype].dtype)
    return array.reshape(-1).view(np.uint8)


class Arena:
    """The regions that this side writes. Any thread may use it."""

    def __init__(self) -> None:
        self._regions: dict[int, _Region] = {}
        self._last = 0
        self._lock = threading.Lock()

    def place(self, rows: Iterable[Row]) -> Placed:
        """Copy the tensors into a free region, or a new one; none is used for tensors without bytes.

        Raise `MemoryError` and `OSError`.
        """
        places, contents, end = _laid_out(rows)
        if not end:
            return Placed(places)
        region, descriptor = self._take(end)
        try:
            for place, data in zip(places, contents, strict=True):
                start, size = place.offset, place.size
                if isinstance(data, bytes):
                    region.memory[start : start + size] = data
                elif size:
                    placed = np.ndarray(place.shape, DATATYPES[place.datatype].dtype, region.memory, start)
                    if isinstance(data, Stack):
                        data.copy_to(placed)
                    else:
                        np.copyto(placed, data)
        except BaseException:
            self.forget(region.number)
            if descriptor is not None:
                os.close(descriptor)
            raise
        return Placed(places, region.number, region.size if descriptor is not None else 0, descriptor)

    def _take(self, size: int) -> tuple[_Region, int | None]:
        with self._lock:
            free = [region for region in self._regions.values() if region.size >= size and not region.busy]
            if free:
                region = min(free, key=lambda region: region.size)
                region.busy, region.empty = True, False
                return region, None
            self._last += 1
            number = self._last
        if size >= _LARGE:
            _check_room(size)
        size = max(MIN_REGION, 1 << (size - 1).bit_length())
        descriptor = shared_memory(size)
        try:
            region = _Region(number, size, mapped(descriptor, size, writable=True))
        except BaseException:
            os.close(descriptor)
            raise
        with self._lock:
            self._regions[number] = region
        return region, descriptor

    def forget(self, number: int) -> None:
        """Drop a region whose frame was not sent: the reader may not know it."""
        with self._lock:
            self._regions.pop(number, None)

    def release(self, numbers: Iterable[int]) -> None:
        """Note that the reader has released these regions. Raise `FrameError` for an unknown one."""
        with self._lock:
            for number in numbers:
                region = self._regions.get(number)
                if region is None:
                    raise FrameError(f"there is no region {number}")
                region.busy, region.used = False, time.monotonic()

    def trim(self, now: float, idle: float = IDLE_SECONDS) -> None:
        """Return the memory of regions that have been free for `idle` seconds to the system.

        `now` is in seconds of `time.monotonic`.
        """
        with self._lock:
            for region in self._regions.values():
                if not region.empty and now - region.used >= idle and not region.busy:
                    region.empty = True
                    if hasattr(mmap, "MADV_REMOVE"):
                        # Not every file system supports it.
                        with suppress(OSError):
                            region.memory.madvise(mmap.MADV_REMOVE)


class Mirror:
    """The regions of the other side. One thread at a time may read them, and any thread may call `released`."""

    def __init__(self) -> None:
        self._memory: dict[int, mmap.mmap] = {}
        self._held: dict[int, weakref.ref[Array]] = {}
        self._released: deque[int] = deque()

    def adopt(self, number: int, size: int, descriptor: int) -> None:
        """Map a new region of `size` bytes, and close its descriptor. Raise `ValueError` and `OSError`."""
        try:
            self._memory[number] = mapped(descriptor, size, writable=False)
        finally:
            os.close(descriptor)

    def tensors(self, number: int, places: Sequence[Place]) -> Named:
        """Return the tensors in the region of this number, as read-only arrays with their names; 0: no region.

        Raise `FrameError` for an unknown region, or places that do not fit it.
        """
        return arrays_at(self._base(number, places) if number else NOTHING, places)

    def _base(self, number: int, places: Sequence[Place]) -> Array:
        memory = self._memory.get(number)
        if memory is None:
            raise FrameError(f"there is no region {number}")
        end = max(place.offset + place.size for place in places)
        if end > len(memory):
            raise FrameError(f"tensors of {end} bytes do not fit into a region of {len(memory)} bytes")
        if end <= COPIED or len(self._held) >= MAX_HELD:
            self._released.append(number)
            return np.frombuffer(memory[:end], np.uint8)
        base: Array = np.frombuffer(memory, np.uint8, end)
        base.flags.writeable = False
        self._held[number] = weakref.ref(base, partial(self._on_released, number))
        return base

    def _on_released(self, number: int, _: object) -> None:
        del self._held[number]
        self._released.append(number)

    def released(self) -> list[int]:
        """Return the regions that have become free since the last call."""
        released: list[int] = []
        with suppress(IndexError):  # Another thread may take the last one.
            while self._released:
                released.append(self._released.popleft())
        return released

    def requeue_released(self, released: Iterable[int]) -> None:
        """Report these regions with the next frame again: the last one was not sent."""
        self._released.extend(released)


def arrays_at(base: Array, places: Sequence[Place]) -> Named:
    """Return the tensors over the bytes of `base`, with their names. Raise as `array_at`."""
    return [(place.name, array_at(base, place)) for place in places]


def array_at(base: Array, place: Place) -> Array:
    """Return the tensor over the bytes of `base`; a copy for BYTES.

    Raise `FrameError` for a wrong size and for wrongly packed BYTES.
    """
    count = element_count(place.shape)
    if place.datatype == "BYTES":
        packed = base[place.offset : place.offset + place.size].tobytes()
        try:
            array = object_array(unpack_bytes(packed, count), place.shape)
        except BytesFramingError as error:
            raise FrameError(f"tensor {place.name!r} of shape {place.shape}: {error}") from error
        array.flags.writeable = False
        return array
    dtype = DATATYPES[place.datatype].dtype
    if count * dtype.itemsize != place.size:
        raise FrameError(f"tensor {place.name!r} of shape {place.shape} has {place.size} bytes")
    if not count:
        return array_over(b"", dtype, place.shape)
    return np.ndarray(place.shape, dtype, base, place.offset)
