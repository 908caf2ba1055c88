"""A model that waits at named points until a test lets it continue."""

from __future__ import annotations

import threading
from collections import Counter
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

    inputs = (TensorSpec("x", "FP32", [-1]),)
    outputs = (TensorSpec("y", "FP32", [-1]),)

    def __init__(self, *closed: str, **attributes: Any) -> None:
        self._closed = set(closed)
        self._arrived: Counter[str] = Counter()
        self._changed = threading.Condition()
        vars(self).update(attributes)

    def load(self, folder: Path) -> None:
        """As in the base class."""
        self.wait_at("load")

    def infer(self, inputs: Any) -> Any:
        """As in the base class."""
        self.wait_at("infer")
        return {"y": inputs["x"]}

    def close(self) -> None:
        """As in the base class."""
        self.wait_at("close")

    def wait_at(self, point: str) -> None:
        """Wait in the model while the point is closed. Raise `TimeoutError` after a minute."""
        with self._changed:
            self._arrived[point] += 1
            self._changed.notify_all()
            self._wait(lambda: point not in self._closed, f"nothing opened {point!r}")

    def wait_until_at(self, point: str, times: int = 1) -> None:
        """Wait in the test until the model has come to the point so many times, since it was made.

        Raise `TimeoutError` after a minute.
        """
        with self._changed:
            self._wait(lambda: self._arrived[point] >= times, f"the model was not {times} times at {point!r}")

    def arrivals(self, point: str) -> int:
        """Return how many times the model has come to the point."""
        with self._changed:
            return self._arrived[point]

    def open_point(self, point: str) -> None:
        """Let the model continue at the point, now and later."""
        with self._changed:
            self._closed.discard(point)
            self._changed.notify_all()

    def close_point(self, point: str) -> None:
        """Make the model wait at the point from now on."""
        with self._changed:
            self._closed.add(point)

    def _wait(self, is_over: Any, failure: str) -> None:
        if not self._changed.wait_for(is_over, SECONDS):
            raise TimeoutError(f"{failure} within {SECONDS:.0f} s")
