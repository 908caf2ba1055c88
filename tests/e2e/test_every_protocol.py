"""One model on one server, asked in every protocol: the numbers are the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from tests.e2e.server_process import ServerProcess
from tests.process import SECONDS
from tests.protocol_clients.channel import rpc
from tests.protocol_clients.rest import Rest
from tests.protocol_clients.tfserving import predict, predict_request
from triglot.pb.kserve import inference_pb2

pytestmark = pytest.mark.both_transports

MODEL = "half_plus_three"
VALUES, ANSWERS = [1.0, 2.0, 5.0], [3.5, 4.0, 5.5]


def kserve_grpc(channel: grpc.Channel, shape: list[int]) -> list[float]:
    call = rpc(channel, "ModelInfer", inference_pb2.ModelInferResponse)
    answers = []
    for value in VALUES:
        request = inference_pb2.ModelInferRequest(model_name=MODEL)
        request.inputs.add(name="x", datatype="FP32", shape=shape)
        request.raw_input_contents.append(np.float32(value).tobytes())
        response = call(request, timeout=SECONDS)
        (output,) = response.outputs
        assert (output.name, output.datatype, list(output.shape)) == ("y", "FP32", shape)
        answers.append(np.frombuffer(response.raw_output_contents[0], "<f4").item())
    return answers


def kserve_rest(rest: Rest, shape: list[int]) -> list[float]:
    answers = []
    for value in VALUES:
        tensor = {"name": "x", "datatype": "FP32", "shape": shape, "data": [value]}
        status, answer = rest.post(f"/v2/models/{MODEL}/infer", {"inputs": [tensor]})
        assert status == 200, answer
        assert answer["outputs"][0]["shape"] == shape
        answers += answer["outputs"][0]["data"]
    return answers


def ask_everybody(server: ServerProcess, shape: list[int]) -> None:
    """`shape` is what KServe's clients have to send, one value at a time."""
    rest = Rest(int(server.rest_address.rpartition(":")[2]))
    with grpc.insecure_channel(server.grpc_address) as channel:
        assert kserve_grpc(channel, shape) == ANSWERS
        assert list(predict(channel, predict_request(MODEL, VALUES)).outputs["y"].float_val) == ANSWERS
    assert kserve_rest(rest, shape) == ANSWERS
    tensorflow, instances = f"/v1/models/{MODEL}:predict", {"instances": VALUES}
    for path, body, expected in (
        (tensorflow, instances, {"predictions": ANSWERS}),
        (tensorflow, {"instances": [{"x": value} for value in VALUES]}, {"predictions": ANSWERS}),
        (tensorflow, {"inputs": VALUES}, {"outputs": ANSWERS}),
        (tensorflow, {"inputs": {"x": VALUES}}, {"outputs": ANSWERS}),
        (f"/v1/projects/some/models/{MODEL}:predict", instances, {"predictions": ANSWERS}),
    ):
        assert rest.post(path, body) == (200, expected)


def test_a_python_model(server: ServerProcess) -> None:
    ask_everybody(server, [1])


@pytest.fixture(scope="module")
def saved_model_server(tensorflow: Path, models: Path) -> Iterator[ServerProcess]:
    """A server with every protocol, of the SavedModel."""
    with ServerProcess(str(models / MODEL), python=tensorflow) as process:
        yield process


@pytest.mark.both_transports(False)
@pytest.mark.newest
def test_a_saved_model(saved_model_server: ServerProcess) -> None:
    """Its signature says that x is a scalar: KServe's clients have to keep to that."""
    ask_everybody(saved_model_server, [])
