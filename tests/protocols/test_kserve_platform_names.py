"""What metadata calls the server, by an option, and models' platforms: as Triton does, or as OIP's list does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.protocols.kserve_served import serve_models
from triglot import Model, TensorSpec
from triglot.core.errors import Code
from triglot.model.config import ModelConfig
from triglot.pb.kserve import inference_pb2 as pb
from triglot.run import DEMO
from triglot.version import __version__

TRITON = {"onnx": "onnxruntime_onnx", "torch": "pytorch_libtorch", "tensorflow": "tensorflow_savedmodel"}
OIP = {"onnx": "onnx_onnxv1", "torch": "pytorch_torchscript", "tensorflow": "tensorflow_savedmodel"}
# These the list does not have.
OTHERS = {"sklearn": "sklearn", "xgboost": "xgboost", "python": "python"}
FILES = {
    "onnx": "model.onnx",
    "torch": "model.pt",
    "tensorflow": "saved_model.pb",
    "sklearn": "model.joblib",
    "xgboost": "model.bst",
    "python": "model.py",
}


class Plain(Model):
    inputs = [TensorSpec("x", "FP32", [-1])]
    outputs = [TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs: Any) -> Any:
        return {"y": inputs["x"]}


def of_platform(backend: str, file: Path, config: ModelConfig) -> Model:
    of: type[Model] = type("Of", (Plain,), {"platform": (TRITON | OTHERS)[backend]})
    return of()


@pytest.mark.parametrize(("option", "expected"), [({}, TRITON), ({"platform_names": "oip"}, OIP)])
async def test_both_interfaces_name_the_platform(
    tmp_path: Path, option: dict[str, str], expected: dict[str, str]
) -> None:
    for name, file in FILES.items():
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / file).write_bytes(b"")
    async with serve_models([tmp_path], load=of_platform, **option) as served:
        for name, platform in (expected | OTHERS).items():
            _, _, reply = await served.grpc.call("ModelMetadata", _asked(name))
            assert pb.ModelMetadataResponse.FromString(reply).platform == platform
            _, _, body = await served.rest.call("GET", f"/v2/models/{name}")
            assert json.loads(body)["platform"] == platform


async def test_the_onnx_demo() -> None:
    pytest.importorskip("onnxruntime")
    async with serve_models([DEMO / "digits"], platform_names="oip") as served:
        _, _, body = await served.rest.call("GET", "/v2/models/digits")
        assert json.loads(body)["platform"] == "onnx_onnxv1"


def _asked(name: str) -> bytes:
    return pb.ModelMetadataRequest(name=name).SerializeToString()


@pytest.mark.parametrize("name", ["triglot", "triton", "größe €"])
async def test_both_interfaces_return_the_name(name: str) -> None:
    options: dict[str, Any] = {} if name == "triglot" else {"server_name": name}
    async with serve_models(**options) as served:
        code, _, reply = await served.grpc.call("ServerMetadata", b"")
        assert code is Code.OK
        metadata = pb.ServerMetadataResponse.FromString(reply)
        assert (metadata.name, metadata.version) == (name, __version__)
        for path in ("/v2", "/v2/"):
            _, _, body = await served.rest.call("GET", path)
            assert json.loads(body) == {
                "name": name,
                "version": __version__,
                "extensions": list(metadata.extensions),
            }
