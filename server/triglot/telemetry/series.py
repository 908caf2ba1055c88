"""Time series: one value per second, kept for a month at decreasing resolution (grps 7)."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from triglot.core.statistics import rank
from triglot.telemetry.monitor import Aggregation
from triglot.telemetry.points import point, points_of, together

log = logging.getLogger(__name__)

MAX_METRICS = 1000
"""Limit on the number of models' own metrics; values of further ones are dropped."""
RINGS = ((60, 1), (60, 60), (24, 3600), (30, 86_400))
"""Seconds, minutes, hours, days: number of points, and the seconds that each of them covers."""
CDF_SHARES = {
    **{percent: percent * 100 for percent in (*range(10, 90, 10), *range(90, 100))},
    100: 9990,
    101: 9999,
}
"""The x of each point of a distribution, and its percentile in ten-thousandths (grps 7)."""
LOGGED_SHARES = {"80": 8000, "90": 9000, "99": 9900, "999": 9990, "9999": 9999}
BUILT_IN: Mapping[str, Aggregation] = {
    "*qps": "inc",
    "*fail_rate(%)": "avg",
    "*latency_avg(ms)": "avg",
    "*latency_max(ms)": "max",
    "*latency_cdf(ms)": "cdf",
    "*cpu_usage(%)": "avg",
    "*mem_usage(%)": "avg",
}

ADDED = ("*cpu_usage(%)", "*mem_usage(%)")
"""Metrics of a process whose sum over several is the server's value."""
BY_REQUESTS = ("*fail_rate(%)", "*latency_avg(ms)")
"""Averages over requests: each process's counts by its number of requests."""
REQUESTS = "*qps"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


SECOND_OF: Mapping[str, Callable[[Sequence[float]], float]] = {"avg": _mean, "max": max, "min": min, "inc": sum}
"""Aggregation of the values of a second."""
COARSER: Mapping[str, Callable[[Sequence[float]], float]] = {"avg": _mean, "max": max, "min": min, "inc": _mean}
"""Aggregation of finer points. Points without values are skipped, but a second without increments is zero."""


class Trend:
    """A metric with one value per second."""

    label: Literal["trend"] = "trend"

    def __init__(self, aggregation: Aggregation) -> None:
        self.aggregation = aggregation
        self.total = 0.0
        """Sum of the positive increments since the start, for `inc`."""
        self._rings: list[deque[float | None]] = [deque([None] * points, points) for points, _ in RINGS]
        self._seconds = 0

    @property
    def value(self) -> float | None:
        """Value of the last finished second; None if it had none."""
        return self._rings[0][-1]

    def end_second(self, values: Sequence[float]) -> None:
        """Aggregate the values of the second that has ended."""
        second = SECOND_OF[self.aggregation](values) if values or self.aggregation == "inc" else None
        if self.aggregation == "inc":
            self.total += sum([value for value in values if 0 < value < math.inf])
        self._rings[0].append(second)
        self._seconds += 1
        for at, (_, seconds) in enumerate(RINGS[1:]):
            if self._seconds % seconds:
                break
            finer = [value for value in self._rings[at] if value is not None]
            self._rings[at + 1].append(COARSER[self.aggregation](finer) if finer else None)

    def points(self) -> list[float | None]:
        """Return 174 points: days, hours, minutes, seconds; the last one is the last finished second."""
        return [value for ring in reversed(self._rings) for value in ring]

    def data(self) -> list[list[float]]:
        """Return the points in the form of the monitor page."""
        return [[at, round(value or 0.0, 2)] for at, value in enumerate(self.points())]

    def lines(self, name: str) -> Iterable[str]:
        """Yield its lines for the monitor log."""
        yield f"{name} : {self.value or 0.0:.2f}"


class Distribution:
    """A metric that keeps the sorted values of the last second."""

    label: Literal["cdf"] = "cdf"
    aggregation: Aggregation = "cdf"

    def __init__(self) -> None:
        self.ordered: list[float] = []

    @property
    def value(self) -> float | None:
        """99th percentile of the values; None without any."""
        ordered = self.ordered  # Read once: it may be replaced while another thread reads.
        return rank(ordered, 9900) if ordered else None

    def end_second(self, values: Sequence[float]) -> None:
        """Keep the values of the second that has ended."""
        self.ordered = sorted(values)

    def data(self) -> list[list[float]]:
        """Return 20 points: x is a percentage, 100 being 99.9 % and 101 being 99.99 %; zeros without values."""
        return [[x, self._rank(share)] for x, share in CDF_SHARES.items()]

    def _rank(self, share: int) -> float:
        return round(rank(self.ordered, share), 2) if self.ordered else 0.0

    def lines(self, name: str) -> Iterable[str]:
        """Yield its lines for the monitor log."""
        for suffix, share in LOGGED_SHARES.items():
            yield f"{name}_{suffix} : {self._rank(share):.2f}"


