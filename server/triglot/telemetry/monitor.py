"""Metrics that a model's own code keeps: any thread adds values, the telemetry collects them."""

from __future__ import annotations

import logging
from collections import deque
from typing import Literal

log = logging.getLogger(__name__)

Aggregation = Literal["avg", "max", "min", "inc", "cdf"]
MAX_WAITING = 10_000
"""Values that wait to be collected, which happens several times a second; more are dropped (grps 7)."""


class Monitor:
    """Named values, aggregated over each second in the way that the name was first used with."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, Aggregation, float]] = deque()
        self._full = False

    def add(self, name: str, aggregation: Aggregation, value: float) -> None:
        """One more value; never blocks. Raises `TypeError` for what is neither int nor float."""
        if type(value) not in (int, float):
            raise TypeError(f"{name}: expected an int or a float, got {type(value).__name__}")
        if len(self._waiting) >= MAX_WAITING:
            if not self._full:
                self._full = True
                log.warning(
                    "metric %s: %d values are buffered; more are dropped until the next collection",
                    name,
                    MAX_WAITING,
                )
            return
        self._waiting.append((name, aggregation, value))

    def drain(self) -> list[tuple[str, Aggregation, float]]:
        """The values that came since the last time, in order."""
        values = []
        while self._waiting:
            values.append(self._waiting.popleft())
        self._full = False
        return values
