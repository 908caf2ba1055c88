"""Metrics under TensorFlow Serving's names and in its text form (tfs 4.7)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

from triglot.core.errors import Code
from triglot.core.types import Call
from triglot.protocols import HttpRequest, HttpResponse, Operation, Route
from triglot.telemetry import Histogram, Telemetry

REQUEST_COUNT = ":tensorflow:serving:request_count"
REQUEST_LATENCY = ":tensorflow:serving:request_latency"


def metrics_route(telemetry: Telemetry, path: str) -> Route:
    """The route at `path`; with a query it is another path."""

    async def read(http: HttpRequest, _: Call) -> HttpResponse:
        if http.target != path:
            return _text(f"Unexpected path: {http.target}. Should be {path}", 400)
        return _text(print_metrics(telemetry), 200)

    return Route("*", path, Operation.INSPECT, lambda http: http, read, lambda answer, _: answer)


def _text(text: str, status: int) -> HttpResponse:
    return HttpResponse(text.encode(), status, "text/plain")


def print_metrics(telemetry: Telemetry) -> str:
    """Requests by model and status, and the latency of those that succeeded, in microseconds."""
    counts: dict[tuple[str, str], int] = {}
    lines = [f"# TYPE {REQUEST_COUNT} counter"]
    for kind, latency in telemetry.calls():
        key = kind.model, kind.code.name
        counts[key] = counts.get(key, 0) + sum(latency.counts)
    for (model, status), count in counts.items():
        lines.append(f"{REQUEST_COUNT}{_labels({'model_name': model, 'status': status})} {count}")
    lines.append(f"# TYPE {REQUEST_LATENCY} histogram")
    for kind, latency in telemetry.calls():
        if kind.code is Code.OK:
            labels = {"model_name": kind.model, "API": kind.api, "entrypoint": kind.door}
            lines += _histogram(REQUEST_LATENCY, labels, latency)
    return "\n".join(lines) + "\n"


def _histogram(name: str, labels: Mapping[str, str], histogram: Histogram) -> Iterable[str]:
    limits = [f"{limit:g}" for limit in histogram.limits] + ["+Inf"]
    for limit, count in zip(limits, accumulate(histogram.counts), strict=True):
        yield f"{name}_bucket{_labels({**labels, 'le': limit})} {count}"
    yield f"{name}_sum{_labels(labels)} {histogram.sum:g}"
    yield f"{name}_count{_labels(labels)} {sum(histogram.counts)}"


def _labels(labels: Mapping[str, str]) -> str:
    escaped = {
        name: value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"
