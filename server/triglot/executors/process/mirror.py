"""The regions that the other side of a pipe writes, and what goes back in them as it came."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Sequence

import numpy as np

from triglot.core.tensor import DATATYPES, Array
from triglot.executors.process.arena import Placed, Row, mapped
from triglot.executors.process.frames import FrameError, Place
from triglot.executors.process.views import Named, Views, base_of, no_region


class Mirror:
    """The regions of the other side. One thread at a time reads them, any may ask what is `released`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: dict[int, mmap.mmap] = {}
        self._views = Views()
        self._released: list[int] = []

    def adopt(self, number: int, size: int, descriptor: int) -> None:
        """Map a new region. The descriptor is closed. Raises `ValueError` and `OSError`."""
        try:
            self._memory[number] = mapped(descriptor, size, writable=False)
        finally:
            os.close(descriptor)

    def tensors(self, number: int, places: Sequence[Place]) -> Named:
        """The tensors that lie in a region, as read-only arrays with their names. Raises `FrameError` for what
        cannot lie there."""
        if not number:
            return no_region(places)
        memory = self._memory.get(number)
        if memory is None:
            raise FrameError(f"there is no region {number}")
        with self._lock:
            named, held = self._views.over(number, memory, places)
            if not held:
                self._released.append(number)
        return named

    def again(self, rows: Sequence[Row]) -> Placed | None:
        """Where these lie already, if all of them came together and go back as they are: nothing is copied."""
        if not self._views:
            return None
        base: Array | None = None
        places = []
        for name, datatype, shape, data in rows:
            size = len(data) if isinstance(data, bytes) else data.nbytes
            if not size:
                places.append(Place(name, datatype, shape, 0, 0))
                continue
            if not isinstance(data, np.ndarray) or data.dtype != DATATYPES[datatype].dtype:
                return None
            if not data.flags.c_contiguous:
                return None
            below = base_of(data)
            if base is None:
                base = below
            elif base is not below:
                return None
            places.append(Place(name, datatype, shape, _address(data) - _address(base), size))
        if base is None:
            return None
        with self._lock:
            number = self._views.region_of(base)
        return Placed(tuple(places), number, kept=base) if number else None

    def released(self) -> tuple[int, ...]:
        """The regions that have become free since this was asked last."""
        with self._lock:
            released, self._released = (*self._released, *self._views.ended()), []
        return released

    def tell_again(self, released: Iterable[int]) -> None:
        """The other side did not get these."""
        with self._lock:
            self._released += released


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
