"""Reads and validates a grps project's conf/server.yml (grps 5.1)."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triglot.backends.grps.yaml_map import YamlMap, read_yaml

ROOT = "/grps/v1"
RESERVED_PATHS = frozenset(
    ["/", f"{ROOT}/"]
    + [f"{ROOT}/health/{name}" for name in ("online", "offline", "live", "ready")]
    + [f"{ROOT}/metadata/{name}" for name in ("server", "model")]
    + [f"{ROOT}/monitor/{name}" for name in ("series", "metrics", "overview")]
    + [f"{ROOT}/js/{name}" for name in ("jquery_min", "flot_min")]
    + [f"{ROOT}/infer/predict"]
)
PATH = re.compile(r"/[A-Za-z0-9_/-]+")
LAST_PORT = 65535
NO_LIMIT = -1
BRPC = "http+brpc"
"""The framework of grps' C++ server."""

MODES = ("query_param", "header_param", "body_param")

KEYS = ("interface", "max_connections", "max_concurrency", "gpu", "log")
INTERFACE_KEYS = ("framework", "host", "port", "customized_predict_http")
CUSTOM_KEYS = ("path", "customized_body", "streaming_ctrl")
STREAMING_KEYS = ("ctrl_mode", "ctrl_key", "res_content_type")
GPU_KEYS = ("devices", "mem_manager_type", "mem_limit_mib", "mem_gc_enable", "mem_gc_interval")
LOG_KEYS = ("log_dir", "log_backup_count")
_CUSTOM = "interface.customized_predict_http"
TEXTS = frozenset(
    ["interface.framework", "interface.host", f"{_CUSTOM}.path", "gpu.mem_manager_type", "log.log_dir"]
    + [f"{_CUSTOM}.streaming_ctrl.{key}" for key in STREAMING_KEYS]
)


