"""Requests are recorded whichever protocol they come by, and warm up another version."""

from __future__ import annotations

import json
import re
import resource
import shutil
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests import environments
from tests.e2e.model_configs import config_flag, config_text
from tests.e2e.server_process import QUICK
from tests.process import SECONDS, Triglot, outcome, run_triglot, start_python, write_atomically, write_model
from tests.protocol_clients import grps
from tests.protocol_clients.channel import grpc_channel, rpc
from tests.protocol_clients.rest import Rest
from tests.protocol_clients.tfserving import RELOAD, failure, predict, predict_request
from tests.recorded import logs_in, pairs_in
from tests.waiting import wait_until
from triglot.pb.grps.grps_pb2 import DT_FLOAT32, GenericTensor
from triglot.pb.kserve import inference_pb2
from triglot.pb.tfserving import inference_pb2 as tf_pb2
from triglot.pb.tfserving import management_pb2
from triglot.repository.manager.warm_up import WARM_UP_FILE

MODELS = Path(__file__).parents[1] / "models_tfserving"
HALF = """
import triglot

class Half(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs):
        if inputs["x"].min() < 0:
            raise triglot.InvalidArgument("x: expected no negative values")
        return {"y": inputs["x"] / 2}
"""
COUNTS = """
import numpy as np
import triglot

class Counts(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [1])]
    y = np.zeros(1, np.float32)

    def infer(self, inputs):
        self.y += 1  # The array of the last answer.
        return {"y": self.y}
"""
CALLS = """
import triglot

class Calls(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs, call):
        return {"y": call.infer("half", {"x": inputs["x"]})["y"]}
"""
STREAMS = """
import triglot

class Streams(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs):
        yield {"y": inputs["x"]}
"""
TWO = """
import triglot

class Two(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1]), triglot.TensorSpec("z", "FP32", [-1])]

    def infer(self, inputs):
        return {"y": inputs["x"] / 2, "z": inputs["x"] * 2}
"""
PREDICTOR = """
class Echo:
    @classmethod
    def from_path(cls, model_dir):
        return cls()

    def predict(self, instances, **kwargs):
        return instances
"""
VALUES = [1.0, 3.0]
PREDICTION_SERVICE = "/tensorflow.serving.PredictionService/"


def infer_message(model: str, values: Sequence[float]) -> inference_pb2.ModelInferRequest:
    message = inference_pb2.ModelInferRequest(model_name=model)
    message.inputs.add(name="x", datatype="FP32", shape=[len(values)])
    message.raw_input_contents.append(np.array(values, "<f4").tobytes())
    return message


def stream(channel: grpc.Channel, *requests: inference_pb2.ModelInferRequest) -> list[Any]:
    call = channel.stream_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer",
        request_serializer=inference_pb2.ModelInferRequest.SerializeToString,
        response_deserializer=inference_pb2.ModelStreamInferResponse.FromString,
    )
    return list(call(iter(requests), timeout=SECONDS))


def gtensor(values: Sequence[float]) -> GenericTensor:
    return GenericTensor(name="x", dtype=DT_FLOAT32, shape=[len(values)], flat_float32=values)


def infer_body(values: Sequence[float]) -> object:
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [len(values)], "data": values}]}


