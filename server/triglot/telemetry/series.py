"""Values over time: what a second gave, kept for a month in ever coarser points (grps 7)."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from triglot.core.histogram import rank
from triglot.telemetry.monitor import Aggregation

log = logging.getLogger(__name__)

MAX_METRICS = 1000
"""Metrics of models that are told apart; values for more are dropped."""
RINGS = ((60, 1), (60, 60), (24, 3600), (30, 86_400))
"""Seconds, minutes, hours, days: how many points are kept, and how many seconds each stands for."""
CDF_SHARES = {
    **{percent: percent * 100 for percent in (*range(10, 90, 10), *range(90, 100))},
    100: 9990,
    101: 9999,
}
"""The x of each point of a distribution, and its share in ten-thousandths (grps 7)."""
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


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


SECOND_OF: Mapping[str, Callable[[Sequence[float]], float]] = {"avg": _mean, "max": max, "min": min, "inc": sum}
"""What the values of a second become."""
COARSER: Mapping[str, Callable[[Sequence[float]], float]] = {"avg": _mean, "max": max, "min": min, "inc": _mean}
"""What finer points become; an empty point is none, except that a second without increments is zero."""


class Trend:
    """A metric with one value for each second."""

    label: Literal["trend"] = "trend"

    def __init__(self, aggregation: Aggregation) -> None:
        self.aggregation = aggregation
        self.total = 0.0
        """The sum of the positive increments since the start, for `inc`."""
        self._rings: list[deque[float | None]] = [deque([None] * points, points) for points, _ in RINGS]
        self._seconds = 0

    @property
    def value(self) -> float | None:
        """The last finished second's; None when it had none."""
        return self._rings[0][-1]

    def end_second(self, values: Sequence[float]) -> None:
        """A second has passed, in which these values came."""
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
        """174 points: days, hours, minutes, seconds; the last one is the last finished second."""
        return [value for ring in reversed(self._rings) for value in ring]

    def data(self) -> list[list[float]]:
        """The points as their page takes them."""
        return [[at, round(value or 0.0, 2)] for at, value in enumerate(self.points())]

    def lines(self, name: str) -> Iterable[str]:
        """What the monitor log says of it."""
        yield f"{name} : {self.value or 0.0:.2f}"


class Distribution:
    """A metric of which the values of the last second are kept, in order."""

    label: Literal["cdf"] = "cdf"
    aggregation: Aggregation = "cdf"

    def __init__(self) -> None:
        self.ordered: list[float] = []

    @property
    def value(self) -> float | None:
        """What 99 % of the values do not exceed; None when there are none."""
        ordered = self.ordered  # Another thread may be reading.
        return rank(ordered, 9900) if ordered else None

    def end_second(self, values: Sequence[float]) -> None:
        """A second has passed, in which these values came."""
        self.ordered = sorted(values)

    def data(self) -> list[list[float]]:
        """20 points: x is a percentage, 100 stands for 99.9 % and 101 for 99.99 %; zeros without values."""
        return [[x, self._rank(share)] for x, share in CDF_SHARES.items()]

    def _rank(self, share: int) -> float:
        return round(rank(self.ordered, share), 2) if self.ordered else 0.0

    def lines(self, name: str) -> Iterable[str]:
        """What the monitor log says of it."""
        for suffix, share in LOGGED_SHARES.items():
            yield f"{name}_{suffix} : {self._rank(share):.2f}"


Metric = Trend | Distribution


class Metrics:
    """The built-in metrics and those that models keep, by name, in the order of their creation."""

    def __init__(self) -> None:
        self.by_name: dict[str, Metric] = {name: _metric(kind) for name, kind in BUILT_IN.items()}
        self._refused: set[str] = set()
        self._came: dict[str, list[float]] = {}

    def collect(self, values: Iterable[tuple[str, Aggregation, float]]) -> None:
        """Values of models that came in this second.

        A name keeps its first aggregation; values for it with another one are dropped (grps 7).
        """
        for name, aggregation, value in values:
            if self._accepts(name, aggregation):
                self._came.setdefault(name, []).append(value)

    def end_second(self, built_in: Mapping[str, Sequence[float]]) -> None:
        """A second has passed, with these values of the built-in metrics."""
        came = {**built_in, **self._came}
        self._came = {}
        for name, metric in self.by_name.items():
            metric.end_second(came.get(name, ()))

    def _accepts(self, name: str, aggregation: Aggregation) -> bool:
        metric = self.by_name.get(name)
        if name in BUILT_IN:
            return self._refuse(name, "metric %s: the name is reserved by the server; values are dropped")
        if metric is None:
            if len(self.by_name) >= MAX_METRICS + len(BUILT_IN):
                return self._refuse("", f"metric %s: dropped, as there are already {MAX_METRICS} names", name)
            self.by_name[name] = _metric(aggregation)
            return True
        if metric.aggregation != aggregation:
            text = f"metric %s: the kind is {metric.aggregation}; values of kind {aggregation} are dropped"
            return self._refuse(name, text)
        return True

    def _refuse(self, about: str, text: str, name: str = "") -> bool:
        """Say so, once for each name; the values come by the thousand."""
        if about not in self._refused:
            self._refused.add(about)
            log.warning(text, name or about)
        return False

    def log_text(self) -> str:
        """The monitor log: a line for each value of the last second (grps 7)."""
        lines = (line for name, metric in self.by_name.items() for line in metric.lines(name))
        return "".join([line + "\n" for line in lines])


def _metric(aggregation: Aggregation) -> Metric:
    return Distribution() if aggregation == "cdf" else Trend(aggregation)
