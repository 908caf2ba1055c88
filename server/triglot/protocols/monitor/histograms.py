"""Histograms and exemplars as Prometheus samples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from prometheus_client import samples
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from triglot.core.statistics import Exemplar


def add_histogram(
    metric: Metric,
    labels: dict[str, str],
    limits: Sequence[float],
    counts: Sequence[int],
    total: float,
    exemplars: Sequence[Exemplar | None] | None = None,
) -> None:
    """Add a histogram's samples; `counts` and `exemplars` are per bucket, the last one above all limits."""
    sums = list(accumulate(counts))
    buckets = zip((*limits, float("inf")), sums, exemplars or [None] * len(sums), strict=True)
    for limit, count, exemplar in buckets:
        metric.add_sample(
            f"{metric.name}_bucket", labels | {"le": number(limit)}, count, exemplar=printed(exemplar)
        )
    metric.add_sample(f"{metric.name}_count", labels, sums[-1])
    metric.add_sample(f"{metric.name}_sum", labels, total)


def printed(exemplar: Exemplar | None, unit: float = 1.0) -> samples.Exemplar | None:
    """Returns the exemplar to print, with its value divided by `unit`."""
    if exemplar is None:
        return None
    time, value, span = exemplar
    _, trace_id, span_id, _ = span.response_traceparent.split("-")
    return samples.Exemplar({"trace_id": trace_id, "span_id": span_id}, value / unit, time)


def number(value: float) -> str:
    """Returns a number as a label's value."""
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]  # It has no types.
