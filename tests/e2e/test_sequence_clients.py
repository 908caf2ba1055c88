"""Unmodified clients send sequences to models of every kind, and a server that ends lets them end, too."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.e2e.client_scripts import ClientScript, Report, ReportOf, script_tests
from tests.e2e.server_process import ServerProcess

onnx = pytest.importorskip("onnx", reason="the onnx package makes the model of these tests")
pytest.importorskip("onnxruntime")

MODEL = """
import triglot


class Sum(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1, 1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1, 1])]
    max_batch_size = 4
    instances = 2
    {batching}

    def __init__(self):
        self.sums = {{}}

    def infer(self, inputs):
        y = inputs["x"].copy()
        for at, ready in enumerate(inputs["READY"][:, 0]):
            number = inputs["CORRID"][at, 0]
            if ready:
                begun = 0 if inputs["START"][at, 0] else self.sums[number]
                self.sums[number] = y[at, 0] = begun + y[at, 0]
                if inputs["END"][at, 0]:
                    del self.sums[number]
        return {{"y": y}}
"""
OWN = """
    sequence_batching = triglot.SequenceBatching(
        max_idle=60,
        controls=[
            triglot.ControlInput("START", "START", "BOOL"),
            triglot.ControlInput("READY", "READY", "FP32"),
            triglot.ControlInput("END", "END", "INT32"),
            triglot.ControlInput("CORRID", "CORRID", "UINT64"),
        ],
    )
"""
OLDEST = """
max_batch_size: 4
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  oldest { max_candidate_sequences: 8 preferred_batch_size: [2, 4] max_queue_delay_microseconds: 1000 }
  control_input [
    { name: "START" control [{ kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] }] },
    { name: "READY" control [{ kind: CONTROL_SEQUENCE_READY bool_false_true: [false, true] }] },
    { name: "END" control [{ kind: CONTROL_SEQUENCE_END fp32_false_true: [0, 1] }] },
    { name: "CORRID" control [{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING }] }
  ]
}
"""
ONNX = """
max_batch_size: 4
output [{ name: "y" data_type: TYPE_FP32 dims: [1] }]
instance_group [{ count: 2 kind: KIND_CPU }]
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  control_input [{ name: "start" control [{ kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] }] }]
  state [{
    input_name: "before" output_name: "after" data_type: TYPE_FP32 dims: [1]
    initial_state: { data_type: TYPE_FP32 dims: [1] zero_data: true name: "zero" }
  }]
}
"""
SCRIPT = ClientScript("tritonclient", "triton_sequences.py")


def write(folder: Path, model: str, config: str = "") -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(model)
    if config:
        (folder / "config.pbtxt").write_text(config)


def write_onnx(folder: Path) -> None:
    """y = x + before, and after is the same; what `start` says makes no difference."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    tensors = {name: helper.make_tensor_value_info(name, kind, ["n", 1]) for name in ("x", "before", "start")}
    outputs = [helper.make_tensor_value_info(name, kind, ["n", 1]) for name in ("y", "after")]
    nodes = [
        helper.make_node("Sub", ["start", "start"], ["nothing"]),
        helper.make_node("Sum", ["x", "before", "nothing"], ["y"]),
        helper.make_node("Identity", ["y"], ["after"]),
    ]
    graph = helper.make_graph(nodes, "sum", list(tensors.values()), outputs)
    (folder / "1").mkdir(parents=True)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(made, folder / "1" / "model.onnx")
    (folder / "config.pbtxt").write_text(ONNX)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> ReportOf:
    """What the client script found; it runs when it is first asked for."""
    repository = tmp_path_factory.mktemp("repository")
    write(repository / "direct", MODEL.format(batching=OWN))
    write(repository / "oldest", MODEL.format(batching=""), OLDEST)
    write_onnx(repository / "onnx")

    def run(script: ClientScript) -> Report:
        with ServerProcess(str(repository)) as server:
            return script.run(server)

    return cache(run)


test_check, test_every_check_is_reported_in_order = script_tests(SCRIPT)
