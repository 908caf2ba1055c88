"""Programs of PyTorch in a real server, as clients of each protocol see them."""

# ruff: noqa: E402 — without the library there is nothing to import.

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest

from tests.process import FREE_PORTS, SECONDS, Triglot
from tests.protocol_clients.channel import grpc_channel, rpc
from tests.protocol_clients.rest import Rest
from triglot.pb.grps import grps_pb2
from triglot.pb.kserve import inference_pb2 as pb

torch = pytest.importorskip("torch", reason="the torch environment has it")

from tests.backends.grps_torch_scripts import SUM, script
from tests.backends.torch_files import Scores, export, forward

CALLS = 64
ROWS = torch.export.Dim("rows", min=1, max=16)
PAIR = """
backend: "pytorch"
max_batch_size: 4
input [{ name: "INPUT__0" data_type: TYPE_FP32 dims: 2 }, { name: "INPUT__1" data_type: TYPE_FP32 dims: 2 }]
output [{ name: "OUTPUT__0" data_type: TYPE_FP32 dims: 2 }, { name: "OUTPUT__1" data_type: TYPE_FP32 dims: 2 }]
instance_group [{ kind: KIND_CPU count: 2 }]
"""
HALVED = """
platform: "pytorch_libtorch"
input { name: "x" data_type: TYPE_BF16 dims: -1 }
output { name: "y" data_type: TYPE_BF16 dims: -1 }
"""
SUMS = """
platform: "pytorch_libtorch"
max_batch_size: 8
sequence_batching {
  control_input [
    { name: "START__2" control [{ kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] }] },
    { name: "READY__3" control [{ kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1 ] }] }
  ]
  state [{ input_name: "INPUT_STATE__1" output_name: "OUTPUT_STATE__1" data_type: TYPE_FP32 dims: 1 }]
}
input { name: "INPUT__0" data_type: TYPE_FP32 dims: 1 }
output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: 1 }
instance_group [{ kind: KIND_CPU }]
"""


def write(folder: Path) -> None:
    """A repository: `pair`, `halved` and `sums` have a configuration, `plain` has none, `scores` needs none."""
    for name in ("pair", "halved", "plain", "scores", "sums"):
        (folder / name / "1").mkdir(parents=True)
    (folder / "sums" / "config.pbtxt").write_text(SUMS)
    added = "total = (state * (1 - start) + x) * ready\n    return (total * 10 + start, total)"
    script(
        folder / "sums" / "1" / "model.pt",
        forward("x: Tensor, state: Tensor, start: Tensor, ready: Tensor", added),
    )
    (folder / "pair" / "config.pbtxt").write_text(PAIR)
    script(folder / "pair" / "1" / "model.pt", forward("a: Tensor, b: Tensor", "return a + b, a - b"))
    (folder / "halved" / "config.pbtxt").write_text(HALVED)
    script(folder / "halved" / "1" / "model.pt", forward("value: Tensor", "return value.div_(2)"))
    script(folder / "plain" / "1" / "model.pt", SUM)
    export(folder / "scores" / "1" / "model.pt2", Scores(), torch.rand(4, 3), dims=({0: ROWS},))


@dataclass
class Served:
    """The server's two ports."""

    rest: Rest
    channel: grpc.Channel

    def infer(self, model: str, sequence: int = 0, start: bool = False, **inputs: Any) -> dict[str, Any]:
        """KServe's ModelInfer of float32 or bfloat16 arrays; raises `grpc.RpcError`."""
        request = pb.ModelInferRequest(model_name=model)
        if sequence:
            request.parameters["sequence_id"].int64_param = sequence
            request.parameters["sequence_start"].bool_param = start
        for name, array in inputs.items():
            datatype = "FP32" if array.dtype == np.float32 else "BF16"
            request.inputs.add(name=name, datatype=datatype, shape=array.shape)
            request.raw_input_contents.append(array.tobytes())
        reply = rpc(self.channel, "ModelInfer", pb.ModelInferResponse)(request, timeout=SECONDS)
        dtypes = {"FP32": "<f4", "INT64": "<i8", "BF16": ml_dtypes.bfloat16}
        return {
            output.name: np.frombuffer(content, dtypes[output.datatype]).reshape(output.shape).tolist()
            for output, content in zip(reply.outputs, reply.raw_output_contents, strict=True)
        }

    def failure(self, model: str, **inputs: Any) -> tuple[str, str]:
        """Code and text of what `infer` raises."""
        with pytest.raises(grpc.RpcError) as caught:
            self.infer(model, **inputs)
        return caught.value.code().name, caught.value.details()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    write(folder)
    with Triglot(folder, *FREE_PORTS, "--drain-delay", "0") as server:
        grpc_port, rest_port = server.ports()
        with grpc_channel(grpc_port) as channel:
            yield Served(Rest(rest_port), channel)
        server.stop()
        assert "Traceback (most" not in server.stderr.text()
        assert "Warning" not in server.stderr.text()


