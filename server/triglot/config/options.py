"""The server's options, each declared once: flags, environment variables and TOML keys derive from the fields."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from triglot.config.metrics_config import MetricsConfig, read_metrics_config
from triglot.config.option_fields import is_loopback, option, problem_of, unknown
from triglot.config.trace_config import (
    LEVELS,
    MOST,
    TRITON,
    TraceConfig,
    least_of,
    levels_of,
    with_triton_config,
)
from triglot.parts import PROTOCOLS

ENVIRONMENT_PREFIX = "TRIGLOT_"
ANY_HOST = "0.0.0.0"


class ConfigError(ValueError):
    """Raised when an option is unknown or has an invalid value."""


NETWORK, TLS, ACCESS, PROTOCOL, GRPS = "network", "TLS", "access", "protocols", "grps"
MODELS, SCHEDULING, LIMITS = "models", "scheduling", "limits of one request"
CONNECTIONS, SHUTDOWN, PROCESSES, RAY = "connections", "shutdown", "processes", "Ray"
PERFORMANCE, LOGS, METRICS, TRACES, RECORDS = "performance", "logs", "metrics", "traces", "request records"
REPEATED = (
    "load_model",
    "tensorflow_op_libraries",
    "named_predictions",
    "vertex_endpoints",
    "allowed_origins",
    "allowed_hosts",
    "grpc_restricted_protocol",
    "http_restricted_api",
    "metrics_config",
    "trace_config",
)
"""Lists whose flag may be repeated, as in Triton; the values are joined."""
LOG_LEVELS = ("debug", "info", "warning", "error")
MAX_WORKERS = 1024
CLIENT_AUTH = ("none", "optional", "required")
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
STORAGE_BYTES = 20 * GIB
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
_ATTRIBUTE = re.compile(r"[a-z0-9]+")
_EVENTS_OWN = ("id", "type", "time", "specversion", "datacontenttype", "data", "metadata")
"""Attributes that each event has of its own."""
_HOST_NAME = re.compile(r"\*|[^*:/\s]+")


def _items(text: str) -> list[str]:
    """Return the items of a comma-separated list."""
    return [part.strip() for part in text.split(",") if part.strip()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All options. Raise `ConfigError` for invalid values, and for options that contradict each other."""

    host: str = option(NETWORK, "127.0.0.1", "address to listen on; 0.0.0.0 for every interface", value="ADDRESS")
    grpc_port: int = option(
        NETWORK,
        8001,
        "port for gRPC; 0: any free port, -1: none",
        value="PORT",
        least=NO_PORT,
        most=LAST_PORT,
    )
    rest_port: int = option(
        NETWORK,
        8000,
        "port for REST; 0: any free port, -1: none; with --grpc-transport h2 it may be the same as --grpc-port",
        value="PORT",
        least=NO_PORT,
        most=LAST_PORT,
    )
    grpc_socket: str = option(NETWORK, "", "Unix socket for gRPC, in addition to the port", value="PATH")
    allowed_hosts: str = option(
        NETWORK,
        "",
        "names accepted in the Host header of REST requests, besides localhost, --host and IP addresses; * for "
        "all; empty on a host that is not loopback: all",
        value="NAME,...",
    )
    allowed_origins: str = option(
        NETWORK,
        "",
        "origins of web pages that may use REST, like https://app.example:8443; pages of other origins can "
        "neither infer nor change anything",
        value="URL,...",
    )
    cors: bool = option(
        NETWORK, False, "let web pages of any origin use TensorFlow Serving's REST interface, and read its answers"
    )
    tls_certificate: str = option(
        TLS,
        "",
        "PEM file of the server's certificate chain, for TLS on every port; read again when it changes",
        value="FILE",
    )
    tls_key: str = option(TLS, "", "PEM file of the certificate's private key, without a passphrase", value="FILE")
    tls_client_ca: str = option(
        TLS,
        "",
        "PEM file of CA certificates, which sign those that clients need; read again when it changes",
        value="FILE",
    )
    tls_client_auth: str = option(
        TLS,
        "",
        "whether clients need a certificate of --tls-client-ca; optional: those without, like Kubernetes' health "
        "probes, are anonymous to --access; empty: required with --tls-client-ca, none without",
        choices=CLIENT_AUTH,
    )
    tls_in_front: bool = option(
        TLS, False, "a proxy speaks TLS with the clients, so that they may send tokens to this server without it"
    )
    access: str = option(
        ACCESS, "", "TOML file that says which clients may do what; read again when it changes", value="FILE"
    )
    audit_log: str = option(
        ACCESS, "", "file for one JSON line for each administrative call and each refusal", value="FILE"
    )
    audit_required: bool = option(
        ACCESS,
        False,
        "an administrative call needs a line in --audit-log before it begins, and is refused if there can be none",
    )
    grpc_restricted_protocol: str = option(
        ACCESS,
        "",
        "Triton's groups of gRPC calls that need the header triton-grpc-protocol-KEY: SECRET",
        value="GROUP,...:KEY=SECRET",
    )
    http_restricted_api: str = option(
        ACCESS,
        "",
        "Triton's groups of REST calls that need the header KEY: SECRET",
        value="GROUP,...:KEY=SECRET",
    )
    protocols: str = option(
        PROTOCOL,
        ",".join(PROTOCOLS),
        f"protocols to serve, of {', '.join(PROTOCOLS)}, or MODULE:FUNCTION of another package; with kserve "
        "first, / answers liveness checks that do not ask for HTML",
        value="NAME,...",
    )
    server_name: str = option(
        PROTOCOL, "triglot", "server name in the metadata; some clients expect a certain one", value="NAME"
    )
    platform_names: str = option(
        PROTOCOL,
        "triton",
        "platform names in KServe V2's metadata: Triton's (onnxruntime_onnx), or the Open Inference Protocol's "
        "(onnx_onnxv1) where it has the platform",
        choices=("triton", "oip"),
    )
    typed_contents: bool = option(
        PROTOCOL,
        False,
        "answer KServe V2's ModelInfer and ModelStreamInfer with typed contents instead of raw tensors, as "
        "MLServer does; the request parameter typed_contents takes precedence; answers with FP16 or BF16 stay raw",
    )
    mlflow_casts: bool = option(
        PROTOCOL,
        False,
        "convert numbers and text of MLflow's /invocations to the type of their column as MLflow does: fractions "
        "are cut, integers wrap around; otherwise a number that would change is an error",
    )
    tensor_content: bool = option(
        PROTOCOL, False, "answer TensorFlow Serving's Predict with tensor_content instead of typed fields"
    )
    named_predictions: str = option(
        PROTOCOL,
        "",
        "models with one output whose AI Platform predictions are objects keyed by the output's name, even where "
        "the instances are bare values; * for all",
        value="NAME,...",
    )
    vertex_endpoints: str = option(
        PROTOCOL,
        "",
        "models that Vertex AI's clients call by an endpoint's id; an endpoint that is not listed is the model of "
        "that name",
        value="ENDPOINT=MODEL[/VERSION],...",
    )
    predict_route: str = option(
        PROTOCOL,
        "",
        "additional REST path for predictions; Vertex AI sets it as AIP_PREDICT_ROUTE",
        value="PATH",
        start="/",
    )
    health_route: str = option(
        PROTOCOL,
        "",
        "additional REST path for readiness; Vertex AI sets it as AIP_HEALTH_ROUTE",
        value="PATH",
        start="/",
    )
    monitoring_path: str = option(
        PROTOCOL, "", "REST path of metrics in TensorFlow Serving's format; empty: none", value="PATH", start="/"
    )
    shared_memory_prefix: str = option(
        PROTOCOL,
        "",
        "prefix of the shared memory keys that clients may register; / allows all keys; empty: no shared memory",
        value="PREFIX",
        start="/",
    )
    default_model: str = option(
        GRPS, "", "model for grps calls that name none; empty: the only model that is served", value="NAME"
    )
    grps_online: bool = option(
        GRPS, False, "report ready to grps clients from the start, without a call of Online"
    )
    grps_http_errors: str = option(
        GRPS,
        "mirror",
        "HTTP status of grps errors: the code in the body (mirror), or always 200",
        choices=("mirror", "always_200"),
    )
    grps_path: str = option(GRPS, "", "additional REST path for grps' predict", value="PATH", start="/")
    grps_customized_body: bool = option(
        GRPS, False, "pass HTTP requests on grps' predict paths to the model unchanged, and its answers back"
    )
    grps_streaming_mode: str = option(
        GRPS, "query_param", "where an HTTP request asks for a stream", choices=STREAMING_MODES
    )
    grps_streaming_key: str = option(
        GRPS, "streaming", "name of the parameter or header that asks for a stream", value="NAME"
    )
    grps_streaming_content_type: str = option(
        GRPS, "application/octet-stream", "content type of grps' HTTP streams", value="TYPE"
    )
    model_control_mode: str = option(
        MODELS,
        "none",
        "which models are served: those found at the start (none), those found every --poll-interval (poll), or "
        "those of --load-model and what clients load and unload (explicit)",
        choices=CONTROL_MODES,
    )
    poll_interval: float = option(
        MODELS,
        POLL_SECONDS,
        "time between two scans for new, changed or removed versions, with --model-control-mode poll; 0: one, at "
        "the start",
    )
    load_model: str = option(
        MODELS, "", "models to load at the start, with --model-control-mode explicit; * for all", value="NAME,..."
    )
    load_on_demand: bool = option(
        MODELS,
        False,
        "load each model with its first call, and at the start none but those of --load-model, which stay; means "
        "--model-control-mode explicit",
    )
    max_loaded_models: int = option(
        MODELS,
        0,
        "models in memory, with --load-on-demand; to load another, the least recently used one that is idle is "
        "unloaded; 0: no limit",
    )
    max_model_memory: int = option(
        MODELS,
        0,
        "bytes of the models in memory, with --load-on-demand: for each, those of its files, or those by which "
        "memory grew when it was loaded; 0: no limit",
        value="BYTES",
    )
    allow_model_upload: bool = option(
        MODELS,
        False,
        "let clients load models from files in their requests (file: parameters), which may contain any code; "
        "needs a loopback host, one worker and --model-control-mode explicit",
    )
    build_environments: str = option(
        MODELS,
        "never",
        "when to build the Python environment that a model in MLflow's format describes, with pip, for a process "
        "of its own: when the server starts, or always, also when a client loads the model",
        choices=("never", "start", "always"),
    )
    model_signatures: str = option(
        MODELS,
        "off",
        "whether models need a signature (OpenSSF Model Signing): a wrong or missing one is an error or a warning",
        choices=("off", "warn", "require"),
    )
    model_signing_keys: str = option(
        MODELS, "", "PEM files with public keys whose signatures count", value="FILE,..."
    )
    model_signing_ca: str = option(
        MODELS, "", "PEM files with the authorities of certificates whose signatures count", value="FILE,..."
    )
    model_signing_identity: str = option(
        MODELS,
        "",
        "identity whose Sigstore signatures count, and its issuer's address",
        value="IDENTITY,ISSUER",
    )
    allow_symlinks: bool = option(MODELS, False, "follow symbolic links that lead out of a repository")
    allowed_model_roots: str = option(
        MODELS,
        "",
        "folders and URLs that TensorFlow Serving's clients may name in HandleReloadConfigRequest, besides the "
        "base paths given at the start; / allows all folders",
        value="FOLDER,...",
    )
    load_timeout: float = option(MODELS, 600.0, "longest time that loading a version may take; 0: no limit")
    load_retries: int = option(
        MODELS, 0, "how many times a version that failed to load is tried again while its files stay the same"
    )
    load_retry_interval: float = option(
        MODELS, 60.0, "time between a failed load and the next try, with --load-retries"
    )
    exit_on_load_error: bool = option(
        MODELS, True, "exit if a model fails to load at the start, instead of staying not ready"
    )
    strict_readiness: bool = option(
        MODELS, True, "the server is ready only if every model is; without it, once it answers"
    )
    wait_for_models: bool = option(
        MODELS,
        False,
        "wait, with closed ports, for models at paths that are missing or empty, instead of exiting; with "
        "--model-control-mode poll",
    )
    labels_before_load: bool = option(
        MODELS, False, "let a new version label point to a version not yet available"
    )
    tensorflow_op_libraries: str = option(
        MODELS,
        "",
        "shared libraries with operations that SavedModels use, besides those of TensorFlow, tensorflow-text and "
        "TensorFlow Decision Forests",
        value="FILE,...",
    )
    warm_up: bool = option(
        MODELS,
        True,
        "run a version's recorded requests (assets.extra/tf_serving_warmup_requests) before it serves",
    )
    max_requested_instances: int = option(
        MODELS,
        0,
        "most instances (threads or processes) that the configuration in a client's load request may ask for, "
        "unless the model's own configuration asks for more; 0: twice the CPUs, and at least 8",
    )
    max_requested_batch_size: int = option(
        MODELS, 65_536, "largest max_batch_size that such a configuration may ask for, likewise", least=1
    )
    max_requested_sequences: int = option(
        MODELS,
        4096,
        "most open sequences on each instance (max_candidate_sequences, or max_batch_size) that such a "
        "configuration may ask for, likewise",
        least=1,
    )
    max_requested_entries: int = option(
        MODELS,
        10_000,
        "most entries in all lists and tables of such a configuration (inputs, dims, versions, parameters and so "
        "on), likewise, and of the one in a HandleReloadConfigRequest",
        least=1,
    )
    max_requested_warm_up_runs: int = option(
        MODELS,
        1000,
        "most runs of warm-up requests (all counts of model_warmup together) that such a configuration may ask "
        "for, likewise",
        least=1,
    )
    max_requested_bytes: int = option(
        MODELS,
        256 * MIB,
        "most bytes that such a configuration may ask for in the tensors of one warm-up request, and in the "
        "states of one sequence, likewise",
        value="BYTES",
        least=1,
    )
    storage_cache: str = option(
        MODELS,
        "",
        "folder for what is downloaded of models at URLs; several servers may share it; empty: "
        "$XDG_CACHE_HOME/triglot or ~/.cache/triglot, and where that cannot be written a folder in /tmp",
        value="FOLDER",
    )
    storage_cache_bytes: int = option(
        MODELS,
        STORAGE_BYTES,
        "size of that folder above which unused objects are removed, least recently used first; 0: no limit",
        value="BYTES",
    )
    default_max_batch_size: int = option(
        SCHEDULING,
        0,
        "max_batch_size, with dynamic batching, of ONNX models that set none (Triton's is 4); 0: no batching",
    )
    max_queue_size: int = option(
        SCHEDULING,
        1024,
        "most requests queued for one model; one ModelStreamInfer stream is read until its open requests take "
        "three quarters of this, or of a limit below",
        least=1,
    )
    max_queue_bytes: int = option(
        SCHEDULING, GIB, "most bytes of requests, queued or running, of one model; 0: no limit", value="BYTES"
    )
    max_total_queue_size: int = option(
        SCHEDULING, 8192, "most requests, queued or running, of all models; 0: no limit"
    )
    max_total_queue_bytes: int = option(
        SCHEDULING,
        AUTOMATIC,
        "most bytes of requests, queued or running, of all models, and again as many being received or decoded; "
        "0: no limit; -1: a quarter of the machine's or container's memory, divided by --workers, up to 2 GiB",
        value="BYTES",
        least=AUTOMATIC,
    )
    max_inner_calls: int = option(
        SCHEDULING,
        10_000,
        "most calls of models to other models, steps of ensembles included, on behalf of one request; 0: no limit",
    )
    max_unread_bytes: int = option(
        SCHEDULING,
        64 * MIB,
        "bytes of a request's responses kept for a client that does not read its stream while others need the "
        "model's thread; above it, the call ends with RESOURCE_EXHAUSTED; above it, too, the requests of a "
        "ModelStreamInfer stream are not read",
        value="BYTES",
        least=1,
    )
    response_cache_bytes: int = option(
        SCHEDULING, 0, "size of the cache of answers to equal requests, for models that allow it", value="BYTES"
    )
    max_message_size: int = option(
        LIMITS, 2**31 - 1, "largest request, over gRPC and REST", value="BYTES", least=1, most=2**31 - 1
    )
    max_json_size: int = option(
        LIMITS,
        64 * MIB,
        "most JSON in one REST request, decompressed; binary tensors do not count; while requests with more than "
        "1 MiB of JSON hold half of this, others wait to be received",
        value="BYTES",
        least=1,
    )
    max_json_values: int = option(
        LIMITS,
        8 * MIB,
        "most values in the JSON of one REST request: a number in a list of numbers counts 1, any other value or "
        "key 16, a list or an object 64",
        least=1,
    )
    default_timeout: float = option(LIMITS, 0.0, "deadline of model requests whose client sets none; 0: no limit")
    rest_timeout: float = option(LIMITS, 0.0, "deadline of REST calls; 0: no limit")
    max_connections: int = option(CONNECTIONS, 0, "most open calls, over gRPC and over REST each; 0: no limit")
    max_sockets: int = option(
        CONNECTIONS,
        10_000,
        "most open connections on one port, fewer if the process may open few files; more are closed",
        least=1,
    )
    max_connection_age: float = option(
        CONNECTIONS,
        300.0,
        "age, plus or minus 10 %, at which gRPC clients are asked to reconnect, so that load balancers can spread "
        "them; 0: never",
    )
    max_connection_age_grace: float = option(
        CONNECTIONS, 0.0, "time that calls then running on the connection may take; 0: no limit"
    )
    keepalive_time: float = option(
        CONNECTIONS, 120.0, "idle time after which the server pings a gRPC client; 0: never"
    )
    keepalive_timeout: float = option(CONNECTIONS, 20.0, "time to wait for a keepalive reply")
    rest_keepalive_time: float = option(
        CONNECTIONS,
        650.0,
        "idle time after which a REST connection over HTTP/1.1 is closed; longer than a proxy in front keeps it",
        least=0.1,
    )
    grpc_compression: str = option(
        CONNECTIONS,
        "none",
        "compression of gRPC answers, for clients that accept it and answers that shrink a lot",
        choices=GRPC_COMPRESSIONS,
    )
    drain_delay: float = option(
        SHUTDOWN, 5.0, "time on SIGTERM between becoming not ready and closing the ports, for load balancers"
    )
    grace: float = option(SHUTDOWN, 20.0, "time that running calls have to finish when the server stops")
    workers: int = option(
        PROCESSES,
        1,
        "processes that share the ports, each with all models and its own limits, queues and caches",
        least=1,
        most=MAX_WORKERS,
    )
    worker_timeout: float = option(
        PROCESSES,
        15.0,
        "time that a worker may neither respond nor use CPU before it is killed and replaced; 0: no limit",
    )
    ray_address: str = option(
        RAY,
        "auto",
        "Ray cluster of models with execution 'ray': HOST:PORT; auto: the one that this machine is a node of; "
        "local: a new one, which ends with the server",
        value="ADDRESS",
    )
    grpc_transport: str = option(
        PERFORMANCE,
        "h2",
        "gRPC implementation: Triglot's own HTTP/2 (h2), which serves more calls a second, or grpcio (aio)",
        choices=GRPC_TRANSPORTS,
    )
    http_transport: str = option(
        PERFORMANCE,
        "h1",
        "HTTP/1.1 implementation: Triglot's own (h1), which serves more calls a second, or aiohttp",
        choices=HTTP_TRANSPORTS,
    )
    event_loop: str = option(
        PERFORMANCE,
        EVENT_LOOPS[0],
        "event loop: uvloop, or the standard library's asyncio",
        choices=EVENT_LOOPS,
    )
    busy_poll: float = option(
        PERFORMANCE,
        0.0002,
        "time that the event loop polls for the next call after a gRPC answer, if calls come one after another: "
        "saves waking a core; 0: never, for containers with a CPU quota; no effect with --grpc-transport aio",
        most=1,
    )
    malloc: str = option(
        PERFORMANCE,
        "keep",
        "free large blocks of memory: reuse them, and return them to the system when the server is idle (keep), "
        "or leave it to the C library (system); no effect without glibc, or if its MALLOC_ variables are set",
        choices=MALLOC_CHOICES,
    )
    debug: bool = option(
        LOGS,
        False,
        "answer an exception of a model's own code with its text and last frames, for development; --reload on a "
        "loopback address implies it",
    )
    log_level: str = option(LOGS, "info", "least severe level to log", choices=LOG_LEVELS)
    log_verbose_level: int = option(
        LOGS, 0, "1 or more: log a line for each request, health checks too", most=2**32 - 1
    )
    log_format: str = option(
        LOGS,
        "default",
        "format of the log: lines of text with the local time (default) or UTC (ISO8601), or JSON objects (json)",
        choices=("default", "ISO8601", "json"),
    )
    access_log: bool = option(
        LOGS, False, "log a line for each request, except health checks and reads of /metrics that succeed"
    )
    log_file: str = option(LOGS, "", "file to log to, instead of standard error", value="FILE")
    loop_lag_warning: float = option(
        LOGS,
        0.05,
        "time that a model's code may block the event loop before the log names the model and /metrics counts it; "
        "0: no limit",
    )
    metrics_config: str = option(
        METRICS,
        "",
        "Triton's latency metrics: histogram_latencies=true and summary_latencies=true add the histogram of first "
        "responses and the summaries, with summary_quantiles=QUANTILE:ERROR,...; counter_latencies=false leaves "
        "the counters of durations out",
        value="SETTING,...",
    )
    metrics_port: int = option(
        METRICS,
        NO_PORT,
        "port on which /metrics is served, too; 0: any free one, -1: only the REST port",
        value="PORT",
        least=NO_PORT,
        most=LAST_PORT,
    )
    mlserver_metrics: bool = option(
        METRICS, False, "export MLServer's metrics, too: model_infer_request_*, rest_server_*, grpc_server_*"
    )
    trace_file: str = option(TRACES, "", "file to write traces of requests to; empty: no traces", value="FILE")
    trace_level: str = option(
        TRACES, "OFF", f"what to trace: OFF, or one or both of {', '.join(LEVELS)}", value="LEVEL,..."
    )
    trace_rate: int = option(TRACES, 1000, "trace one request in N", least=least_of("rate", TRITON), most=MOST)
    trace_count: int = option(
        TRACES, -1, "most requests to trace; -1: no limit", least=least_of("count", TRITON), most=MOST
    )
    trace_log_frequency: int = option(
        TRACES,
        0,
        "traces in one file: the files are --trace-file with .0, .1 and so on; 0: one file",
        least=least_of("log-frequency", TRITON),
        most=MOST,
    )
    trace_config: str = option(
        TRACES,
        "",
        "the same in the form of Triton's flag of this name; mode=opentelemetry exports spans to url=URL, as "
        "OpenTelemetry's environment variables do",
        value="KEY=SETTING,...",
    )
    request_log: str = option(
        RECORDS,
        "",
        "record requests and their answers in the files PREFIX-00001.tfrecord and so on, which warm up later "
        "versions and can be replayed; empty: none, unless a model's logging_config says so",
        value="PREFIX",
    )
    request_log_rate: float = option(
        RECORDS, 1.0, "share of the requests to record, each chosen by chance", value="SHARE", most=1
    )
    request_log_file_size: int = option(
        RECORDS,
        64 * MIB,
        "size at which the next file begins; a file has at most 1000 records, which is the limit of a warm-up",
        value="BYTES",
        least=1,
    )
    request_log_files: int = option(
        RECORDS, 10, "files to keep of each PREFIX, and of each of the --workers; older ones are deleted; 0: all"
    )
    shadow_samples: str = option(
        RECORDS,
        "",
        "record requests that a model's shadow answers otherwise, with the answer that the client got, in files "
        "as those of --request-log",
        value="PREFIX",
    )
    payload_log: str = option(
        RECORDS,
        "",
        "send requests and responses as CloudEvents, as KServe's logger does, to this http:// or https:// URL, or "
        "append them to this file",
        value="URL",
    )
    payload_log_rate: float = option(
        RECORDS, 1.0, "share of the requests to send, each chosen by chance", value="SHARE", most=1
    )
    payload_log_batch: int = option(
        RECORDS,
        1,
        "most events in one request to the URL; 1: each in one of its own, in binary mode",
        value="EVENTS",
        least=1,
        most=1000,
    )
    payload_log_attributes: str = option(
        RECORDS,
        "",
        "attributes of all events, such as source, inferenceservicename (the model's name, if it is not set), "
        "namespace, component, endpoint and annotations",
        value="NAME=VALUE,...",
    )
    payload_log_metadata: str = option(
        RECORDS,
        "",
        "headers or metadata of the requests to send in the attribute metadata; those with credentials do not "
        "belong there",
        value="NAME,...",
    )

    def __post_init__(self) -> None:
        for name in OPTIONS:
            check_option(name, getattr(self, name), name)
        self._check_ports()
        self._check_tls()
        self._check_browsers()
        self._check_signers()
        if self.allow_model_upload and not self.on_loopback:
            raise ConfigError(
                f"allow_model_upload: expected a host on loopback, as clients may run any code, got {self.host}"
            )
        if self.allow_model_upload and self.workers > 1:
            raise ConfigError(f"allow_model_upload: needs workers 1, got {self.workers}")
        self._check_on_demand()
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
            # One of another package is named by its import string.
            if name not in PROTOCOLS and ":" not in name:
                raise ConfigError(
                    f"protocols: {unknown(name, PROTOCOLS, 'protocol')}; there are {', '.join(PROTOCOLS)}"
                )

        try:
            self.traces.check()
        except ValueError as error:
            raise ConfigError(str(error)) from None
        try:
            read_metrics_config(self.metrics_config)
        except ValueError as error:
            raise ConfigError(f"metrics_config: {error}") from None

        self.endpoint_models  # noqa: B018 - it checks the list.
        self.payload_attributes  # noqa: B018 - it checks them.
        if "://" in self.payload_log and not re.match("https?://[^/]", self.payload_log):
            raise ConfigError(
                f"payload_log: expected http://HOST, https://HOST or a file, got {self.payload_log!r}"
            )
        if self.request_log.endswith("/"):
            raise ConfigError(
                f"request_log: expected a name to begin with after the folder, got {self.request_log!r}"
            )

    def _check_on_demand(self) -> None:
        for name in () if self.load_on_demand else ("max_loaded_models", "max_model_memory"):
            if getattr(self, name):
                raise ConfigError(f"{name}: only with load_on_demand")
        if not self.load_on_demand:
            return
        if self.model_control_mode == "poll":
            raise ConfigError("load_on_demand: expected model_control_mode explicit, got poll")
        if "*" in self.models_to_load:
            raise ConfigError("load_model: expected names with load_on_demand, got *")
        object.__setattr__(self, "model_control_mode", "explicit")

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
        if self.metrics_port > 0 and self.metrics_port in (self.grpc_port, self.rest_port):
            raise ConfigError(
                f"metrics_port: expected a port of its own, got {self.metrics_port}, as of another port"
            )
        if self.grpc_port == self.rest_port == NO_PORT and not self.grpc_socket:
            raise ConfigError(
                "grpc_port and rest_port are both -1, and there is no grpc_socket; expected one of them"
            )

    def _check_tls(self) -> None:
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ConfigError("expected both tls_certificate and tls_key, or neither, got one of them")
        if self.tls_client_ca and not self.tls_certificate:
            raise ConfigError("tls_client_ca: needs tls_certificate and tls_key")
        if self.client_auth == "none":
            if self.tls_client_ca:
                raise ConfigError("tls_client_auth: expected no tls_client_ca with none, got one")
            return
        if not self.tls_client_ca:
            raise ConfigError(f"tls_client_auth: {self.client_auth} needs tls_client_ca")
        if self.client_auth == "optional":
            if not self.access:
                raise ConfigError(
                    "tls_client_auth: optional needs access, which says what clients without a certificate may do"
                )
            if self.grpc_transport == "aio" and self.grpc_port != NO_PORT:
                raise ConfigError(
                    "tls_client_auth: optional needs grpc_transport h2, as aio can only ask for what it requires"
                )

    @property
    def traces(self) -> TraceConfig:
        """The trace options combined. Raise `ValueError`."""
        own = TraceConfig(
            level=levels_of(self.trace_level),
            rate=self.trace_rate,
            count=self.trace_count,
            file=self.trace_file,
            frequency=self.trace_log_frequency,
        )
        return with_triton_config(own, self.trace_config)

    @property
    def latency_metrics(self) -> MetricsConfig:
        """The latency metrics in `metrics_config`."""
        return read_metrics_config(self.metrics_config)

    @property
    def protocol_names(self) -> frozenset[str]:
        """The names in `protocols`."""
        return frozenset(name.strip() for name in self.protocols.split(","))

    @property
    def served_protocols(self) -> list[str]:
        """The names in `protocols`: the server's own in the order of its table, then those of other packages."""
        names = self.protocol_names
        return [*(name for name in PROTOCOLS if name in names), *sorted(names.difference(PROTOCOLS))]

    @property
    def models_to_load(self) -> tuple[str, ...]:
        """The names in `load_model`."""
        return tuple(_items(self.load_model))

    @property
    def named_prediction_models(self) -> frozenset[str]:
        """The names in `named_predictions`."""
        return frozenset(_items(self.named_predictions))

    @property
    def endpoint_models(self) -> dict[str, str]:
        """The models in `vertex_endpoints` by endpoint, each NAME or NAME/VERSION. Raise `ConfigError`."""
        models: dict[str, str] = {}
        for item in _items(self.vertex_endpoints):
            endpoint, _, model = (part.strip() for part in item.partition("="))
            if not endpoint or not model or endpoint in models:
                raise ConfigError(
                    f"vertex_endpoints: expected ENDPOINT=MODEL or ENDPOINT=MODEL/VERSION, each endpoint once, "
                    f"got {item!r}"
                )
            models[endpoint] = model
        return models

    @property
    def payload_attributes(self) -> dict[str, str]:
        """The attributes of payload events, with KServe's names. Raise `ConfigError`."""
        attributes = {"source": "triglot", "namespace": "", "component": "predictor", "endpoint": ""}
        attributes["annotations"] = "{}"
        for item in _items(self.payload_log_attributes):
            name, equals, value = item.partition("=")
            if not equals or not _ATTRIBUTE.fullmatch(name) or name in _EVENTS_OWN:
                raise ConfigError(
                    "payload_log_attributes: expected NAME=VALUE, with lower-case letters and digits in the name, "
                    f"which is none of {', '.join(_EVENTS_OWN)}, got {item!r}"
                )
            attributes[name] = value
        return attributes

    @property
    def payload_metadata(self) -> tuple[str, ...]:
        """The names in `payload_log_metadata`, in lower case."""
        return tuple(name.lower() for name in _items(self.payload_log_metadata))

    @property
    def model_roots(self) -> list[Path]:
        """The folders in `allowed_model_roots`."""
        return [Path(part) for part in _items(self.allowed_model_roots)]

    @property
    def rest_timeout_source(self) -> str:
        """What errors call `rest_timeout`."""
        return f"the server's rest_timeout of {self.rest_timeout:g} seconds"

    def _check_signers(self) -> None:
        if self.model_signatures == "off":
            return
        for name, files in (
            ("model_signing_keys", self.signing_keys),
            ("model_signing_ca", self.signing_authorities),
        ):
            for file in files:
                if not file.is_file():
                    raise ConfigError(f"{name}: {file}: no such file")
        if self.model_signing_identity and len(self.model_signing_identity.split(",")) != 2:
            raise ConfigError(
                f"model_signing_identity: expected IDENTITY,ISSUER, got {self.model_signing_identity!r}"
            )
        if not (self.model_signing_keys or self.model_signing_ca or self.model_signing_identity):
            raise ConfigError(
                f"model_signatures {self.model_signatures}: expected model_signing_keys, model_signing_ca or "
                "model_signing_identity, which say whose signatures count; got none"
            )

    @property
    def signing_keys(self) -> list[Path]:
        """The files in `model_signing_keys`."""
        return [Path(part) for part in _items(self.model_signing_keys)]

    @property
    def signing_authorities(self) -> list[Path]:
        """The files in `model_signing_ca`."""
        return [Path(part) for part in _items(self.model_signing_ca)]

    @property
    def op_libraries(self) -> list[Path]:
        """The files in `tensorflow_op_libraries`."""
        return [Path(part) for part in _items(self.tensorflow_op_libraries)]

    @property
    def allowed_origin_list(self) -> tuple[str, ...]:
        """The origins in `allowed_origins`, as browsers write them."""
        return tuple(origin.lower().rstrip("/") for origin in _items(self.allowed_origins))

    @property
    def allowed_host_list(self) -> tuple[str, ...]:
        """The names in `allowed_hosts`, in lower case."""
        return tuple(name.lower() for name in _items(self.allowed_hosts))

    @property
    def rotated_files(self) -> bool:
        """Whether the server writes files that log rotation renames, and may send SIGHUP for."""
        return bool(self.audit_log or self.log_file)

    @property
    def on_loopback(self) -> bool:
        """Whether the server listens on loopback only."""
        return is_loopback(self.host)

    @property
    def only_known_connect(self) -> bool:
        """Whether only this machine's processes, or clients with a certificate, can connect."""
        return self.on_loopback or bool(self.tls_client_ca)

    @property
    def client_auth(self) -> str:
        """`tls_client_auth`, or its default if that is empty."""
        return self.tls_client_auth or ("required" if self.tls_client_ca else "none")

    @property
    def rest_with_grpc(self) -> bool:
        """Whether REST shares the port of gRPC."""
        return self.rest_port == self.grpc_port > 0 and self.grpc_transport == "h2"

    @property
    def first_protocol(self) -> str:
        """The first name in `protocols`."""
        return self.protocols.partition(",")[0].strip()

    def total_queue_bytes(self, memory: int | None) -> int:
        """Return the limit in bytes; -1 becomes a share of `memory`, which is None if unknown."""
        if self.max_total_queue_bytes != AUTOMATIC:
            return self.max_total_queue_bytes
        return LARGEST_TOTAL if memory is None else min(memory // MEMORY_SHARE // self.workers, LARGEST_TOTAL)

    def address(self, port: int) -> str:
        """Return `host:port`, with an IPv6 host in brackets."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    def local_address(self, port: int) -> str:
        """Return the address for local clients: `address`, or loopback if the server listens everywhere."""
        return f"127.0.0.1:{port}" if self.host in (ANY_HOST, "::") else self.address(port)


OPTIONS = {option.name: option for option in fields(Config)}
"""The fields of `Config` by name."""
GRPC_ADDRESS = f"{OPTIONS['host'].default}:{OPTIONS['grpc_port'].default}"
"""What the client commands connect to without `--url`."""


def check_option(name: str, value: Any, source: str) -> None:
    """Raise `ConfigError`, beginning with `source`, for a value that the option cannot have."""
    if problem := problem_of(OPTIONS[name], value):
        raise ConfigError(f"{source}: {problem}")
