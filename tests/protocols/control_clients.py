"""Loading and unloading over KServe's gRPC and REST, and what is asked afterwards."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from tests.protocol_clients.kserve_async import STATUS_OF, Answer, GrpcClient, Infer, RestClient, Tensor
from tests.protocols.kserve_served import Served, serve_models
from tests.waiting import until_found
from triglot import backends
from triglot.core.errors import Code
from triglot.model.config import ModelConfig
from triglot.model.model import Model
from triglot.pb.kserve import inference_pb2 as pb
from triglot.repository.manager.loader import Load

SECONDS = 20
"""How long anything may take; only a test that fails waits so long."""
SAYS = """
import triglot

class Says(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [-1])]
    outputs = [triglot.TensorSpec("y", "INT32", [-1])]

    def infer(self, inputs):
        return {{"y": inputs["x"] * 0 + int(self.model_config.parameters.get("says", {says}))}}
"""
EXPLICIT: dict[str, Any] = {"model_control_mode": "explicit"}
UNLOADED = "unloaded"
"""The reason of a version that was unloaded."""
FAILS = SAYS + "\n    def load(self, folder):\n        raise OSError('no disk')\n"


def put(folder: Path, says: int = 0, text: str = SAYS) -> Path:
    """A version that answers a number, its own or that of the parameter `says`; the path of its file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.py"
    file.write_text(text.format(says=says))
    return file


def put_config(folder: Path, text: str) -> None:
    """A model's config.pbtxt."""
    (folder / "config.pbtxt").write_text(text)


def config_text(**fields: Any) -> str:
    """The JSON of a configuration."""
    return json.dumps(fields)


def saying(number: int) -> dict[str, Any]:
    """The field `parameters` that has `Says` answer the number."""
    return {"parameters": {"says": {"string_value": str(number)}}}


