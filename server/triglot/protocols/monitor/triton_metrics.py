"""Triton's metrics, with the names and units of its dashboards (spec 6)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily, UnknownMetricFamily
from prometheus_client.metrics_core import Metric

from triglot.core.fast_json import loads
from triglot.core.statistics import (
    CACHE_HIT,
    CACHE_MISS,
    INFER,
    INPUT,
    OUTPUT,
    QUEUE,
    REASONS,
    REQUEST,
    Latencies,
    Statistics,
)
from triglot.protocols.monitor.model_metrics import add_histogram, number
from triglot.protocols.monitor.overview import printable
from triglot.repository.manager.plan import Version
from triglot.scheduling.servable import Servable
from triglot.telemetry.process import MachineUsage

COUNTERS: Mapping[str, tuple[str, Callable[[Statistics], float]]] = {
    "nv_inference_request_success": ("Successful inference requests.", lambda stats: stats.success.count),
    "nv_inference_count": ("Inferences; a batch of n counts as n.", lambda stats: stats.inference_count),
    "nv_inference_exec_count": ("Model executions; a batch counts as 1.", lambda stats: stats.execution_count),
    "nv_inference_request_duration_us": (
        "Cumulative request duration in microseconds.",
        lambda stats: _us(stats.success.seconds),
    ),
    "nv_inference_queue_duration_us": (
        "Cumulative queue time in microseconds.",
        lambda stats: _us(stats.queue_seconds),
    ),
    "nv_inference_compute_input_duration_us": (
        "Cumulative time to prepare inputs, in microseconds.",
        lambda stats: _us(stats.input_seconds),
    ),
    "nv_inference_compute_infer_duration_us": (
        "Cumulative compute time in microseconds.",
        lambda stats: _us(stats.infer_seconds),
    ),
    "nv_inference_compute_output_duration_us": (
        "Cumulative time to process outputs, in microseconds.",
        lambda stats: _us(stats.output_seconds),
    ),
}
CACHE_COUNTERS: Mapping[str, tuple[str, Callable[[Statistics], float]]] = {
    "nv_cache_num_hits_per_model": (
        "Response cache hits.",
        lambda stats: stats.hit.count,
    ),
    "nv_cache_num_misses_per_model": (
        "Response cache misses.",
        lambda stats: stats.miss.count,
    ),
    "nv_cache_hit_duration_per_model": (
        "Cumulative duration of cache hits in microseconds.",
        lambda stats: _us(stats.hit.seconds),
    ),
    "nv_cache_miss_duration_per_model": (
        "Cumulative duration of cache misses, inserts included, in microseconds.",
        lambda stats: _us(stats.miss.seconds),
    ),
}
FAILURES = "nv_inference_request_failure"
FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
SUMMARIES: Mapping[str, tuple[str, str]] = {
    REQUEST: ("nv_inference_request_summary_us", "Request duration in microseconds."),
    QUEUE: ("nv_inference_queue_summary_us", "Queue time in microseconds."),
    INPUT: ("nv_inference_compute_input_summary_us", "Time to prepare inputs, in microseconds."),
    INFER: ("nv_inference_compute_infer_summary_us", "Compute time in microseconds."),
    OUTPUT: ("nv_inference_compute_output_summary_us", "Time to process outputs, in microseconds."),
    CACHE_HIT: ("nv_cache_hit_summary_per_model", "Duration of cache hits in microseconds."),
    CACHE_MISS: (
        "nv_cache_miss_summary_per_model",
        "Duration of cache misses, inserts included, in microseconds.",
    ),
}
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\Z")
_EXPONENT = re.compile(rb"(?m)(?<= )-?[0-9][0-9.]*e\+[0-9]+$")


def triton_metrics(
    versions: Sequence[Version], machine: MachineUsage, *, latency_counters: bool = True
) -> Iterator[Metric]:
    """Yield metrics of the loaded versions since their load, and of the machine.

    Triton's counters lack OpenMetrics' suffix `_total`, so they are of unknown type there: see
    `with_counter_types`. Without `latency_counters` those of durations and of the response cache are omitted.
    """
    servables = [version.servable for version in versions if version.servable is not None]
    labelled = [(_labels(servable), servable) for servable in servables]
    for name, (about, value) in COUNTERS.items():
        if name.endswith("_us") and not latency_counters:
            continue
        yield _family(
            name, about, [(labels, value(labelled_servable.statistics)) for labels, labelled_servable in labelled]
        )
    yield _family(
        FAILURES,
        "Failed inference requests, rejected ones included.",
        [
            (labels | {"reason": reason}, labelled_servable.statistics.failures[reason])
            for labels, labelled_servable in labelled
            for reason in REASONS
        ],
    )
    cached = [
        (labels, labelled_servable)
        for labels, labelled_servable in labelled
        if labelled_servable.response_cache is not None
    ]
    for name, (about, value) in CACHE_COUNTERS.items() if cached and latency_counters else ():
        yield _family(name, about, [(labels, value(servable.statistics)) for labels, servable in cached])
    measured = [(labels, labelled_servable.statistics.latencies) for labels, labelled_servable in labelled]
    yield from _latencies([(labels, latencies) for labels, latencies in measured if latencies is not None])
    waiting = Metric("nv_inference_pending_request_count", "Queued inference requests.", "gauge")
    loading = Metric("nv_model_load_duration_secs", "Load duration of the model in seconds.", "gauge")
    for labels, labelled_servable in labelled:
        waiting.add_sample(waiting.name, labels, labelled_servable.queue_depth)
        loading.add_sample(loading.name, labels, labelled_servable.load_seconds)
    yield waiting
    yield loading
    yield GaugeMetricFamily(
        "nv_cpu_utilization", "CPU utilization of the machine, from 0 to 1.", machine.cpu_share()
    )
    used, total = machine.memory_bytes()
    yield GaugeMetricFamily("nv_cpu_memory_total_bytes", "Memory of the machine in bytes.", total)
    yield GaugeMetricFamily("nv_cpu_memory_used_bytes", "Used memory of the machine in bytes.", used)


def _latencies(measured: Sequence[tuple[dict[str, str], Latencies]]) -> Iterator[Metric]:
    """Yield histograms and summaries."""
    first = Metric(FIRST_RESPONSE, "Time from the request to the first response in milliseconds.", "histogram")
    summaries = {name: Metric(*named, "summary") for name, named in SUMMARIES.items()}
    now = time.time()
    for labels, latencies in measured:
        if latencies.first_response is not None:
            first_response = latencies.first_response
            add_histogram(
                first,
                labels,
                first_response.limits,
                first_response.counts,
                first_response.sum,
                first_response.exemplars,
            )
        for name, summary in latencies.summaries.items():
            metric = summaries[name]
            shares = latencies.quantiles
            for share, value in zip(shares, summary.quantiles(shares, now), strict=True):
                metric.add_sample(metric.name, labels | {"quantile": number(share)}, value)
            metric.add_sample(f"{metric.name}_count", labels, summary.count)
            metric.add_sample(f"{metric.name}_sum", labels, round(summary.sum))
    yield from (metric for metric in (first, *summaries.values()) if metric.samples)


def without_exponents(text: bytes) -> bytes:
    """Print values from 1e+06 up to 1e+16 as Triton does: with all digits, and without an exponent."""
    return _EXPONENT.sub(lambda value: repr(float(value[0])).removesuffix(".0").encode(), text)


def with_counter_types(text: bytes, more: Iterable[str] = ()) -> bytes:
    """Set the type of Triton's counters, and of `more`, in the older text format, which allows their names."""
    for name in (*COUNTERS, *CACHE_COUNTERS, FAILURES, *more):
        text = text.replace(f"\n# TYPE {name} untyped\n".encode(), f"\n# TYPE {name} counter\n".encode(), 1)
    return text


def _family(name: str, about: str, samples: Sequence[tuple[dict[str, str], float]]) -> Metric:
    family = UnknownMetricFamily(name, about)
    for labels, value in samples:
        family.add_sample(name, labels, value)
    return family


def _labels(servable: Servable) -> dict[str, str]:
    """Return labels for model and version, and the configuration's `metric_tags`, prefixed with `_` (spec 6)."""
    text = servable.model.model_config.text
    tags = loads(text).get("metric_tags", {}) if text else {}
    own = {label: tag for name, tag in tags.items() if _LABEL.match(label := f"_{name}")}
    return own | {"model": printable(servable.name), "version": str(servable.version)}


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