Send = Callable[[grpc.Channel, Rest, str, list[float]], object]
INTERFACES: dict[str, Send] = {
    "kserve_grpc": lambda channel, _, model, values: rpc(channel, "ModelInfer", inference_pb2.ModelInferResponse)(
        infer_message(model, values), timeout=SECONDS
    ),
    "kserve_stream": lambda channel, _, model, values: stream(channel, infer_message(model, values)),
    "kserve_rest": lambda _, rest, model, values: rest.post(f"/v2/models/{model}/infer", infer_body(values)),
    "kserve_generate": lambda _, rest, model, values: rest.post(f"/v2/models/{model}/generate", {"x": values}),
    "tfserving_grpc": lambda channel, _, model, values: predict(channel, predict_request(model, values)),
    "tfserving_rest_rows": lambda _, rest, model, values: rest.post(
        f"/v1/models/{model}:predict", {"instances": values}
    ),
    "tfserving_rest_columns": lambda _, rest, model, values: rest.post(
        f"/v1/models/{model}:predict", {"inputs": values}
    ),
    "ai_platform": lambda _, rest, model, values: rest.post(
        f"/v1/projects/p/models/{model}:predict", {"instances": values}
    ),
    "grps_grpc": lambda channel, _, model, values: grps.predict(
        channel, grps.tensors(gtensor(values), model=model)
    ),
    "grps_stream": lambda channel, _, model, values: grps.predict_streaming(
        channel, grps.tensors(gtensor(values), model=model)
    ),
    "grps_rest": lambda _, rest, model, values: grps.post(
        f"127.0.0.1:{rest.port}",
        {
            "model": model,
            "gtensors": {"tensors": [{"name": "x", "dtype": "DT_FLOAT32", "shape": [2], "flat_float32": values}]},
        },
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models in Python."""
    folder = tmp_path_factory.mktemp("models")
    for name, text in (("half", HALF), ("counts", COUNTS), ("calls", CALLS), ("streams", STREAMS)):
        write_model(folder / name, text)
    return folder


def recording(folder: Path, to: Path, *more: str) -> Triglot:
    return Triglot(folder, "--request-log", to / "r", *more, environment=QUICK)


@pytest.fixture(scope="module")
def records_by_interface(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of records of one request over each of `INTERFACES`, in this order, and of one that fails."""
    records = tmp_path_factory.mktemp("records")
    with recording(folder, records) as server:
        grpc_port, rest_port = server.ports()
        with grpc_channel(grpc_port) as channel:
            for number, send in enumerate(INTERFACES.values()):
                with suppress(grpc.RpcError):  # Over REST it has a status.
                    send(channel, Rest(rest_port), "half", [-1.0, -2.0])
                send(channel, Rest(rest_port), "half", [2.0 * number, 3.0])
                wait_until(lambda number=number: len(logs_in(records)) > number)  # type: ignore[misc]
        server.stop()
    return records


@pytest.mark.parametrize("interface", INTERFACES)
def test_each_protocol_gives_the_same_record(records_by_interface: Path, interface: str) -> None:
    """Of the request that went well, and of nothing else."""
    number = list(INTERFACES).index(interface)
    logs = logs_in(records_by_interface)
    assert len(logs) == len(INTERFACES)
    log = logs[number]
    assert pairs_in(records_by_interface)[number] == ([2.0 * number, 3.0], [float(number), 1.5])
    request, response, metadata = log.predict_log.request, log.predict_log.response, log.log_metadata
    assert (request.model_spec.name, request.model_spec.HasField("version")) == ("half", False)
    assert request.model_spec.signature_name == "serving_default"
    assert metadata.model_spec == response.model_spec
    assert (response.model_spec.name, response.model_spec.version.value) == ("half", 1)
    assert metadata.sampling_config.sampling_rate == 1
    assert abs(metadata.timestamp_secs - records_by_interface.stat().st_mtime) < 10 * SECONDS


def test_what_is_not_recorded(folder: Path, tmp_path: Path) -> None:
    """The answers of a stream, and what models ask of each other."""
    with recording(folder, tmp_path) as server:
        grpc_port, rest_port = server.ports()
        with grpc_channel(grpc_port) as channel:
            assert len(stream(channel, infer_message("streams", VALUES))) == 1
            assert len(grps.predict_streaming(channel, grps.tensors(gtensor(VALUES), model="streams"))) == 1
            assert Rest(rest_port).post("/v1/models/calls:predict", {"instances": VALUES})[0] == 200
        server.stop()
    assert [log.log_metadata.model_spec.name for log in logs_in(tmp_path)] == ["calls"]


def test_a_record_stays_as_it_was(folder: Path, tmp_path: Path) -> None:
    """The model writes into the array of its last answer."""
    with recording(folder, tmp_path) as server:
        with grpc_channel(server.ports()[0]) as channel:
            for _ in range(50):
                predict(channel, predict_request("counts", [7.0]))
        server.stop()
    assert pairs_in(tmp_path) == [([7.0], [float(number)]) for number in range(1, 51)]


def test_only_the_outputs_that_were_wanted(tmp_path: Path) -> None:
    write_model(tmp_path / "two", TWO)
    body = infer_body(VALUES) | {"outputs": [{"name": "z"}]}  # type: ignore[operator]
    with recording(tmp_path / "two", tmp_path) as server:
        assert Rest(server.ports()[1]).post("/v2/models/two/infer", body)[0] == 200
        server.stop()
    (log,) = logs_in(tmp_path)
    assert list(log.predict_log.request.output_filter) == ["z"]
    assert list(log.predict_log.response.outputs) == ["z"]
    with Triglot(tmp_path / "two", environment=QUICK) as server:
        assert_equal(server, tmp_path, 1)


def test_a_model_that_takes_json(tmp_path: Path) -> None:
    """AI Platform's Predictor class: its JSON is in the tensors."""
    write_model(tmp_path / "echo", "").unlink()
    (tmp_path / "echo" / "predictor.toml").write_text('prediction_class = "predictor.Echo"\n')
    (tmp_path / "echo" / "predictor.py").write_text(PREDICTOR)
    with recording(tmp_path / "echo", tmp_path) as server:
        body = {"instances": [{"a": 1}, ["b", None]]}
        answer = Rest(server.ports()[1]).post("/v1/projects/p/models/echo:predict", body)
        assert answer == (200, {"predictions": body["instances"]})
        server.stop()
    with Triglot(tmp_path / "echo", environment=QUICK) as server:
        assert_equal(server, tmp_path, 1)


def test_a_share_of_the_requests(folder: Path, tmp_path: Path) -> None:
    calls = 400
    with recording(folder, tmp_path, "--request-log-rate", "0.25") as server:
        with grpc_channel(server.ports()[0]) as channel:
            for _ in range(calls):
                predict(channel, predict_request("half", VALUES))
        server.stop()
    # Twelve standard deviations.
    assert 0 < len(logs_in(tmp_path)) < 200
    assert {log.log_metadata.sampling_config.sampling_rate for log in logs_in(tmp_path)} == {0.25}


def examples_request(message: Any, signature: str) -> Any:
    message.model_spec.name, message.model_spec.signature_name = "half_plus_two", signature
    for value in VALUES:
        message.input.example_list.examples.add().features.feature["x"].float_list.value.append(value)
    return message


def test_classify_and_regress(tmp_path: Path) -> None:
    """By both protocols, and one record for each task of MultiInference; all can be replayed."""
    body = {"examples": [{"x": value} for value in VALUES]}
    with recording(MODELS / "half_plus_two", tmp_path) as server:
        grpc_port, rest_port = server.ports()
        with grpc_channel(grpc_port) as channel:
            classify = examples_request(tf_pb2.ClassificationRequest(), "classify_x_to_y")
            answers = [
                rpc(channel, PREDICTION_SERVICE + "Classify", tf_pb2.ClassificationResponse)(classify),
                rpc(channel, PREDICTION_SERVICE + "Regress", tf_pb2.RegressionResponse)(
                    examples_request(tf_pb2.RegressionRequest(), "regress_x_to_y2")
                ),
            ]
            for verb, name in (("classify", "classify_x_to_y"), ("regress", "regress_x_to_y2")):
                status, _ = Rest(rest_port).post(
                    f"/v1/models/half_plus_two:{verb}", body | {"signature_name": name}
                )
                assert status == 200
            multi = tf_pb2.MultiInferenceRequest()
            multi.input.CopyFrom(classify.input)
            for verb, name in (("classify", "classify_x_to_y"), ("regress", "regress_x_to_y2")):
                task = multi.tasks.add(method_name=f"tensorflow/serving/{verb}")
                task.model_spec.name, task.model_spec.signature_name = "half_plus_two", name
            rpc(channel, PREDICTION_SERVICE + "MultiInference", tf_pb2.MultiInferenceResponse)(multi)
        server.stop()
    logs = logs_in(tmp_path)
    assert [log.WhichOneof("log_type") for log in logs] == ["classify_log", "regress_log"] * 3
    for log in logs[::2]:
        assert log.classify_log.request.input == classify.input
        assert log.classify_log.response == answers[0]
    for log in logs[1::2]:
        assert log.regress_log.request.input == classify.input
        assert log.regress_log.response == answers[1]
    with Triglot(MODELS / "half_plus_two", environment=QUICK) as server:
        assert_equal(server, tmp_path, 6)


def assert_equal(server: Triglot, records: Path, count: int, prefix: str = "r") -> None:
    """All records, so many, are answered as they were."""
    files = sorted(records.glob(f"{prefix}-*.tfrecord"))
    completed = run_triglot("replay", "--json", "--to", f"127.0.0.1:{server.ports()[0]}", *files)
    results = json.loads(completed.stdout)
    assert (completed.returncode, results["records"], results["equal"]) == (0, count, count), completed.stdout


def test_a_full_disk_fails_no_call(folder: Path, tmp_path: Path) -> None:
    """It is logged once, what is lost is counted, and it continues when there is room."""
    file = tmp_path / "r-00001.tfrecord"
    with recording(folder, tmp_path) as server:
        grpc_port, rest_port = server.ports()
        with grpc_channel(grpc_port) as channel:

            def call(value: float) -> None:
                assert list(predict(channel, predict_request("half", [value])).outputs["y"].float_val) == [
                    value / 2
                ]

            call(2.0)
            wait_until(lambda: record_count(rest_port, "written") == 1)
            hard = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (file.stat().st_size + 5, hard))
            for _ in range(20):
                call(4.0)
            server.stderr.wait_for(f"request records are lost: cannot write {tmp_path}/r: .*the disk is full")
            wait_until(lambda: record_count(rest_port, "dropped") == 20)
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (hard, hard))
            call(6.0)
        server.stop()
        assert server.stderr.text().count("are lost") == 1
    assert pairs_in(tmp_path) == [([2.0], [1.0]), ([6.0], [3.0])]


