"""Metrics under TensorFlow Serving's names and in its text form (tfs 4.7)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from triglot.core.call import Call
from triglot.core.errors import Code
from triglot.core.http import HttpRequest, HttpResponse
from triglot.dataplane.control import TFSERVING_METRICS, Arguments, Control, Reports
from triglot.protocols.rows import Operation, Route
from triglot.telemetry.calls import CallStats, Endpoint, Kind
from triglot.telemetry.histogram import Histogram
from triglot.telemetry.merging import merged_texts
from triglot.telemetry.store import Telemetry

REQUEST_COUNT = ":tensorflow:serving:request_count"
REQUEST_LATENCY = ":tensorflow:serving:request_latency"
REST_MODELS = "models"
"""What every REST call below /v1/ is counted as that is not one of the three below."""
API_OF = {
    "GRPC": {name: name for name in ("Predict", "Classify", "Regress")},
    "REST": {**{name: name for name in ("predict", "classify", "regress")}, REST_MODELS: ""},
}
"""The methods that TensorFlow Serving counts, by entrypoint, and what it calls them."""
KIND_BYTES = 2048
"""What one kind of call takes on the page, about."""


def metrics_route(telemetry: Telemetry, control: Control, path: str) -> Route:
    """The route at `path`; with a query it is another path."""

    async def report(_: Arguments) -> str:
        return print_metrics(telemetry)

    control.register_report(TFSERVING_METRICS, report)

    async def read(http: HttpRequest, _: Call) -> Reports | None:
        if control.alone or http.target != path:
            return None
        return await control.reports(TFSERVING_METRICS, {})

    def encode(reports: Reports | None, http: HttpRequest) -> HttpResponse:
        if http.target != path:
            return _text(f"Unexpected path: {http.target}. Should be {path}", 400)
        if reports is None:
            return _text(print_metrics(telemetry), 200)
        return _text(merged_texts([*reports.each, *([] if reports.past is None else [reports.past])]), 200)

    return Route(
        "*",
        path,
        Operation.INSPECT,
        lambda http: http,
        read,
        encode,
        answer_size=lambda _: telemetry.kinds * KIND_BYTES,
    )


def _text(text: str, status: int) -> HttpResponse:
    return HttpResponse(text.encode(), status, "text/plain")


def _counted(telemetry: Telemetry) -> Iterator[tuple[Endpoint, Kind, CallStats]]:
    for endpoint, kind, stats in telemetry.calls():
        if endpoint.protocol == "tfserving" and endpoint.method in API_OF[endpoint.entrypoint]:
            yield endpoint, kind, stats


def print_metrics(telemetry: Telemetry) -> str:
    """Requests by model and status, and the latency of those that succeeded, in microseconds."""
    counts: dict[tuple[str, str], int] = {}
    latencies: dict[tuple[str, str, str], Histogram] = {}
    for endpoint, kind, stats in _counted(telemetry):
        by_status = kind.model, kind.code.name
        counts[by_status] = counts.get(by_status, 0) + stats.latency.count
        if kind.code is Code.OK:
            by_api = kind.model, API_OF[endpoint.entrypoint][endpoint.method], endpoint.entrypoint
            latencies.setdefault(by_api, Histogram()).merge(stats.latency)
    lines = [f"# TYPE {REQUEST_COUNT} counter"]
    for (model, status), count in counts.items():
        lines.append(f"{REQUEST_COUNT}{_labels({'model_name': model, 'status': status})} {count}")
    lines.append(f"# TYPE {REQUEST_LATENCY} histogram")
    for (model, api, entrypoint), latency in latencies.items():
        lines += _histogram(REQUEST_LATENCY, {"model_name": model, "API": api, "entrypoint": entrypoint}, latency)
    return "\n".join(lines) + "\n"


def _histogram(name: str, labels: Mapping[str, str], histogram: Histogram) -> Iterable[str]:
    limits = [f"{limit:g}" for limit in histogram.limits] + ["+Inf"]
    for limit, count in zip(limits, accumulate(histogram.counts), strict=True):
        yield f"{name}_bucket{_labels({**labels, 'le': limit})} {count}"
    yield f"{name}_sum{_labels(labels)} {histogram.sum:.15g}"
    yield f"{name}_count{_labels(labels)} {histogram.count}"


def _labels(labels: Mapping[str, str]) -> str:
    escaped = {
        name: value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"
