"""A grps project, as it lies in its folder, for the clients of every protocol."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from tests.e2e.server_process import QUICK, ServerProcess
from tests.grps_toys import TOYS, grps_arguments
from tests.process import SECONDS, Triglot, run_triglot
from tests.protocol_clients.channel import grpc_channel, rpc
from tests.protocol_clients.grps import failure, post, predicted
from tests.protocol_clients.rest import Rest
from tests.protocol_clients.tfserving import PREDICT
from triglot.pb.grps.grps_pb2 import GrpsMessage
from triglot.pb.kserve import inference_pb2
from triglot.pb.tfserving import predict_pb2, tensor_pb2

OK = {"code": 200, "msg": "OK", "status": "SUCCESS"}
FLOATS = [[1.5, -2.0, 3.25], [4.0, 5.5, 6.0]]
WORDS = ["Grüße", "", "中"]


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The toy project, as it lies in its folder."""
    with ServerProcess(*grps_arguments(TOYS, tmp_path_factory.mktemp("toys")), command="grps") as process:
        yield process


@pytest.fixture(scope="module")
def project_channel(project: ServerProcess) -> Iterator[grpc.Channel]:
    """To its gRPC port."""
    with grpc_channel(port_of(project.grpc_address)) as channel:
        yield channel


@pytest.fixture(scope="module")
def project_rest(project: ServerProcess) -> Rest:
    """Its HTTP port, for KServe's calls."""
    return Rest(port_of(project.rest_address))


def test_grps_clients(project: ServerProcess, project_channel: grpc.Channel) -> None:
    assert predicted(project_channel, GrpsMessage(str_data="hello")).str_data == "hello"
    assert predicted(project_channel, GrpsMessage(model="double-1.0.0", str_data="4")).str_data == "8"
    assert post(project.rest_address, {"str_data": "hello"}) == (200, {"status": OK, "str_data": "hello"})
    assert post(project.rest_address, {"str_data": "4"}, "model=double-1.0.0")[1]["str_data"] == "8"
    assert post(project.rest_address, b"\x00\xff") == (200, b"\x00\xff")


def test_the_folder_stays_as_it_is(project: ServerProcess, project_channel: grpc.Channel) -> None:
    """Logs are where the configuration says, and the server writes nothing into the project."""
    assert predicted(project_channel, GrpsMessage(str_data="hello")).str_data == "hello"
    assert {path.name for path in TOYS.iterdir()} - {"__pycache__"} == {"conf", "src", "test.py"}


def v2_request(model: str) -> inference_pb2.ModelInferRequest:
    """Two tensors: floats, and texts."""
    request = inference_pb2.ModelInferRequest(model_name=model, id="7")
    request.inputs.add(name="floats", datatype="FP32", shape=[2, 3])
    request.inputs.add(name="words", datatype="BYTES", shape=[len(WORDS)])
    packed = b"".join(struct.pack("<I", len(word.encode())) + word.encode() for word in WORDS)
    request.raw_input_contents.extend([np.array(FLOATS, "<f4").tobytes(), packed])
    return request


def test_kserve_grpc(project_channel: grpc.Channel) -> None:
    """The project sees gtensors, and what it answers are the outputs."""
    request = v2_request("echo")
    response = rpc(project_channel, "ModelInfer", inference_pb2.ModelInferResponse)(request, timeout=SECONDS)
    assert (response.model_name, response.id) == ("echo", "7")
    shown = [(output.name, output.datatype, list(output.shape)) for output in response.outputs]
    assert shown == [("floats", "FP32", [2, 3]), ("words", "BYTES", [3])]
    assert list(response.raw_output_contents) == list(request.raw_input_contents)


def test_kserve_rest(project_rest: Rest) -> None:
    inputs = [
        {"name": "floats", "datatype": "FP32", "shape": [2, 3], "data": FLOATS},
        {"name": "words", "datatype": "BYTES", "shape": [3], "data": WORDS},
    ]
    status, answer = project_rest.post("/v2/models/echo/infer", {"inputs": inputs})
    assert status == 200, answer
    assert answer["outputs"][0] | {"data": FLOATS} == inputs[0]
    assert np.reshape(answer["outputs"][0]["data"], (2, 3)).tolist() == FLOATS
    assert answer["outputs"][1] == inputs[1]


