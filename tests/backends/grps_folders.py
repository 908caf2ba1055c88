"""grps project folders that a test writes, and calls of their models without a server."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from triglot.backends.grps.model import GrpsModel
from triglot.backends.grps.project import GrpsProject
from triglot.backends.grps.settings import ProjectSettings, read_project
from triglot.core.call import Call
from triglot.core.http import HttpRequest
from triglot.core.types import Exchange
from triglot.pb.grps.grps_pb2 import GrpsMessage
from triglot.telemetry.monitor import Monitor

PATIENCE = 30
"""Seconds after which a test gives up waiting for what must come."""

IMPORTS = """
import threading
from grps_framework.apis.grps_pb2 import DataType, GenericTensor, GrpsMessage
from grps_framework.converter.converter import Converter, converter_register
from grps_framework.logger.logger import clogger
from grps_framework.model_infer.inferer import ModelInferer, inferer_register
from grps_framework.monitor.monitor import app_monitor


class Base(ModelInferer):
    def init(self, path, device=None, args=None):
        super().init(path, device, args)

    def load(self):
        return True
"""
"""What the inferers of most tests begin with."""


def entry(name: str = "m", **keys: Any) -> dict[str, Any]:
    """A model of inference.yml, by default with the inferer "inferer" and no converter."""
    return {
        "name": name,
        "version": "1.0.0",
        "device": "cpu",
        "inferer_type": "customized",
        "inferer_name": "inferer",
        "converter_type": "none",
        **keys,
    }


def batched(max_batch_size: int, timeout_us: int) -> dict[str, Any]:
    """The key `batching` of a model."""
    return {"type": "dynamic", "max_batch_size": max_batch_size, "batch_timeout_us": timeout_us}


def write_project(
    folder: Path,
    inferer: str = "",
    *,
    models: Sequence[Mapping[str, Any]] = (),
    nodes: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
    **server: Any,
) -> ProjectSettings:
    """A project's folder: `inferer` is src/customized_inferer.py behind `IMPORTS`, `files` are others by path.

    The DAG is `nodes`, "name-version" each, or else the first model. `server` are keys of server.yml.
    """
    models = [dict(model) for model in models or [entry()]]
    nodes = nodes or [f"{models[0]['name']}-{models[0]['version']}"]
    inference = {
        "models": models,
        "dag": {
            "type": "sequential",
            "name": "the_dag",
            "nodes": [{"name": f"node-{at}", "type": "model", "model": node} for at, node in enumerate(nodes)],
        },
    }
    conf = {
        "interface": {"framework": "http+grpc", "host": "0.0.0.0", "port": "7080,7081"},
        "max_connections": 1000,
        "max_concurrency": 8,
        "log": {"log_dir": "./logs"},
        **server,
    }
    written = {
        "conf/server.yml": yaml.safe_dump(conf),
        "conf/inference.yml": yaml.safe_dump(inference),
        **({"src/customized_inferer.py": IMPORTS + inferer} if inferer else {}),
        **(files or {}),
    }
    for name, text in written.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_project(folder)


@contextmanager
def opened(settings: ProjectSettings, name: str = "", monitor: Monitor | None = None) -> Iterator[GrpsModel]:
    """The project's model `name` of version 1.0.0, or its DAG; closed at the end of the block."""
    project = GrpsProject(settings, monitor or Monitor())
    model = project.model(name, "1.0.0") if name else project.dag()
    try:
        yield model
    finally:
        model.close()


def own_module() -> Any:
    """src.customized_inferer of the project that is loaded."""
    return sys.modules["src.customized_inferer"]


class GrpsCall(Call):
    """A grps call; `answers` are what the model responded, until `leave_after` of them were read."""

    __slots__ = ("answers", "finished", "leave_after")

    def __init__(
        self,
        message: GrpsMessage | None = None,
        *,
        streaming: bool = False,
        http: HttpRequest | None = None,
        leave_after: int | None = None,
    ) -> None:
        super().__init__()
        self.exchange = Exchange(b"" if message is None else message.SerializeToString(), streaming, http)
        self.answers: list[bytes] = []
        self.leave_after = leave_after
        self.finished = threading.Event()

    def finish(self) -> None:
        """See `Call`."""
        self.finished.set()

    def respond(self, answer: bytes) -> bool:
        """See `Call`."""
        assert not self.finished.is_set()
        if len(self.answers) == self.leave_after:
            return False
        self.answers.append(answer)
        return True

    @property
    def texts(self) -> list[str]:
        """The `str_data` of each answer."""
        return [GrpsMessage.FromString(answer).str_data for answer in self.answers]


def ask(model: GrpsModel, text: str) -> str:
    """The `str_data` that a unary call with this `str_data` is answered with."""
    return answer_of(model.infer({}, GrpsCall(GrpsMessage(str_data=text))))


def answer_of(encoded: Any) -> str:
    """The `str_data` of an encoded message."""
    assert isinstance(encoded, bytes)
    return GrpsMessage.FromString(encoded).str_data


def stream(model: GrpsModel, text: str = "", **keys: Any) -> GrpsCall:
    """A streaming call that has run to its end."""
    call = GrpsCall(GrpsMessage(str_data=text), streaming=True, **keys)
    assert model.infer({}, call) is None
    return call


@contextmanager
def threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads to call models on, as a server's instances do."""
    with ThreadPoolExecutor(count) as pool:
        yield pool


def result(future: Future[Any]) -> Any:
    """What a call on another thread gave, or its exception."""
    return future.result(PATIENCE)