@dataclass(frozen=True, slots=True)
class CustomHttp:
    """An additional path for predict, and how its requests ask for a stream (grps 3.6)."""

    path: str
    customized_body: bool = False
    ctrl_mode: str = "query_param"
    ctrl_key: str = "streaming"
    res_content_type: str = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """GPU settings. `devices` are indices into CUDA_VISIBLE_DEVICES, if that is set.

    `mem_limit_mib` is in MiB per device, None: no limit. `mem_gc_interval` is in seconds, None: nothing is freed.
    """

    devices: tuple[int, ...]
    mem_manager: str
    mem_limit_mib: int | None = None
    mem_gc_interval: int | None = None


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The settings in server.yml. `grpc_port` is None for HTTP alone; `log_dir` is relative to the project."""

    framework: str
    host: str
    http_port: int
    grpc_port: int | None
    custom_http: CustomHttp | None
    max_connections: int
    max_concurrency: int
    gpu: GpuSettings | None
    log_dir: str
    log_backup_count: int = 7


def read_server(folder: Path, file: Path, warnings: list[str]) -> tuple[str, dict[str, Any], ServerSettings]:
    """Return the file's text, its plain values, and its settings, for a project in `folder`.

    Appends to `warnings`. Raise `ModelLoadError`.
    """
    text, values = read_yaml(file, TEXTS)
    return text, values, _server(folder, YamlMap(file, values, KEYS), warnings)


def _server(folder: Path, values: YamlMap, warnings: list[str]) -> ServerSettings:
    warnings += values.misspelt_keys()
    interface = values.map("interface", INTERFACE_KEYS)
    if interface.values.get("framework") == BRPC:
        framework = "http+grpc"
        warnings.append(
            f"{values.file}: interface.framework: {BRPC} is treated as {framework}: the second port serves gRPC; "
            "GrpsBrpcService clients and brpc's own protocols and pages are not supported"
        )
    else:
        framework = interface.choice("framework", ["http", "http+grpc"])
    http_port, grpc_port = _ports(interface, framework)
    max_connections = values.integer("max_connections")
    max_concurrency = values.integer("max_concurrency")
    if max_concurrency > max_connections:
        values.fail("max_concurrency", f"at most max_connections, {max_connections}")
    log = values.map("log", LOG_KEYS)
    log_dir = log.text("log_dir", "a folder")
    if (folder / log_dir).exists() and not (folder / log_dir).is_dir():
        log.fail("log_dir", "a folder", reason=f"a file, {folder / log_dir}")
    warnings += [*interface.misspelt_keys(), *log.misspelt_keys()]
    return ServerSettings(
        framework=framework,
        host=_host(interface),
        http_port=http_port,
        grpc_port=grpc_port,
        custom_http=_custom_http(interface, warnings),
        max_connections=max_connections,
        max_concurrency=max_concurrency,
        gpu=_gpu(values, warnings),
        log_dir=log_dir,
        log_backup_count=log.integer("log_backup_count") if log.has("log_backup_count") else 7,
    )


def _host(interface: YamlMap) -> str:
    host = interface.text("host", "an IPv4 address")
    try:
        return str(ipaddress.IPv4Address(host))
    except ValueError:
        interface.fail("host", "an IPv4 address")


def _ports(interface: YamlMap, framework: str) -> tuple[int, int | None]:
    value = interface.values.get("port")
    expected = "one port, such as 7080" if framework == "http" else "two ports, such as 7080,7081"
    expected = f"{expected}, for framework {framework}"
    if isinstance(value, bool) or not isinstance(value, int | str):
        interface.fail("port", expected)
    texts = [text.strip() for text in str(value).split(",")]
    ports = [int(text) for text in texts if text.isascii() and text.isdigit() and len(text) <= 5]
    if len(ports) != len(texts) or len(ports) != (1 if framework == "http" else 2):
        interface.fail("port", expected)
    if not all(1 <= port <= LAST_PORT for port in ports):
        interface.fail("port", f"ports between 1 and {LAST_PORT}")
    if framework == "http":
        return ports[0], None
    if ports[0] == ports[1]:
        interface.fail("port", "two different ports")
    return ports[0], ports[1]


def _custom_http(interface: YamlMap, warnings: list[str]) -> CustomHttp | None:
    if not interface.has("customized_predict_http"):
        return None
    custom = interface.map("customized_predict_http", CUSTOM_KEYS)
    warnings += custom.misspelt_keys()
    path = custom.text("path", "a path, such as /predict")
    if not PATH.fullmatch(path):
        custom.fail("path", "a path of '/' and letters, digits, '_', '-' and '/'")
    if path in RESERVED_PATHS:
        custom.fail("path", "a path that is not reserved by grps")
    body = custom.has("customized_body") and custom.boolean("customized_body")
    if not custom.has("streaming_ctrl"):
        return CustomHttp(path, body)
    streaming = custom.map("streaming_ctrl", STREAMING_KEYS)
    warnings += streaming.misspelt_keys()
    options = {key: streaming.text(key) for key in STREAMING_KEYS if streaming.has(key)}
    if "ctrl_mode" in options:
        streaming.choice("ctrl_mode", MODES)
    return CustomHttp(path, body, **options)


def _gpu(values: YamlMap, warnings: list[str]) -> GpuSettings | None:
    if not values.has("gpu"):
        return None
    gpu = values.map("gpu", GPU_KEYS)
    warnings += gpu.misspelt_keys()
    devices = gpu.values.get("devices")
    if not isinstance(devices, list) or not devices or not all(type(device) is int for device in devices):
        gpu.fail("devices", "a list of integers, such as [0]")
    if min(devices) < 0:
        gpu.fail("devices", "integers of at least 0")
    unique = tuple(dict.fromkeys(devices))
    manager = gpu.choice("mem_manager_type", ["torch", "tensorflow", "none"])
    if manager == "none":
        return GpuSettings(unique, manager)
    limit = gpu.values.get("mem_limit_mib")
    if type(limit) is not int or (limit < 1 and limit != NO_LIMIT):
        gpu.fail("mem_limit_mib", "at least 1 MiB, or -1 for no limit")
    interval = gpu.integer("mem_gc_interval") if gpu.boolean("mem_gc_enable") else None
    return GpuSettings(unique, manager, None if limit == NO_LIMIT else limit, interval)
