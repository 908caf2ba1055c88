"""What `triglot serve` has in place of the flags of Triton's `tritonserver`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_REPOSITORY = "the repository is an argument: triglot serve PATH"
_ONE_ADDRESS = "--host is the address of all ports"
_CERTIFICATE = "--tls-certificate and --tls-key, for all ports"
_CLIENT_CA = "--tls-client-ca: whoever has no certificate of those is refused"
_IN_SECONDS = "in seconds"
_METRICS = "metrics are at /metrics of the REST port"
OURS: Mapping[str, str] = MappingProxyType(
    {
        "--model-repository": _REPOSITORY,
        "--model-store": _REPOSITORY,
        "--http-port": "--rest-port",
        "--http-address": _ONE_ADDRESS,
        "--grpc-address": _ONE_ADDRESS,
        "--metrics-address": _ONE_ADDRESS,
        "--metrics-port": _METRICS,
        "--allow-metrics": _METRICS,
        "--allow-http": "--rest-port -1 opens none",
        "--allow-grpc": "--grpc-port -1 opens none",
        "--log-verbose": "--log-verbose-level",
        "--server-id": "--server-name",
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
        "--trace-config": "--trace-file, --trace-level, --trace-rate, --trace-count and --trace-log-frequency",
        "--backend-config": "--default-max-batch-size; other settings are parameters of a model's config.pbtxt",
        "--strict-model-config": "a config.pbtxt may be partial or missing in any case",
        "--disable-auto-complete-config": "a config.pbtxt may be partial or missing in any case",
    }
)
"""Triton's flag → ours, or what there is in place of it."""


def in_place_of(flag: str) -> str:
    """The end of the error for an unknown flag: "" where it is none of Triton's."""
    ours = OURS.get(flag)
    return f" of Triton's; here: {ours}" if ours else ""
