"""Imports point down: the layers of the design against every import, type-only and late ones included."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "server" / "triglot"

CORE = {"triglot.core"}
DATA_PLANE = CORE | {"triglot.dataplane"}
CODEC = CORE | {
    "triglot.grps_types",
    "triglot.pb",
    "triglot.protocols",
    "numpy",
    "orjson",
    "simdjson",
    "google.protobuf",
}
SERVICE = DATA_PLANE | {
    "triglot.engine.servable",
    "triglot.pb",
    "triglot.protocols",
    "triglot.repository.manager",
    "triglot.repository.model_config",
    "triglot.repository.plan",
    "triglot.repository.registry",
    "triglot.telemetry",
    "triglot.version",
    "google.protobuf",
    "orjson",
}
BACKEND = CORE | {"triglot.backends.parameters", "triglot.backends.placement", "numpy"}
GRPS_BACKEND = BACKEND | {
    "triglot.backends",
    "triglot.grps_types",
    "triglot.pb",
    "flask",
    "google.protobuf",
    "werkzeug",
    "yaml",
}
# Configurations are protobuf messages.
PROTO_REPOSITORY = CORE | {"triglot.pb", "triglot.repository", "google.protobuf"}
DOWN = CORE | {
    "triglot.backends",
    "triglot.config",
    "triglot.dataplane",
    "triglot.protocols",
    "triglot.repository",
}
ASYNC = {"asyncio", "grpc", "aiohttp", "threading", "socket", "selectors"}

# What a module may import besides the standard library: the longest prefix of its name decides.
MAY_IMPORT = {
    "triglot": CORE | {"triglot.version", "triglot.app", "triglot.config", "triglot.tf_example"},
    "triglot.version": set(),
    "triglot.telemetry": CORE | {"triglot.telemetry"},
    "triglot.telemetry.process": {"psutil"},
    "triglot.grps_types": {"triglot.pb", "numpy"},
    "triglot.tf_example": CORE | {"triglot.pb", "numpy", "google.protobuf"},
    "triglot.config": set(),
    "triglot.config_sources": {"triglot.config"},
    "triglot.core": CORE | {"numpy", "ml_dtypes"},
    "triglot.pb": {"triglot.pb", "google.protobuf"},
    "triglot.engine": CORE | {"triglot.engine"},
    # Where the tensors of several requests become those of one batch.
    "triglot.engine.processes": CORE | {"triglot.engine", "numpy"},
    "triglot.engine.buffers": CORE | {"numpy"},
    "triglot.engine.sequences": CORE | {"triglot.engine", "numpy"},
    "triglot.engine.joining": CORE | {"triglot.engine.buffers", "numpy"},
    "triglot.repository": CORE | {"triglot.engine", "triglot.repository"},
    "triglot.repository.completed_config": PROTO_REPOSITORY | {"triglot.engine.servable"},
    "triglot.repository.config_json": {"google.protobuf"},
    "triglot.repository.config_values": PROTO_REPOSITORY,
    "triglot.repository.model_config": PROTO_REPOSITORY,
    "triglot.repository.ensembles": PROTO_REPOSITORY,
    "triglot.repository.proto_text": PROTO_REPOSITORY,
    "triglot.repository.scheduling": PROTO_REPOSITORY,
    "triglot.repository.scheduling_messages": PROTO_REPOSITORY,
    "triglot.backends": CORE | {"triglot.backends.reshaping"},
    "triglot.backends.features": BACKEND | {"triglot.backends"},
    # What a project imports is ours to provide, messages among it.
    "triglot.backends.grps": GRPS_BACKEND,
    "triglot.backends.grps.gpu": GRPS_BACKEND | {"pynvml", "tensorflow", "torch"},
    "triglot.backends.grps.tf_inferer": GRPS_BACKEND | {"tensorflow"},
    "triglot.backends.grps.tf_tensor_converter": GRPS_BACKEND | {"tensorflow"},
    "triglot.backends.grps.torch_inferer": GRPS_BACKEND | {"torch"},
    "triglot.backends.grps.torch_tensor_converter": GRPS_BACKEND | {"torch"},
    "triglot.backends.onnx": BACKEND | {"triglot.backends.reshaping", "onnxruntime"},
    "triglot.backends.reshaping": CORE,
    "triglot.backends.python": CORE
    | {
        "triglot.backends",
        "triglot.backends.foreign_classes",
        "triglot.backends.model_modules",
        "triglot.backends.triton_python",
    },
    # Their libraries are imported by name, when there is such a model.
    "triglot.backends.foreign_classes": BACKEND,
    "triglot.backends.kserve_model": BACKEND | {"triglot.backends.foreign_classes"},
    "triglot.backends.mlserver": BACKEND | {"triglot.backends", "triglot.backends.foreign_classes"},
    "triglot.backends.predictor": BACKEND | {"triglot.backends.model_modules", "orjson"},
    "triglot.backends.sklearn": BACKEND | {"triglot.backends", "joblib", "sklearn"},
    "triglot.backends.tensorflow": BACKEND | {"tensorflow"},
    "triglot.backends.torch": BACKEND | {"triglot.backends", "torch"},
    # As grps' projects: what a model imports is ours to provide.
    "triglot.backends.triton_python": BACKEND
    | {"triglot.backends", "triglot.backends.model_modules", "triglot.backends.triton_python", "ml_dtypes"},
    "triglot.backends.xgboost": BACKEND | {"triglot.backends.error_text", "xgboost"},
    "triglot.binding": CORE | {"triglot.engine.servable"},
    "triglot.dataplane": CORE
    | {"triglot.binding", "triglot.engine", "triglot.repository", "triglot.telemetry.tracing"},
    "triglot.model_calls": DATA_PLANE | {"triglot.engine", "triglot.model_tensors", "triglot.telemetry"},
    "triglot.model_tensors": CORE | {"numpy"},
    "triglot.protocols": CODEC,
    "triglot.protocols.kserve.service": SERVICE,
    "triglot.protocols.kserve.model_config": SERVICE
    | {"triglot.repository.completed_config", "triglot.repository.config_json"},
    "triglot.protocols.kserve.extended_plane": SERVICE | {"numpy"},
    "triglot.protocols.kserve.regions": CORE
    | {"triglot.engine.buffers", "triglot.protocols.kserve.guarded_memory", "numpy"},
    "triglot.protocols.kserve.statistics": SERVICE | {"triglot.repository.config_json"},
    "triglot.protocols.kserve.routes": SERVICE,
    "triglot.protocols.kserve.shared_memory": SERVICE,
    "triglot.protocols.kserve.stream": SERVICE,
    "triglot.protocols.kserve.trace_settings": SERVICE,
    "triglot.protocols.kserve.log_settings": SERVICE,
    "triglot.protocols.kserve.generate": SERVICE,
    "triglot.protocols.grps.lookup": SERVICE,
    "triglot.protocols.grps.metadata": SERVICE | {"yaml"},
    "triglot.protocols.grps.routes": SERVICE,
    "triglot.protocols.grps.service": SERVICE,
    "triglot.protocols.monitor": SERVICE | {"prometheus_client"},
    "triglot.protocols.grpc": SERVICE | {"google.protobuf"},
    "triglot.protocols.tfserving.metrics": SERVICE,
    "triglot.protocols.tfserving.service": SERVICE,
    "triglot.protocols.tfserving.models": SERVICE,
    "triglot.protocols.tfserving.lookup": SERVICE,
    "triglot.protocols.tfserving.routes": SERVICE,
    "triglot.protocols.tfserving.rows": SERVICE,
    "triglot.protocols.tfserving.warmup": SERVICE,
    "triglot.protocols.tfserving.ai_platform": SERVICE,
    "triglot.protocols.tfserving.model_config": CODEC
    | {"triglot.repository.layout", "triglot.repository.proto_text", "triglot.repository.settings"},
    "triglot.transports": CORE | {"triglot.config", "triglot.transports"},
    "triglot.transports.inflate": {"triglot.protocols"},
    "triglot.transports.grpc_calls": CORE
    | {
        "triglot.protocols",
        "triglot.telemetry",
        "triglot.transports.off_loop",
        "triglot.transports.shutdown",
    },
    "triglot.transports.grpc_server": CORE
    | {
        "triglot.config",
        "triglot.protocols",
        "triglot.telemetry",
        "triglot.transports.grpc_calls",
        "grpc",
    },
    # HTTP/2 without I/O.
    **{
        f"triglot.transports.h2.{name}": {"triglot.transports.h2", "hpack"}
        for name in (
            "connection",
            "control",
            "events",
            "frames",
            "header_frames",
            "headers",
            "limits",
            "requests",
            "sending",
            "streams",
            "windows",
        )
    },
    "triglot.transports.h2": CORE
    | {
        "triglot.config",
        "triglot.protocols",
        "triglot.telemetry",
        "triglot.transports.grpc_calls",
        "triglot.transports.h2",
        "triglot.transports.inflate",
        "triglot.transports.off_loop",
        "triglot.transports.shutdown",
        "numpy",
    },
    "triglot.transports.http_server": CORE
    | {
        "triglot.config",
        "triglot.protocols",
        "triglot.telemetry",
        "triglot.transports.deflate",
        "triglot.transports.http_errors",
        "triglot.transports.inflate",
        "triglot.transports.off_loop",
        "triglot.transports.shutdown",
        "aiohttp",
    },
    "triglot.app": DOWN
    | {
        "triglot.doors",
        "triglot.engine.admission",
        "triglot.engine.response_cache",
        "triglot.engine.servable",
        "triglot.engine.starting",
        "triglot.engine.warm_up",
        "triglot.model_calls",
        "triglot.telemetry",
        "triglot.transports",
    },
    "triglot.doors": CORE | {"triglot.config", "triglot.dataplane", "triglot.protocols", "triglot.telemetry"},
    "triglot.hints": {"triglot.config", "triglot.core.signature", "triglot.dataplane"},
    "triglot.cli": CORE
    | {
        "triglot.app",
        "triglot.config",
        "triglot.config_sources",
        "triglot.grps_cli",
        "triglot.hints",
        "triglot.repository.settings",
        "triglot.repository.source",
        "triglot.telemetry.log_settings",
        "triglot.telemetry.store",
        "triglot.tfserving_batching",
        "triglot.tfserving_cli",
        "triglot.triton_flags",
        "triglot.version",
    },
    "triglot.triton_flags": set(),
    "triglot.grps_cli": CORE
    | {
        "triglot.app",
        "triglot.backends.grps",
        "triglot.config",
        "triglot.config_sources",
        "triglot.repository.settings",
        "triglot.repository.source",
        "triglot.telemetry.store",
    },
    "triglot.tfserving_cli": CORE
    | {
        "triglot.config",
        "triglot.config_sources",
        "triglot.pb",
        "triglot.protocols.tfserving.batching",
        "triglot.protocols.tfserving.model_config",
        "triglot.repository.proto_text",
        "triglot.repository.settings",
        "triglot.tfserving_batching",
        "triglot.version",
    },
    "triglot.tfserving_batching": CORE
    | {
        "triglot.pb",
        "triglot.protocols.tfserving.batching",
        "triglot.repository.proto_text",
        "triglot.repository.source",
    },
    "triglot.__main__": {"triglot.cli"},
    # Written as users write theirs.
    "triglot.demo": {"triglot", "numpy", "ml_dtypes"},
}
# Of a package these may import nothing below it: a transport knows the rows, and no protocol.
ITSELF_ONLY = {
    "triglot.protocols.tfserving.model_config": {"triglot.backends"},
    "triglot.transports.grpc_calls": {"triglot.protocols"},
    "triglot.transports.grpc_server": {"triglot.protocols"},
    "triglot.transports.h2": {"triglot.protocols"},
    "triglot.transports.http_server": {"triglot.protocols"},
    "triglot.transports.inflate": {"triglot.protocols"},
    "triglot.demo": {"triglot"},
}
# Codecs are functions of bytes: they neither wait nor talk.
NO_IO = "triglot.protocols"
MAY_WAIT = {
    "triglot.protocols.kserve.service",
    "triglot.protocols.kserve.routes",
    "triglot.protocols.kserve.stream",
    "triglot.protocols.grpc",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports; `from a import b` is a.b when that is a module, a otherwise."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                place = PACKAGE.parent / name.replace(".", "/")
                yield name if place.is_dir() or place.with_suffix(".py").is_file() else str(node.module)


def below(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def allowed(module: str, name: str) -> bool:
    row = max((row for row in MAY_IMPORT if below(module, {row})), key=len)
    if name.split(".", maxsplit=1)[0] in sys.stdlib_module_names:
        waits = below(module, {NO_IO}) and not below(module, MAY_WAIT)
        return not (waits and below(name, ASYNC))
    if row == "triglot" and module != "triglot":
        return False  # A module that no row knows: give it one.
    itself = ITSELF_ONLY.get(row, set())
    return below(name, MAY_IMPORT[row] - itself) or name in itself


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    assert [name for name in imports(MODULES[module]) if not allowed(module, name)] == []


def test_only_transports_know_a_network_library() -> None:
    known = {(module, name.split(".")[0]) for module, path in MODULES.items() for name in imports(path)}
    assert {pair for pair in known if pair[1] in ("grpc", "aiohttp")} == {
        ("triglot.transports.grpc_server", "grpc"),
        ("triglot.transports.http_server", "aiohttp"),
    }


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("triglot.core.tensor", "triglot.pb"),
        ("triglot.core.tensor", "orjson"),
        ("triglot.engine.queue", "numpy"),
        ("triglot.protocols.kserve.codec", "asyncio"),
        ("triglot.protocols.kserve.codec", "triglot.dataplane"),
        ("triglot.transports.http_server", "triglot.protocols.kserve.rest"),
        ("triglot.transports.http_server", "grpc"),
        ("triglot.repository.source", "triglot.pb"),
        ("triglot.repository.settings", "google.protobuf"),
        ("triglot.backends.python", "onnxruntime"),
        ("triglot.demo.half_plus_two.model", "triglot.core.types"),
        ("triglot.somewhere_new", "triglot.core"),
    ],
)
def test_the_table_refuses(module: str, name: str) -> None:
    assert not allowed(module, name)