@pytest.mark.parametrize(
    ("datatype", "dtype", "values"),
    [
        ("UINT8", "u1", [0, 255]),
        ("INT8", "i1", [-128, 127]),
        ("INT16", "<i2", [-32768, 32767]),
        ("INT32", "<i4", [-(2**31), 2**31 - 1]),
        ("INT64", "<i8", [-(2**63), 2**63 - 1]),
        ("FP16", "<f2", [0.1, -65504]),
        ("FP32", "<f4", [0.1, 3e38]),
        ("FP64", "<f8", [0.1, 1e308]),
    ],
)
def test_every_datatype_of_grps(
    project_channel: grpc.Channel, datatype: str, dtype: str, values: list[float]
) -> None:
    request = inference_pb2.ModelInferRequest(model_name="echo")
    request.inputs.add(name="x", datatype=datatype, shape=[len(values)])
    request.raw_input_contents.append(np.array(values, dtype).tobytes())
    response = rpc(project_channel, "ModelInfer", inference_pb2.ModelInferResponse)(request, timeout=SECONDS)
    assert [output.datatype for output in response.outputs] == [datatype]
    assert list(response.raw_output_contents) == list(request.raw_input_contents)


def test_tfserving_grpc(project_channel: grpc.Channel) -> None:
    request = predict_pb2.PredictRequest(model_spec={"name": "echo"})
    tensor = request.inputs["x"]
    tensor.dtype = tensor_pb2.DT_FLOAT
    tensor.tensor_shape.dim.add(size=2)
    tensor.float_val.extend([1.5, 2.5])
    response = rpc(project_channel, PREDICT, predict_pb2.PredictResponse)(request, timeout=SECONDS)
    assert list(response.outputs) == ["x"]
    answer = response.outputs["x"]
    assert (answer.dtype, [dim.size for dim in answer.tensor_shape.dim]) == (tensor_pb2.DT_FLOAT, [2])
    values = answer.float_val or np.frombuffer(answer.tensor_content, "<f4")
    assert list(values) == [1.5, 2.5]


def test_errors_of_a_project(project_channel: grpc.Channel, project_rest: Rest, project: ServerProcess) -> None:
    """The same text for everybody."""
    assert v2_failure(project_channel, "set_err") == "my error"
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}
    status, answer = project_rest.post("/v2/models/set_err/infer", {"inputs": [tensor]})
    assert (status, answer) == (500, {"error": "my error"})
    assert failure(project_channel, GrpsMessage(model="set_err-1.0.0", str_data="x")) == "my error"
    status, answer = post(project.rest_address, {"str_data": "x"}, "model=set_err-1.0.0")
    assert (status, answer) == (500, {"status": {"code": 500, "msg": "my error", "status": "FAILURE"}})


def v2_failure(channel: grpc.Channel, model: str) -> str:
    call = rpc(channel, "ModelInfer", inference_pb2.ModelInferResponse)
    with pytest.raises(grpc.RpcError) as caught:
        call(v2_request(model), timeout=SECONDS)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    details: str = caught.value.details()
    return details


def test_exceptions_of_a_project(tmp_path: Path) -> None:
    """Everybody sees the text, and the log has the trace."""
    with Triglot(*grps_arguments(TOYS, tmp_path), command="grps", environment=QUICK) as server:
        grpc_port, _ = server.ports()
        with grpc_channel(grpc_port) as channel:
            assert "boom" in v2_failure(channel, "raise")
            assert "boom" in failure(channel, GrpsMessage(model="raise-1.0.0", str_data="x"))
        server.stop()
        assert server.stderr.text().count("ValueError: boom") == 2


def test_answers_that_are_no_tensors(project_channel: grpc.Channel) -> None:
    """A text is one element, a message without data no output, and an ambiguous message an error."""
    call = rpc(project_channel, "ModelInfer", inference_pb2.ModelInferResponse)
    response = call(v2_request("bin2str"), timeout=SECONDS)
    shown = [(output.name, output.datatype, list(output.shape)) for output in response.outputs]
    assert shown == [("str_data", "BYTES", [1])]
    assert list(response.raw_output_contents) == [b"\7\0\0\0Samoyed"]
    assert not call(v2_request("empty"), timeout=SECONDS).outputs
    assert "'zero'" in v2_failure(project_channel, "gmap_out")


def test_the_projects_own_test(tmp_path: Path) -> None:
    """As it is, and a copy of it whose test fails."""
    run = run_triglot("grps", *grps_arguments(TOYS, tmp_path / "conf"), "--unittest")
    assert run.returncode == 0, run.stderr
    copy = shutil.copytree(TOYS, tmp_path / "toys", ignore=shutil.ignore_patterns("__pycache__"))
    test = copy / "test.py"
    test.write_text(test.read_text().replace('"42"', '"43"'))
    run = run_triglot("grps", str(copy), "--unittest")
    assert run.returncode != 0
    assert "'42' != '43'" in run.stderr
