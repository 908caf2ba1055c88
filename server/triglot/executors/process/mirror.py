"""The regions of shared memory that the other side of a channel writes."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Sequence

from triglot.executors.process.arena import mapped
from triglot.executors.process.frames import FrameError, Place
from triglot.executors.process.views import Named, Views, no_region


class Mirror:
    """The regions of the other side. One thread at a time may read them, and any thread may call `released`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: dict[int, mmap.mmap] = {}
        self._views = Views()
        self._released: list[int] = []

    def adopt(self, number: int, size: int, descriptor: int) -> None:
        """Map a new region of `size` bytes, and close its descriptor. Raises `ValueError` and `OSError`."""
        try:
            self._memory[number] = mapped(descriptor, size, writable=False)
        finally:
            os.close(descriptor)

    def tensors(self, number: int, places: Sequence[Place]) -> Named:
        """Returns the tensors in the region of this number, as read-only arrays with their names; 0: no region.

        Raises `FrameError` for an unknown region, or places that do not fit it.
        """
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

    def released(self) -> tuple[int, ...]:
        """Returns the regions that have become free since the last call."""
        with self._lock:
            released, self._released = (*self._released, *self._views.ended()), []
        return released

    def tell_again(self, released: Iterable[int]) -> None:
        """Report these regions with the next frame again: the last one was not sent."""
        with self._lock:
            self._released += released
