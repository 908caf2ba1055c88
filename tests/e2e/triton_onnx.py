"""The ONNX models of tests/models_triton, written anew: `python tests/e2e/triton_onnx.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

REPOSITORY = Path(__file__).resolve().parents[1] / "models_triton"
Tensors = Mapping[str, tuple[int, Sequence[Any]]]
"""Name → element type and shape."""


def _model(name: str, nodes: Sequence[Any], inputs: Tensors, outputs: Tensors) -> Any:
    """For every runtime that reads ONNX: an old opset, an old form of the file."""
    given, made = (
        [helper.make_tensor_value_info(key, kind, shape) for key, (kind, shape) in some.items()]
        for some in (inputs, outputs)
    )
    graph = helper.make_graph(nodes, name, given, made)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def _add_sub(kind: int, wide: int) -> Any:
    """OUTPUT0 is the sum and OUTPUT1 the difference, made in `wide`: the runtime adds no INT8."""
    nodes = [helper.make_node("Cast", [f"INPUT{at}"], [f"wide{at}"], to=wide) for at in (0, 1)]
    for at, operation in enumerate(("Add", "Sub")):
        nodes.append(helper.make_node(operation, ["wide0", "wide1"], [f"result{at}"]))
        nodes.append(helper.make_node("Cast", [f"result{at}"], [f"OUTPUT{at}"], to=kind))
    tensor = (kind, ["batch", 16])
    return _model("add_sub", nodes, {"INPUT0": tensor, "INPUT1": tensor}, {"OUTPUT0": tensor, "OUTPUT1": tensor})


def _identity(kind: int) -> Any:
    tensor = (kind, ["batch", "n"])
    return _model(
        "identity",
        [helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])],
        {"INPUT0": tensor},
        {"OUTPUT0": tensor},
    )


def _sequence() -> Any:
    """The state and the input added up; START empties the state, and a row that is not READY keeps it."""
    number, flag = (TensorProto.INT32, ["batch", 1]), (TensorProto.FLOAT, ["batch", 1])
    nodes = [
        helper.make_node("Cast", ["START"], ["start"], to=TensorProto.BOOL),
        helper.make_node("Cast", ["READY"], ["ready"], to=TensorProto.BOOL),
        helper.make_node("Sub", ["INPUT_STATE", "INPUT_STATE"], ["zero"]),
        helper.make_node("Where", ["start", "zero", "INPUT_STATE"], ["before"]),
        helper.make_node("Where", ["ready", "INPUT", "zero"], ["value"]),
        helper.make_node("Add", ["before", "value"], ["OUTPUT"]),
        helper.make_node("Identity", ["OUTPUT"], ["OUTPUT_STATE"]),
    ]
    inputs = {"INPUT": number, "INPUT_STATE": number, "START": flag, "READY": flag}
    return _model("sequence", nodes, inputs, {"OUTPUT": number, "OUTPUT_STATE": number})


def _classifier() -> Any:
    tensor = (TensorProto.FLOAT, ["batch", 4])
    nodes = [helper.make_node("Softmax", ["scores"], ["prob"], axis=1)]
    return _model("classifier", nodes, {"scores": tensor}, {"prob": tensor})


def models() -> dict[str, Any]:
    """By name."""
    return {
        "auto_onnx": _add_sub(TensorProto.FLOAT, TensorProto.FLOAT),
        "classifier": _classifier(),
        "simple": _add_sub(TensorProto.INT32, TensorProto.INT32),
        "simple_identity": _identity(TensorProto.STRING),
        "simple_int8": _add_sub(TensorProto.INT8, TensorProto.INT32),
        "simple_sequence": _sequence(),
    }


def file_of(name: str) -> Path:
    return REPOSITORY / name / "1" / "model.onnx"


if __name__ == "__main__":
    for name, model in models().items():
        file_of(name).parent.mkdir(parents=True, exist_ok=True)
        onnx.save(model, file_of(name))
