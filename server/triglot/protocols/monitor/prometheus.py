"""Telemetry in Prometheus' formats: OpenMetrics, or the older text format."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any

from prometheus_client import GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import CollectorRegistry
from prometheus_client.samples import Exemplar, Sample
from prometheus_client.utils import floatToGoString

from triglot.core.errors import Code
from triglot.core.http import STATUS_OF
from triglot.core.statistics import LATENCY_LIMITS, Histogram, latest, rank
from triglot.dataplane.control import Reports
from triglot.model.metrics import Family
from triglot.protocols.monitor.model_metrics import own_families, plain_counters, printed, printed_families
from triglot.protocols.monitor.overview import printable
from triglot.protocols.monitor.triton_metrics import (
    triton_metrics,
    with_counter_types,
    without_exponents,
)
from triglot.repository.manager.plan import Version
from triglot.telemetry.calls import ENDED, CallStats, Endpoint, Kind
from triglot.telemetry.merging import WORKER, Page, merged_pages
from triglot.telemetry.process import MachineUsage
from triglot.telemetry.series import BUILT_IN, Distribution, Trend
from triglot.telemetry.store import Telemetry
from triglot.version import __version__

BATCH_LIMITS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
OPEN_METRICS = "application/openmetrics-text"
VERSIONS = {OPEN_METRICS: ("", "1.0.0"), "text/plain": ("", "0.0.4", "1.0.0")}
"""The formats that can be asked for; other ones are passed over."""
BY_METHOD = ("protocol", "entrypoint", "method", "model", "version")
BY_MODEL = ("model", "version")
PROBES = ("/v2/health/live", "/v2/health/ready")
"""Paths that MLServer does not count."""
BUILD = {"version": __version__, "python": platform.python_version()}
QUANTILES = {"0.5": 5000, "0.9": 9000, "0.99": 9900}
_SECONDS = [f"{limit / 1e6:.6g}" for limit in LATENCY_LIMITS[1::2]] + ["+Inf"]
"""Every second limit: 16 buckets show as much in a chart, and halve the text."""

Labels = tuple[str, ...]


class PrometheusText:
    """Prints the telemetry, the models' states, and this process's resources. May be used on another thread."""

    def __init__(self, telemetry: Telemetry, machine: MachineUsage | None = None) -> None:
        self._telemetry = telemetry
        self._machine = machine or MachineUsage()
        self._process = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._process)

    def render(self, versions: Sequence[Version], accept: str) -> tuple[bytes, str]:
        """Return the text in the format that an Accept header asks for, and its content type."""
        own = own_families(versions)
        registry = _TelemetryRegistry(self._telemetry, versions, self._process, self._machine, own)
        return _printed(registry, plain_counters(own), accept)

    def page(self, versions: Sequence[Version]) -> Page:
        """Return all metrics as JSON values, to be merged with those of other workers."""
        own = own_families(versions)
        registry = _TelemetryRegistry(self._telemetry, versions, self._process, self._machine, own)
        families = [
            {
                "name": metric.name,
                "help": metric.documentation,
                "type": metric.type,
                "samples": [_as_json(sample) for sample in metric.samples],
            }
            for metric in registry.collect()
        ]
        return {"families": families, "plain": plain_counters(own)}

    def render_reports(self, reports: Reports, accept: str) -> tuple[bytes, str]:
        """Return the merged pages of all workers, with the workers' states; see `render`."""
        page = merged_pages(reports.workers, reports.past)
        return _printed(_MergedRegistry(page, reports), page["plain"], accept)


def _counters(telemetry: Telemetry) -> Iterator[Metric]:
    """Yield the counters of what observes calls, like records and lines of logs, written and lost; and others."""
    sources = [*(observer.counters for observer in telemetry.observers), *telemetry.counters]
    for counter in (counter for source in sources for counter in source()):
        made = GaugeMetricFamily if counter.gauge else CounterMetricFamily
        family = made(counter.name, counter.text, labels=counter.labels)
        for labels, value in counter.values:
            family.add_metric([printable(label) for label in labels], value)
        yield family


def _as_json(sample: Sample) -> list[Any]:
    """Return a sample in the form of a `Page`."""
    return [sample.name, sample.labels, sample.value, *(sample.exemplar or ())]


