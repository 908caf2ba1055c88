"""grpcurl, which knows nothing but what reflection tells it, against every service."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.both_transports

SECONDS = 30
Run = Callable[..., str]


@pytest.fixture
def run(grpcurl: Path, server: ServerProcess) -> Run:
    def run(*words: str, body: Any = None) -> str:
        flags = [] if body is None else ["-d", json.dumps(body)]
        command = [str(grpcurl), "-plaintext", *flags, server.grpc_address, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_services_are_listed_and_described(run: Run) -> None:
    services = run("list").split()
    assert {
        "grpc.health.v1.Health",
        "grps.protos.v1.GrpsService",
        "inference.GRPCInferenceService",
        "tensorflow.serving.ModelService",
        "tensorflow.serving.PredictionService",
    } <= set(services)
    for service in services:
        assert "rpc " in run("describe", service)
    assert "map<string, string> properties = 6;" in run("describe", "inference.ModelMetadataResponse")


def test_what_an_any_holds_is_shown(run: Run) -> None:
    body = {"model_spec": {"name": "half_plus_three"}, "metadata_field": ["signature_def"]}
    answer = json.loads(run("tensorflow.serving.PredictionService/GetModelMetadata", body=body))
    definitions = answer["metadata"]["signature_def"]
    assert definitions["@type"] == "type.googleapis.com/tensorflow.serving.SignatureDefMap"
    assert definitions["signatureDef"]["serving_default"]["methodName"] == "tensorflow/serving/predict"


def test_a_stream(run: Run) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "contents": {"fp32_contents": [1.5]}}
    body = {"model_name": "half_plus_three", "id": "7", "inputs": [tensor]}
    answer = json.loads(run("inference.GRPCInferenceService/ModelStreamInfer", body=body))
    assert answer["inferResponse"]["id"] == "7"
    assert answer["inferResponse"]["rawOutputContents"] == ["AABwQA=="]


def test_health(run: Run) -> None:
    assert json.loads(run("grpc.health.v1.Health/Check", body={})) == {"status": "SERVING"}
