"""Tensors that lie over regions of shared memory, and how long each region is read.

Strategy: every array that lies over a region holds one and the same array, its base, so that a weak reference to
the base says when the region is read no more. Small tensors are copied out at once, so that what a model keeps of
them keeps no region.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence

import numpy as np

from triglot.core.tensor import DATATYPES, Array, array_over, element_count, object_array, unpack_bytes
from triglot.executors.process.frames import FrameError, Place

COPIED = 16 * 1024
"""Tensors of one frame that are copied out: fewer bytes than a region's books cost."""
MAX_HELD = 16
"""Regions that are read at the same time; each has a file descriptor. Of any more the tensors are copied out."""
_NOTHING = np.frombuffer(b"", np.uint8)

Named = list[tuple[str, Array]]
"""Tensors with their names, several of which may be the same."""


class Views:
    """The regions that are read. One thread at a time may call it."""

    def __init__(self) -> None:
        self._held: list[tuple[int, weakref.ref[Array]]] = []

    def over(self, number: int, memory: mmap.mmap, places: Sequence[Place]) -> tuple[Named, bool]:
        """The tensors that lie in a region, as read-only arrays, and whether the region is read from now on.

        Raises `FrameError` for what cannot lie there.
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
        """The regions that nobody reads any more, since this was asked last."""
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
    """Tensors without any bytes. Raises `FrameError` for others."""
    return [(place.name, array_at(_NOTHING, place)) for place in places]


def array_at(base: Array, place: Place) -> Array:
    """The tensor that lies over the bytes of `base`. Raises `FrameError`."""
    count = element_count(place.shape)
    if place.datatype == "BYTES":
        packed = base[place.offset : place.offset + place.size].tobytes()
        array = object_array(unpack_bytes(packed, count), place.shape)
        array.flags.writeable = False
        return array
    dtype = DATATYPES[place.datatype].dtype
    if count * dtype.itemsize != place.size:
        raise FrameError(f"tensor {place.name!r} of shape {place.shape} has {place.size} bytes")
    if not count:
        return array_over(b"", dtype, place.shape)
    return np.ndarray(place.shape, dtype, base, place.offset)
