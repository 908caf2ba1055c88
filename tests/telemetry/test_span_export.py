"""What the environment asks for, and what becomes of spans that a collector does not take."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import grpc
import pytest

from tests.process import FREE_PORTS, PLAIN_MODELS, SECONDS, Triglot, unused_ports
from tests.span_receivers import SERVER, Received, grpc_receiver, http_receiver
from triglot.telemetry.spans.exporter import Exporter, exporter_of
from triglot.telemetry.spans.otlp import constant
from triglot.telemetry.spans.recorder import of_ratio
from triglot.telemetry.spans.rows import Row
from triglot.telemetry.spans.settings import SpanSettings, settings_of, trace_config_settings

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]}
Receiver = Callable[[], AbstractContextManager[tuple[str, Received]]]


def one_span(number: int) -> Row:
    return (constant("one", 2), b"", b"", b"", "ab" * 16, "", number, 1, 1.0, 2.0, 0, 0, 0, 0, 0, 0, 1)


def infer(port: int, traceparent: str = "") -> None:
    """One request to an identity."""
    headers = {"traceparent": traceparent} if traceparent else {}
    url = f"http://127.0.0.1:{port}/v2/models/identity_fp32/infer"
    request = urllib.request.Request(url, json.dumps(BODY).encode(), headers)
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        assert response.status == 200


# --- a server with nothing but variables ---


def test_only_what_kserve_sets() -> None:
    with grpc_receiver() as (url, received):
        environment = {
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_ENDPOINT": url,
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": "0.05",
            "OTEL_SERVICE_NAME": "my-service",
        }
        with Triglot(PLAIN_MODELS, *FREE_PORTS, environment=environment) as server:
            infer(server.ports()[1], PARENT)
            assert f"spans are exported to {url}" in server.stderr.text()
            server.stop()
        spans = received.wait_for(3)
        (call,) = [span for span in spans if span.kind == SERVER]
        assert (call.trace, call.parent) == (PARENT[3:35], PARENT[36:52])
        assert call.resource["service.name"] == "my-service"
        assert received.headers["user-agent"].startswith("OTel-OTLP-Exporter-triglot")


def test_over_http() -> None:
    with http_receiver() as (url, received):
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": url,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
            "OTEL_EXPORTER_OTLP_HEADERS": "x-team=models,authorization=Bearer%20secret",
            "OTEL_RESOURCE_ATTRIBUTES": "service.name=a,deployment.environment.name=test",
        }
        with Triglot(PLAIN_MODELS, *FREE_PORTS, environment=environment) as server:
            infer(server.ports()[1], PARENT)
            server.stop()
            assert "secret" not in server.stderr.text()
        spans = received.wait_for(3)
        assert {span.trace for span in spans} == {PARENT[3:35]}
        assert spans[0].resource["service.name"] == "a"
        assert spans[0].resource["deployment.environment.name"] == "test"
        assert isinstance(spans[0].resource["process.pid"], int)
        assert (received.headers["x-team"], received.headers["authorization"]) == ("models", "Bearer secret")
        assert received.headers["content-encoding"] == "gzip"


def test_on_the_console() -> None:
    with Triglot(PLAIN_MODELS, *FREE_PORTS, environment={"OTEL_TRACES_EXPORTER": "console"}) as server:
        infer(server.ports()[1], PARENT)
        server.stop()
        lines = [line for line in server.stdout.text().splitlines() if line.startswith("{")]
    spans = {span["name"]: span for span in map(json.loads, lines)}
    assert spans.keys() == {"POST /v2/models/{model}/infer", "queue", "compute"}
    call = spans["POST /v2/models/{model}/infer"]
    assert (call["kind"], call["traceId"], call["parentSpanId"]) == ("SERVER", PARENT[3:35], PARENT[36:52])
    assert call["attributes"]["http.response.status_code"] == 200
    assert spans["queue"]["parentSpanId"] == call["spanId"]


@pytest.mark.parametrize("variables", [{}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_SDK_DISABLED": "true"}])
def test_none_are_asked_for(variables: dict[str, str]) -> None:
    more = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"} if variables else {}
    assert settings_of(variables | more) == (None, [])


def test_triton_s_flag() -> None:
    with http_receiver() as (url, received):
        flags = ["mode=opentelemetry", f"opentelemetry,url={url}/v1/traces", "rate=2", "level=TIMESTAMPS"]
        flags += ["opentelemetry,resource=service.name=triton", "opentelemetry,bsp_schedule_delay=20"]
        with Triglot(
            PLAIN_MODELS, *FREE_PORTS, *(part for flag in flags for part in ("--trace-config", flag))
        ) as server:
            port = server.ports()[1]
            for _ in range(4):
                infer(port)
            spans = received.wait_for(6)
            assert len(spans) == 6  # Every second request.
            assert spans[0].resource["service.name"] == "triton"
            change(port, {"trace_rate": "0"})
            infer(port)
            infer(port, PARENT)
            assert {span.trace for span in received.wait_for(9)[6:]} == {PARENT[3:35]}
            settings = change(port, {"trace_level": ["OFF"]})
            assert (settings["trace_mode"], settings["trace_level"]) == ("opentelemetry", ["OFF"])
            infer(port, PARENT)
            server.stop()
        assert len(received.spans) == 9


def change(port: int, settings: Mapping[str, Any]) -> Any:
    url = f"http://127.0.0.1:{port}/v2/trace/setting"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(settings).encode())) as response:
        return json.loads(response.read())


# --- variables ---


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("OTEL_TRACES_SAMPLER", "jaeger_remote", "parentbased_always_on is used"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "grpc is used"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip", "none is used"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "10000 is used"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0", "16384 is used"),
        ("OTEL_BSP_SCHEDULE_DELAY", "inf", "5000 is used"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "ftp://x", "the default is used"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://x:port", "the default is used"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "Bearer secret", "without '='"),
        ("OTEL_SDK_DISABLED", "1", "expected true or false, got '1'; false is used"),
        ("OTEL_SDK_DISABLED", "yes", "false is used"),
        (
            "OTEL_TRACES_EXPORTER",
            "otlp,console",
            "expected one of otlp, console and none, got 'otlp,console'; otlp is used",
        ),
        ("OTEL_TRACES_EXPORTER", "zipkin, OTLP", "otlp is used"),
        ("OTEL_PROPAGATORS", "tracecontext,xray", "expected tracecontext, baggage or none, got 'xray'"),
    ],
)
def test_a_variable_that_is_wrong(name: str, value: str, expected: str) -> None:
    settings, (problem,) = settings_of({"OTEL_TRACES_EXPORTER": "otlp", name: value})
    assert settings is not None
    assert name in problem
    assert expected in problem
    assert "secret" not in problem
    assert settings.endpoint == "http://localhost:4317"
    assert (settings.by_parent, settings.ratio) == (True, 1.0)


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("OTEL_PROPAGATORS", "baggage, tracecontext", "propagate", True),
        ("OTEL_PROPAGATORS", " TraceContext ,", "propagate", True),
        ("OTEL_PROPAGATORS", "baggage", "propagate", False),
        ("OTEL_PROPAGATORS", "none", "propagate", False),
        ("OTEL_TRACES_SAMPLER", "ALWAYS_OFF", "ratio", 0.0),
        ("OTEL_TRACES_SAMPLER", "Always_On", "by_parent", False),
        ("OTEL_TRACES_EXPORTER", "OTLP", "exporter", "otlp"),
        ("OTEL_TRACES_EXPORTER", " Console ", "exporter", "console"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "GZIP", "gzip", True),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "HTTP/Protobuf", "protocol", "http/protobuf"),
        ("OTEL_SDK_DISABLED", "FALSE", "exporter", "otlp"),
    ],
)
def test_lists_are_trimmed_and_enum_values_have_no_case(
    name: str, value: str, field: str, expected: object
) -> None:
    """OpenTelemetry's specification of its environment variables, "Enum" and "Boolean"; its Python SDK 1.45."""
    settings, problems = settings_of({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317", name: value})
    assert (getattr(settings, field), problems) == (expected, [])


def test_an_unknown_exporter() -> None:
    settings, problems = settings_of({"OTEL_TRACES_EXPORTER": "zipkin"})
    assert settings is None
    assert problems == [
        "OTEL_TRACES_EXPORTER: expected otlp, console or none, got 'zipkin'; no spans are exported"
    ]


def test_those_for_traces_come_first() -> None:
    settings, problems = settings_of(
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://general:4318/base/",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "2000",
            "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "3000",
            "OTEL_TRACES_SAMPLER": "traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": "0.25",
            "OTEL_PROPAGATORS": "b3",
        }
    )
    assert settings is not None
    assert problems == ["OTEL_PROPAGATORS: expected tracecontext, baggage or none, got 'b3'; it is ignored"]
    assert (settings.endpoint, settings.timeout) == ("http://general:4318/base/v1/traces", 3.0)
    assert (settings.by_parent, settings.ratio, settings.propagate) == (False, 0.25, False)
    own = {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://own/spans",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    }
    settings, _ = settings_of(own)
    assert settings is not None
    assert settings.endpoint == "http://own/spans"


@pytest.mark.parametrize("exporter", ["", "otlp", "none"])
def test_the_trace_setting_exports_whatever_the_variables_say(exporter: str) -> None:
    variables = {"OTEL_TRACES_EXPORTER": exporter, "OTEL_SERVICE_NAME": "own", "OTEL_BSP_SCHEDULE_DELAY": "20"}
    settings, problems = trace_config_settings(variables, "", {"team": "a"}, {"bsp_max_queue_size": 7})
    assert (settings.exporter, settings.endpoint, problems) == ("otlp", "http://localhost:4318/v1/traces", [])
    assert (settings.queue_size, settings.delay) == (7, 0.02)
    assert (settings.resource["service.name"], settings.resource["team"]) == ("own", "a")
    given, _ = trace_config_settings(variables, "collector:1/traces", {}, {})
    assert given.endpoint == "http://collector:1/traces"


def test_ratios() -> None:
    half = of_ratio(0.5)
    assert [half(number) for number in (2**63 - 1, 2**63, 2**63 - 1 + 2**100)] == [True, False, True]
    assert of_ratio(1.0)(2**128 - 1)
    assert not of_ratio(0.0)(1)


# --- a collector that is slow, dead, or says no ---


def exporting(url: str, **settings: Any) -> Exporter:
    return exporter_of(SpanSettings(endpoint=url, delay=0.01, **settings), "1")


def test_a_collector_that_is_slow() -> None:
    with grpc_receiver() as (url, received):
        exporter = exporting(url, queue_size=10, batch_size=4)
        received.gate.clear()
        for number in range(1, 31):
            exporter.put(one_span(number))
        received.gate.set()
        exporter.close()
        counts = exporter.counts
        assert counts.exported == len(received.spans) >= 10
        assert (counts.exported + counts.queue_full, counts.export_failed, counts.rejected) == (30, 0, 0)
        assert len({span.id for span in received.spans}) == len(received.spans)


def test_missing_collector(caplog: pytest.LogCaptureFixture) -> None:
    port, _ = unused_ports()
    for protocol, path in (("grpc", ""), ("http/protobuf", "/v1/traces")):
        caplog.clear()
        exporter = exporting(f"http://user:secret@127.0.0.1:{port}{path}", protocol=protocol, timeout=0.3)
        for number in range(1, 6):
            exporter.put(one_span(number))
        exporter.close()
        assert (exporter.counts.export_failed, exporter.counts.exported) == (5, 0)
        (line,) = [record.getMessage() for record in caplog.records]
        assert line.startswith(f"spans are lost: cannot export them to http://127.0.0.1:{port}{path}: ")
        assert "secret" not in line


@pytest.mark.parametrize(
    ("receiver", "refusal", "protocol"),
    [(grpc_receiver, grpc.StatusCode.UNAVAILABLE, "grpc"), (http_receiver, 503, "http/protobuf")],
)
def test_a_collector_that_comes_back(receiver: Receiver, refusal: Any, protocol: str) -> None:
    with receiver() as (url, received):
        received.refuse = refusal
        exporter = exporting(url + ("/v1/traces" if protocol != "grpc" else ""), protocol=protocol)
        exporter.put(one_span(1))
        received.wait_for_request(2)
        received.refuse = None
        received.wait_for(1)
        exporter.close()
        assert (exporter.counts.exported, exporter.counts.export_failed) == (1, 0)


@pytest.mark.parametrize(
    ("receiver", "refusal", "protocol"),
    [
        (grpc_receiver, grpc.StatusCode.INVALID_ARGUMENT, "grpc"),
        *((http_receiver, status, "http/protobuf") for status in (301, 302, 303, 307, 308, 400)),
    ],
)
def test_a_collector_that_refuses(receiver: Receiver, refusal: Any, protocol: str) -> None:
    with receiver() as (url, received):
        received.refuse = refusal
        exporter = exporting(url + ("/v1/traces" if protocol != "grpc" else ""), protocol=protocol)
        exporter.put(one_span(1))
        received.wait_for_request(1)
        exporter.close()
        assert (exporter.counts.export_failed, received.requests) == (1, 1)


def test_a_collector_that_takes_a_part() -> None:
    with grpc_receiver() as (url, received):
        received.rejects = 2
        exporter = exporting(url)
        for number in (1, 2, 3):
            exporter.put(one_span(number))
        exporter.close()
        assert (exporter.counts.exported, exporter.counts.rejected) == (1, 2)


def test_a_collector_that_hangs_does_not_keep_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triglot.telemetry.spans.exporter.CLOSE_SECONDS", 0.1)
    with grpc_receiver() as (url, received):
        received.gate.clear()
        exporter = exporting(url)
        exporter.put(one_span(1))
        exporter.close()
        threads = [thread for thread in threading.enumerate() if thread.name == "spans"]
        assert threads
        assert all(thread.daemon for thread in threads)
        received.gate.set()
    for thread in threads:
        thread.join(SECONDS)  # Else it complains in the next test.


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_certificate_that_is_missing(protocol: str, caplog: pytest.LogCaptureFixture) -> None:
    exporter = exporting("https://127.0.0.1:1/v1/traces", protocol=protocol, certificate="/none/ca.pem")
    for number in range(1, 4):
        exporter.put(one_span(number))
    exporter.close()
    assert exporter.counts.export_failed == 3
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("spans are lost: cannot export them to https://127.0.0.1:1")
    assert "FileNotFoundError" in line
