"""The server's options, each written once: flags, environment names and the TOML keys derive from the fields."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

ENVIRONMENT_PREFIX = "TRIGLOT_"
ANY_HOST = "0.0.0.0"


class ConfigError(ValueError):
    """An option is unknown, or has a value that it cannot have."""


def _option(
    default: Any,
    help_text: str,
    *,
    least: float = 0,
    most: float = sys.float_info.max,
    choices: tuple[str, ...] = (),
    start: str = "",
) -> Any:
    limits = {"least": least, "most": most, "choices": choices, "start": start}
    return field(default=default, metadata={"help": help_text} | limits)


LOG_LEVELS = ("debug", "info", "warning", "error")
PROTOCOLS = ("kserve", "tfserving", "grps")
TRACE_LEVELS = ("TIMESTAMPS", "TENSORS")
MOST_TRACES = 2**31 - 1
GRPC_TRANSPORTS = ("aio", "h2")
CONTROL_MODES = ("none", "poll", "explicit")
POLL_SECONDS = 5.0
STREAMING_MODES = ("query_param", "header_param", "body_param")
LAST_PORT = 65535
GIB = 2**30
NO_PORT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All options. Raises `ConfigError` for a value that an option cannot have."""

    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    grpc_port: int = _option(
        8001, "port for gRPC; 0 picks a free one, -1 opens none", least=NO_PORT, most=LAST_PORT
    )
    rest_port: int = _option(
        8000, "port for REST; 0 picks a free one, -1 opens none", least=NO_PORT, most=LAST_PORT
    )
    grpc_socket: str = _option("", "path of a Unix socket for gRPC, besides the port")
    grpc_transport: str = _option(
        "aio",
        "what carries gRPC: aio, grpc's own library; h2, ours, for more calls a second",
        choices=GRPC_TRANSPORTS,
    )
    protocols: str = _option(
        ",".join(PROTOCOLS),
        f"protocols to serve, of {', '.join(PROTOCOLS)}, with commas; with kserve first, / is its liveness for "
        "clients that ask for no page",
    )
    server_name: str = _option("triglot", "name in the server metadata; some clients insist on theirs")
    max_message_size: int = _option(
        2**31 - 1, "largest request, in bytes, for gRPC and REST", least=1, most=2**31 - 1
    )
    max_connections: int = _option(0, "calls that may be open at a time, over gRPC and over REST; 0 sets no limit")
    rest_timeout: float = _option(0.0, "seconds that a REST call may take; 0 sets no limit")
    default_timeout: float = _option(
        0.0, "seconds that a request for a model may take when its client sets no deadline; 0 sets no limit"
    )
    cors: bool = _option(
        False, "let web pages of any origin read the answers of TensorFlow Serving's REST interface"
    )
    tensor_content: bool = _option(
        False, "answer TensorFlow Serving's Predict with tensor_content instead of typed fields"
    )
    model_control_mode: str = _option(
        "none",
        "which models are served: none, those found at the start; poll, those found every poll_interval seconds; "
        "explicit, those of load_model, and what clients load and unload",
        choices=CONTROL_MODES,
    )
    poll_interval: float = _option(
        POLL_SECONDS,
        "seconds between two looks for new, changed or removed versions, with model_control_mode poll; 0 looks "
        "when the server starts, and not again",
    )
    load_model: str = _option(
        "",
        "models to load at the start, with commas or each with a flag of its own, * for all; with "
        "model_control_mode explicit",
    )
    load_timeout: float = _option(600.0, "seconds that loading a version may take; 0 sets no limit")
    allow_symlinks: bool = _option(False, "let symbolic links in a repository lead out of it")
    labels_before_load: bool = _option(
        False, "let a new version label point to a version that is not available yet"
    )
    warm_up: bool = _option(
        True, "run a version's recorded requests, assets.extra/tf_serving_warmup_requests, before it takes calls"
    )
    monitoring_path: str = _option(
        "", "REST path of metrics in TensorFlow Serving's form; without one there are none", start="/"
    )
    predict_route: str = _option(
        "", "one more REST path for predictions; Vertex AI sets it as AIP_PREDICT_ROUTE", start="/"
    )
    health_route: str = _option(
        "", "one more REST path for readiness; Vertex AI sets it as AIP_HEALTH_ROUTE", start="/"
    )
    default_model: str = _option(
        "", "model for grps calls that name none; without one, the only model that is served"
    )
    grps_online: bool = _option(False, "let grps' health be ready from the start, without a call of Online")
    grps_http_errors: str = _option(
        "mirror",
        "HTTP status of errors of grps' interface: mirror repeats the code of the body, always_200 is 200",
        choices=("mirror", "always_200"),
    )
    grps_path: str = _option("", "one more REST path for grps' predict", start="/")
    grps_customized_body: bool = _option(
        False, "hand the HTTP requests of grps' predict paths to the model as they are, and its answers back"
    )
    grps_streaming_mode: str = _option(
        "query_param",
        f"where an HTTP request asks for a stream: {', '.join(STREAMING_MODES)}",
        choices=STREAMING_MODES,
    )
    grps_streaming_key: str = _option("streaming", "name of the parameter or header that asks for a stream")
    grps_streaming_content_type: str = _option(
        "application/octet-stream", "content type of streams over HTTP in grps' interface"
    )
    max_queue_size: int = _option(1024, "requests that may wait for one model", least=1)
    max_queue_bytes: int = _option(
        GIB, "bytes of requests that one model may hold, waiting or running; 0 sets no limit"
    )
    max_total_queue_size: int = _option(
        8192, "requests that all models may hold, waiting or running; 0 sets no limit"
    )
    max_total_queue_bytes: int = _option(
        2 * GIB, "bytes of requests that all models may hold, waiting or running; 0 sets no limit"
    )
    response_cache_bytes: int = _option(
        0, "bytes of answers to keep for equal requests to models that allow it; 0 keeps none"
    )
    shared_memory_prefix: str = _option(
        "",
        "what the keys of shared memory that clients may register begin with; / allows all keys, and without one "
        "there is no shared memory",
        start="/",
    )
    drain_delay: float = _option(5.0, "seconds between not-ready and closing the listeners on SIGTERM")
    grace: float = _option(20.0, "seconds that running calls have to finish when the server stops")
    exit_on_load_error: bool = _option(True, "end when a model cannot be loaded, instead of staying not ready")
    trace_file: str = _option("", "file that traces of single requests are written to; without one there are none")
    trace_level: str = _option(
        "OFF", f"what traces tell of a request: OFF for no traces, or of {', '.join(TRACE_LEVELS)}, with commas"
    )
    trace_rate: int = _option(1000, "one of so many requests is traced", least=1, most=MOST_TRACES)
    trace_count: int = _option(-1, "requests to trace in all; -1 sets no limit", least=-1, most=MOST_TRACES)
    trace_log_frequency: int = _option(
        0, "traces in one file, trace_file with .0, .1 and so on; 0 writes all to trace_file", most=MOST_TRACES
    )
    log_level: str = _option("info", "debug, info, warning or error", choices=LOG_LEVELS)
    log_verbose_level: int = _option(0, "from 1 on, a line for each request in the log", most=2**32 - 1)
    log_format: str = _option("default", "time in the log: default or ISO8601", choices=("default", "ISO8601"))
    log_file: str = _option("", "file for the log, in place of the standard error")

    def __post_init__(self) -> None:
        for name in OPTIONS:
            value, expected = getattr(self, name), option_type(name)
            if not is_of(value, expected):
                raise ConfigError(f"{name}: expected {expected.__name__}, got {value!r}")
            check_option(name, value, name)
        if self.grpc_port == self.rest_port > 0:
            raise ConfigError(f"grpc_port and rest_port are both {self.grpc_port}; expected two ports")
        if self.grpc_port == self.rest_port == NO_PORT and not self.grpc_socket:
            raise ConfigError(
                "grpc_port and rest_port are both -1, and there is no grpc_socket; expected one of them"
            )
        for name, value, mode in (
            ("poll_interval", self.poll_interval != POLL_SECONDS, "poll"),
            ("load_model", bool(self.load_model), "explicit"),
        ):
            if value and self.model_control_mode != mode:
                raise ConfigError(
                    f"{name}: only with model_control_mode {mode}, and that is {self.model_control_mode}"
                )
        for name in self.protocol_names:
            if name not in PROTOCOLS:
                raise ConfigError(
                    f"protocols: {unknown(name, PROTOCOLS, 'protocol')}; there are {', '.join(PROTOCOLS)}"
                )

        for name in self.trace_levels:
            if name not in TRACE_LEVELS:
                raise ConfigError(f"trace_level: expected OFF, or of {', '.join(TRACE_LEVELS)}, got {name!r}")
            if not self.trace_file:
                raise ConfigError(f"trace_level: {name} needs a trace_file to write traces to")

    @property
    def trace_levels(self) -> tuple[str, ...]:
        """The parts of `trace_level`, in their order."""
        return () if self.trace_level == "OFF" else tuple(name.strip() for name in self.trace_level.split(","))

    @property
    def protocol_names(self) -> frozenset[str]:
        """The protocols that are served."""
        return frozenset(name.strip() for name in self.protocols.split(","))

    @property
    def models_to_load(self) -> tuple[str, ...]:
        """The names in `load_model`."""
        return tuple(name.strip() for name in self.load_model.split(",") if name.strip())

    @property
    def first_protocol(self) -> str:
        """The protocol that is named first."""
        return self.protocols.partition(",")[0].strip()

    def address(self, port: int) -> str:
        """`host:port`, with an IPv6 host in brackets."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"


OPTIONS = {option.name: option for option in fields(Config)}
_TYPES = {"str": str, "int": int, "float": float, "bool": bool}


def option_type(name: str) -> type:
    """The type of an option's values."""
    return _TYPES[str(OPTIONS[name].type)]


