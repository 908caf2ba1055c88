"""Arrays over regions of shared memory, and the time for which each region is in use.

Strategy: all arrays over a region refer to one array, their base, so that a weak reference to the base shows when
the region is no longer in use. Small tensors are copied at once, so that a model that keeps them keeps no region
in use.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence

import numpy as np

from triglot.core.tensor import (
    DATATYPES,
    Array,
    BytesFramingError,
    array_over,
    element_count,
    object_array,
    unpack_bytes,
)
from triglot.executors.process.frames import FrameError, Place

COPIED = 16 * 1024
"""Largest size in bytes of a frame's tensors that are copied: it costs less than to keep track of a region."""
MAX_HELD = 16
"""Limit on regions in use, each of which has a file descriptor; tensors in further regions are copied."""
_NOTHING = np.frombuffer(b"", np.uint8)

Named = list[tuple[str, Array]]
"""Tensors with their names, which need not be unique."""


class Views:
    """The regions in use. One thread at a time may use it."""

    def __init__(self) -> None:
        self._held: list[tuple[int, weakref.ref[Array]]] = []

    def over(self, number: int, memory: mmap.mmap, places: Sequence[Place]) -> tuple[Named, bool]:
        """Returns the tensors in a region, as read-only arrays, and whether these keep the region in use.

        Raises `FrameError` for places that do not fit the region.
        """
        end = max(place.offset + place.size for place in places)
        if end > len(memory):
            raise FrameError(f"tensors of {end} bytes do not fit into a region of {len(memory)} bytes")
        holds = end > COPIED and not self._holds_many()
        if holds:
            base: Array = np.frombuffer(memory, np.uint8, end)
            base.flags.writeable = False
            self._held.append((number, weakref.ref(base)))
        else:
            base = np.frombuffer(memory[:end], np.uint8)
        return [(place.name, array_at(base, place)) for place in places], holds

    def _holds_many(self) -> bool:
        return len(self._held) >= MAX_HELD and sum(base() is not None for _, base in self._held) >= MAX_HELD

    def ended(self) -> list[int]:
        """Returns the regions that are no longer in use, each once."""
        ended: list[int] = []
        if not self._held:
            return ended
        held = []
        for number, base in self._held:
            if base() is None:
                ended.append(number)
            else:
                held.append((number, base))
        self._held = held
        return ended


def no_region(places: Sequence[Place]) -> Named:
    """Returns tensors without any bytes. Raises `FrameError` for others."""
    return [(place.name, array_at(_NOTHING, place)) for place in places]


def array_at(base: Array, place: Place) -> Array:
    """Returns the tensor over the bytes of `base`; a copy for BYTES.

    Raises `FrameError` for a wrong size and for wrongly packed BYTES.
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
