"""Instances and their devices: where they are, and which of a model's copies the calling thread runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import cycle
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


class Placement(Generic[T]):
    """One item for each instance, given to the threads that call: each in turn, and a thread keeps its own.

    An instance is a thread of the engine's, so with as many items as instances each item has one thread. Raises
    `ValueError` without items.
    """

    def __init__(self, items: Sequence[T]) -> None:
        if not items:
            raise ValueError("items: expected one for each instance, got none")
        self._next = cycle(items)
        self._giving = threading.Lock()
        self._threads = threading.local()

    def mine(self) -> T:
        """The item of the calling thread."""
        try:
            item: T = self._threads.item
        except AttributeError:
            with self._giving:
                item = self._threads.item = next(self._next)
        return item
