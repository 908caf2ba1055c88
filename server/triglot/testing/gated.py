"""A model that waits at named points until a test lets it continue."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from triglot.core.types import TensorSpec
from triglot.model.model import Model

SECONDS = 60.0
"""Limit of every wait: only a failing test waits as long."""


class GatedModel(Model):
    """A model that returns its input `x` as `y`, after it has waited at those of its points that are closed.

    `closed`: the points that are closed at first. Those of this class are "load", "infer" and "close"; a subclass
    names others by calling `wait_at`. `attributes` are set on the model: `instances=2`.
    """

    inputs: Sequence[TensorSpec] = (TensorSpec("x", "FP32", [-1]),)
    outputs: Sequence[TensorSpec] = (TensorSpec("y", "FP32", [-1]),)

    def __init__(self, *closed: str, **attributes: Any) -> None:
        self._closed = set(closed)
        self._arrivals: Counter[str] = Counter()
        self._changed = threading.Condition()
        vars(self).update(attributes)

    def load(self, folder: Path) -> None:
        """As in the base class."""
        self.wait_at("load")

    def _infer(self, inputs: Any) -> Any:
        self.wait_at("infer")
        return {"y": inputs["x"]}

    infer: Callable[..., Any] = _infer  # A subclass may take the call, too.

    def close(self) -> None:
        """As in the base class."""
        self.wait_at("close")

    def wait_at(self, point: str) -> None:
        """Wait in the model while the point is closed. Raise `TimeoutError` after a minute."""
        with self._changed:
            self._arrivals[point] += 1
            self._changed.notify_all()
            self._wait(lambda: point not in self._closed, f"nothing opened {point!r}")

    def wait_until_at(self, point: str, times: int = 1) -> None:
        """Wait in the test until the model has come to the point, so many times since the last wait for it.

        Raise `TimeoutError` after a minute.
        """
        with self._changed:
            self._wait(lambda: self._arrivals[point] >= times, f"the model did not come to {point!r}")
            self._arrivals[point] -= times

    async def until_at(self, point: str, times: int = 1) -> None:
        """Do the same in a coroutine."""
        await asyncio.to_thread(self.wait_until_at, point, times)

    def forget_arrivals(self, point: str) -> None:
        """Let the next wait for the point wait for another arrival."""
        with self._changed:
            del self._arrivals[point]

    def open_point(self, point: str) -> None:
        """Let the model continue at the point, now and later."""
        with self._changed:
            self._closed.discard(point)
            self._changed.notify_all()

    def close_point(self, point: str) -> None:
        """Make the model wait at the point from now on."""
        with self._changed:
            self._closed.add(point)

    def _wait(self, is_over: Callable[[], bool], failure: str) -> None:
        if not self._changed.wait_for(is_over, SECONDS):
            raise TimeoutError(f"{failure} within {SECONDS:.0f} s")
