"""`MetricFamily`: custom metrics of a Triton Python model."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from triglot.backends.triton_python.context import ModelContext, current_model
from triglot.backends.triton_python.errors import TritonModelException
from triglot.model import metrics as model_metrics
from triglot.model.metrics import Kind, ModelMetrics, Operation


class MetricKind(enum.Enum):
    """The kind of a family's metrics."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric:
    """One metric, from `MetricFamily.Metric`. Thread-safe.

    Raise `TritonModelException` for operations that its kind does not support. In a model process, `value` is
    what the code in that process has added up; the server's metrics page has the total of all processes.
    """

    def __init__(self, metrics: ModelMetrics, family: model_metrics.Family, metric: model_metrics.Metric) -> None:
        self._metrics = metrics
        self._family = family
        self._metric = metric

    def increment(self, value: float) -> None:
        """Add to a counter, at least 0, or to a gauge."""
        self._must_not_be("histogram", "Increment")
        value = _number(value)
        if self._family.kind == "counter" and value < 0:
            raise TritonModelException(
                f"metric '{self._family.name}': TRITONSERVER_METRIC_KIND_COUNTER can only be incremented "
                f"monotonically by non-negative values, got {value:g}"
            )
        self._do("increment", value)

    def set(self, value: float) -> None:
        """Set a gauge."""
        self._must_not_be("counter", "Set")
        self._must_not_be("histogram", "Set")
        self._do("set", _number(value))

    def observe(self, value: float) -> None:
        """Add a value to a histogram."""
        self._must_not_be("counter", "Observe")
        self._must_not_be("gauge", "Observe")
        self._do("observe", _number(value))

    def value(self) -> float:
        """Return the value of a counter or a gauge."""
        self._must_not_be("histogram", "Value")
        return self._metric.value

    def _must_not_be(self, kind: Kind, operation: str) -> None:
        if self._family.kind == kind:
            kinds = f"TRITONSERVER_METRIC_KIND_{kind.upper()}"
            raise TritonModelException(f"metric '{self._family.name}': {kinds} does not support {operation}")

    def _do(self, operation: Operation, value: float) -> None:
        self._metrics.do(self._family, self._metric, operation, value)


class MetricFamily:
    """The metrics of one name; families with equal names and kinds are the same.

    Raise `TypeError` for arguments of other types, and `TritonModelException` for a name that is invalid,
    reserved by the server, or used by a family of another kind.
    """

    context: ClassVar[ModelContext | None] = None
    COUNTER: ClassVar[MetricKind] = MetricKind.COUNTER
    GAUGE: ClassVar[MetricKind] = MetricKind.GAUGE
    HISTOGRAM: ClassVar[MetricKind] = MetricKind.HISTOGRAM

    def __init__(self, name: Any, description: Any, kind: Any) -> None:
        if not isinstance(name, str) or not isinstance(description, str):
            raise TypeError(
                f"MetricFamily: expected strings as name and description, got {name!r}, {description!r}"
            )
        if not isinstance(kind, MetricKind):
            raise TypeError(f"MetricFamily '{name}': kind: expected MetricFamily.COUNTER or another, got {kind!r}")
        self._metrics = current_model(self.context).metrics
        try:
            self._family = self._metrics.family(name, description, kind.value)
        except ValueError as error:
            raise TritonModelException(str(error)) from None

    def Metric(  # noqa: N802 - Triton's name.
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """Return the metric with these labels; a histogram has `buckets`, its ascending upper bounds.

        Raise as the class does.
        """
        labels = {} if labels is None else labels
        name = self._family.name
        if not _are_texts(labels):
            raise TypeError(f"metric '{name}': labels: expected a dict of strings, got {labels!r}")
        if self._family.kind == "histogram" and buckets is None:
            raise TritonModelException(f"metric '{name}': buckets: expected some for a histogram, got none")
        if self._family.kind != "histogram" and buckets is not None:
            raise TritonModelException(
                f"metric '{name}': buckets: expected none for a {self._family.kind}, got {buckets!r}"
            )
        limits = [_number(bucket) for bucket in buckets or ()]
        try:
            return Metric(self._metrics, self._family, self._metrics.metric(self._family, labels, limits))
        except ValueError as error:
            raise TritonModelException(str(error)) from None


def metric_family_class(context: ModelContext | None) -> type[MetricFamily]:
    """Return the class for the code of one model; None: for that of the running model."""
    return type("MetricFamily", (MetricFamily,), {"context": context, "__doc__": MetricFamily.__doc__})


def _are_texts(labels: Any) -> bool:
    return isinstance(labels, Mapping) and all(isinstance(part, str) for item in labels.items() for part in item)


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"metric: expected a number, got {value!r}") from None
    if math.isnan(number):
        raise TritonModelException("metric: expected a number, got NaN")
    return number
