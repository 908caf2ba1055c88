"""Metrics with TensorFlow Serving's names and in its text format (tfs 4.7)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import Code
from triglot.core.http import HttpRequest, HttpResponse
from triglot.core.operation import Operation
from triglot.core.statistics import Histogram
from triglot.dataplane.control import TFSERVING_METRICS, Arguments, Control, Reports
from triglot.protocols.rows import Route
from triglot.protocols.tfserving.openapi import METRICS
from triglot.telemetry.merging import Family, Page, merged_pages
from triglot.telemetry.store import Telemetry

Labels = tuple[tuple[str, str], ...]
REQUEST_COUNT = ":tensorflow:serving:request_count"
REQUEST_LATENCY = ":tensorflow:serving:request_latency"
RUNTIME_LATENCY = ":tensorflow:serving:runtime_latency"
QUEUING_LATENCY = ":tensorflow:serving:batching_session:queuing_latency"
GRAPH_RUNS, GRAPH_RUN_TIME = ":tensorflow:core:graph_runs", ":tensorflow:core:graph_run_time_usecs"
LOAD_ATTEMPTS = ":tensorflow:cc:saved_model:load_attempt_count"
LOAD_LATENCY = ":tensorflow:cc:saved_model:load_latency"
THREAD_POOL = "model_server_batch_threads"
REST_MODELS = "models"
"""Method name of all REST calls below /v1/ besides predict, classify and regress."""
API_OF = {
    "GRPC": {name: name for name in ("Predict", "Classify", "Regress")},
    "REST": {**{name: name for name in ("predict", "classify", "regress")}, REST_MODELS: ""},
}
"""Methods that TensorFlow Serving counts, by entrypoint, with its names for them."""
KIND_BYTES = 4096
"""Estimates of the text that one kind of call takes on the page, in bytes."""


def metrics_route(telemetry: Telemetry, control: Control, path: str) -> Route:
    """Return the route at `path` with the metrics of all models; with a query the path does not match."""

    async def report(_: Arguments) -> Page:
        return metrics_page(telemetry)

    control.register_report(TFSERVING_METRICS, report)

    async def read(http: HttpRequest, call: Call) -> Reports | None:
        call.permission.check_all_models()
        if control.single_process or http.target != path:
            return None
        return await control.reports(TFSERVING_METRICS, {})

    def encode(reports: Reports | None, http: HttpRequest) -> HttpResponse:
        if http.target != path:
            return _text(f"Unexpected path: {http.target}. Should be {path}", 400)
        if reports is None:
            return _text(print_page(metrics_page(telemetry)), 200)
        return _text(print_page(merged_pages(reports.workers, reports.past)), 200)

    return Route(
        "*",
        path,
        Operation.METRICS,
        lambda http: http,
        read,
        encode,
        answer_size=lambda _: telemetry.kinds * KIND_BYTES,
        documented=(METRICS,),
    )


def _text(text: str, status: int) -> HttpResponse:
    return HttpResponse(text.encode(), status, "text/plain")


def metrics_page(telemetry: Telemetry) -> Page:
    """Return counts of requests by model and status, and latencies of successful ones, in microseconds.

    Under the names of TensorFlow's own metrics it adds how often and how long models ran, for any protocol, and
    how versions were loaded.
    """
    counts: dict[Labels, float] = {}
    latencies: dict[Labels, Histogram] = {}
    runtimes: dict[Labels, Histogram] = {}
    queuing = Histogram()
    runs = run_time = 0.0
    for endpoint, kind, stats in telemetry.calls():
        runs += sum(count / size for size, count in list(stats.batches.items()))
        run_time += stats.shares
        api = API_OF[endpoint.entrypoint].get(endpoint.method) if endpoint.protocol == "tfserving" else None
        if api is None:
            continue
        model = ("model_name", kind.model)
        by_status = model, ("status", kind.code.name)
        counts[by_status] = counts.get(by_status, 0) + stats.latency.count
        if stats.queue is not None:
            queuing.merge(stats.queue)
        if kind.code is Code.OK:
            by_api = model, ("API", api), ("entrypoint", endpoint.entrypoint)
            latencies.setdefault(by_api, Histogram()).merge(stats.latency)
            if stats.compute is not None:
                by_runtime = model, ("API", api.capitalize()), ("runtime", "TF1")
                runtimes.setdefault(by_runtime, Histogram()).merge(stats.compute)
    attempts: dict[Labels, float] = {}
    load_times: dict[Labels, float] = {}
    for name, loads in list(telemetry.loads.items()):
        path = ("model_path", name)
        for status, count in (("success", loads.successes), ("fail", loads.failures)):
            if count:
                attempts[path, ("status", status)] = count
        if loads.successes:
            load_times[(path,)] = round(loads.seconds * 1e6)
    families = [
        _counters(REQUEST_COUNT, counts),
        _histograms(REQUEST_LATENCY, latencies),
        _histograms(RUNTIME_LATENCY, runtimes),
        _histograms(QUEUING_LATENCY, {(("thread_pool_name", THREAD_POOL),): queuing} if queuing.count else {}),
        _counters(GRAPH_RUNS, {(): round(runs)}),
        _counters(GRAPH_RUN_TIME, {(): round(run_time)}),
        _counters(LOAD_ATTEMPTS, attempts),
        _counters(LOAD_LATENCY, load_times),
    ]
    return {"families": families, "plain": []}


def _counters(name: str, samples: Mapping[Labels, float]) -> Family:
    listed = [[name, dict(labels), value] for labels, value in samples.items()]
    return {"name": name, "type": "counter", "samples": listed}


def _histograms(name: str, samples: Mapping[Labels, Histogram]) -> Family:
    listed: list[list[Any]] = []
    for pairs, histogram in samples.items():
        labels = dict(pairs)
        limits = [f"{limit:g}" for limit in histogram.limits] + ["+Inf"]
        for limit, count in zip(limits, accumulate(histogram.counts), strict=True):
            listed.append([f"{name}_bucket", {**labels, "le": limit}, count])
        listed += [[f"{name}_sum", labels, histogram.sum], [f"{name}_count", labels, histogram.count]]
    return {"name": name, "type": "histogram", "samples": listed}


def print_page(page: Page) -> str:
    """Return the text of a page."""
    return "\n".join(line for family in page["families"] for line in _lines(family)) + "\n"


def _lines(family: Family) -> Iterator[str]:
    yield f"# TYPE {family['name']} {family['type']}"
    for name, labels, value in family["samples"]:
        number = str(value) if isinstance(value, int) else f"{value:.15g}"
        yield f"{name}{_labels(labels)} {number}"


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
