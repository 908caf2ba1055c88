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
    goes: bool = False


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
                place = min([one for one in self._places if not one.goes], key=lambda one: one.users)
                place.users += 1
            self._threads.place = place
        return place.item

    def change(self, come: Sequence[T], go: Sequence[T]) -> int:
        """Some items come, and others go as soon as their threads `leave`; how many of these have a thread."""
        with self._giving:
            for place in self._places:
                place.goes |= any(place.item is item for item in go)
            self._places = [place for place in self._places if place.users or not place.goes]
            self._places += [_Place(item) for item in come]
            return sum(place.goes for place in self._places)

    def leave(self, *, anyway: bool = False) -> bool:
        """Whether the calling thread's item is one that goes, or is left `anyway`: it is not its own any more."""
        place: _Place[T] | None = getattr(self._threads, "place", None)
        if place is None or not (place.goes or anyway):
            return False
        del self._threads.place
        with self._giving:
            place.users -= 1
            self._places = [one for one in self._places if one is not place or place.users or not place.goes]
        return True
