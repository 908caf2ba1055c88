"""Models that are made of others, asked in every protocol of a server process, while their parts are swapped."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from tests.e2e.server_process import ServerProcess
from tests.e2e.steady_caller import Caller
from tests.process import SECONDS, write_atomically
from tests.protocol_clients.channel import rpc
from tests.protocol_clients.grps import post, predicted, tensors
from tests.protocol_clients.rest import Rest
from tests.protocol_clients.tfserving import predict, predict_request
from tests.waiting import wait_until
from triglot.pb.grps.grps_pb2 import DT_FLOAT32, GenericTensor
from triglot.pb.kserve import inference_pb2

ON_THREAD = """
import triglot

class Model(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs, call):
        return {"y": inputs["x"] + 1}
"""
ON_LOOP = ON_THREAD.replace("def infer", "async def infer").replace("+ 1", "* 2")
CALLER = ON_THREAD.replace('{"y": inputs["x"] + 1}', 'call.infer("config_form", inputs)')
ASYNC_CALLER = CALLER.replace("def infer", "async def infer").replace("return call", "return await call")
PYTHON_FORM = """
import triglot

class Pipeline(triglot.Ensemble):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]
    steps = [
        triglot.Step("increment", {"x": "x"}, {"y": "more"}),
        triglot.Step("double", {"x": "more"}, {"y": "y"}),
    ]
"""
CONFIG_FORM = """
platform: "ensemble"
input { name: "x" data_type: TYPE_FP32 dims: -1 }
output { name: "y" data_type: TYPE_FP32 dims: -1 }
ensemble_scheduling {
  step {
    model_name: "increment" model_version: -1
    input_map { key: "x" value: "x" } output_map { key: "y" value: "more" }
  }
  step {
    model_name: "double" model_version: -1
    input_map { key: "x" value: "more" } output_map { key: "y" value: "y" }
  }
}
"""
MADE = ("config_form", "python_form", "caller", "async_caller")


def write_repository(folder: Path) -> None:
    """Every model that gives (x + 1) * 2, and what they are made of."""
    for name, text in {
        "increment": ON_THREAD,
        "double": ON_LOOP,
        "python_form": PYTHON_FORM,
        "caller": CALLER,
        "async_caller": ASYNC_CALLER,
    }.items():
        write_atomically(folder / name / "1" / "model.py", text)
    (folder / "config_form" / "1").mkdir(parents=True)
    write_atomically(folder / "config_form" / "config.pbtxt", CONFIG_FORM)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("made")
    write_repository(folder)
    with ServerProcess(str(folder)) as process:
        yield process


@pytest.fixture(scope="module")
def channel(made: ServerProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(made.grpc_address) as opened:
        yield opened


def rest_of(server: ServerProcess) -> Rest:
    return Rest(server.ports()[1])


def kserve(channel: grpc.Channel, model: str, *values: float) -> list[float]:
    request = inference_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="FP32", shape=[len(values)])
    request.raw_input_contents.append(np.array(values, np.float32).tobytes())
    reply = rpc(channel, "ModelInfer", inference_pb2.ModelInferResponse)(request, timeout=SECONDS)
    return list(np.frombuffer(reply.raw_output_contents[0], np.float32))


@pytest.mark.parametrize("model", MADE)
def test_by_every_interface(made: ServerProcess, channel: grpc.Channel, model: str) -> None:
    rest, expected = rest_of(made), [4.0, 6.0]
    assert kserve(channel, model, 1, 2) == expected
    assert list(predict(channel, predict_request(model, [1, 2])).outputs["y"].float_val) == expected
    tensor = GenericTensor(name="x", dtype=DT_FLOAT32, shape=[2], flat_float32=[1, 2])
    answer = predicted(channel, tensors(tensor, model=model))
    assert list(answer.gtensors.tensors[0].flat_float32) == expected
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}
    status, reply = rest.post(f"/v2/models/{model}/infer", body)
    assert (status, reply["outputs"][0]["data"]) == (200, expected)
    assert rest.post(f"/v1/models/{model}:predict", {"instances": [1, 2]}) == (200, {"predictions": expected})
    status, reply = post(made.rest_address, {"gtensors": {"tensors": [_grps_json(1.0, 2.0)]}}, f"model={model}")
    assert status == 200, reply
    assert reply["gtensors"]["tensors"][0]["flat_float32"] == expected


def _grps_json(*values: float) -> dict[str, object]:
    return {"name": "x", "dtype": "DT_FLOAT32", "shape": [len(values)], "flat_float32": list(values)}


def test_metadata_of_ensembles(made: ServerProcess) -> None:
    rest = rest_of(made)
    for model in ("config_form", "python_form"):
        status, metadata = rest.get(f"/v2/models/{model}")
        assert (status, metadata["platform"], metadata["versions"]) == (200, "ensemble", ["1"])
    assert rest.get("/v2/models/caller")[1]["platform"] == "python"
    _, index = rest.post("/v2/repository/index", {})
    assert {row["state"] for row in index} == {"READY"}


def test_what_is_counted(made: ServerProcess, channel: grpc.Channel) -> None:
    """Calls between models are no client's."""
    rest = rest_of(made)

    def numbers() -> tuple[int, int, dict[str, int]]:
        _, page = rest.get("/grps/v1/monitor/overview")
        rows = {row["name"]: row for row in page["models"]}
        return page["totals"]["requests"], rows["config_form"]["requests"], rows["increment"]["protocols"]

    before = numbers()
    kserve(channel, "config_form", 1)
    after = numbers()
    assert after[0] - before[0] == 1
    assert after[1] - before[1] == 1
    assert after[2]["internal"] - before[2].get("internal", 0) == 1
    assert after[2].get("kserve", 0) == before[2].get("kserve", 0)