def _preferred(accept: str) -> str:
    """Return the media range of an Accept header to answer with; "" stands for the text format 0.0.4.

    `choose_encoder` takes the first range that it knows whatever its `q`, claims any version of OpenMetrics, and
    fails for one that is no number or quoted (prometheus_client 0.26).
    """
    best, preferred = 0.0, ""
    for text in accept.split(","):
        media, *pairs = (part.strip() for part in text.split(";"))
        split = (pair.partition("=") for pair in pairs)
        values = {name.strip().lower(): value.strip(' "') for name, _, value in split}
        try:
            quality = float(values.pop("q", "1"))
        except ValueError:
            continue
        if quality > best and values.get("version", "") in VERSIONS.get(media.lower(), ()):
            parameters = (f"{name}={values[name]}" for name in ("version", "escaping") if name in values)
            best, preferred = quality, ";".join((media.lower(), *parameters))
    return preferred


def _printed(registry: CollectorRegistry, plain: Sequence[str], accept: str) -> tuple[bytes, str]:
    """Return the registry's text, with the `plain` counters' types, and its content type."""
    encode, content_type = choose_encoder(_preferred(accept))
    text = without_exponents(encode(registry))
    return text if content_type.startswith(OPEN_METRICS) else with_counter_types(text, plain), content_type


class _MergedRegistry(CollectorRegistry):
    """The metrics of a merged page, and of the workers themselves."""

    def __init__(self, page: Page, reports: Reports) -> None:
        super().__init__()
        self._page = page
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        for family in self._page["families"]:
            metric = Metric(family["name"], family["help"], family["type"])
            for name, labels, value, *exemplar in family["samples"]:
                metric.add_sample(name, labels, value, exemplar=Exemplar(*exemplar) if exemplar else None)
            yield metric
        up = GaugeMetricFamily("triglot_worker_up", "1 if the worker is serving.", labels=(WORKER,))
        restarts = CounterMetricFamily("triglot_worker_restarts", "Restarts of the worker.", labels=(WORKER,))
        for number, count in self._reports.restarts.items():
            up.add_metric((str(number),), int(number in self._reports.up))
            restarts.add_metric((str(number),), count)
        yield up
        yield restarts


