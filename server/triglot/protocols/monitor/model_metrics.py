"""The metrics that models' own code keeps, by exactly the names it gives them (spec 6)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import Metric

from triglot.model.metrics import Family
from triglot.protocols.monitor.histograms import add_histogram
from triglot.repository.manager.plan import Version

log = logging.getLogger(__name__)


def own_families(versions: Sequence[Version]) -> list[Family]:
    """Of the versions that are in memory. Those of one name are one family, as in Triton: of equal labels,
    counters and histograms are added, and of gauges the last is taken."""
    found: dict[str, Family] = {}
    for version in versions:
        own = None if version.servable is None else version.servable.model.own_metrics
        for family in () if own is None else own.collect():
            there = found.setdefault(family.name, family)
            if there is not family and there.kind == family.kind:
                _merge(there, family)
            elif there is not family:
                log.warning(
                    "%s: metric '%s' is a %s here and a %s in another model; dropped",
                    version.files,
                    family.name,
                    family.kind,
                    there.kind,
                )
    return list(found.values())


def _merge(there: Family, more: Family) -> None:
    for labels, metric in more.metrics.items():
        known = there.metrics.setdefault(labels, metric)
        if known is metric:
            continue
        if there.kind == "gauge":
            known.value = metric.value
        elif known.buckets == metric.buckets:
            known.value += metric.value
            known.counts = [old + new for old, new in zip(known.counts, metric.counts, strict=True)]


def printed_families(families: Sequence[Family]) -> Iterator[Metric]:
    """A counter that is not named as in OpenMetrics is of unknown type there: see `triton_metrics.counters`."""
    for family in families:
        name, kind = family.name, str(family.kind)
        if kind == "counter":
            kind = "counter" if name.endswith("_total") else "unknown"
        metric = Metric(name.removesuffix("_total") if kind == "counter" else name, family.description, kind)
        for one in family.metrics.values():
            if family.kind == "histogram":
                add_histogram(metric, dict(one.labels), one.buckets, one.counts, one.value)
            else:
                metric.add_sample(name, dict(one.labels), one.value)
        yield metric


def plain_counters(families: Sequence[Family]) -> list[str]:
    """The names of the counters that are not named as OpenMetrics has it."""
    return [one.name for one in families if one.kind == "counter" and not one.name.endswith("_total")]