def check_option(name: str, value: Any, source: str) -> None:
    """Raises `ConfigError`, beginning with `source`, for a value that the option cannot have."""
    limits = OPTIONS[name].metadata
    if limits["choices"] and value not in limits["choices"]:
        *others, last = limits["choices"]
        raise ConfigError(f"{source}: expected {', '.join(others)} or {last}, got {value!r}")
    if isinstance(value, str) and value and not value.startswith(limits["start"]):
        raise ConfigError(f"{source}: expected a text that begins with {limits['start']!r}, got {value!r}")
    if isinstance(value, int | float) and not limits["least"] <= value <= limits["most"]:
        bound = f"at most {limits['most']}" if value > limits["most"] else f"at least {limits['least']}"
        raise ConfigError(f"{source}: expected {bound}, got {value}")


def flag_of(name: str) -> str:
    """An option's flag."""
    return f"--{name.replace('_', '-')}"


def is_of(value: object, expected: type) -> bool:
    """Whether an option of the expected type can have this value."""
    return type(value) is expected or (expected is float and type(value) is int)


def unknown(name: str, known: Iterable[str], kind: str = "option") -> str:
    """The text for an option, or another kind of name, that does not exist, with the nearest that does."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"unknown {kind} {name!r}" + (f", did you mean {near[0]!r}?" if near else "")
