"""A version that takes the calls between a body's decoding and its run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triglot import Call, Model, TensorSpec
from triglot.core.fast_json import dumps, loads
from triglot.core.http import HttpRequest
from triglot.dataplane.dataplane import DataPlane
from triglot.model.config import ModelConfig
from triglot.protocols.tfserving.ai_platform import AIPlatform, Predicted
from triglot.protocols.tfserving.models import Models
from triglot.protocols.tfserving.routes import RestApi
from triglot.protocols.tfserving.service import Predictions
from triglot.protocols.tfserving.vertex import Vertex
from triglot.repository.manager.manager import Manager

DATATYPES = {1: "FP32", 2: "FP64"}


class Typed(Model):
    """Takes another datatype in each version, and answers which one came."""

    outputs = [TensorSpec("y", "BYTES", [-1])]

    def __init__(self, version: int) -> None:
        self.inputs = [TensorSpec("x", DATATYPES[version], [-1])]

    def infer(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"y": np.array([inputs["x"].dtype.name.encode()] * len(inputs["x"]), object)}


def load(backend: str, file: Path, config: ModelConfig) -> Model:
    return Typed(int(file.parent.name))


def put(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "model.py").touch()


@asynccontextmanager
async def first_version(folder: Path) -> AsyncIterator[Manager]:
    put(folder / "m" / "1")
    (folder / "m" / "config.pbtxt").write_text("version_policy { latest {} }")
    manager = Manager([folder], load, max_queue_size=9, explicit=["m"])
    try:
        await manager.load_all()
        yield manager
    finally:
        await manager.close()


async def swap(manager: Manager, folder: Path) -> None:
    put(folder / "m" / "2")
    await manager.load_model("m")
    assert manager.registry.ready_versions("m") == [2]


def request(path: str, body: object, **parts: str) -> HttpRequest:
    return HttpRequest(parts, {}, dumps(body), "POST", path)


@pytest.mark.parametrize("body", [{"instances": [1.5, 2]}, {"inputs": [1.5, 2]}, {"inputs": {"x": [1.5, 2]}}])
@pytest.mark.parametrize("swapped", [False, True])
async def test_rest_predict(tmp_path: Path, body: object, *, swapped: bool) -> None:
    async with first_version(tmp_path) as manager:
        dataplane = DataPlane(manager)
        api = RestApi(dataplane, Predictions(dataplane), Models(dataplane, 100), kserve_v1=False)
        call = api.decode_post(request("/v1/models/m:predict", body))
        if swapped:
            await swap(manager, tmp_path)
        answer = loads(bytes(call.encode(await api.infer(call, Call()))))
        (values,) = answer.values()
        assert values == ["float64" if swapped else "float32"] * 2


@pytest.mark.parametrize("vertex", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
async def test_ai_platform(tmp_path: Path, *, vertex: bool, swapped: bool) -> None:
    async with first_version(tmp_path) as manager:
        platform = AIPlatform(DataPlane(manager))
        http = request("/v1/projects/p/models/m:predict", {"instances": [1.5, 2]}, project="p", model="m")
        asked = Vertex(DataPlane(manager), platform, {}).decode_only(http) if vertex else platform.decode(http)
        if swapped:
            await swap(manager, tmp_path)
        predicted: Predicted = await platform.predict(asked, Call())
        (output,) = predicted.response.outputs
        assert output.array.tolist() == [b"float64" if swapped else b"float32"] * 2
        assert predicted.response.model_version == ("2" if swapped else "1")
