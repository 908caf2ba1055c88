"""ONNX initializers that are inputs, too: requests may set them, or leave them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.test_onnx_backend import node, save, tensor
from triglot.backends.onnx import MAX_DEFAULTS, load
from triglot.core.types import InferenceRequest, InputTensor, TensorSpec
from triglot.model.config import ModelConfig, TensorConfig
from triglot.model.configure import configure
from triglot.model.model import Model, signatures_of
from triglot.model.validation import InvalidRequest, bind_inputs

onnx = pytest.importorskip("onnx", reason="the onnx package makes the models of these tests")
X = TensorConfig("x", "FP32", [-1])


def initializer(name: str, *values: float) -> Any:
    return onnx.numpy_helper.from_array(np.array(values, np.float32), name)


def scaled(file: Path, dims: Any = (1,)) -> Path:
    """y = x * scale; scale is 3 unless it is given."""
    inputs = [tensor("x", "FLOAT", ["n"]), tensor("scale", "FLOAT", dims)]
    return save(file, node("Mul", "x scale"), inputs, tensor("y", "FLOAT", ["n"]), [initializer("scale", 3)])


def loaded(file: Path, config: ModelConfig) -> Model:
    model = load(file, config)
    configure(model, config)
    return model


def answer(model: Model, **values: list[float]) -> list[float]:
    tensors = [
        InputTensor(name, "FP32", (len(value),), np.array(value, np.float32).tobytes())
        for name, value in values.items()
    ]
    inputs = bind_inputs(signatures_of(model)["serving_default"], InferenceRequest("m", inputs=tensors))
    found: list[float] = model.infer(inputs)["y"].tolist()
    return found


def test_it_is_what_the_model_takes_when_a_request_has_none(tmp_path: Path) -> None:
    model = loaded(scaled(tmp_path / "model.onnx"), ModelConfig())
    assert list(model.inputs) == [TensorSpec("x", "FP32", [-1]), TensorSpec("scale", "FP32", [1], optional=True)]
    assert answer(model, x=[1, 2]) == [3, 6]
    assert answer(model, x=[1, 2], scale=[5]) == [5, 10]
    assert answer(model, x=[1]) == [3]
    with pytest.raises(InvalidRequest, match=r"missing required input\(s\) \['x'\]"):
        answer(model, scale=[5])


def test_a_configuration_may_leave_it_out_or_name_it(tmp_path: Path) -> None:
    file = scaled(tmp_path / "model.onnx")
    model = loaded(file, ModelConfig(inputs=[X]))
    assert [spec.name for spec in model.inputs] == ["x"]
    assert answer(model, x=[1, 2]) == [3, 6]
    scale = TensorConfig("scale", "FP32", [1], optional=True)
    model = loaded(file, ModelConfig(inputs=[X, scale]))
    assert [(spec.name, spec.optional) for spec in model.inputs] == [("x", False), ("scale", True)]
    required = TensorConfig("x", "FP32", [-1], optional=True)
    with pytest.raises(ValueError, match="but the model requires 'x'"):
        loaded(file, ModelConfig(inputs=[required]))


def test_with_a_batch_dim_only_what_has_it_is_an_input(tmp_path: Path) -> None:
    config = ModelConfig(max_batch_size=4)
    model = loaded(scaled(tmp_path / "fixed" / "model.onnx"), config)
    assert [spec.name for spec in model.inputs] == ["x"]
    model = loaded(scaled(tmp_path / "free" / "model.onnx", ["n"]), config)
    assert [(spec.name, spec.optional) for spec in model.inputs] == [("x", False), ("scale", True)]


def test_weights_that_were_exported_as_inputs_are_none(tmp_path: Path) -> None:
    names = [f"w{at}" for at in range(MAX_DEFAULTS + 1)]
    file = save(
        tmp_path / "model.onnx",
        onnx.helper.make_node("Sum", ["x", *names], ["y"]),
        [tensor("x", "FLOAT", ["n"]), *(tensor(name, "FLOAT", [1]) for name in names)],
        tensor("y", "FLOAT", ["n"]),
        [initializer(name, 1) for name in names],
    )
    model = loaded(file, ModelConfig())
    assert [spec.name for spec in model.inputs] == ["x"]
    assert answer(model, x=[1]) == [MAX_DEFAULTS + 2]


def test_a_constant_is_no_input(tmp_path: Path) -> None:
    file = save(
        tmp_path / "model.onnx",
        node("Mul", "x scale"),
        [tensor("x", "FLOAT", ["n"])],
        tensor("y", "FLOAT", ["n"]),
        [initializer("scale", 3)],
    )
    assert [spec.name for spec in loaded(file, ModelConfig()).inputs] == ["x"]
