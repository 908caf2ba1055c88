"""Reads Triton's `--trace-config`: traces in Triton's own files, or as OpenTelemetry spans (spec 3.11)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

TRITON, OPENTELEMETRY = "triton", "opentelemetry"
MODES = (TRITON, OPENTELEMETRY)
SPAN_VARIABLES = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's environment variables that enable the export of spans."""
LEVELS = ("TIMESTAMPS", "TENSORS")
OFF = "OFF"
MOST = 2**31 - 1
"""Largest value of each of these numbers."""
_LEAST = {
    "rate": 0,
    "count": -1,
    "log-frequency": 0,
    "bsp_max_queue_size": 1,
    "bsp_schedule_delay": 1,
    "bsp_max_export_batch_size": 1,
}
KEYS = ("mode", "level", "file", "url", "resource", *_LEAST)


def least_of(key: str, mode: str) -> int:
    """Return the least value of a number; only OpenTelemetry has a rate of 0: what clients trace."""
    return 1 if key == "rate" and mode == TRITON else _LEAST[key]


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """The trace options combined.

    One of `rate` requests is traced (0, with OpenTelemetry: only requests whose client traces them), `count` in
    total (-1: no limit). `file` and `frequency` apply to Triton's mode. `url`, `resource` and `batching` apply to
    OpenTelemetry, where they override the environment; `batching` has the names of Triton's settings.
    """

    mode: str = TRITON
    level: tuple[str, ...] = ()
    rate: int = 1000
    count: int = -1
    file: str = ""
    frequency: int = 0
    url: str = ""
    resource: Mapping[str, str] = field(default_factory=dict)
    batching: Mapping[str, int] = field(default_factory=dict)

    def wants_spans(self, environment: Mapping[str, str]) -> bool:
        """Whether spans are exported, by these options or OpenTelemetry's environment variables."""
        if self.mode == OPENTELEMETRY:
            return True
        values = [value for name in SPAN_VARIABLES if (value := environment.get(name, "").strip().lower())]
        disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        return bool(values) and values[0] != "none" and not disabled

    def check(self) -> None:
        """Raise `ValueError` for options that contradict each other."""
        for name in self.level:
            if name not in LEVELS:
                raise ValueError(f"trace_level: expected OFF, or of {', '.join(LEVELS)}, got {name!r}")
            if self.mode == OPENTELEMETRY and name != "TIMESTAMPS":
                raise ValueError(f"trace_level: expected TIMESTAMPS with mode {OPENTELEMETRY}, got {name}")
            if self.mode == TRITON and not self.file:
                raise ValueError(f"trace_level: {name} needs a trace_file to write traces to")
        if self.mode == TRITON and self.rate == 0:
            raise ValueError("trace_config: rate 0 needs mode opentelemetry")


def levels_of(text: str) -> tuple[str, ...]:
    """Return the parts of a level, in their order."""
    return () if text == OFF else tuple(name.strip() for name in text.split(","))


def with_triton_config(config: TraceConfig, text: str) -> TraceConfig:
    """Return the options overridden by Triton's flag: comma-separated `KEY=VALUE` or `MODE,KEY=VALUE`.

    Raise `ValueError`.
    """
    values: dict[str, Any] = {}
    levels: list[str] = []
    resource, batching = dict(config.resource), dict(config.batching)
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals and key in MODES:
            continue  # The mode of the following setting; settings of different modes have different names.
        if not equals or key not in KEYS:
            raise ValueError(f"trace_config: expected KEY=VALUE with KEY of {', '.join(KEYS)}, got {part[:100]!r}")
        if key == "mode":
            if value not in MODES:
                raise ValueError(f"trace_config: mode: expected {' or '.join(MODES)}, got {value[:100]!r}")
            values["mode"] = value
        elif key == "level":
            levels += [] if value == OFF else [value]
            values["level"] = tuple(levels)
        elif key == "resource":
            name, _, attribute = value.partition("=")
            resource[name] = attribute
        elif key in ("file", "url"):
            values[key] = value
        elif key.startswith("bsp_"):
            batching[key] = _number(key, value)
        else:
            values["frequency" if key == "log-frequency" else key] = _number(key, value)
    return replace(config, resource=resource, batching=batching, **values)


def _number(key: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -MOST
    if not _LEAST[key] <= number <= MOST:
        raise ValueError(
            f"trace_config: {key}: expected an integer from {_LEAST[key]} to {MOST}, got {text[:100]!r}"
        )
    return number
