"""The servers that the cases go to, each a process of its own, started when a case first asks for it."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from tests.cases.lazy_servers import LazyServers
from tests.process import Triglot, write_model
from tests.protocol_clients.channel import grpc_channel

PYTHON_MODELS = Path(__file__).resolve().parents[1] / "models_tfserving"
IDENTITIES = {
    "bool_identity": ("x", "BOOL"),
    "bytes_identity": ("img_bytes", "BYTES"),
    "float_identity": ("x", "FP32"),
    "half_identity": ("x", "FP16"),
    "int32_identity": ("default", "INT32"),
    "int64_identity": ("x", "INT64"),
    "string_identity": ("s", "BYTES"),
    "uint16_identity": ("x", "UINT16"),
    "uint64_identity": ("x", "UINT64"),
    "uint8_identity": ("x", "UINT8"),
}
"""Models that answer with their input, of any shape: its name and datatype."""
IDENTITY = """
import triglot

class Identity(triglot.Model):
    inputs = outputs = [triglot.TensorSpec("{name}", "{datatype}", None)]

    def infer(self, inputs):
        return inputs
"""
LABELS = {"half_plus_two": "version_labels { key: 'Version_Label' value: 123 }"}
ONE, ROUTINE = "half_plus_two", "raising"
ROUTES = {"AIP_PREDICT_ROUTE": "/ask", "AIP_HEALTH_ROUTE": "/alive"}
"""Vertex AI's variables, which lines name instead of the paths."""
_QUICK = {
    "TRIGLOT_HOST": "127.0.0.1",
    "TRIGLOT_GRPC_PORT": "0",
    "TRIGLOT_REST_PORT": "0",
    "TRIGLOT_DRAIN_DELAY": "0",
}
ENVIRONMENT = {"tfserving": _QUICK, "serve": _QUICK | ROUTES}


def write_python_models(folder: Path) -> Path:
    """FOLDER/NAME/VERSION/… for every model that the cases name. Return `folder`."""
    shutil.copytree(PYTHON_MODELS, folder, dirs_exist_ok=True)
    for model, (name, datatype) in IDENTITIES.items():
        write_model(folder / model / "123", IDENTITY.format(name=name, datatype=datatype))
    return folder


@dataclass(frozen=True)
class Address:
    """Where a server listens, and the folder of its models."""

    rest_port: int
    channel: grpc.Channel
    models: Path


class Servers(LazyServers[Address]):
    """Servers of the models in `models` (NAME/VERSION/…), in the environment of `python`.

    - models, ml: all of them
    - reload, emptied: half_plus_two; what cases do to the one must not trouble those of the other
    - metrics: half_plus_two, monitored
    - vertex: half_plus_two, as Vertex AI starts it
    """

    def __init__(self, models: Path, folder: Path, python: str | Path = sys.executable) -> None:
        super().__init__()
        self._models = models
        self._folder = folder
        self._python = python

    def _start(self, name: str) -> Address:
        command, arguments = self._command(name)
        grpc_port, rest_port = self._keep(
            Triglot(*arguments, command=command, environment=ENVIRONMENT[command], python=self._python)
        )
        return Address(rest_port, self._running.enter_context(grpc_channel(grpc_port)), self._models)

    def _check_end(self, server: Triglot) -> None:
        """A clean end, and no error in the log but the prediction routine's."""
        status = server.wait()
        log = server.stderr.text()
        errors = re.findall(r"^[\d:]{8} E .*", log, re.MULTILINE)
        assert (status, [error for error in errors if "predict() of Raising failed" not in error]) == (0, []), log

    def _command(self, name: str) -> tuple[str, list[str]]:
        every = sorted(folder.name for folder in self._models.iterdir())
        if name in ("models", "ml"):
            return "tfserving", [self._config(every)]
        if name in ("reload", "emptied"):
            return "tfserving", [self._config([ONE])]
        if name == "metrics":
            file = self._folder / "monitoring.config"
            file.write_text("prometheus_config { enable: true }")
            return "tfserving", [self._config([ONE]), f"--monitoring_config_file={file}"]
        assert name == "vertex", f"no set-up {name}"
        return "serve", [str(self._models / ONE)]

    def _config(self, names: Sequence[str]) -> str:
        """The flag for a configuration of these models."""
        file = self._folder / f"{len(names)}.config"
        models = [
            f"config {{ name: '{name}' base_path: '{self._models / name}' model_platform: 'tensorflow' "
            f"{LABELS.get(name, '')} }}\n"
            for name in names
        ]
        file.write_text(f"model_config_list {{\n{''.join(models)}}}\n")
        return f"--model_config_file={file}"