A, B = np.array([[1, 2]], "f4"), np.array([[10, 20]], "f4")


# --- KServe V2 ---


@pytest.mark.parametrize(
    ("model", "inputs", "outputs"),
    [
        (
            "pair",
            [("INPUT__0", "FP32", [-1, 2]), ("INPUT__1", "FP32", [-1, 2])],
            [("OUTPUT__0", "FP32", [-1, 2]), ("OUTPUT__1", "FP32", [-1, 2])],
        ),
        ("halved", [("x", "BF16", [-1])], [("y", "BF16", [-1])]),
        ("plain", [], []),
        ("sums", [("INPUT__0", "FP32", [-1, 1])], [("OUTPUT__0", "FP32", [-1, 1])]),
        ("scores", [("x", "FP32", [-1, 3])], [("score", "FP32", [-1]), ("best", "INT64", [-1])]),
    ],
)
def test_metadata(served: Served, model: str, inputs: Any, outputs: Any) -> None:
    status, answer = served.rest.get(f"/v2/models/{model}")
    assert (status, answer["platform"], answer["versions"]) == (200, "pytorch_libtorch", ["1"])
    assert [(tensor["name"], tensor["datatype"], tensor["shape"]) for tensor in answer["inputs"]] == inputs
    assert [(tensor["name"], tensor["datatype"], tensor["shape"]) for tensor in answer["outputs"]] == outputs


def test_v2_over_grpc(served: Served) -> None:
    assert served.infer("pair", INPUT__0=A, INPUT__1=B) == {"OUTPUT__0": [[11, 22]], "OUTPUT__1": [[-9, -18]]}
    assert served.infer("plain", a=A, b=B) == {"OUTPUT__0": [[11, 22]]}
    assert served.infer("plain", INPUT__1=B, INPUT__0=A) == {"OUTPUT__0": [[11, 22]]}
    assert served.infer("halved", x=np.array([3, 5], ml_dtypes.bfloat16)) == {"y": [1.5, 2.5]}
    rows = np.array([[1, 5, 2], [9, 0, 0]], "f4")
    assert served.infer("scores", x=rows) == {"score": [8, 9], "best": [1, 0]}


def test_v2_over_rest(served: Served) -> None:
    inputs = [
        {"name": name, "datatype": "FP32", "shape": [1, 2], "data": data}
        for name, data in (("INPUT__0", [1, 2]), ("INPUT__1", [10, 20]))
    ]
    for model, expected in (("pair", [11, 22]), ("plain", [11, 22])):
        status, answer = served.rest.post(f"/v2/models/{model}/infer", {"inputs": inputs})
        assert (status, answer["outputs"][0]["data"]) == (200, expected), answer


def test_what_is_refused(served: Served) -> None:
    code, text = served.failure("pair", INPUT__0=np.zeros((1, 3), "f4"), INPUT__1=B)
    assert code == "INVALID_ARGUMENT"
    assert "unexpected shape for input 'INPUT__0' for model 'pair'. Expected [-1,2], got [1,3]" in text
    assert served.failure("plain", a=A, c=B) == ("INVALID_ARGUMENT", "expected the inputs a, b; got a, c")
    assert served.failure("scores", x=np.zeros((17, 3), "f4")) == (
        "INVALID_ARGUMENT",
        "Guard failed: x.size()[0] <= 16",
    )
    assert served.failure("plain", a=np.zeros(2, "f4"), b=np.zeros(3, "f4")) == (
        "INTERNAL",
        "PyTorch execute failure: The size of tensor a (2) must match the size of tensor b (3) at "
        "non-singleton dimension 0",
    )


