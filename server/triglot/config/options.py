"""The server's options, each written once: flags, environment names and the TOML keys derive from the fields."""

from __future__ import annotations

import difflib
import ipaddress
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
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
MOST_WORKERS = 1024
GRPC_TRANSPORTS = ("aio", "h2")
HTTP_TRANSPORTS = ("aiohttp", "h1")
GRPC_COMPRESSIONS = ("none", "gzip", "deflate")
EVENT_LOOPS = ("uvloop", "asyncio")
MALLOC_CHOICES = ("keep", "system")
CONTROL_MODES = ("none", "poll", "explicit")
POLL_SECONDS = 1.0
STREAMING_MODES = ("query_param", "header_param", "body_param")
LAST_PORT = 65535
MIB, GIB = 2**20, 2**30
NO_PORT = -1
AUTOMATIC = -1
LARGEST_TOTAL = 2 * GIB
MEMORY_SHARE = 4
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
_HOST_NAME = re.compile(r"\*|[^*:/\s]+")


def _parts(text: str) -> list[str]:
    """What an option lists with commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All options. Raises `ConfigError` for a value that an option cannot have."""

    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    grpc_port: int = _option(
        8001, "port for gRPC; 0 picks a free one, -1 opens none", least=NO_PORT, most=LAST_PORT
    )
    rest_port: int = _option(
        8000,
        "port for REST; 0 picks a free one, -1 is for no REST; with h2 it may be grpc_port, which takes both",
        least=NO_PORT,
        most=LAST_PORT,
    )
    grpc_socket: str = _option("", "path of a Unix socket for gRPC, besides the port")
    grpc_transport: str = _option(
        "h2",
        "what carries gRPC: h2, HTTP/2 of our own, for more calls a second; aio, grpc's own library",
        choices=GRPC_TRANSPORTS,
    )
    http_transport: str = _option(
        "h1",
        "what carries REST over HTTP/1.1: h1, of our own, for more calls a second; aiohttp, the library",
        choices=HTTP_TRANSPORTS,
    )
    workers: int = _option(
        1,
        "processes that share the ports, each with all the models and with limits, queues and caches of its own",
        least=1,
        most=MOST_WORKERS,
    )
    worker_timeout: float = _option(
        15.0, "seconds that a worker may neither answer nor compute before it is killed, and replaced; 0: any time"
    )
    event_loop: str = _option(
        EVENT_LOOPS[sys.platform == "win32"],
        "what waits for sockets: uvloop, or Python's own asyncio",
        choices=EVENT_LOOPS,
    )
    busy_poll: float = _option(
        0.0002,
        "seconds that the event loop stays awake after a gRPC answer, for the next call, if the last one came as "
        "soon and none is open: no core has to be woken for it then; 0: never, as where a quota limits CPU time; "
        "no effect over aio",
        most=1,
    )
    malloc: str = _option(
        "keep",
        "what becomes of large blocks of memory that are free: keep, they are used again, and given back when the "
        "server rests; system, what the C library does by itself. No effect with another library than glibc, or "
        "where its MALLOC_ variables are set",
        choices=MALLOC_CHOICES,
    )
    grpc_compression: str = _option(
        "none",
        "how answers over gRPC are compressed for clients that accept it, where that makes them much smaller",
        choices=GRPC_COMPRESSIONS,
    )
    tls_certificate: str = _option(
        "",
        "PEM file of the server's certificate, and of those that vouch for it, for TLS on every port; when it "
        "changes, new connections get the new one",
    )
    tls_key: str = _option("", "PEM file of the certificate's private key, without a passphrase")
    tls_client_ca: str = _option(
        "", "PEM file of certificates: only clients with one that these vouch for are served"
    )
    protocols: str = _option(
        ",".join(PROTOCOLS),
        f"protocols to serve, of {', '.join(PROTOCOLS)}, with commas; with kserve first, / is its liveness for "
        "clients that ask for no page",
    )
    server_name: str = _option("triglot", "name in the server metadata; some clients insist on theirs")
    platform_names: str = _option(
        "triton",
        "what KServe V2's metadata calls a model's platform: triton, as Triton does (onnxruntime_onnx); oip, as "
        "the Open Inference Protocol's own list does (onnx_onnxv1), where it has the platform",
        choices=("triton", "oip"),
    )
    typed_contents: bool = _option(
        False,
        "answer KServe V2's ModelInfer and ModelStreamInfer with typed contents in place of raw tensors, as "
        "MLServer does; a request's parameter typed_contents wins; FP16 and BF16 have none: such answers are raw",
    )
    max_message_size: int = _option(
        2**31 - 1, "largest request, in bytes, for gRPC and REST", least=1, most=2**31 - 1
    )
    max_json_size: int = _option(
        64 * MIB,
        "bytes of JSON in one REST request, inflated; binary tensors beside it do not count; while requests with "
        "more than 1 MiB of JSON hold half as many, others wait in their clients",
        least=1,
    )
    max_json_values: int = _option(
        8 * MIB,
        "values in the JSON of one REST request: a number in a list of numbers counts 1, any other value or key "
        "16, a list or an object 64",
        least=1,
    )
    max_connections: int = _option(0, "calls that may be open at a time, over gRPC and over REST; 0 sets no limit")
    max_sockets: int = _option(
        10_000,
        "connections that may be open at a time on one port, or fewer where the process may have few files; "
        "more are closed at once",
        least=1,
    )
    max_connection_age: float = _option(
        300.0,
        "seconds, give or take a tenth, after which a gRPC client is asked to connect anew, so that balancers can "
        "spread connections; 0: never",
    )
    max_connection_age_grace: float = _option(0.0, "seconds that calls which run then may take; 0 sets no limit")
    keepalive_time: float = _option(
        120.0, "seconds without a word, after which a gRPC client is asked whether it is still there; 0: never"
    )
    keepalive_timeout: float = _option(20.0, "seconds to wait for a keepalive reply")
    rest_timeout: float = _option(0.0, "seconds that a REST call may take; 0 sets no limit")
    default_timeout: float = _option(
        0.0, "seconds that a request for a model may take when its client sets no deadline; 0 sets no limit"
    )
    cors: bool = _option(
        False, "let web pages of any origin use TensorFlow Serving's REST interface, and read its answers"
    )
    allowed_origins: str = _option(
        "",
        "origins of web pages that may use REST as the server's own page may, like https://app.example:8443, with "
        "commas or each with a flag of its own; pages of others can neither infer nor change anything",
    )
    allowed_hosts: str = _option(
        "",
        "names that the Host header of REST requests may have besides localhost, host and addresses, with commas "
        "or each with a flag of its own, * for all; without any, a server that is not on loopback takes all",
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
    max_requested_instances: int = _option(
        0,
        "instances, each a thread or a process, that the configuration in a client's request to load a model may "
        "ask for, unless the model's own asks for more; 0: twice the CPUs, and 8 at least",
    )
    allow_model_upload: bool = _option(
        False,
        "let clients load models from files in their requests (file: parameters), which may be any code; on a "
        "loopback address only, with one worker and model_control_mode explicit",
    )
    load_timeout: float = _option(600.0, "seconds that loading a version may take; 0 sets no limit")
    load_retries: int = _option(
        0, "how often a version that could not be loaded is tried again, while its files stay as they are"
    )
    load_retry_interval: float = _option(60.0, "seconds from a load that failed to its next try; see load_retries")
    default_max_batch_size: int = _option(
        0, "max_batch_size, with dynamic batching, of ONNX models that say none (Triton's is 4); 0: not batched"
    )
    allow_symlinks: bool = _option(False, "let symbolic links in a repository lead out of it")
    allowed_model_roots: str = _option(
        "",
        "folders, with commas, that TensorFlow Serving's clients may have models loaded from by "
        "HandleReloadConfigRequest, besides the base paths of the start; / allows all",
    )
    wait_for_models: bool = _option(
        False,
        "at the start, wait with closed ports for models at paths that are missing or empty, instead of ending "
        "with an error; with model_control_mode poll",
    )
    labels_before_load: bool = _option(False, "let a new version label point to one that is not available yet")
    warm_up: bool = _option(
        True, "run a version's recorded requests, assets.extra/tf_serving_warmup_requests, before it takes calls"
    )
    monitoring_path: str = _option(
        "", "REST path of metrics in TensorFlow Serving's form; without one there are none", start="/"
    )
    named_predictions: str = _option(
        "",
        "models of one output whose predictions on AI Platform's paths are objects, by the output's name, also "
        "where the instances are bare values; with commas or each with a flag of its own, * for all",
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
    loop_lag_warning: float = _option(
        0.05,
        "seconds that a model's own code may hold the event loop before the log names it and /metrics count it; 0 "
        "sets no limit",
    )
    max_queue_size: int = _option(1024, "requests that may wait for one model", least=1)
    max_queue_bytes: int = _option(
        GIB, "bytes of requests that one model may hold, waiting or running; 0 sets no limit"
    )
    max_total_queue_size: int = _option(
        8192, "requests that all models may hold, waiting or running; 0 sets no limit"
    )
    max_total_queue_bytes: int = _option(
        AUTOMATIC,
        "bytes of requests that all models may hold, waiting or running, and as many that are being received or "
        "decoded; 0 sets no limit, -1 is a quarter of the memory that the machine or the container has, divided "
        "by workers, and 2 GiB at most",
        least=AUTOMATIC,
    )
    response_cache_bytes: int = _option(0, "bytes of answers to keep for equal requests, where models allow it")
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
        self._check_ports()
        self._check_browsers()
        if self.allow_model_upload and not self.on_loopback:
            raise ConfigError(
                f"allow_model_upload: expected a host on loopback, as clients may run any code, got {self.host}"
            )
        if self.allow_model_upload and self.workers > 1:
            raise ConfigError(f"allow_model_upload: needs workers 1, got {self.workers}")
        for name, value, mode in (
            ("poll_interval", self.poll_interval != POLL_SECONDS, "poll"),
            ("load_model", bool(self.load_model), "explicit"),
            ("wait_for_models", self.wait_for_models, "poll"),
            ("allow_model_upload", self.allow_model_upload, "explicit"),
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

    def _check_browsers(self) -> None:
        for origin in self.allowed_origin_list:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins: expected origins like https://app.example:8443, got {origin!r}"
                )
        for host in self.allowed_host_list:
            if not _HOST_NAME.fullmatch(host):
                raise ConfigError(f"allowed_hosts: expected names like app.example, without a port, got {host!r}")

    def _check_ports(self) -> None:
        if self.workers > 1 and self.grpc_socket:
            raise ConfigError(f"grpc_socket: needs workers 1, as it cannot be shared, got {self.workers}")
        if self.workers > 1 and not sys.platform.startswith("linux"):
            raise ConfigError(f"workers: expected 1, as only Linux shares a port fairly, got {self.workers}")
        if self.grpc_port == self.rest_port > 0 and not self.rest_with_grpc:
            raise ConfigError(
                f"grpc_port and rest_port are both {self.grpc_port}; expected two ports, or grpc_transport h2"
            )
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ConfigError("expected both tls_certificate and tls_key, or neither, got one of them")
        if self.tls_client_ca and not self.tls_certificate:
            raise ConfigError("tls_client_ca: needs tls_certificate and tls_key")
        if self.grpc_port == self.rest_port == NO_PORT and not self.grpc_socket:
            raise ConfigError(
                "grpc_port and rest_port are both -1, and there is no grpc_socket; expected one of them"
            )

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
        return tuple(_parts(self.load_model))

    @property
    def named_prediction_models(self) -> frozenset[str]:
        """The names in `named_predictions`."""
        return frozenset(_parts(self.named_predictions))

    @property
    def model_roots(self) -> list[Path]:
        """The folders in `allowed_model_roots`."""
        return [Path(part) for part in _parts(self.allowed_model_roots)]

    @property
    def allowed_origin_list(self) -> tuple[str, ...]:
        """The origins in `allowed_origins`, as browsers write them."""
        return tuple(origin.lower().rstrip("/") for origin in _parts(self.allowed_origins))

    @property
    def allowed_host_list(self) -> tuple[str, ...]:
        """The names in `allowed_hosts`, in lower case."""
        return tuple(name.lower() for name in _parts(self.allowed_hosts))

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def rest_with_grpc(self) -> bool:
        """Whether REST has no port of its own, and gRPC's takes its calls."""
        return self.rest_port == self.grpc_port > 0 and self.grpc_transport == "h2"

    @property
    def first_protocol(self) -> str:
        """The protocol that is named first."""
        return self.protocols.partition(",")[0].strip()

    def total_queue_bytes(self, memory: int | None) -> int:
        """What `max_total_queue_bytes` comes to with so much memory; None: that is not known."""
        if self.max_total_queue_bytes != AUTOMATIC:
            return self.max_total_queue_bytes
        return LARGEST_TOTAL if memory is None else min(memory // MEMORY_SHARE // self.workers, LARGEST_TOTAL)

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
