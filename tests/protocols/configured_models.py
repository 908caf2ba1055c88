"""Models whose configuration is asked for over gRPC and REST."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from google.protobuf import json_format

import triglot
from tests.protocols.control_clients import put_config
from tests.protocols.kserve_served import Served, serve_models
from triglot.core.errors import Code
from triglot.model.config import ModelConfig
from triglot.model.scheduling import (
    ControlInput,
    InitialState,
    OldestStrategy,
    SequenceBatching,
    SequenceState,
)
from triglot.pb.kserve import inference_pb2 as pb
from triglot.pb.kserve import model_config_pb2

TRITON_MODELS = Path(__file__).resolve().parents[1] / "models_triton"
EXPLICIT: dict[str, Any] = {"model_control_mode": "explicit", "load_model": "*"}
X, Y = triglot.TensorSpec("x", "FP32", [-1, 3]), triglot.TensorSpec("y", "BYTES", [-1])
CPU = {"gpus": [], "kind": "KIND_CPU", "profile": [], "passive": False, "secondary_devices": [], "host_policy": ""}
SCHEDULING = ("dynamic_batching", "sequence_batching", "ensemble_scheduling")
SEQUENCES = SequenceBatching(
    max_idle=2.5,
    controls=[
        ControlInput("start", "START", "FP32", 0.0, 1.0),
        ControlInput("ready", "READY", "BOOL", False, True),
        ControlInput("end", "END", "INT32", -1, 1),
        ControlInput("id", "CORRID", "BYTES"),
    ],
    states=[SequenceState("in", "out", "INT32", [-1, 2], InitialState("INT32", [1, 2], name="first"))],
    strategy=OldestStrategy(4, (2,), 1e-3, True),
    iterative=True,
)


class Rows(triglot.Model):
    """One word for each row."""

    inputs, outputs = (X,), (Y,)

    def infer(self, inputs: Any) -> dict[str, Any]:
        return {"y": inputs["x"][:, 0].astype("S")}


class Words(Rows):
    def infer(self, inputs: Any) -> Any:
        yield super().infer(inputs)


class Loading:
    """`load` for a server: a model of one class, whatever the file."""

    def __init__(self, model: type[triglot.Model], **attributes: Any) -> None:
        self.made = type(model.__name__, (model,), attributes)
        self.count = 0

    def __call__(self, _: str, __: Path, config: ModelConfig) -> triglot.Model:
        self.count += 1
        model: triglot.Model = self.made()
        model.model_config = config
        return model


async def asked(served: Served, name: str, version: str = "") -> dict[str, Any]:
    """What REST says, which is what gRPC says."""
    request = pb.ModelConfigRequest(name=name, version=version)
    code, text, reply = await served.grpc.call("ModelConfig", request.SerializeToString())
    assert (code, text) == (Code.OK, "")
    path = f"/v2/models/{name}/versions/{version}/config" if version else f"/v2/models/{name}/config"
    status, headers, body = await served.rest.call("GET", path)
    assert (status, headers["Content-Type"]) == (200, "application/json")
    message = json_format.Parse(body, model_config_pb2.ModelConfig())
    assert message == pb.ModelConfigResponse.FromString(reply).config
    config: dict[str, Any] = json.loads(body)
    return config


async def configured(
    folder: Path, text: str = "", model: type[triglot.Model] = Rows, **attributes: Any
) -> dict[str, Any]:
    """What is said of model `m` with this config.pbtxt; "" for none."""
    file = folder / "m" / "1" / "model.py"
    file.parent.mkdir(parents=True)
    file.touch()
    if text:
        put_config(folder / "m", text)
    async with serve_models([folder], Loading(model, **attributes)) as served:
        return await asked(served, "m")