def record_count(rest_port: int, outcome: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{rest_port}/metrics", timeout=SECONDS) as response:
        text = response.read().decode()
    found = re.search(rf'triglot_request_records_total{{model="half",outcome="{outcome}"}} (\d+\.\d+)', text)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize("flag", ["--request-log", "--shadow-samples"])
def test_a_folder_that_is_missing_ends_the_start(flag: str, folder: Path, tmp_path: Path) -> None:
    completed = run_triglot("serve", folder, flag, tmp_path / "none" / "r", environment=QUICK)
    assert completed.returncode == 1
    assert completed.stderr.endswith(
        f"triglot: request records: expected a prefix in an existing folder, got {tmp_path}/none\n"
    )


# --- warm-up ---


def test_a_recorded_file_warms_up_the_next_version(
    folder: Path, records_by_interface: Path, tmp_path: Path
) -> None:
    """And is no reason for a new record."""
    counts = tmp_path / "m" / "2"
    write_model(counts, COUNTS)
    (counts / WARM_UP_FILE).parent.mkdir()
    shutil.copy(records_by_interface / "r-00001.tfrecord", counts / WARM_UP_FILE)
    with recording(tmp_path / "m", tmp_path) as server:
        with grpc_channel(server.ports()[0]) as channel:
            answer = predict(channel, predict_request("m", [1.0]))
        server.stop()
    # The model counts its calls.
    assert list(answer.outputs["y"].float_val) == [len(INTERFACES) + 1]
    assert pairs_in(tmp_path) == [([1.0], [len(INTERFACES) + 1])]


def test_a_version_that_cannot_answer_the_records_is_not_served(
    records_by_interface: Path, tmp_path: Path
) -> None:
    other = tmp_path / "m" / "2"
    write_model(other, HALF.replace("FP32", "INT32"))
    (other / WARM_UP_FILE).parent.mkdir()
    shutil.copy(records_by_interface / "r-00001.tfrecord", other / WARM_UP_FILE)
    completed = run_triglot("serve", tmp_path / "m", environment=QUICK)
    assert completed.returncode == 1
    assert "warm-up record 0 failed: " in completed.stderr


def test_a_recorded_file_warms_up_a_model_of_another_kind(records_by_interface: Path, tmp_path: Path) -> None:
    """ONNX in place of Python, which answers the records as well; with another input it cannot."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    for name in ("x", "z"):
        info = [helper.make_tensor_value_info(tensor_name, kind, ["n"]) for tensor_name in (name, "y")]
        two = helper.make_tensor("two", kind, [], [2.0])
        graph = helper.make_graph(
            [helper.make_node("Div", [name, "two"], ["y"])], "half", info[:1], info[1:], [two]
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        folder = tmp_path / name / "half" / "2"
        (folder / WARM_UP_FILE).parent.mkdir(parents=True)
        onnx.save(model, folder / "model.onnx")
        shutil.copy(records_by_interface / "r-00001.tfrecord", folder / WARM_UP_FILE)
    with Triglot(tmp_path / "x" / "half", environment=QUICK) as server:
        assert_equal(server, records_by_interface, len(INTERFACES))
    completed = run_triglot("serve", tmp_path / "z" / "half", environment=QUICK)
    assert completed.returncode == 1
    assert "warm-up record 0 failed: " in completed.stderr


# --- TensorFlow Serving's configuration ---


def logging(prefix: Path, rate: float = 1.0, kind: str = "") -> str:
    collector = f"log_collector_config {{ type: '{kind}' filename_prefix: '{prefix}' }}"
    return f"logging_config {{ {collector} sampling_config {{ sampling_rate: {rate} }} }}"


@pytest.fixture
def shelf(folder: Path, tmp_path: Path) -> Path:
    """Base paths of two models, and a folder for records."""
    for name in ("one", "two"):
        shutil.copytree(folder / "half", tmp_path / name / "1")
    (tmp_path / "records").mkdir()
    return tmp_path


def reload(channel: grpc.Channel, *configs: Any) -> None:
    request = management_pb2.ReloadConfigRequest(config={"model_config_list": {"config": configs}})
    rpc(channel, RELOAD, management_pb2.ReloadConfigResponse)(request, timeout=SECONDS)


def config(shelf: Path, name: str, prefix: Path | None = None, rate: float = 1.0) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "base_path": str(shelf / name), "model_platform": "tensorflow"}
    if prefix is not None:
        found["logging_config"] = {
            "log_collector_config": {"filename_prefix": str(prefix)},
            "sampling_config": {"sampling_rate": rate},
        }
    return found


def ask(server: Triglot, name: str, value: float) -> None:
    with grpc_channel(server.ports()[0]) as channel:
        predict(channel, predict_request(name, [value]))


def test_logging_config(shelf: Path) -> None:
    """At the start, and as HandleReloadConfigRequest changes it."""
    records = shelf / "records"
    flag = config_flag(
        shelf / "models.config",
        config_text("one", shelf / "one", logging(records / "r", kind="file")),
        config_text("two", shelf / "two"),
    )
    with Triglot(flag, command="tfserving", environment=QUICK) as server:
        ask(server, "one", 2.0)
        ask(server, "two", 4.0)
        with grpc_channel(server.ports()[0]) as channel:
            reload(channel, config(shelf, "one"), config(shelf, "two", records / "s"))
            ask(server, "one", 6.0)
            ask(server, "two", 8.0)
            reload(channel, config(shelf, "one", records / "r"), config(shelf, "two", records / "r", 0.0))
            ask(server, "one", 10.0)
            ask(server, "two", 12.0)
            outside = failure(lambda: reload(channel, config(shelf, "one", shelf / "elsewhere")))
            unknown = config(shelf, "one", records / "r")
            unknown["logging_config"]["log_collector_config"]["type"] = "kafka"
            kafka = failure(lambda: reload(channel, unknown))
            ask(server, "one", 14.0)
        server.stop()
    assert pairs_in(records) == [([2.0], [1.0]), ([10.0], [5.0]), ([14.0], [7.0])]
    assert pairs_in(records, "s") == [([8.0], [4.0])]
    assert outside == (
        grpc.StatusCode.PERMISSION_DENIED,
        "model one: expected a filename_prefix in one of the folders that the server records to "
        f"({records}), got one in {shelf}; name a folder with TRIGLOT_REQUEST_LOG, or in the server's own "
        "configuration",
    )
    assert kafka == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "Cannot find LogCollector::Factory for type: kafka; model one: logging_config: expected '' or 'file'",
    )


def test_a_configuration_file_that_changes(shelf: Path) -> None:
    records = shelf / "records"
    file = shelf / "models.config"
    flag = config_flag(file, config_text("one", shelf / "one"))
    with Triglot(
        flag, "--model_config_file_poll_wait_seconds=1", command="tfserving", environment=QUICK
    ) as server:
        ask(server, "one", 2.0)
        model = config_text("one", shelf / "one", logging(records / "r"))
        write_atomically(file, f"model_config_list {{ {model} }}")
        server.stderr.wait_for("the model list changed: changed: one")
        ask(server, "one", 4.0)
        server.stop()
    assert pairs_in(records) == [([4.0], [2.0])]


def test_the_servers_own_setting_is_for_the_other_models(shelf: Path) -> None:
    records = shelf / "records"
    flag = config_flag(
        shelf / "models.config",
        config_text("one", shelf / "one", logging(records / "s")),
        config_text("two", shelf / "two"),
    )
    environment = QUICK | {"TRIGLOT_REQUEST_LOG": str(records / "r")}
    with Triglot(flag, command="tfserving", environment=environment) as server:
        ask(server, "one", 2.0)
        ask(server, "two", 4.0)
        server.stop()
    assert pairs_in(records, "s") == [([2.0], [1.0])]
    assert pairs_in(records) == [([4.0], [2.0])]


# --- TensorFlow ---

READ = """
import json, sys
import tensorflow as tf
from tensorflow_serving.apis import prediction_log_pb2

for record in tf.data.TFRecordDataset(sys.argv[1]).as_numpy_iterator():
    log = prediction_log_pb2.PredictionLog.FromString(record)
    predict = log.predict_log
    tensors = {**predict.request.inputs, **predict.response.outputs}
    arrays = {name: tf.make_ndarray(tensor) for name, tensor in tensors.items()}
    print(json.dumps({
        "model": log.log_metadata.model_spec.name,
        "version": predict.response.model_spec.version.value,
        **{name: [str(array.dtype), array.tolist()] for name, array in arrays.items()},
    }))
"""


@pytest.mark.newest
def test_tensorflow_reads_the_records(records_by_interface: Path) -> None:
    arguments = "-c", READ, str(records_by_interface / "r-00001.tfrecord")
    done = outcome(start_python(arguments, environments.python("tensorflow")), 5 * SECONDS)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"model": "half", "version": 1, "x": ["float32", x], "y": ["float32", y]}
        for x, y in pairs_in(records_by_interface)
    ]
