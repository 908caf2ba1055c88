"""Instances and their devices: where they are, and which of a model's copies the calling thread runs."""

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
    """The device of each instance; empty when no instance group says so.

    Raises `ModelLoadError`, which names the configuration's file and key and ends with `hint`, for a GPU that is
    not there.
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
    """One item for each instance, given to the threads that call: each in turn, and a thread keeps its own.

    An instance is a thread of the engine's, so with as many items as instances each item has one thread. Raises
    `ValueError` without items.
    """

    def __init__(self, items: Sequence[T]) -> None:
        if not items:
            raise ValueError("items: expected one for each instance, got none")
        self._places = [_Place(item) for item in items]
        self._giving = threading.Lock()
        self._threads = threading.local()

    def mine(self) -> T:
        """The item of the calling thread."""
        try:
            place: _Place[T] = self._threads.place
        except AttributeError:
            with self._giving:
                place = min(self._places, key=lambda one: one.users)
                place.users += 1
            self._threads.place = place
        return place.item

    def add(self, items: Sequence[T]) -> None:
        """For threads that come."""
        with self._giving:
            self._places += [_Place(item) for item in items]

    def leave(self) -> None:
        """The calling thread's item is not its own any more, and goes where it is nobody's."""
        place: _Place[T] = self._threads.place
        del self._threads.place
        with self._giving:
            place.users -= 1
            if not place.users:
                self._places.remove(place)
