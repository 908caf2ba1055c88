"""Reads OpenTelemetry's environment variables (opentelemetry.io/docs/specs/otel, SDK and exporter pages).

An invalid value is logged, and the default is used: tracing never keeps a server from starting.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from triglot.telemetry.spans.otlp import Value

T = TypeVar("T")

GRPC, HTTP = "grpc", "http/protobuf"
OTLP, CONSOLE, NONE = "otlp", "console", "none"
TRACE_CONTEXT = "tracecontext"
DEFAULT_ENDPOINTS = {GRPC: "http://localhost:4317", HTTP: "http://localhost:4318"}
TRACES_PATH = "v1/traces"
DEFAULT_SAMPLER = "parentbased_always_on"
SAMPLERS = {
    f"{prefix}{name}": (bool(prefix), ratio)
    for prefix in ("parentbased_", "")
    for name, ratio in (("always_on", 1.0), ("always_off", 0.0), ("traceidratio", None))
}
"""By sampler name: whether the parent's sampled flag decides, where there is a parent; and the share of the other
traces that is sampled, None if OTEL_TRACES_SAMPLER_ARG sets it."""
SERVICE = "triglot"
QUEUE_SIZE, BATCH_SIZE = 16_384, 4_096
"""Defaults in spans, larger than OpenTelemetry's, which are for fewer calls per second: 2,048 spans are about 700
calls."""


@dataclass(frozen=True, slots=True)
class SpanSettings:
    """Settings of sampling and export.

    `endpoint`: the collector's URL, with a path if the protocol is HTTP. `timeout`: seconds for one batch, retries
    included. `certificate`, `client_key` and `client_certificate`: paths of PEM files. `by_parent`: the sampled
    flag of a parent decides. `ratio`: the share of the traces that begin in this server, or of all traces unless
    `by_parent`. `resource`: attributes of the resource. `queue_size` and `batch_size`: most spans in the queue and
    in a batch. `delay`: seconds between exports.
    """

    exporter: str = OTLP
    protocol: str = GRPC
    endpoint: str = DEFAULT_ENDPOINTS[GRPC]
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 10.0
    gzip: bool = False
    certificate: str = ""
    client_key: str = ""
    client_certificate: str = ""
    by_parent: bool = True
    ratio: float = 1.0
    resource: Mapping[str, Value] = field(default_factory=dict)
    propagate: bool = True
    """Whether `traceparent` is read and sent (OTEL_PROPAGATORS)."""
    queue_size: int = QUEUE_SIZE
    batch_size: int = BATCH_SIZE
    delay: float = 5.0

    @property
    def destination(self) -> str:
        """The collector's URL without password and query, or "standard output"; for messages."""
        if self.exporter == CONSOLE:
            return "standard output"
        parts = urlsplit(self.endpoint)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def settings_of(environment: Mapping[str, str]) -> tuple[SpanSettings | None, list[str]]:
    """Return the settings, None if no variable enables spans, and texts about invalid variables."""
    found = _Variables(environment)
    settings = found.settings() if found.wanted() else None
    return settings, found.problems


