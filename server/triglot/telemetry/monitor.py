"""Metrics that a model's own code keeps: any thread adds values, `Telemetry` collects them."""

from __future__ import annotations

import logging
from collections import deque
from typing import Literal

log = logging.getLogger(__name__)

Aggregation = Literal["avg", "max", "min", "inc", "cdf"]
MAX_WAITING = 10_000
"""Limit on values that are not yet collected, which happens several times a second; more are dropped (grps 7)."""


class Monitor:
    """Named values, aggregated per second with the aggregation of the name's first use. Thread-safe."""

    def __init__(self) -> None:
        self._values: deque[tuple[str, Aggregation, float]] = deque()
        self._full = False

    def add(self, name: str, aggregation: Aggregation, value: float) -> None:
        """Add a value; never blocks. Raise `TypeError` for anything but an int or float."""
        if type(value) not in (int, float):
            raise TypeError(f"{name}: expected an int or a float, got {type(value).__name__}")
        if len(self._values) >= MAX_WAITING:
            if not self._full:
                self._full = True
                log.warning(
                    "metric %s: %d values are buffered; more are dropped until the next collection",
                    name,
                    MAX_WAITING,
                )
            return
        self._values.append((name, aggregation, value))

    def drain(self) -> list[tuple[str, Aggregation, float]]:
        """Return and removes the values added since the last call, in order."""
        values = []
        while self._values:
            values.append(self._values.popleft())
        self._full = False
        return values
