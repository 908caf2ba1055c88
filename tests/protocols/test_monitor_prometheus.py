"""/metrics: what Prometheus' own parsers read from it."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as classic
from prometheus_client.samples import Exemplar as ParsedExemplar

from tests.recorded_calls import record_call, unsent_spans
from triglot.core.call import Call
from triglot.core.errors import Code
from triglot.core.statistics import CallTimes
from triglot.dataplane.control import Reports
from triglot.protocols.monitor.prometheus import BATCH_LIMITS, PrometheusText
from triglot.telemetry.merging import growing
from triglot.telemetry.spans.recorder import CallSpan
from triglot.telemetry.store import Telemetry

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
PREDICT = {"protocol": "kserve", "entrypoint": "GRPC", "method": "ModelInfer", "model": "m", "version": "2"}
MODEL = {"model": "m", "version": "2"}
FORMS = {
    "classic": ("text/plain", classic),
    "no header": ("", classic),
    "OpenMetrics": (OPEN_METRICS, open_metrics),
    "a browser": ("text/html,application/xhtml+xml,*/*;q=0.8", classic),
}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def call_of(model: str, version: int, batch: int = 0) -> Call:
    call = Call()
    call.model_name, call.model_version, call.batch_size = model, version, batch
    call.queue_seconds, call.compute_seconds = 0.001, 0.01
    return call


@pytest.fixture
def telemetry() -> Telemetry:
    """One endpoint with three successes and a failure of each reason, and a model's own metrics."""
    telemetry = Telemetry(clock=lambda: 0.0)
    infer = telemetry.endpoint("kserve", "GRPC", "ModelInfer", inference=True)
    for batch in (1, 3, 1000):
        record_call(infer, call_of("m", 2, batch), Code.OK, 0.02, 0.0005, 100, 50)
    for code in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.INTERNAL, Code.NOT_FOUND):
        record_call(infer, call_of("m", 2), code, 0.001, 0.0001, 10, 0)
    infer.in_flight = 5
    record_call(
        telemetry.endpoint("tfserving", "REST", "models", inference=False),
        call_of('odd "name"\\\n\ud800', 0),
        Code.NOT_FOUND,
        1.0,
        0.0,
        0,
        0,
    )
    telemetry.lagged(0.002)
    monitor = telemetry.monitor
    monitor.add("tp(token/s)", "avg", 4)
    monitor.add("count", "inc", 3)
    for value in range(1, 101):
        monitor.add("length", "cdf", value)
    telemetry.tick(1.0)
    return telemetry


