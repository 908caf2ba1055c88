"""Histograms as Prometheus samples, and metrics of models' own code, with the names that it gives (spec 6)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import samples
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from triglot.core.statistics import Exemplar
from triglot.model.metrics import Family
from triglot.repository.manager.plan import Version

log = logging.getLogger(__name__)


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
    """Return the exemplar to print, with its value divided by `unit`."""
    if exemplar is None:
        return None
    time, value, span = exemplar
    _, trace_id, span_id, _ = span.response_traceparent.split("-")
    return samples.Exemplar({"trace_id": trace_id, "span_id": span_id}, value / unit, time)


def number(value: float) -> str:
    """Return a number as a label's value."""
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]  # It has no types.


def own_families(versions: Sequence[Version]) -> list[Family]:
    """Return the metric families of loaded versions.

    Those of the same name are one family, as in Triton: for equal labels, counters and histograms are added, and
    of gauges the last one is taken.
    """
    found: dict[str, Family] = {}
    for version in versions:
        own = None if version.servable is None else version.servable.model.own_metrics
        for family in () if own is None else own.collect():
            total = found.setdefault(family.name, family)
            if total is not family and total.kind == family.kind:
                _merge(total, family)
            elif total is not family:
                log.warning(
                    "%s: metric '%s' is a %s here and a %s in another model; dropped",
                    version.files,
                    family.name,
                    family.kind,
                    total.kind,
                )
    return list(found.values())


def _merge(total: Family, other: Family) -> None:
    for labels, metric in other.metrics.items():
        known = total.metrics.setdefault(labels, metric)
        if known is metric:
            continue
        if total.kind == "gauge":
            known.value = metric.value
        elif known.buckets == metric.buckets:
            known.value += metric.value
            known.counts = [old + new for old, new in zip(known.counts, metric.counts, strict=True)]


def printed_families(families: Sequence[Family]) -> Iterator[Metric]:
    """Yield Prometheus families.

    OpenMetrics has no counters without `_total`: see `triton_metrics.with_counter_types`.
    """
    for family in families:
        name, kind = family.name, str(family.kind)
        if kind == "counter":
            kind = "counter" if name.endswith("_total") else "unknown"
        metric = Metric(name.removesuffix("_total") if kind == "counter" else name, family.description, kind)
        for measured in family.metrics.values():
            if family.kind == "histogram":
                add_histogram(metric, dict(measured.labels), measured.buckets, measured.counts, measured.value)
            else:
                metric.add_sample(name, dict(measured.labels), measured.value)
        yield metric


def plain_counters(families: Sequence[Family]) -> list[str]:
    """Return the names of counters that do not end in `_total`, as OpenMetrics requires."""
    return [family.name for family in families if family.kind == "counter" and not family.name.endswith("_total")]
