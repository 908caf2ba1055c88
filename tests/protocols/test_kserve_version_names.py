"""Versions by name, and 0 for the default version, wherever a request may say a version."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.protocol_clients.kserve_async import SERVICE, Infer, Tensor
from tests.protocols.kserve_served import Served, serve_models
from triglot.core.errors import Code
from triglot.pb.kserve import inference_pb2 as pb
from triglot.pb.tfserving import management_pb2, metadata_pb2, predict_pb2, tensor_pb2

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.both_transports]
MODEL = """import numpy as np
import triglot


class Version(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [1])]
    outputs = [triglot.TensorSpec("version", "FP32", [1])]

    def infer(self, inputs):
        return {"version": np.array([NUMBER], np.float32)}
"""
NAMES = 'default = "v1.0"\n[versions]\n"v1.0" = 1\nv10 = 3\nlatest = 3\nlater = 4\n'
X = Tensor("x", "FP32", [1], struct.pack("<f", 0))
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [0]}]}
SERVES = pytest.mark.parametrize(
    ("model", "version", "number"),
    [
        ("named", "v10", 3),
        ("named", "latest", 3),
        ("named", "v1.0", 1),
        ("named", "3", 3),
        ("named", "0", 1),
        ("numbers", "0", 3),
        ("zero", "0", 0),
    ],
)
MISSING = {
    "v11": "Request for unknown model: 'named' version v11 is not found, only 1, 3, v1.0, v10, latest",
    "V10": "Request for unknown model: 'named' version V10 is not found, only 1, 3, v1.0, v10, latest",
    "later": "Request for unknown model: 'named' version 4 is not found",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    for model, numbers in (("named", (1, 3)), ("numbers", (1, 3)), ("zero", (0, 3))):
        for number in numbers:
            put(folder / model / str(number), number)
    (folder / "named" / "versions.toml").write_text(NAMES)
    async with serve_models([folder]) as served:
        yield served


def put(folder: Path, number: int) -> None:
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(MODEL.replace("NUMBER", str(number)))


async def get(served: Served, path: str, verb: str = "GET", body: Any = None) -> tuple[int, Any]:
    status, _, reply = await served.rest.call(verb, path, json.dumps(body).encode() if body else b"")
    return status, json.loads(reply)


@SERVES
@pytest.mark.parametrize("interface", ["grpc", "rest"])
async def test_infer_by_name(served: Served, interface: str, model: str, version: str, number: int) -> None:
    answer = await served.client(interface).infer(Infer(model, [X], version=version))
    assert (answer.code, answer.version) == (Code.OK, str(number))
    assert answer.outputs[0].raw == struct.pack("<f", number)


@SERVES
async def test_every_route_takes_names(served: Served, model: str, version: str, number: int) -> None:
    path = f"/v2/models/{model}/versions/{version}"
    assert await get(served, f"{path}/ready") == (200, {"name": model, "ready": True})
    assert str(number) in (await get(served, path))[1]["versions"]
    assert (await get(served, f"{path}/config"))[1]["name"] == model
    assert [stats["version"] for stats in (await get(served, f"{path}/stats"))[1]["model_stats"]] == [str(number)]
    assert (await get(served, f"{path}/trace/setting"))[0] == 200
    assert (await get(served, f"{path}/generate", "POST", {"x": 0}))[1]["model_version"] == str(number)
    assert (await get(served, f"{path}/infer", "POST", BODY))[1]["model_version"] == str(number)


@SERVES
async def test_every_rpc_takes_names(served: Served, model: str, version: str, number: int) -> None:
    kinds: list[tuple[str, Any, Any]] = [
        ("ModelReady", pb.ModelReadyRequest, pb.ModelReadyResponse),
        ("ModelMetadata", pb.ModelMetadataRequest, pb.ModelMetadataResponse),
        ("ModelConfig", pb.ModelConfigRequest, pb.ModelConfigResponse),
        ("ModelStatistics", pb.ModelStatisticsRequest, pb.ModelStatisticsResponse),
    ]
    replies = []
    for rpc, request, response in kinds:
        code, text, reply = await served.grpc.call(rpc, request(name=model, version=version).SerializeToString())
        assert code is Code.OK, text
        replies.append(response.FromString(reply))
    ready, metadata, config, statistics = replies
    assert ready.ready
    assert str(number) in metadata.versions
    assert config.config.name == model
    assert [stats.version for stats in statistics.model_stats] == [str(number)]
    message = pb.ModelInferRequest(model_name=model, model_version=version, raw_input_contents=[X.raw])
    message.inputs.add(name="x", datatype="FP32", shape=[1])
    stream = served.grpc.channel.stream_stream(SERVICE + "ModelStreamInfer")
    [answer] = [response async for response in stream(iter([message.SerializeToString()]), timeout=20)]
    assert pb.ModelStreamInferResponse.FromString(answer).infer_response.model_version == str(number)


async def test_metadata_lists_names_and_numbers(served: Served) -> None:
    for version, versions in (
        ("", ["1", "3", "v1.0", "v10", "latest"]),
        ("/versions/3", ["3", "v10", "latest"]),
        ("/versions/v10", ["3", "v10", "latest"]),
    ):
        assert (await get(served, f"/v2/models/named{version}"))[1]["versions"] == versions
    assert (await get(served, "/v2/models/numbers"))[1]["versions"] == ["1", "3"]


@pytest.mark.parametrize(("version", "text"), MISSING.items())
async def test_missing_name_error_lists_the_names(served: Served, version: str, text: str) -> None:
    for interface in ("grpc", "rest"):
        answer = await served.client(interface).infer(Infer("named", [X], version=version))
        assert (answer.code, answer.text) == (Code.NOT_FOUND, text)
    for part in ("", "/ready", "/config", "/stats"):
        assert await get(served, f"/v2/models/named/versions/{version}{part}") == (404, {"error": text})
    request = pb.ModelReadyRequest(name="named", version=version).SerializeToString()
    assert await served.grpc.call("ModelReady", request) == (Code.OK, "", b"")


@pytest.mark.parametrize(("model", "number"), [("named", 1), ("numbers", 3), ("zero", 0)])
async def test_version_0_is_the_default_for_clients_of_tensorflow_serving(
    served: Served, model: str, number: int
) -> None:
    path = f"/v1/models/{model}/versions/0"
    status, answer = await get(served, f"{path}:predict", "POST", {"instances": [0.0]})
    assert (status, answer) == (200, {"predictions": [float(number)]})
    status, answer = await get(served, f"{path}/metadata")
    assert (status, answer["model_spec"]["version"]) == (200, str(number))
    listed = ["0"] if model == "zero" else ["3", "1"]
    status, answer = await get(served, path)
    assert [status["version"] for status in answer["model_version_status"]] == listed
    spec = {"name": model, "version": {"value": 0}}
    predict = predict_pb2.PredictRequest(model_spec=spec)
    predict.inputs["x"].dtype = tensor_pb2.DT_FLOAT
    predict.inputs["x"].float_val.append(0)
    predict.inputs["x"].tensor_shape.dim.add(size=1)
    for rpc, request, response in (
        ("PredictionService/Predict", predict, predict_pb2.PredictResponse),
        (
            "PredictionService/GetModelMetadata",
            metadata_pb2.GetModelMetadataRequest(model_spec=spec, metadata_field=["signature_def"]),
            metadata_pb2.GetModelMetadataResponse,
        ),
    ):
        code, text, reply = await served.grpc.call(f"/tensorflow.serving.{rpc}", request.SerializeToString())
        assert code is Code.OK, text
        assert response.FromString(reply).model_spec.version.value == number
    states = management_pb2.GetModelStatusRequest(model_spec=spec).SerializeToString()
    code, text, reply = await served.grpc.call("/tensorflow.serving.ModelService/GetModelStatus", states)
    found = management_pb2.GetModelStatusResponse.FromString(reply)
    assert [str(status.version) for status in found.model_version_status] == listed