def read(telemetry: Telemetry, form: str) -> tuple[list[Metric], Samples]:
    accept, parse = FORMS[form]
    body, _ = PrometheusText(telemetry).render([], accept)
    families: Iterable[Metric] = parse(body.decode())
    found = list(families)
    samples = [sample for family in found for sample in family.samples]
    return found, {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


def value(samples: Samples, name: str, /, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


@pytest.mark.parametrize("form", FORMS)
def test_every_number_is_exported(telemetry: Telemetry, form: str) -> None:
    _, samples = read(telemetry, form)
    assert value(samples, "triglot_requests_total", **PREDICT, code="OK") == 3
    assert value(samples, "triglot_requests_total", **PREDICT, code="NOT_FOUND") == 1
    for code, reason in {
        "UNAVAILABLE": "REJECTED",
        "DEADLINE_EXCEEDED": "CANCELED",
        "INTERNAL": "BACKEND",
        "NOT_FOUND": "OTHER",
    }.items():
        assert value(samples, "triglot_request_failures_total", **PREDICT, code=code, reason=reason) == 1
    assert value(samples, "triglot_request_seconds_count", **PREDICT) == 7
    assert value(samples, "triglot_request_seconds_sum", **PREDICT) == pytest.approx(0.064)
    assert value(samples, "triglot_request_seconds_bucket", **PREDICT, le="+Inf") == 7
    assert (
        value(samples, "triglot_codec_seconds_sum", protocol="kserve", entrypoint="GRPC", method="ModelInfer") > 0
    )
    assert value(samples, "triglot_request_bytes_total", **PREDICT) == 340
    assert value(samples, "triglot_response_bytes_total", **PREDICT) == 150
    assert value(samples, "triglot_queue_seconds_count", **MODEL) == 3
    assert value(samples, "triglot_executions_total", **MODEL) == round(1 + 1 / 3 + 1 / 1000, 3)
    assert value(samples, "triglot_compute_seconds_sum", **MODEL) == pytest.approx(0.03)
    in_flight = {"protocol": "kserve", "entrypoint": "GRPC", "method": "ModelInfer"}
    assert value(samples, "triglot_in_flight", **in_flight) == 5
    assert value(samples, "triglot_event_loop_lag_seconds_count") == 1
    assert value(samples, "triglot_user_metric", name="tp(token/s)", aggregation="avg") == 4
    assert value(samples, "triglot_user_metric", name="count", aggregation="inc") == 3
    assert value(samples, "triglot_user_increments_total", name="count") == 3
    assert value(samples, "triglot_user_quantiles", name="length", quantile="0.9") == 90
    assert value(samples, "process_resident_memory_bytes") > 0
    assert any(name.startswith("python_gc_") for name, _ in samples)


@pytest.mark.parametrize("form", ["classic", "OpenMetrics"])
def test_histograms_are_cumulative(telemetry: Telemetry, form: str) -> None:
    families, samples = read(telemetry, form)
    for family in families:
        if family.type != "histogram":
            continue
        rows: dict[frozenset[tuple[str, str]], list[tuple[float, float]]] = {}
        for sample in family.samples:
            if sample.name == family.name + "_bucket":
                labels = {name: text for name, text in sample.labels.items() if name != "le"}
                rows.setdefault(frozenset(labels.items()), []).append((float(sample.labels["le"]), sample.value))
        for key, buckets in rows.items():
            assert buckets == sorted(buckets)
            assert [count for _, count in buckets] == sorted(count for _, count in buckets)
            assert len(buckets) == (len(BATCH_LIMITS) + 1 if "batch" in family.name else 17)
            assert buckets[-1][1] == samples[family.name + "_count", key]
    sizes = {
        float(dict(labels)["le"]): count
        for (name, labels), count in samples.items()
        if name == "triglot_batch_size_bucket"
    }
    assert [sizes[limit] for limit in (1, 2, 4, 512, math.inf)] == [1, 1, 2, 2, 3]
    # 1 ms falls between the limits 0.63 ms and 2.0 ms, 20 ms between 6.6 ms and 21 ms.
    below = {
        float(dict(labels)["le"]): count
        for (name, labels), count in samples.items()
        if name == "triglot_request_seconds_bucket" and ("model", "m") in labels
    }
    assert max(count for limit, count in below.items() if limit < 0.001) == 0
    assert {count for limit, count in below.items() if 0.001 < limit < 0.02} == {4}


@pytest.mark.parametrize("form", ["classic", "OpenMetrics"])
def test_names_are_as_prometheus_wants_them(telemetry: Telemetry, form: str) -> None:
    """What `promtool check metrics` would say of our own."""
    families, _ = read(telemetry, form)
    for family in families:
        if not family.name.startswith("triglot_"):
            continue
        assert family.documentation.endswith("."), family.name
        for sample in family.samples:
            assert (family.type == "counter") == sample.name.endswith("_total")
            assert "le" not in sample.labels or family.type == "histogram"
            assert "quantile" not in sample.labels or family.type == "summary"
            # Numbers as OpenMetrics writes them, in both forms: 1.0, never 1.
            limit = sample.labels.get("le", "+Inf")
            assert limit == "+Inf" or repr(float(limit)) == limit
        unit = family.name.rpartition("_")[2]
        assert unit not in ("milliseconds", "microseconds", "ms", "us", "kilobytes", "percent")


def test_open_metrics_has_units_and_an_end(telemetry: Telemetry) -> None:
    body, content_type = PrometheusText(telemetry).render([], OPEN_METRICS)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0; charset=utf-8")
    assert body.endswith(b"# EOF\n")
    for line in (
        b"# UNIT triglot_request_seconds seconds\n",
        b"# UNIT triglot_request_bytes bytes\n",
        b"# TYPE triglot_requests counter\n",
    ):
        assert line in body


OPEN, PLAIN = "application/openmetrics-text", "text/plain; version=0.0.4"
ASKED = [
    ('application/openmetrics-text; version="1.0.0"; charset=utf-8', OPEN),
    (
        "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3",
        "application/openmetrics-text",
    ),
    ("text/plain;version=0.0.4;q=0.5, application/openmetrics-text;Q=1", OPEN),
    ("APPLICATION/OpenMetrics-Text", OPEN),
    ("application/openmetrics-text;version=1.0.0;q=0", PLAIN),
    ("application/openmetrics-text;q=0.000, */*", PLAIN),
    ("application/openmetrics-text;version=1.0.0;q=0.2,text/plain;version=1.0.0;q=0.7", "text/plain; version="),
    ("application/openmetrics-text;version=2.0.0", PLAIN),
    ("application/openmetrics-text;version=abc", PLAIN),
    ('application/openmetrics-text;version="1,0"', PLAIN),
    ("application/openmetrics-text;version=1.0.0;q=high", PLAIN),
    ("text/plain;version=later", PLAIN),
    ("application/json", PLAIN),
    (",;=,q=;,", PLAIN),
]
"""RFC 9110 12.5.1: what is not acceptable to a client may still be answered, and is no error."""


@pytest.mark.parametrize(("accept", "form"), ASKED)
def test_accept_chooses_a_form_that_prometheus_reads(telemetry: Telemetry, accept: str, form: str) -> None:
    body, content_type = PrometheusText(telemetry).render([], accept)
    assert content_type.startswith(form)
    assert body.endswith(b"# EOF\n") == content_type.startswith("application/openmetrics-text")


@given(st.text(st.characters(codec="latin-1")) | st.text('applicationtext/plain openmetrics-;,=".qversion0123\\'))
def test_no_accept_header_is_an_error(accept: str) -> None:
    assert PrometheusText(Telemetry()).render([], accept)[0]


def test_names_of_clients_are_escaped(telemetry: Telemetry) -> None:
    for form in ("classic", "OpenMetrics"):
        _, samples = read(telemetry, form)
        names = {dict(labels).get("model") for name, labels in samples if name == "triglot_requests_total"}
        assert names == {"m", 'odd "name"\\\n?'}


def test_an_empty_store_is_a_page_too() -> None:
    for form in FORMS:
        families, samples = read(Telemetry(), form)
        assert value(samples, "triglot_event_loop_lag_seconds_count") == 0
        assert "triglot_requests" in {family.name for family in families}


@pytest.mark.parametrize("form", FORMS)
def test_large_values_are_printed_in_full(telemetry: Telemetry, form: str) -> None:
    accept, parse = FORMS[form]
    text, _ = PrometheusText(telemetry).render([], accept)
    (memory,) = [line for line in text.splitlines() if line.startswith(b"nv_cpu_memory_total_bytes ")]
    assert memory.split(b" ")[1].isdigit()
    samples = {sample.name: sample.value for family in parse(text.decode()) for sample in family.samples}
    assert samples["nv_cpu_memory_total_bytes"] == float(memory.split(b" ")[1])


# --- exemplars ---

TRACE = "0af7651916cd43dd8448eb211c80319c"


def exemplars(families: Iterable[Metric]) -> dict[tuple[str, str], ParsedExemplar]:
    """By the name and the limit of their buckets."""
    return {
        (sample.name, sample.labels["le"]): sample.exemplar
        for family in families
        for sample in family.samples
        if sample.exemplar is not None
    }


def parsed(text: str) -> Iterable[Metric]:
    families: Iterable[Metric] = FORMS["OpenMetrics"][1](text)
    return families


def record(telemetry: Telemetry, seconds: float, trace: str = "", code: Code = Code.OK, batch: int = 1) -> None:
    call = call_of("m", 2, batch)
    call.span = CallSpan(unsent_spans(), call, trace, "", 1, "") if trace else None
    record_call(telemetry.endpoint("kserve", "GRPC", "ModelInfer", inference=True), call, code, seconds, 0.0, 0, 0)


def test_sampled_calls_are_exemplars_of_their_buckets(telemetry: Telemetry) -> None:
    before = time.time()
    record(telemetry, 0.02, TRACE)
    found = exemplars(read(telemetry, "OpenMetrics")[0])
    assert {name for name, _ in found} == {
        "triglot_request_seconds_bucket",
        "triglot_queue_seconds_bucket",
        "triglot_compute_seconds_bucket",
    }
    for (name, limit), exemplar in found.items():
        assert exemplar.labels.keys() == {"trace_id", "span_id"}
        assert exemplar.labels["trace_id"] == TRACE
        assert re.fullmatch("[0-9a-f]{16}", exemplar.labels["span_id"])
        assert exemplar.value == pytest.approx({"r": 0.02, "q": 0.001, "c": 0.01}[name[len("triglot_")]])
        assert float(limit) / 1.8**2 < exemplar.value <= float(limit)
        assert before - 0.001 <= float(exemplar.timestamp or 0) <= time.time() + 0.001
    assert exemplars(read(telemetry, "classic")[0]) == {}


def test_who_asks_for_the_older_format_gets_the_same_as_without_them(telemetry: Telemetry) -> None:
    record(telemetry, 0.02)
    prints = PrometheusText(telemetry)
    own = [line for line in prints.render([], "")[0].splitlines() if b"triglot_request" in line]
    kept = telemetry.endpoint("kserve", "GRPC", "ModelInfer", inference=True).calls()
    span = CallSpan(unsent_spans(), CallTimes(), TRACE, "", 1, "")
    for _, stats in kept:
        stats.latency.exemplars = [(1.0, 20_000.0, span)] * len(stats.latency.counts)
    assert own == [line for line in prints.render([], "")[0].splitlines() if b"triglot_request" in line]
    assert TRACE.encode() in prints.render([], OPEN_METRICS)[0]


def test_the_latest_of_a_bucket_is_its_exemplar(telemetry: Telemetry) -> None:
    """Also where it was of another code, and of the other of the two buckets that are printed as one."""
    traces = [f"{number:032x}" for number in range(1, 5)]
    record(telemetry, 0.02, traces[0])
    record(telemetry, 0.0201, traces[1], Code.INTERNAL)
    record(telemetry, 3000.0, traces[2], batch=0)
    record(telemetry, 1e-7, traces[3], batch=0)
    record(telemetry, 0.02)
    found = exemplars(read(telemetry, "OpenMetrics")[0])
    latency = {
        limit: exemplar for (name, limit), exemplar in found.items() if name == "triglot_request_seconds_bucket"
    }
    assert [exemplar.labels["trace_id"] for exemplar in latency.values()] == [traces[3], traces[1], traces[2]]
    lowest, _, above = latency
    assert (lowest, above) == ("1.8e-05", "+Inf")
    assert latency["+Inf"].value == 3000.0


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.floats(0, 1e4), st.integers(1, 2**128 - 1), st.sampled_from([Code.OK, Code.INTERNAL])),
        max_size=60,
    )
)
def test_exemplars_lie_in_their_buckets(calls: list[tuple[float, int, Code]]) -> None:
    telemetry = Telemetry()
    for seconds, trace, code in calls:
        record(telemetry, seconds, f"{trace:032x}", code)
    families, _ = read(telemetry, "OpenMetrics")
    (family,) = [family for family in families if family.name == "triglot_request_seconds"]
    below = -1.0
    for sample in family.samples:
        if sample.name != "triglot_request_seconds_bucket":
            continue
        limit = float(sample.labels["le"])
        inside = [call for call in calls if below * (1 + 1e-5) < call[0] <= limit * (1 - 1e-5)]
        if inside and sample.exemplar is None:
            pytest.fail(f"no exemplar up to {limit} for {inside}")
        if sample.exemplar is not None:
            assert below * (1 - 1e-5) <= sample.exemplar.value <= limit * (1 + 1e-5)
            assert int(sample.exemplar.labels["trace_id"], 16) in [trace for _, trace, _ in calls]
        below = limit


