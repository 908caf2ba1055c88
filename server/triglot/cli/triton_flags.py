"""Hints for flags of Triton's `tritonserver`: what `triglot serve` has instead."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_REPOSITORY = "the repository is an argument: triglot serve PATH"
_ONE_ADDRESS = "--host is the address of all ports"
_CERTIFICATE = "--tls-certificate and --tls-key, for all ports"
_CLIENT_CA = "--tls-client-ca: clients without a certificate that these CAs signed are rejected"
_IN_SECONDS = "in seconds"
_METRICS = "metrics are at /metrics of the REST port"
_READ = "metrics are made when they are read"
_LEVEL = "--log-level"
_FORWARD = "a model's code finds headers in its call's metadata"
_NO_THREADS = "one event loop serves all connections; --workers has several processes do so"
_NO_POOL = "nothing is kept for further requests"
_SHARED_PORT = "--workers has several processes share the ports"
_PINGS = "how often clients may ask is fixed"
_NO_LIBRARIES = "there are no shared libraries to load"
_NO_RATES = "there is no rate limiter; instance_group of a config.pbtxt says how many requests run"
_NO_MEMORY_POOL = "there are no pools of GPU memory or pinned memory"
_NO_SAGEMAKER = "there are no routes of SageMaker's"
_VERTEX = "--predict-route and --health-route, or AIP_PREDICT_ROUTE and AIP_HEALTH_ROUTE"
REPLACEMENTS: Mapping[str, str] = MappingProxyType(
    {
        "--model-repository": _REPOSITORY,
        "--model-store": _REPOSITORY,
        "--http-port": "--rest-port",
        "--http-address": _ONE_ADDRESS,
        "--grpc-address": _ONE_ADDRESS,
        "--metrics-address": _ONE_ADDRESS,
        "--allow-metrics": _METRICS,
        "--allow-http": "--rest-port -1 opens none",
        "--allow-grpc": "--grpc-port -1 opens none",
        "--log-verbose": "--log-verbose-level",
        "--id": "--server-name",
        "--repository-poll-secs": "--poll-interval",
        "--exit-on-error": "--exit-on-load-error",
        "--exit-timeout-secs": "--grace",
        "--cache-config": "--response-cache-bytes",
        "--response-cache-byte-size": "--response-cache-bytes",
        "--grpc-use-ssl": _CERTIFICATE,
        "--grpc-server-cert": _CERTIFICATE,
        "--grpc-server-key": _CERTIFICATE,
        "--grpc-use-ssl-mutual": _CLIENT_CA,
        "--grpc-root-cert": _CLIENT_CA,
        "--grpc-infer-response-compression-level": "--grpc-compression gzip",
        "--grpc-keepalive-time": f"--keepalive-time, {_IN_SECONDS}",
        "--grpc-keepalive-timeout": f"--keepalive-timeout, {_IN_SECONDS}",
        "--grpc-max-connection-age": f"--max-connection-age, {_IN_SECONDS}",
        "--grpc-max-connection-age-grace": f"--max-connection-age-grace, {_IN_SECONDS}",
        "--backend-config": "--default-max-batch-size; other settings are parameters of a model's config.pbtxt",
        "--model-config-name": "a model's configuration is its config.pbtxt",
        "--model-load-thread-count": "models are loaded one after the other",
        "--model-load-retry-count": "what could not be loaded is tried again when its files have changed",
        "--model-namespacing": "each name is there once, in all repositories",
        "--enable-peer-access": _NO_MEMORY_POOL,
        "--reuse-http-port": _SHARED_PORT,
        "--reuse-grpc-port": _SHARED_PORT,
        "--http-header-forward-pattern": _FORWARD,
        "--grpc-header-forward-pattern": _FORWARD,
        "--http-thread-count": _NO_THREADS,
        "--http-max-input-size": "--max-message-size, and --max-json-size for JSON",
        "--grpc-infer-thread-count": _NO_THREADS,
        "--grpc-infer-allocation-pool-size": _NO_POOL,
        "--grpc-max-response-pool-size": _NO_POOL,
        "--grpc-keepalive-permit-without-calls": "--keepalive-time holds with and without calls",
        "--grpc-http2-max-pings-without-data": _PINGS,
        "--grpc-http2-min-recv-ping-interval-without-data": _PINGS,
        "--grpc-http2-max-ping-strikes": _PINGS,
        "--log-info": _LEVEL,
        "--log-warning": _LEVEL,
        "--log-error": _LEVEL,
        "--allow-sagemaker": _NO_SAGEMAKER,
        "--sagemaker-port": _NO_SAGEMAKER,
        "--sagemaker-safe-port-range": _NO_SAGEMAKER,
        "--sagemaker-thread-count": _NO_SAGEMAKER,
        "--allow-vertex-ai": _VERTEX,
        "--vertex-ai-port": "--rest-port, or AIP_HTTP_PORT",
        "--vertex-ai-thread-count": _NO_THREADS,
        "--vertex-ai-default-model": "a predict route is for the one model that is served",
        "--allow-gpu-metrics": "there are no metrics of GPUs",
        "--allow-cpu-metrics": "/metrics has those of CPUs in any case",
        "--metrics-interval-ms": _READ,
        "--cache-directory": _NO_LIBRARIES,
        "--backend-directory": _NO_LIBRARIES,
        "--repoagent-directory": _NO_LIBRARIES,
        "--rate-limit": _NO_RATES,
        "--rate-limit-resource": _NO_RATES,
        "--pinned-memory-pool-byte-size": _NO_MEMORY_POOL,
        "--cuda-memory-pool-byte-size": _NO_MEMORY_POOL,
        "--cuda-virtual-address-size": _NO_MEMORY_POOL,
        "--buffer-manager-thread-count": _NO_MEMORY_POOL,
        "--min-supported-compute-capability": "gpus of an instance_group say where a model runs",
        "--model-load-gpu-limit": "gpus of an instance_group say where a model runs",
        "--host-policy": "the parameter cpus of a model's config.pbtxt",
        "--strict-model-config": "a config.pbtxt may be partial or missing in any case",
        "--disable-auto-complete-config": "a config.pbtxt may be partial or missing in any case",
    }
)
"""Triton's flag → Triglot's flag, or what replaces it."""


def replacement_of(flag: str) -> str:
    """Return the end of the error for an unknown flag; "" if it is not one of Triton's."""
    ours = REPLACEMENTS.get(flag)
    return f" of Triton's; here: {ours}" if ours else ""