class _TelemetryRegistry(CollectorRegistry):
    """Makes Prometheus metrics of the telemetry when they are read, and adds the process's own."""

    def __init__(
        self,
        telemetry: Telemetry,
        versions: Sequence[Version],
        process: CollectorRegistry,
        machine: MachineUsage,
        own: Sequence[Family],
    ) -> None:
        super().__init__()
        self._own = own
        self._machine = machine
        self._telemetry = telemetry
        self._versions = versions
        self._process = process

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        calls = list(self._telemetry.calls())
        yield from _requests(calls)
        yield from _executions(calls)
        yield from _clients(self._telemetry.endpoints())
        yield self._in_flight()
        yield from self._models()
        yield from _readings(self._versions)
        lag = _histogram("triglot_event_loop_lag", "Delay of the event loop.", ())
        _add_times(lag, (), self._telemetry.loop_lag)
        yield lag
        yield from _counters(self._telemetry)
        build = GaugeMetricFamily("triglot_build_info", "Versions of Triglot and Python.", labels=tuple(BUILD))
        build.add_metric(tuple(BUILD.values()), 1)
        yield build
        yield from self._metrics()
        if self._telemetry.mlserver_names:
            yield from _mlserver(calls, self._telemetry.endpoints())
        yield from triton_metrics(self._versions, self._machine, latency_counters=self._telemetry.latency_counters)
        yield from printed_families(self._own)
        yield from self._process.collect()

    def _in_flight(self) -> Metric:
        family = GaugeMetricFamily(
            "triglot_in_flight", "In-flight calls.", labels=("protocol", "entrypoint", "method")
        )
        for endpoint in self._telemetry.endpoints():
            family.add_metric((endpoint.protocol, endpoint.entrypoint, endpoint.method), endpoint.in_flight)
        return family

    def _models(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily(
            "triglot_model_ready", "1 if the version is ready; an unloaded version has none.", labels=BY_MODEL
        )
        failed = GaugeMetricFamily(
            "triglot_model_load_failed", "1 if the version's files could not be loaded.", labels=BY_MODEL
        )
        waiting = GaugeMetricFamily("triglot_queue_depth", "Queued requests.", labels=BY_MODEL)
        for version in self._versions:
            labels = printable(version.files.name), str(version.files.version)
            servable = version.servable
            if not version.closed_to_calls or version.failure is not None:
                ready.add_metric(labels, int(version.ready))
            failed.add_metric(labels, int(version.failure is not None))
            if servable is not None:
                waiting.add_metric(labels, servable.queue_depth)
        yield ready
        yield failed
        yield waiting

    def _metrics(self) -> Iterator[Metric]:
        """Yield the metrics that models' code keeps; the built-in ones would repeat metrics above."""
        gauge = GaugeMetricFamily(
            "triglot_user_metric", "A model's own metric over the last second.", labels=("name", "aggregation")
        )
        total = CounterMetricFamily(
            "triglot_user_increments", "Sum of the positive increments of a model's own metric.", labels=("name",)
        )
        quantiles = Metric(
            "triglot_user_quantiles", "Quantiles of a model's own metric over the last second.", "summary"
        )
        for name, metric in list(self._telemetry.metrics.by_name.items())[len(BUILT_IN) :]:
            label = printable(name)
            if isinstance(metric, Distribution):
                ordered = metric.ordered
                for share, parts in QUANTILES.items() if ordered else ():
                    labels = {"name": label, "quantile": share}
                    quantiles.add_sample(quantiles.name, labels, rank(ordered, parts))
            elif (value := metric.value) is not None:
                gauge.add_metric((label, metric.aggregation), value)
            if isinstance(metric, Trend) and metric.aggregation == "inc":
                total.add_metric((label,), metric.total)
        yield gauge
        yield total
        yield quantiles


def _reason(code: Code) -> str:
    """Return the reason of a failed request in Triton's terms."""
    if code in (Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE):
        return "REJECTED"
    if code in (Code.CANCELLED, Code.DEADLINE_EXCEEDED):
        return "CANCELED"
    return "BACKEND" if code is Code.INTERNAL else "OTHER"


def _requests(calls: Sequence[tuple[Endpoint, Kind, CallStats]]) -> Iterator[Metric]:
    """Yield the metrics by method."""
    requests = CounterMetricFamily("triglot_requests", "Finished calls.", labels=(*BY_METHOD, "code"))
    failures = CounterMetricFamily(
        "triglot_request_failures", "Failed calls.", labels=(*BY_METHOD, "code", "reason")
    )
    times: dict[Labels, Histogram] = {}
    codec: dict[Labels, Histogram] = {}
    bytes_in: dict[Labels, int] = {}
    bytes_out: dict[Labels, int] = {}
    for endpoint, kind, stats in calls:
        labels = (endpoint.protocol, endpoint.entrypoint, endpoint.method, *_model(kind))
        _merge(codec, labels[:3], stats.codec)
        if kind.version == ENDED:
            continue  # Already reported under the versions that they belonged to.
        requests.add_metric((*labels, kind.code.name), stats.latency.count)
        if kind.code is not Code.OK:
            failures.add_metric((*labels, kind.code.name, _reason(kind.code)), stats.latency.count)
        _merge(times, labels, stats.latency)
        bytes_in[labels] = bytes_in.get(labels, 0) + stats.bytes_in
        bytes_out[labels] = bytes_out.get(labels, 0) + stats.bytes_out
    yield requests
    yield failures
    yield _times("triglot_request", "Latency of calls.", BY_METHOD, times)
    yield _times(
        "triglot_codec", "Time to decode the request and encode the response of a call.", BY_METHOD[:3], codec
    )
    yield _counter("triglot_request_bytes", "Request bytes.", bytes_in)
    yield _counter("triglot_response_bytes", "Response bytes.", bytes_out)


def _mlserver(
    calls: Sequence[tuple[Endpoint, Kind, CallStats]], endpoints: Sequence[Endpoint]
) -> Iterator[Metric]:
    """Yield metrics with MLServer's names and labels."""
    running = [call for call in calls if call[1].version != ENDED]
    yield from _mlserver_models(running)
    yield from _mlserver_rest(running, endpoints)
    yield from _mlserver_grpc(running, endpoints)


def _mlserver_models(calls: Sequence[tuple[Endpoint, Kind, CallStats]]) -> Iterator[Metric]:
    outcomes = {
        outcome: CounterMetricFamily(
            f"model_infer_request_{outcome}", f"Inference requests that ended in {outcome}.", labels=BY_MODEL
        )
        for outcome in ("success", "failure")
    }
    counts: dict[str, Counter[Labels]] = {outcome: Counter() for outcome in outcomes}
    models: dict[Labels, Histogram] = {}
    for endpoint, kind, stats in calls:
        if endpoint.inference and kind.model:
            counts["success" if kind.code is Code.OK else "failure"][_model(kind)] += stats.latency.count
            _merge(models, _model(kind), stats.latency)
    for outcome, family in outcomes.items():
        for labels, count in counts[outcome].items():
            family.add_metric(labels, count)
        yield family
    duration = Metric("model_infer_request_duration", "Duration of inference requests in seconds.", "summary")
    for labels, histogram in models.items():
        named = dict(zip(BY_MODEL, labels, strict=True))
        duration.add_sample(f"{duration.name}_count", named, histogram.count)
        duration.add_sample(f"{duration.name}_sum", named, histogram.sum / 1e6)
    yield duration


def _mlserver_rest(
    calls: Sequence[tuple[Endpoint, Kind, CallStats]], endpoints: Sequence[Endpoint]
) -> Iterator[Metric]:
    times: dict[Labels, Histogram] = {}
    for endpoint, kind, stats in calls:
        verb, path = endpoint.route
        if endpoint.entrypoint == "REST" and path not in PROBES:
            path = path.replace("{model}", "{model_name}").replace("{version}", "{model_version}")
            status = 200 if kind.code is Code.OK else STATUS_OF[kind.code]
            _merge(times, ("mlserver", verb, path, str(status)), stats.latency)
    by_path = ("app_name", "method", "path", "status_code")
    requests = CounterMetricFamily("rest_server_requests", "Finished REST calls.", labels=by_path)
    for labels, histogram in times.items():
        requests.add_metric(labels, histogram.count)
    yield requests
    yield _times("rest_server_request_duration", "Latency of REST calls.", by_path, times)
    in_flight: Counter[str] = Counter()
    for endpoint in endpoints:
        if endpoint.entrypoint == "REST":
            in_flight[endpoint.route[0]] += endpoint.in_flight
    running = GaugeMetricFamily("rest_server_requests_in_progress", "Running REST calls.", labels=by_path[:2])
    for verb, count in in_flight.items():
        running.add_metric(("mlserver", verb), count)
    yield running


def _mlserver_grpc(
    calls: Sequence[tuple[Endpoint, Kind, CallStats]], endpoints: Sequence[Endpoint]
) -> Iterator[Metric]:
    times: dict[Labels, Histogram] = {}
    handled: Counter[Labels] = Counter()
    for endpoint, kind, stats in calls:
        if endpoint.entrypoint != "REST":
            rpc = _rpc(endpoint)
            handled[*rpc, kind.code.name] += stats.latency.count
            _merge(times, rpc, stats.latency)
    by_rpc = ("grpc_type", "grpc_service", "grpc_method")
    started = CounterMetricFamily("grpc_server_started", "Started gRPC calls.", labels=by_rpc)
    for endpoint in endpoints:
        if endpoint.entrypoint != "REST":
            rpc = _rpc(endpoint)
            finished = times[rpc].count if rpc in times else 0
            started.add_metric(rpc, finished + endpoint.in_flight)
    yield started
    family = CounterMetricFamily("grpc_server_handled", "Finished gRPC calls.", labels=(*by_rpc, "grpc_code"))
    for labels, count in handled.items():
        family.add_metric(labels, count)
    yield family
    yield _times("grpc_server_handling", "Latency of gRPC calls.", by_rpc, times)


def _rpc(endpoint: Endpoint) -> Labels:
    service, _, method = endpoint.rpc.strip("/").rpartition("/")
    return "BIDI_STREAM" if method.endswith("StreamInfer") else "UNARY", service, method


def _clients(endpoints: Sequence[Endpoint]) -> Iterator[Metric]:
    """Yield the metrics by client of access control."""
    labels = ("client", "protocol", "operation", "code")
    for name, about, counts in (
        ("triglot_client_requests", "Finished calls, where there is an access file.", attrgetter("clients")),
        ("triglot_client_refusals", "Calls refused by access control.", attrgetter("refusals")),
    ):
        sums: Counter[Labels] = Counter()
        for endpoint in endpoints:
            for (client, operation, code), count in list(counts(endpoint).items()):
                sums[client, endpoint.protocol, operation.value, code.name] += count
        family = CounterMetricFamily(name, about, labels=labels)
        for values, count in sums.items():
            family.add_metric(values, count)
        yield family


def _executions(calls: Sequence[tuple[Endpoint, Kind, CallStats]]) -> Iterator[Metric]:
    """Yield the metrics by model, over all methods: they share executions."""
    queue: dict[Labels, Histogram] = {}
    compute: dict[Labels, Histogram] = {}
    batches: dict[Labels, Histogram] = {}
    executions: dict[Labels, float] = {}
    for _, kind, stats in calls:
        if kind.version == ENDED:
            continue
        labels: Labels = _model(kind)
        _merge(queue, labels, stats.queue)
        _merge(compute, labels, stats.compute)
        for size, count in list(stats.batches.items()):
            sizes = batches.setdefault(labels, Histogram(BATCH_LIMITS))
            sizes.add_many(size, count)
            executions[labels] = executions.get(labels, 0.0) + count / size
    yield _times("triglot_queue", "Time that requests spent in the queue.", BY_MODEL, queue)
    yield _times("triglot_compute", "Time that the model computed for a request.", BY_MODEL, compute)
    family = HistogramMetricFamily(
        "triglot_batch_size", "Requests per executed batch, counted once per request.", labels=BY_MODEL
    )
    limits = [*map(floatToGoString, BATCH_LIMITS), "+Inf"]
    for labels, sizes in batches.items():
        family.add_metric(labels, list(zip(limits, accumulate(sizes.counts), strict=True)), sizes.sum)
    yield family
    runs = CounterMetricFamily("triglot_executions", "Model executions, one per batch.", labels=BY_MODEL)
    for labels, number in executions.items():
        runs.add_metric(labels, round(number, 3))
    yield runs


def _readings(versions: Sequence[Version]) -> Iterator[Metric]:
    """Yield the counters and gauges of the parts of the server that schedule a version's requests."""
    families: dict[str, Metric] = {}
    for version in versions:
        if version.servable is None:
            continue
        labels = {"model": printable(version.files.name), "version": str(version.files.version)}
        for reading in version.servable.readings():
            name = f"triglot_{reading.name}"
            family = families.get(name)
            if family is None:
                family = families[name] = Metric(name, reading.help, "counter" if reading.counter else "gauge")
            family.add_sample(
                f"{name}_total" if reading.counter else name, labels | dict(reading.labels), reading.value
            )
    yield from families.values()


def _model(kind: Kind) -> tuple[str, str]:
    return printable(kind.model), str(kind.version) if kind.version else ""


def _merge(sums: dict[Labels, Histogram], labels: Labels, more: Histogram | None) -> None:
    if more is not None:
        sums.setdefault(labels, Histogram(more.limits)).merge(more)


def _histogram(name: str, about: str, labels: Labels) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, about, labels=labels, unit="seconds")


def _times(name: str, about: str, labels: Labels, times: Mapping[Labels, Histogram]) -> Metric:
    family = _histogram(name, about, labels)
    for values, histogram in times.items():
        _add_times(family, values, histogram)
    return family


def _add_times(family: HistogramMetricFamily, labels: Labels, histogram: Histogram) -> None:
    counts = list(accumulate(histogram.counts))
    counts = [*counts[1:-1:2], counts[-1]]
    buckets: list[Any] = list(zip(_SECONDS, counts, strict=True))
    if (exemplars := histogram.exemplars) is not None:
        examples = [printed(latest(pair), 1e6) for pair in zip(exemplars[::2], exemplars[1::2], strict=True)]
        buckets = list(zip(_SECONDS, counts, examples, strict=True))
    family.add_metric(labels, buckets, histogram.sum / 1e6)


def _counter(name: str, about: str, sums: Mapping[Labels, int]) -> Metric:
    family = CounterMetricFamily(name, about, labels=BY_METHOD, unit="bytes")
    for labels, size in sums.items():
        family.add_metric(labels, size)
    return family