@settings(max_examples=30)
@given(st.integers(1, 3), st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.001, 0.02, 9.0])), max_size=20))
def test_workers_pages_keep_the_latest(workers: int, calls: list[tuple[int, float]]) -> None:
    """Whichever worker answered, and however many are gone."""
    stores = [Telemetry() for _ in range(workers)]
    latest: dict[float, str] = {}
    for number, (worker, seconds) in enumerate(calls, 1):
        record(stores[worker % workers], seconds, f"{number:032x}")
        latest[seconds] = f"{number:032x}"
    pages = [json.loads(json.dumps(PrometheusText(store).page([]))) for store in stores]
    reports = Reports(workers=list(enumerate(pages[1:], 1)), past=growing(pages[0]))
    text = PrometheusText(Telemetry()).render_reports(reports, OPEN_METRICS)[0].decode()
    families = list(parsed(text))
    found = exemplars(families)
    kept = {
        exemplar.value: exemplar.labels["trace_id"] for (name, _), exemplar in found.items() if "request" in name
    }
    assert kept.keys() == latest.keys()
    counts = {
        sample.labels["le"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "triglot_request_seconds_bucket"
    }
    assert counts.get("+Inf", 0) == len(calls)
    assert all(trace == latest[value] for value, trace in kept.items())