class Row(NamedTuple):
    """A line of the index."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


Parameters = Mapping[str, Any]
Outcome = tuple[Code, str]
"""A code and its text."""
FINE: Outcome = Code.OK, ""


class GrpcControl:
    """Over gRPC."""

    def __init__(self, client: GrpcClient) -> None:
        self.client = client

    async def change(self, rpc: str, request_class: Any, name: str, parameters: Parameters) -> Outcome:
        request = request_class(model_name=name)
        kinds = {bool: "bool_param", int: "int64_param", str: "string_param", bytes: "bytes_param"}
        for key, value in parameters.items():
            request.parameters[key].SetInParent()
            if value is not None:
                setattr(request.parameters[key], kinds[type(value)], value)
        code, text, reply = await self.client.call(rpc, request.SerializeToString())
        if code is Code.OK:
            assert reply == b"\x0a" + bytes([len(name)]) + name.encode() + b"\x10\x01"
        return code, text

    async def load(self, name: str, **parameters: Any) -> Outcome:
        return await self.change("RepositoryModelLoad", pb.RepositoryModelLoadRequest, name, parameters)

    async def unload(self, name: str, **parameters: Any) -> Outcome:
        return await self.change("RepositoryModelUnload", pb.RepositoryModelUnloadRequest, name, parameters)

    async def index(self, *, ready: bool = False) -> list[Row]:
        request = pb.RepositoryIndexRequest(ready=ready)
        code, text, reply = await self.client.call("RepositoryIndex", request.SerializeToString())
        assert code is Code.OK, text
        models = pb.RepositoryIndexResponse.FromString(reply).models
        return [Row(model.name, model.version, model.state, model.reason) for model in models]

    async def ready(self, name: str = "", version: str = "") -> bool:
        if not name:
            _, _, reply = await self.client.call("ServerReady", b"")
            return pb.ServerReadyResponse.FromString(reply).ready
        request = pb.ModelReadyRequest(name=name, version=version)
        code, text, reply = await self.client.call("ModelReady", request.SerializeToString())
        assert code is Code.OK, text
        return pb.ModelReadyResponse.FromString(reply).ready


class RestControl:
    """Over REST."""

    def __init__(self, client: RestClient) -> None:
        self.client = client

    async def change(self, verb: str, name: str, parameters: Parameters) -> Outcome:
        body = json.dumps({"parameters": parameters}).encode() if parameters else b""
        path = f"/v2/repository/models/{quote(name, safe='').replace('.', '%2E')}/{verb}"
        status, headers, reply = await self.client.call("POST", path, body)
        assert headers["Content-Type"] == "application/json"
        answer = json.loads(reply)
        if status == STATUS_OF[Code.OK]:
            assert answer == {"name": name, verb: True}
            return FINE
        assert list(answer) == ["error"]
        return next(code for code, number in STATUS_OF.items() if number == status), answer["error"]

    async def load(self, name: str, **parameters: Any) -> Outcome:
        return await self.change("load", name, parameters)

    async def unload(self, name: str, **parameters: Any) -> Outcome:
        return await self.change("unload", name, parameters)

    async def index(self, *, ready: bool = False) -> list[Row]:
        body = json.dumps({"ready": True}).encode() if ready else b""
        status, _, reply = await self.client.call("POST", "/v2/repository/index", body)
        assert status == STATUS_OF[Code.OK], reply
        return [Row(**row) for row in json.loads(reply)]

    async def ready(self, name: str = "", version: str = "") -> bool:
        path = "/v2/health/ready"
        if name:
            path = f"/v2/models/{name}/versions/{version}/ready" if version else f"/v2/models/{name}/ready"
        status, _, _ = await self.client.call("GET", path)
        assert status in (200, 404, 503)
        return status == STATUS_OF[Code.OK]


Control = GrpcControl | RestControl


def control_of(served: Served, interface: str) -> Control:
    """A control over the protocol of this name, "grpc" or "rest"."""
    return GrpcControl(served.grpc) if interface == "grpc" else RestControl(served.rest)


async def ask(served: Served, name: str, version: str = "", x: int = 0) -> int | Outcome:
    """What the model says, or the error."""
    tensor = Tensor("x", "INT32", [1], struct.pack("<i", x))
    answer: Answer = await served.grpc.infer(Infer(name, [tensor], version=version))
    if answer.code is not Code.OK:
        return answer.code, answer.text
    (number,) = struct.unpack("<i", answer.outputs[0].raw)
    return int(number)


class Loads:
    """`load` for a server: the usual one, which counts, and waits while it is held."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, backend: str, file: Path, config: ModelConfig) -> Model:
        self.begun.append(f"{file.parent.parent.name}/{file.parent.name}")
        assert self.gate.wait(SECONDS)
        return backends.load(backend, file, config)


@dataclass(frozen=True)
class Explicit:
    """Servers in explicit control mode of the models in a folder, controlled over one of KServe's interfaces."""

    interface: str
    folder: Path

    @asynccontextmanager
    async def __call__(
        self, *paths: Path, load: Load = backends.load, **options: Any
    ) -> AsyncIterator[tuple[Served, Control]]:
        async with serve_models(paths or [self.folder], load, **EXPLICIT | options) as served:
            yield served, control_of(served, self.interface)


async def until_index(control: Control, *rows: Row) -> None:
    """Wait until the index has these lines."""
    await until_found(control.index, lambda found: found == list(rows))


# --- what is said ---

INVALID = Code.INVALID_ARGUMENT


def unknown(name: str, what: str = "has no available versions") -> tuple[Code, str]:
    return Code.NOT_FOUND, f"Request for unknown model: '{name}' {what}"


def not_ready(name: str, version: int) -> tuple[Code, str]:
    return Code.UNAVAILABLE, f"Request for unknown model: '{name}' version {version} is not at ready state"


def not_polled(name: str, why: str) -> tuple[Code, str]:
    return Code.INTERNAL, f"failed to load '{name}', failed to poll from model repository: {why}"


def load_failed(name: str, why: object, version: int = 1) -> tuple[Code, str]:
    return INVALID, f"load failed for model '{name}': version {version} is at UNAVAILABLE state: {why};"
