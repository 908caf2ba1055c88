"""What a server with the default options does not import: libraries and parts that are not needed."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.process import FREE_PORTS, Triglot

MODEL = """
import sys

import triglot


class Modules(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [1])]
    outputs = [triglot.TensorSpec("names", "BYTES", [-1])]

    def infer(self, inputs):
        return {"names": sorted(sys.modules)}
"""
LIBRARIES = (
    "aiohttp",
    "flask",
    "grpc",
    "jwt",
    "onnxruntime",
    "prometheus_client",
    "psutil",
    "ray",
    "yaml",
    "tarfile",
    "unittest",
    "urllib.request",
    "zipfile",
)
PARTS = (
    "access.control",
    "backends.grps",
    "cli.grps",
    "cli.infer",
    "cli.tfserving",
    "executors.process.environment",
    "executors.ray",
    "executors.remote.pool",
    "protocols.monitor.prometheus",
    "repository.storage.update",
    "telemetry.spans.senders",
    "transports.aio",
    "transports.aiohttp",
    "workers",
)
UNUSED = {*LIBRARIES, *(f"triglot.{name}" for name in PARTS)}


def served(folder: Path, name: str, config: str = "") -> None:
    """Write the model."""
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "1" / "model.py").write_text(MODEL)
    (folder / name / "config.pbtxt").write_text(config)


def imported(port: int, name: str) -> set[str]:
    """The modules of the process in which the model runs."""
    inputs = [{"name": "x", "datatype": "FP32", "shape": [1], "data": [0]}]
    request = json.dumps({"inputs": inputs}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/{name}/infer", request) as response:
        return set(json.load(response)["outputs"][0]["data"])


def test_server_imports_what_is_asked_for(tmp_path: Path) -> None:
    served(tmp_path, "plain")
    with Triglot(tmp_path, *FREE_PORTS) as server:
        port = server.ports()[1]
        at_rest = imported(port, "plain")
        assert UNUSED & at_rest == set()
        assert {"numpy", "triglot.transports.http2.server", "triglot.transports.http1.server"} <= at_rest
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").close()
        asked = imported(port, "plain") - at_rest
    assert {"prometheus_client", "triglot.protocols.monitor.prometheus"} <= asked


@pytest.mark.skipif(sys.platform != "linux", reason="needs processes")
def test_process_of_a_model_imports_no_server(tmp_path: Path) -> None:
    served(tmp_path, "apart", 'parameters { key: "execution" value { string_value: "process" } }')
    with Triglot(tmp_path, *FREE_PORTS) as server:
        found = imported(server.ports()[1], "apart")
    assert (UNUSED | {"triglot.server", "triglot.cli", "uvloop", "google.protobuf"}) & found == set()


def test_worker_imports_what_is_asked_for(tmp_path: Path) -> None:
    served(tmp_path, "plain")
    with Triglot(tmp_path, *FREE_PORTS, "--workers", "2") as server:
        found = imported(server.ports()[1], "plain")
    assert "triglot.workers.link" in found
    assert (UNUSED - {"triglot.workers"} | {"triglot.workers.supervisor"}) & found == set()
