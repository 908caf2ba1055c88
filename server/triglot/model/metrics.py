"""Custom metrics that a model's own code keeps, with Prometheus' kinds; usable from any thread."""

from __future__ import annotations

import math
import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

Kind = Literal["counter", "gauge", "histogram"]
Operation = Literal["increment", "set", "observe"]
Labels = tuple[tuple[str, str], ...]
ReportChange = Callable[[Mapping[str, Any]], object]
"""Passes a change to the process that collects it, see `ModelMetrics.apply`."""

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*\Z")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*\Z")
OURS = ("triglot_", "nv_", "process_", "python_")
"""Name prefixes of the server's own metrics."""


@dataclass(slots=True)
class Metric:
    """One metric of a family.

    `value` is the value, or the sum of a histogram. `counts` are a histogram's observations per bucket, the last
    one above all bounds in `buckets`.
    """

    labels: Labels
    buckets: Sequence[float] = ()
    value: float = 0.0
    counts: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Family:
    """The metrics of one name, by their labels."""

    name: str
    description: str
    kind: Kind
    metrics: dict[Labels, Metric] = field(default_factory=dict)


class ModelMetrics:
    """The custom metrics of one version of a model.

    If the model runs in its own process, that process reports each change to the server's instance, see
    `report_to`.
    """

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}
        self._lock = threading.Lock()
        self._report: ReportChange | None = None

    def family(self, name: str, description: str, kind: Kind) -> Family:
        """Return the family of this name, creating it if needed.

        Raise `ValueError` for an invalid name, or if the family exists with another kind.
        """
        if not _NAME.match(name):
            raise ValueError(f"metric family {name!r}: expected a name of letters, digits, '_' and ':'")
        if name.startswith(OURS):
            ours = ", ".join(OURS)
            raise ValueError(f"metric family '{name}': expected another name, as {ours} are the server's prefixes")
        with self._lock:
            family = self._families.get(name)
            if family is None:
                family = self._families[name] = Family(name, description, kind)
            elif family.kind != kind:
                raise ValueError(f"metric family '{name}' is already a {family.kind}, got a {kind}")
            return family

    def metric(self, family: Family, labels: Mapping[str, str], buckets: Sequence[float]) -> Metric:
        """Return the metric with these labels, creating it if needed.

        Raise `ValueError` for invalid labels, or for `buckets` that are invalid or not those of the metric.
        """
        for label in labels:
            if not _LABEL.match(label) or (label == "le" and family.kind == "histogram"):
                raise ValueError(f"metric '{family.name}': label {label!r}: expected another name")
        if not all(map(math.isfinite, buckets)) or any(lower >= upper for lower, upper in pairwise(buckets)):
            raise ValueError(f"metric '{family.name}': buckets: expected ascending numbers, got {list(buckets)}")
        key = tuple(sorted(labels.items()))
        with self._lock:
            metric = family.metrics.get(key)
            if metric is None:
                counts = [0] * (len(buckets) + 1) if family.kind == "histogram" else []
                metric = family.metrics[key] = Metric(key, tuple(buckets), counts=counts)
                self._notify(family, metric)
            elif metric.buckets != tuple(buckets):
                before = list(metric.buckets)
                raise ValueError(
                    f"metric '{family.name}': buckets: expected {before}, as registered before, got "
                    f"{list(buckets)}"
                )
            return metric

    def do(self, family: Family, metric: Metric, operation: Operation, value: float) -> None:
        """Apply an operation to a metric."""
        with self._lock:
            if operation == "set":
                metric.value = value
            else:
                metric.value += value
            if operation == "observe":
                metric.counts[bisect_left(metric.buckets, value)] += 1
            self._notify(family, metric, operation, value)

    def _notify(self, family: Family, metric: Metric, operation: str = "", value: float = 0.0) -> None:
        if self._report is not None:
            self._report(_fields_of(family, metric) | {"operation": operation, "value": value})

    def report_to(self, report: ReportChange) -> None:
        """Report the current state to `report`, and each change from now on. `report` must not raise."""
        with self._lock:
            self._report = report
            for family in self._families.values():
                for metric in family.metrics.values():
                    self._notify(family, metric, "state", metric.value)

    def apply(self, change: Mapping[str, Any]) -> None:
        """In the server: apply a change that a process reported. Raise as `family` and `metric` do."""
        family = self.family(change["name"], change["description"], change["kind"])
        metric = self.metric(family, change["labels"], change["buckets"])
        operation = change["operation"]
        if operation == "state":
            with self._lock:
                metric.value = change["value"] + (0.0 if family.kind == "gauge" else metric.value)
                metric.counts = [old + new for old, new in zip(metric.counts, change["counts"], strict=True)]
        elif operation:
            self.do(family, metric, operation, change["value"])

    def collect(self) -> Iterator[Family]:
        """Yield copies of the families that have metrics."""
        with self._lock:
            families = [
                Family(
                    family.name,
                    family.description,
                    family.kind,
                    {
                        labels: Metric(labels, metric.buckets, metric.value, list(metric.counts))
                        for labels, metric in family.metrics.items()
                    },
                )
                for family in self._families.values()
                if family.metrics
            ]
        yield from families


def _fields_of(family: Family, metric: Metric) -> dict[str, Any]:
    return {
        "name": family.name,
        "description": family.description,
        "kind": family.kind,
        "labels": dict(metric.labels),
        "buckets": metric.buckets,
        "counts": metric.counts,
    }
