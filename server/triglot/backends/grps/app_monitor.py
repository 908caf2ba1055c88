"""`app_monitor`: custom metrics of a grps project (grps 7)."""

from __future__ import annotations

import logging

from triglot.telemetry.monitor import Aggregation, Monitor

log = logging.getLogger(__name__)


class AppMonitor:
    """Named numbers, aggregated per second; no method blocks or raises.

    Values that are neither int nor float are dropped and logged.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def avg(self, name: str, value: float) -> None:
        """Add a value; the metric is the mean of the second's values."""
        self._add(name, "avg", value)

    def max(self, name: str, value: float) -> None:
        """Add a value; the metric is the largest of the second."""
        self._add(name, "max", value)

    def min(self, name: str, value: float) -> None:
        """Add a value; the metric is the smallest of the second."""
        self._add(name, "min", value)

    def inc(self, name: str, value: float) -> None:
        """Add a value; the metric is the sum of the second."""
        self._add(name, "inc", value)

    def cdf(self, name: str, value: float) -> None:
        """Add a value; the metric is the distribution of the second."""
        self._add(name, "cdf", value)

    def _add(self, name: object, aggregation: Aggregation, value: object) -> None:
        if not isinstance(name, str) or not isinstance(value, int | float):
            log.error("app_monitor.%s(%r, %r): expected a name and an int or a float", aggregation, name, value)
            return
        # Subclasses, such as numpy's float64, count as numbers.
        self._monitor.add(name, aggregation, float(value) if isinstance(value, float) else int(value))