Metric = Trend | Distribution


class Metrics:
    """The built-in metrics and the models' own ones, by name, in the order of their creation."""

    def __init__(self) -> None:
        self.by_name: dict[str, Metric] = {name: _metric(kind) for name, kind in BUILT_IN.items()}
        self._warned: set[str] = set()
        self._values: dict[str, list[float]] = {}

    def collect(self, values: Iterable[tuple[str, Aggregation, float]]) -> None:
        """Add values of models' own metrics to the current second.

        A name keeps its first aggregation; values with another one are dropped (grps 7).
        """
        for name, aggregation, value in values:
            if self._accepts(name, aggregation):
                self._values.setdefault(name, []).append(value)

    def end_second(self, built_in: Mapping[str, Sequence[float]]) -> None:
        """End the second, with these values of the built-in metrics."""
        values_of = {**built_in, **self._values}
        self._values = {}
        for name, metric in self.by_name.items():
            metric.end_second(values_of.get(name, ()))

    def _accepts(self, name: str, aggregation: Aggregation) -> bool:
        metric = self.by_name.get(name)
        if name in BUILT_IN:
            return self._warn_once(name, "metric %s: the name is reserved by the server; values are dropped")
        if metric is None:
            if len(self.by_name) >= MAX_METRICS + len(BUILT_IN):
                return self._warn_once("", f"metric %s: dropped, as there are already {MAX_METRICS} names", name)
            self.by_name[name] = _metric(aggregation)
            return True
        if metric.aggregation != aggregation:
            text = f"metric %s: the kind is {metric.aggregation}; values of kind {aggregation} are dropped"
            return self._warn_once(name, text)
        return True

    def _warn_once(self, about: str, text: str, name: str = "") -> bool:
        """Log a warning, once per name, as there may be thousands of values."""
        if about not in self._warned:
            self._warned.add(about)
            log.warning(text, name or about)
        return False

    def log_text(self) -> str:
        """Return the monitor log: a line per value of the last second (grps 7)."""
        lines = (line for name, metric in self.by_name.items() for line in metric.lines(name))
        return "".join([line + "\n" for line in lines])


def _metric(aggregation: Aggregation) -> Metric:
    return Distribution() if aggregation == "cdf" else Trend(aggregation)


# --- several processes (grps 7) ---


def series_report(metrics: Metrics, name: str, *, last: bool = False) -> dict[str, Any] | None:
    """Return a metric of this process as JSON values; None if it does not exist. `last`: only the last second."""
    metric = metrics.by_name.get(name)
    if metric is None:
        return None
    if isinstance(metric, Distribution):
        return {"aggregation": metric.aggregation, "points": points_of(metric.ordered)}
    requests = metrics.by_name[REQUESTS]
    assert isinstance(requests, Trend)  # It is built in.
    values, weights = ([each.value] if last else each.points() for each in (metric, requests))
    pairs = [
        (value, (weight or 0.0) if name in BY_REQUESTS else 1.0)
        for value, weight in zip(values, weights, strict=True)
    ]
    return {"aggregation": "inc" if name in ADDED else metric.aggregation, "points": pairs}


def merged_series(reports: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Return the merged series in the form of its page; None if no process has it.

    Processes whose aggregation differs from that of the first are ignored.
    """
    aggregation, points = _alike(reports)
    if aggregation == "":
        return None
    if aggregation == "cdf":
        values = {x: point(together(points), share) for x, share in CDF_SHARES.items()}
    else:
        values = dict(enumerate(_merged(aggregation, pairs) for pairs in zip(*points, strict=True)))
    label = "cdf" if aggregation == "cdf" else "trend"
    return {"label": label, "data": [[x, round(value or 0.0, 2)] for x, value in values.items()]}


def merged_value(reports: Sequence[Mapping[str, Any] | None]) -> float | None:
    """Return the merged value of the last second; None without a process that has one."""
    aggregation, points = _alike(reports)
    if aggregation == "cdf":
        return point(together(points), 9900)
    return _merged(aggregation, [each[-1] for each in points])


def _alike(reports: Sequence[Mapping[str, Any] | None]) -> tuple[str, list[Any]]:
    known = [report for report in reports if report is not None]
    aggregation = known[0]["aggregation"] if known else ""
    return aggregation, [report["points"] for report in known if report["aggregation"] == aggregation]


def _merged(aggregation: str, pairs: Sequence[tuple[float | None, float]]) -> float | None:
    """Merge one value and its weight per process; without a weight that is not 0, all count alike."""
    known = [(value, weight) for value, weight in pairs if value is not None]
    if not known:
        return None
    total = sum(weight for _, weight in known)
    if aggregation != "avg" or not total:
        return SECOND_OF[aggregation]([value for value, _ in known])
    return sum(value * weight for value, weight in known) / total