def test_errors(made: ServerProcess) -> None:
    body = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [1]}]}
    status, reply = rest_of(made).post("/v2/models/config_form/infer", body)
    assert status == 400
    assert "data-type is 'FP64', but model 'config_form' expects 'FP32'" in reply["error"]


@pytest.mark.parametrize("model", MADE)
def test_parts_are_swapped_under_traffic(tmp_path: Path, model: str) -> None:
    """No call fails, and each next answer is that of the new part."""
    write_repository(tmp_path)
    options = ("--watch", "--poll-interval", "0.1")
    with ServerProcess(str(tmp_path), *options) as server, grpc.insecure_channel(server.grpc_address) as channel:
        with Caller(lambda: kserve(channel, model, 1)) as asking:
            asking.wait_for([4.0])
            for place, text, answer in (
                ("increment/1", ON_THREAD.replace("+ 1", "+ 2"), [6.0]),
                ("double/2", ON_LOOP.replace("* 2", "* 3"), [9.0]),
                ("increment/1", ON_THREAD.replace("+ 1", "+ 3"), [12.0]),
            ):
                write_atomically(tmp_path / place / "model.py", text)
                asking.wait_for(answer)
        assert asking.answers == [[4.0], [6.0], [9.0], [12.0]]


def test_part_is_unloaded_and_loaded_again(tmp_path: Path) -> None:
    write_repository(tmp_path)
    with ServerProcess(str(tmp_path), "--watch", "--poll-interval", "0.1") as server:
        rest = rest_of(server)

        def index(key: str) -> dict[str, str]:
            return {row["name"]: row.get(key, "") for row in rest.post("/v2/repository/index", {})[1]}

        assert index("state")["config_form"] == "READY"
        shutil.move(tmp_path / "double", tmp_path.parent / "double")
        reason = "steps[1].model: 'double' is not available: there is no such model"
        file = tmp_path / "python_form" / "1" / "model.py"
        wait_until(lambda: index("reason").get("python_form") == f"{file}: {reason}")
        assert index("state")["python_form"] == "UNAVAILABLE"
        wait_until(lambda: index("state")["config_form"] == "UNAVAILABLE")
        assert rest.get("/v2/models/config_form/ready")[0] == 503
        shutil.move(tmp_path.parent / "double", tmp_path / "double")
        wait_until(lambda: index("state")["config_form"] == index("state")["python_form"] == "READY")
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]}
        for model in itertools.chain(MADE):
            assert rest.post(f"/v2/models/{model}/infer", body)[1]["outputs"][0]["data"] == [4.0]