class _Variables:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.problems: list[str] = []

    def text(self, *names: str) -> str:
        """Return the first of these variables that is set and not empty; "" if none is."""
        return next((value for name in names if (value := self._environment.get(name, "").strip())), "")

    def wanted(self) -> bool:
        """Return whether an exporter, or an endpoint for one, is set."""
        if self._is_true("OTEL_SDK_DISABLED"):
            return False
        if self.text("OTEL_TRACES_EXPORTER"):
            return self.exporter != NONE
        return bool(self.text("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"))

    @cached_property
    def exporter(self) -> str:
        """The first exporter of the list that there is."""
        variable, names = "OTEL_TRACES_EXPORTER", self._names("OTEL_TRACES_EXPORTER")
        known = [name for name in names if name in (OTLP, CONSOLE, NONE)]
        if not known and names:
            self._problem(variable, ",".join(names), "otlp, console or none", "no spans are exported")
            return NONE
        if len(names) > 1:
            self._problem(variable, ",".join(names), "one of otlp, console and none", f"{known[0]} is used")
        return known[0] if known else OTLP

    def settings(self) -> SpanSettings:
        protocol = self._choice(
            GRPC, (GRPC, HTTP), "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
        )
        by_parent, ratio = self._sampler()
        return SpanSettings(
            exporter=self.exporter,
            protocol=protocol,
            endpoint=self._endpoint(protocol),
            headers=dict(
                self._pairs("OTEL_EXPORTER_OTLP_TRACES_HEADERS") or self._pairs("OTEL_EXPORTER_OTLP_HEADERS")
            ),
            timeout=self._number(10_000, 1, "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
            / 1000,
            gzip=self._choice(
                "none",
                ("none", "gzip"),
                "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION",
                "OTEL_EXPORTER_OTLP_COMPRESSION",
            )
            == "gzip",
            certificate=self._otlp_text("CERTIFICATE"),
            client_key=self._otlp_text("CLIENT_KEY"),
            client_certificate=self._otlp_text("CLIENT_CERTIFICATE"),
            by_parent=by_parent,
            ratio=ratio,
            resource=self._resource(),
            propagate=self._propagates(),
            queue_size=int(self._number(QUEUE_SIZE, 1, "OTEL_BSP_MAX_QUEUE_SIZE")),
            batch_size=int(self._number(BATCH_SIZE, 1, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE")),
            delay=self._number(5000, 1, "OTEL_BSP_SCHEDULE_DELAY") / 1000,
        )

    def _endpoint(self, protocol: str) -> str:
        url = self.text("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
        general = self.text("OTEL_EXPORTER_OTLP_ENDPOINT")
        if not url and general and protocol == HTTP:
            url = f"{general.rstrip('/')}/{TRACES_PATH}"
        url = url or general
        if url and "://" not in url and protocol == GRPC:
            # A gRPC target, HOST:PORT.
            insecure = self._is_true("OTEL_EXPORTER_OTLP_TRACES_INSECURE", "OTEL_EXPORTER_OTLP_INSECURE")
            url = f"{'http' if insecure else 'https'}://{url}"
        if url and (problem := _problem_of(url)):
            self._problem("OTEL_EXPORTER_OTLP_ENDPOINT", url, "a URL like http://collector:4317", problem)
            url = ""
        if not url:
            url = DEFAULT_ENDPOINTS[protocol] + (f"/{TRACES_PATH}" if protocol == HTTP else "")
        return url

    def _otlp_text(self, name: str) -> str:
        return self.text(f"OTEL_EXPORTER_OTLP_TRACES_{name}", f"OTEL_EXPORTER_OTLP_{name}")

    def _propagates(self) -> bool:
        variable, names = "OTEL_PROPAGATORS", self._names("OTEL_PROPAGATORS") or [TRACE_CONTEXT]
        unknown = [name for name in names if name not in (TRACE_CONTEXT, "baggage", NONE)]
        if unknown:
            self._problem(variable, ",".join(unknown), f"{TRACE_CONTEXT}, baggage or none", "it is ignored")
        return TRACE_CONTEXT in names

    def _sampler(self) -> tuple[bool, float]:
        name = self._choice(DEFAULT_SAMPLER, tuple(SAMPLERS), "OTEL_TRACES_SAMPLER")
        by_parent, ratio = SAMPLERS[name]
        if ratio is None:
            ratio = self._convert(1.0, "a number from 0 to 1", _share, "OTEL_TRACES_SAMPLER_ARG")
        return by_parent, ratio

    def _resource(self) -> dict[str, Value]:
        resource: dict[str, Value] = {
            "service.name": SERVICE,
            "host.name": socket.gethostname(),
            "process.pid": os.getpid(),
            "process.runtime.name": platform.python_implementation().lower(),
            "process.runtime.version": platform.python_version(),
            **self._pairs("OTEL_RESOURCE_ATTRIBUTES"),
        }
        if name := self.text("OTEL_SERVICE_NAME"):
            resource["service.name"] = name
        return resource

    def _pairs(self, variable: str) -> dict[str, str]:
        pairs = {}
        for pair in self.text(variable).split(","):
            key, equals, value = pair.partition("=")
            if equals and key.strip():
                pairs[key.strip()] = unquote(value.strip())
            elif pair.strip():
                # Headers may be credentials, so the message does not quote them.
                self.problems.append(f"{variable}: expected KEY=VALUE,..., got a part without '='; it is ignored")
        return pairs

    def _names(self, variable: str) -> list[str]:
        """Return the elements of a list, in lower case: enum values are read without regard to case."""
        return [name for text in self.text(variable).split(",") if (name := text.strip().lower())]

    def _is_true(self, *names: str) -> bool:
        value = self.text(*names).lower()
        if value not in ("", "true", "false"):
            self._problem(names[-1], value, "true or false", "false is used")
        return value == "true"

    def _choice(self, default: str, choices: tuple[str, ...], *names: str) -> str:
        value = self.text(*names).lower()
        if not value or value in choices:
            return value or default
        self._problem(names[-1], value, ", ".join(choices), f"{default} is used")
        return default

    def _number(self, default: float, least: float, *names: str) -> float:
        def number(text: str) -> float:
            if not least <= (value := float(text)) < float("inf"):
                raise ValueError
            return value

        return self._convert(default, f"a number from {least:g}", number, *names)

    def _convert(self, default: T, expected: str, convert: Callable[[str], T], *names: str) -> T:
        text = self.text(*names)
        if not text:
            return default
        try:
            return convert(text)
        except ValueError:
            self._problem(names[-1], text, expected, f"{default} is used")
            return default

    def _problem(self, name: str, value: str, expected: str, then: str) -> None:
        self.problems.append(f"{name}: expected {expected}, got {value[:100]!r}; {then}")


def _share(text: str) -> float:
    if not 0 <= (share := float(text)) <= 1:
        raise ValueError
    return share


def _problem_of(url: str) -> str:
    try:
        parts = urlsplit(url)
        port_is_right = parts.port is None or parts.port > 0
    except ValueError:
        port_is_right = False
        parts = urlsplit("")
    if parts.scheme in ("http", "https") and parts.hostname and port_is_right:
        return ""
    return "the default is used"


def trace_config_settings(
    environment: Mapping[str, str], url: str, resource: Mapping[str, str], batching: Mapping[str, int]
) -> tuple[SpanSettings, list[str]]:
    """Return settings for Triton's `--trace-config`, which exports over HTTP, and texts about invalid variables.

    The environment variables apply where the flag sets nothing, whether or not they enable spans. `url` has a
    path; "" is Triton's default. `batching` has Triton's settings `bsp_…` by name, in spans and milliseconds.
    """
    found = _Variables(environment)
    settings = found.settings()
    if url:
        url = url if "://" in url else f"http://{url}"
        settings = replace(settings, exporter=OTLP, protocol=HTTP, endpoint=url)
    elif settings.protocol != HTTP:
        settings = replace(settings, protocol=HTTP, endpoint=f"{DEFAULT_ENDPOINTS[HTTP]}/{TRACES_PATH}")
    if settings.exporter == NONE:
        settings = replace(settings, exporter=OTLP)
    settings = replace(
        settings,
        resource={**settings.resource, **resource},
        queue_size=batching.get("bsp_max_queue_size", settings.queue_size),
        batch_size=batching.get("bsp_max_export_batch_size", settings.batch_size),
        delay=batching.get("bsp_schedule_delay", settings.delay * 1000) / 1000,
    )
    return settings, found.problems
