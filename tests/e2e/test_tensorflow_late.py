"""A SavedModel's run ends at the deadline of its call, wherever it was set."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests import saved_models
from tests.e2e.server_process import ServerProcess
from tests.protocol_clients.channel import grpc_channel, rpc
from tests.protocol_clients.rest import Rest
from tests.protocol_clients.tfserving import PREDICT, failure, predict, predict_request
from tests.waiting import wait_until
from triglot.pb.kserve import inference_pb2
from triglot.pb.tfserving import predict_pb2

pytestmark = [pytest.mark.newest, pytest.mark.both_transports]

SOON = 1.0
LATE = "the server's rest_timeout of 1 seconds passed while the model ran"


@pytest.fixture(scope="module")
def server(tensorflow: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = saved_models.write(tmp_path_factory.mktemp("late"), "kinds", script="tf_kinds_models.py")
    with ServerProcess(str(folder), "--rest-timeout", f"{SOON:g}", python=tensorflow) as process:
        yield process


@pytest.fixture
def rest(server: ServerProcess) -> Rest:
    return Rest(int(server.rest_address.rpartition(":")[2]))


@pytest.fixture
def channel(server: ServerProcess) -> Iterator[grpc.Channel]:
    with grpc_channel(int(server.grpc_address.rpartition(":")[2])) as channel:
        yield channel


def busy(server: ServerProcess) -> int:
    """Return how many instances of the model run a graph."""
    with urllib.request.urlopen(f"http://{server.rest_address}/metrics") as page:
        (number,) = re.findall(r"^triglot_instances_busy\{[^}]*\} (\d+)", page.read().decode(), re.MULTILINE)
    return int(number)


def wait_until_idle(server: ServerProcess) -> None:
    """Wait until the graph, which would never end by itself, has ended."""
    wait_until(lambda: busy(server) == 0)


def test_a_run_ends_at_the_deadline_of_tensorflow_serving_rest(server: ServerProcess, rest: Rest) -> None:
    body = {"signature_name": "endless", "instances": [1.0]}
    assert rest.post("/v1/models/kinds:predict", body) == (504, {"error": LATE})
    wait_until_idle(server)


def test_a_run_ends_at_the_deadline_of_v2_rest(server: ServerProcess, rest: Rest) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}
    body = {"inputs": [tensor], "parameters": {"signature_name": "endless"}}
    status, answer = rest.post("/v2/models/kinds/infer", body)
    assert (status, LATE in answer["error"]) == (504, True)
    wait_until_idle(server)


def test_a_run_ends_at_the_deadline_of_predict(server: ServerProcess, channel: grpc.Channel) -> None:
    request = predict_request("kinds", [1.0])
    request.model_spec.signature_name = "endless"
    call = rpc(channel, PREDICT, predict_pb2.PredictResponse)
    code, _ = failure(lambda: call(request, timeout=SOON))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until_idle(server)


def test_a_run_ends_at_the_deadline_of_model_infer(server: ServerProcess, channel: grpc.Channel) -> None:
    request = inference_pb2.ModelInferRequest(model_name="kinds")
    request.parameters["signature_name"].string_param = "endless"
    tensor = request.inputs.add(name="x", datatype="FP32", shape=[1])
    tensor.contents.fp32_contents.append(1.0)
    call = rpc(channel, "ModelInfer", inference_pb2.ModelInferResponse)
    code, _ = failure(lambda: call(request, timeout=SOON))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until_idle(server)


def test_a_cancelled_run_ends_at_its_deadline(server: ServerProcess, channel: grpc.Channel) -> None:
    """A session cannot end one run before that, in TensorFlow Serving neither."""
    request = predict_request("kinds", [1.0])
    request.model_spec.signature_name = "endless"
    running = rpc(channel, PREDICT, predict_pb2.PredictResponse).future(request, timeout=3 * SOON)
    wait_until(lambda: busy(server) == 1)
    running.cancel()
    wait_until_idle(server)
    request.output_filter.append("y")
    assert list(predict(channel, request).outputs["y"].float_val) == [2.0]