def test_controls_and_states_of_sequences(served: Served) -> None:
    def sum_of(sequence: int, value: float, start: bool = False) -> Any:
        return served.infer("sums", sequence, start, INPUT__0=np.array([[value]], "f4"))

    assert [sum_of(7, 1, True), sum_of(8, 5, True)] == [{"OUTPUT__0": [[11]]}, {"OUTPUT__0": [[51]]}]
    assert [sum_of(7, 2), sum_of(8, 5), sum_of(7, 3)] == [
        {"OUTPUT__0": [[30]]},
        {"OUTPUT__0": [[100]]},
        {"OUTPUT__0": [[60]]},
    ]
    assert sum_of(7, 4, True) == {"OUTPUT__0": [[41]]}


def test_many_calls_at_a_time(served: Served) -> None:
    def call(number: int) -> Any:
        return served.infer("pair", INPUT__0=A * number, INPUT__1=B)

    with ThreadPoolExecutor(16) as pool:
        for number, answer in enumerate(pool.map(call, range(CALLS))):
            assert answer["OUTPUT__0"] == [[number + 10, 2 * number + 20]]


# --- TensorFlow Serving ---


@pytest.mark.parametrize(
    ("model", "body", "expected"),
    [
        (
            "pair",
            {"instances": [{"INPUT__0": [1, 2], "INPUT__1": [10, 20]}]},
            {"predictions": [{"OUTPUT__0": [11, 22], "OUTPUT__1": [-9, -18]}]},
        ),
        (
            "scores",
            {"instances": [[1, 5, 2], [9, 0, 0]]},
            {"predictions": [{"score": 8, "best": 1}, {"score": 9, "best": 0}]},
        ),
        ("plain", {"inputs": {"a": [1, 2], "b": [10, 20]}}, {"outputs": [11, 22]}),
        ("plain", {"instances": [{"a": 1, "b": 10}, {"a": 2, "b": 20}]}, {"predictions": [11, 22]}),
    ],
)
def test_predict_over_rest(served: Served, model: str, body: Any, expected: Any) -> None:
    assert served.rest.post(f"/v1/models/{model}:predict", body) == (200, expected)


# --- grps ---


def floats(name: str, values: Any) -> grps_pb2.GenericTensor:
    return grps_pb2.GenericTensor(
        name=name, dtype=grps_pb2.DT_FLOAT32, shape=values.shape, flat_float32=values.ravel().tolist()
    )


@pytest.mark.parametrize(
    ("model", "names", "outputs"),
    [
        ("pair", ["INPUT__0", "INPUT__1"], {"OUTPUT__0": [11, 22], "OUTPUT__1": [-9, -18]}),
        ("pair", ["", ""], {"OUTPUT__0": [11, 22], "OUTPUT__1": [-9, -18]}),
        ("plain", ["a", "b"], {"OUTPUT__0": [11, 22]}),
        ("plain", ["", ""], {"OUTPUT__0": [11, 22]}),
    ],
)
def test_grps(served: Served, model: str, names: list[str], outputs: dict[str, Any]) -> None:
    sent = grps_pb2.GrpsMessage(model=f"{model}-1")
    sent.gtensors.tensors.extend([floats(names[0], A), floats(names[1], B)])
    answer = rpc(served.channel, "/grps.protos.v1.GrpsService/Predict", grps_pb2.GrpsMessage)(
        sent, timeout=SECONDS
    )
    assert answer.status.code == 200, answer
    assert {tensor.name: list(tensor.flat_float32) for tensor in answer.gtensors.tensors} == outputs


# --- what does not load ---


def test_a_state_dict(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    torch.save(torch.nn.Linear(1, 1).state_dict(), folder / "model.pt")
    with Triglot(tmp_path, *FREE_PORTS) as server:
        server.stderr.wait_for(
            r"model\.pt: this is a state dict or pickled module \(torch\.save\); expected a Torch"
        )
