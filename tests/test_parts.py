"""Each part taken away in turn: the core serves without it, and what asks for it gets an error that names it."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import triglot
from tests.process import Triglot, run_triglot, write_model
from triglot import parts
from triglot.repository.manager.warm_up import WARM_UP_FILE
from triglot.testing import KServeGrpc, KServeRest

PACKAGE = Path(parts.__file__).parent
MODEL = """
import triglot

class Double(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [1])]
    outputs = [triglot.TensorSpec("y", "FP32", [1])]

    def infer(self, inputs):
        return {"y": inputs["x"] * 2}
"""
CORE = {
    "TRIGLOT_HOST": "127.0.0.1",
    "TRIGLOT_GRPC_PORT": "0",
    "TRIGLOT_REST_PORT": "0",
    "TRIGLOT_DRAIN_DELAY": "0",
    "TRIGLOT_PROTOCOLS": "kserve",
    "TRIGLOT_MODEL_CONTROL_MODE": "explicit",
}
INPUT = {"x": np.array([2.5], np.float32)}


@dataclass(frozen=True, slots=True)
class Asked:
    """What asks for a part: options and files, or the URL, of a server that does not start without it."""

    error: str
    options: Mapping[str, str]
    prepare: Callable[[Path], object] = lambda _: None
    url: str = ""


def lacks(what: str, module: str) -> str:
    return f"{what} is not in this build of Triglot, which has no triglot.{module}"


def recorded(models: Path) -> None:
    file = models / "double" / "1" / WARM_UP_FILE
    file.parent.mkdir()
    file.write_bytes(b"")


def model_file(name: str, content: str = "") -> Callable[[Path], object]:
    """Add a model of one file."""

    def write(models: Path) -> None:
        file = models / "asked" / "1" / name
        file.parent.mkdir(parents=True)
        file.write_text(content)

    return write


def backend(name: str, prepare: Callable[[Path], object]) -> tuple[str, list[Asked]]:
    """A folder or file of a backend, and that a model asks for it."""
    return f"backends/{name}", [Asked(lacks(f"the {name} backend", f"backends.{name}"), LOADED, prepare)]


def observed(option: str, name: str, module: str, options: Mapping[str, str]) -> Asked:
    """An option or variable that asks for an observer of calls."""
    return Asked(f"{option}: " + lacks(f"the {name} observer", module), options)


def store(scheme: str, module: str) -> tuple[str, list[Asked]]:
    """A file of a store of models, and that a URL asks for it."""
    text = lacks(f"the {scheme} store", f"repository.storage.{module}")
    return f"repository/storage/{module}", [Asked(text, LOADED, url=f"{scheme}://host/models")]


def executor(name: str) -> tuple[str, list[Asked]]:
    """A folder of an executor, and that a model asks for it."""
    text = lacks(f"the {name} executor", f"executors.{name}")
    return f"executors/{name}", [Asked(text, LOADED, model_file("model.py", f'{MODEL}    execution = "{name}"\n'))]


LOADED = {"TRIGLOT_MODEL_CONTROL_MODE": "none"}
REFUSING: dict[str, list[Asked]] = {
    "protocols/tfserving": [
        Asked(
            "protocols: " + lacks("the tfserving protocol", "protocols.tfserving"),
            {"TRIGLOT_PROTOCOLS": "kserve,tfserving"},
        ),
        observed("request_log", "request records", "protocols.tfserving", {"TRIGLOT_REQUEST_LOG": "records"}),
        Asked(lacks("the warm-up records observer", "protocols.tfserving"), LOADED, recorded),
    ],
    "protocols/tfserving/recorder": [
        observed(
            "request_log", "request records", "protocols.tfserving.recorder", {"TRIGLOT_REQUEST_LOG": "records"}
        )
    ],
    "protocols/kserve/payload_log": [
        observed(
            "payload_log", "payload log", "protocols.kserve.payload_log", {"TRIGLOT_PAYLOAD_LOG": "events.jsonl"}
        )
    ],
    "telemetry/access_log": [
        observed("access_log", "access log", "telemetry.access_log", {"TRIGLOT_ACCESS_LOG": "true"}),
        observed("log_verbose_level", "access log", "telemetry.access_log", {"TRIGLOT_LOG_VERBOSE_LEVEL": "1"}),
    ],
    "telemetry/audit_log": [
        observed("audit_log", "audit log", "telemetry.audit_log", {"TRIGLOT_AUDIT_LOG": "/dev/null"})
    ],
    "telemetry/spans": [
        observed("spans", "spans", "telemetry.spans", {"OTEL_TRACES_EXPORTER": "console"}),
        observed("spans", "spans", "telemetry.spans", {"TRIGLOT_TRACE_CONFIG": "mode=opentelemetry"}),
    ],
    "access": [
        Asked("access: " + lacks("the access control part", "access"), {"TRIGLOT_ACCESS": "access.toml"}),
        Asked(
            "http_restricted_api: " + lacks("the access control part", "access"),
            {"TRIGLOT_HTTP_RESTRICTED_API": "inference:key=value"},
        ),
    ],
    "testing": [],  # Nothing of a server asks for it.
    "workers": [Asked("workers: " + lacks("the workers part", "workers"), {"TRIGLOT_WORKERS": "2"})],
    "protocols/grps": [
        Asked("protocols: " + lacks("the grps protocol", "protocols.grps"), {"TRIGLOT_PROTOCOLS": "grps,kserve"})
    ],
    "protocols/mlflow": [
        Asked(
            "protocols: " + lacks("the mlflow protocol", "protocols.mlflow"),
            {"TRIGLOT_PROTOCOLS": "kserve,mlflow"},
        )
    ],
    **dict(
        [
            backend("catboost", model_file("model.cbm")),
            backend("lightgbm", model_file("model.txt")),
            backend("mlflow", model_file("MLmodel", "flavors: {}")),
            backend("mlserver", model_file("model-settings.json", "{}")),
            backend("onnx", model_file("model.onnx")),
            backend("predictor", model_file("predictor.toml")),
            backend("sklearn", model_file("model.joblib")),
            backend("tensorflow", model_file("saved_model.pb")),
            backend("torch", model_file("model.pt")),
            backend("triton_python", model_file("model.py", "class TritonPythonModel: pass")),
            backend("xgboost", model_file("model.ubj")),
            executor("process"),
            executor("ray"),
            store("s3", "buckets"),
            store("hf", "hub"),
            store("https", "web"),
        ]
    ),
}
"""By part, what does not start without it."""
ANSWERING = {
    "protocols/monitor": ("/metrics", lacks("the monitor protocol", "protocols.monitor")),
    "protocols/traffic": ("/v2/models/double/traffic", lacks("the traffic protocol", "protocols.traffic")),
    "protocols/openapi": ("/openapi.json", lacks("the openapi protocol", "protocols.openapi")),
}
"""By part, a path that answers 501 without it, and its text."""


def package_without(part: str, folder: Path) -> dict[str, str]:
    """A copy of the package, by links, without a folder or file; returns the environment that runs it."""
    place, copy = PACKAGE, folder / "without" / "triglot"
    *above, name = part.split("/")
    for step in [*above, name]:
        copy.mkdir(parents=True)
        others = [entry for entry in place.iterdir() if entry.name not in (step, f"{step}.py", "__pycache__")]
        assert len(others) < len([entry for entry in place.iterdir() if entry.name != "__pycache__"]), part
        for entry in others:
            (copy / entry.name).symlink_to(entry)
        place, copy = place / step, copy / step
    for library in PACKAGE.parent.glob("triglot__mypyc*"):  # Of the compiled build.
        (folder / "without" / library.name).symlink_to(library)
    return {"PYTHONPATH": str(folder / "without")}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write_model(tmp_path / "models" / "double" / "1", MODEL)
    return tmp_path / "models"


@pytest.mark.parametrize("part", sorted({*REFUSING, *ANSWERING}))
def test_core_serves_without_the_part(part: str, models: Path, tmp_path: Path) -> None:
    environment = CORE | package_without(part, tmp_path)
    with Triglot(models, environment=environment) as server:
        grpc_port, rest_port = server.ports()
        rest = KServeRest(f"http://127.0.0.1:{rest_port}")
        rest.post("/v2/repository/models/double/load", {})
        assert rest.infer("double", INPUT)["y"] == 5
        with KServeGrpc(f"127.0.0.1:{grpc_port}") as client:
            assert client.infer("double", INPUT)["y"] == 5
        rest.post("/v2/repository/models/double/unload", {})
        with pytest.raises(triglot.ServingError, match="double"):
            rest.infer("double", INPUT)
        if part in ANSWERING:
            path, text = ANSWERING[part]
            with pytest.raises(triglot.Unimplemented) as missing:
                rest.get(path)
            assert str(missing.value) == text
        server.stop()


def test_processes_serve_without_ray(models: Path, tmp_path: Path) -> None:
    model_file("model.py", f'{MODEL}    execution = "process"\n')(models)
    with Triglot(models, environment=CORE | package_without("executors/ray", tmp_path) | LOADED) as server:
        assert KServeRest(f"http://127.0.0.1:{server.ports()[1]}").infer("asked", INPUT)["y"] == 5
        server.stop()


def test_ray_is_imported_without_processes(tmp_path: Path) -> None:
    environment = os.environ | package_without("executors/process", tmp_path)
    code = "import triglot.executors.ray.place, triglot.executors.remote.child"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)


@pytest.mark.parametrize(
    ("part", "asked"),
    [pytest.param(part, asked, id=part) for part, all_of in REFUSING.items() for asked in all_of],
)
def test_missing_part_is_an_error_where_it_is_asked_for(
    part: str, asked: Asked, models: Path, tmp_path: Path
) -> None:
    asked.prepare(models)
    completed = run_triglot(
        "serve", asked.url or models, environment={**CORE, **package_without(part, tmp_path), **asked.options}
    )
    assert completed.returncode
    assert asked.error in completed.stderr
    assert "Traceback" not in completed.stderr


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, its in parts.PARTS.items() for name in its])
def test_part_is_where_the_table_says(kind: str, name: str) -> None:
    """Its module defines it; it is not imported, since that takes the libraries of all parts."""
    module, function = parts.PARTS[kind][name].split(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    assert function in {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }


@pytest.mark.parametrize(
    ("name", "error"),
    [
        (
            "no_such_module:protocol",
            "the protocol no_such_module:protocol: there is no module no_such_module on Python's path",
        ),
        ("json:protocol", "the protocol json:protocol: json has no attribute 'protocol'"),
    ],
)
def test_missing_protocol_of_another_package(name: str, error: str) -> None:
    completed = run_triglot("serve", environment=CORE | {"TRIGLOT_PROTOCOLS": f"kserve,{name}"})
    assert (completed.returncode, completed.stderr.splitlines()[-1]) == (2, f"triglot: protocols: {error}")


@pytest.mark.parametrize(
    ("part", "command", "module"),
    [
        ("protocols/tfserving", "tfserving", "protocols.tfserving"),
        ("protocols/tfserving", "replay", "protocols.tfserving"),
        ("backends/grps", "grps", "backends.grps"),
        ("access", "token", "access"),
        ("protocols/traffic", "traffic", "protocols.traffic"),
    ],
)
def test_command_of_a_missing_part(part: str, command: str, module: str, tmp_path: Path) -> None:
    environment = package_without(part, tmp_path)
    completed = run_triglot(command, environment=environment)
    assert (completed.returncode, completed.stderr) == (2, f"triglot: {lacks(f'the command {command}', module)}\n")
    listed = run_triglot("--help", environment=environment)
    assert listed.returncode == 0
    assert f"\n    {command} " not in listed.stdout
    assert "\n    serve " in listed.stdout


def test_client_gets_an_error_for_a_missing_access_log(models: Path, tmp_path: Path) -> None:
    with Triglot(models, environment=CORE | package_without("telemetry/access_log", tmp_path)) as server:
        rest = KServeRest(f"http://127.0.0.1:{server.ports()[1]}")
        with pytest.raises(triglot.Unimplemented) as refused:
            rest.post("/v2/logging", {"log_verbose_level": 1, "log_info": False})
        assert str(refused.value) == lacks("log_verbose_level: the access log observer", "telemetry.access_log")
        assert rest.post("/v2/logging", {"log_verbose_level": 0})["log_info"] is True
        server.stop()
