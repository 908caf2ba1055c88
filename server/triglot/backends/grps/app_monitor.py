"""`app_monitor`: the metrics that a grps project keeps by itself (grps 7)."""

from __future__ import annotations

import logging

from triglot.telemetry.monitor import Aggregation, Monitor

log = logging.getLogger(__name__)


class AppMonitor:
    """Named numbers, aggregated over each second; no call blocks or raises.

    What is neither an int nor a float is left out, with a line in the log.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def avg(self, name: str, value: float) -> None:
        """The mean of the second's values."""
        self._add(name, "avg", value)

    def max(self, name: str, value: float) -> None:
        """The largest one."""
        self._add(name, "max", value)

    def min(self, name: str, value: float) -> None:
        """The smallest one."""
        self._add(name, "min", value)

    def inc(self, name: str, value: float) -> None:
        """Their sum."""
        self._add(name, "inc", value)

    def cdf(self, name: str, value: float) -> None:
        """Their distribution."""
        self._add(name, "cdf", value)

    def _add(self, name: object, aggregation: Aggregation, value: object) -> None:
        if not isinstance(name, str) or not isinstance(value, int | float):
            log.error("app_monitor.%s(%r, %r): expected a name and an int or a float", aggregation, name, value)
            return
        # Subclasses, numpy's float64 among them, are numbers like any other.
        self._monitor.add(name, aggregation, float(value) if isinstance(value, float) else int(value))
