"""Places instances on devices, and selects the calling thread's copy of a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from triglot.core.errors import ModelLoadError
from triglot.model.config import Device, ModelConfig

T = TypeVar("T")


def devices_of(file: Path, config: ModelConfig, gpu_count: Callable[[], int], hint: str = "") -> list[Device]:
    """Return the device of each instance; empty without instance groups.

    Raise `ModelLoadError` with the configuration's file and key, followed by `hint`, for a GPU that does not
    exist.
    """
    try:
        return config.devices(gpu_count)
    except ValueError as error:
        raise ModelLoadError(f"{config.source or file}: {error}{hint}") from error


@dataclass(slots=True, eq=False)
class _Place(Generic[T]):
    item: T
    users: int = 0


class Placement(Generic[T]):
    """Assigns one item per instance to the threads that call: in round-robin order, and a thread keeps its item.

    Each instance is a thread of the executor, so with one item per instance each item has one thread. Raises
    `ValueError` without items.
    """

    def __init__(self, items: Sequence[T]) -> None:
        if not items:
            raise ValueError("items: expected one for each instance, got none")
        self._places = [_Place(item) for item in items]
        self._lock = threading.Lock()
        self._threads = threading.local()

    def current(self) -> T:
        """Return the item of the calling thread."""
        try:
            place: _Place[T] = self._threads.place
        except AttributeError:
            with self._lock:
                place = min(self._places, key=lambda place: place.users)
                place.users += 1
            self._threads.place = place
        return place.item

    def add(self, items: Sequence[T]) -> None:
        """Add items for new threads."""
        with self._lock:
            self._places += [_Place(item) for item in items]

    def release(self) -> None:
        """Releases the calling thread's item, and removes it if no other thread uses it."""
        place: _Place[T] = self._threads.place
        del self._threads.place
        with self._lock:
            place.users -= 1
            if not place.users:
                self._places.remove(place)
