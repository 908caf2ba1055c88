"""Programs of torch.export, called without a server."""

# ruff: noqa: E402 — without the library there is nothing to import.

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triglot.core.errors import Code, Internal, InvalidArgument
from triglot.core.tensor import DATATYPES
from triglot.core.types import TensorSpec
from triglot.model.config import InstanceGroup, ModelConfig
from triglot.model.configure import configure

torch = pytest.importorskip("torch", reason="the torch environment has it")

from tests.backends.torch_files import (
    ON_CPU,
    SAMPLES,
    WHERE_SAVED,
    Pair,
    Program,
    config,
    export,
    fp32,
    in_a_thread,
    lists,
    load,
    refused,
    skip_unless_exported,
)

THREADS = 6
ROUNDS = 10
ROWS = torch.export.Dim("rows", min=1, max=16)


def specs(tensors: Any) -> list[tuple[str, str, Any]]:
    return [(spec.name, spec.datatype, list(spec.shape)) for spec in tensors]


# --- what a program says of itself ---


def test_a_batch(tmp_path: Path) -> None:
    linear = torch.nn.Linear(3, 2)
    model = load(export(tmp_path / "model.pt2", linear, torch.rand(4, 3), dims=({0: ROWS},)))
    assert model.platform == "pytorch_libtorch"
    assert not model.any_tensors
    assert specs(model.inputs) == [("input", "FP32", [-1, 3])]
    assert specs(model.outputs) == [("OUTPUT__0", "FP32", [-1, 2])]
    for rows in (1, 2, 16):
        x = torch.rand(rows, 3)
        np.testing.assert_allclose(model.infer({"input": x.numpy()})["OUTPUT__0"], linear(x).detach(), rtol=1e-5)


@pytest.mark.parametrize("datatype", SAMPLES)
def test_every_datatype(tmp_path: Path, datatype: str) -> None:
    skip_unless_exported(datatype)
    array = SAMPLES[datatype]
    dtype = load_dtype(array)
    model = load(export(tmp_path / "model.pt2", Program(lambda _, x: x.clone()), torch.zeros(3, dtype=dtype)))
    assert specs(model.inputs) == [("x", datatype, [3])]
    assert specs(model.outputs) == [("OUTPUT__0", datatype, [3])]
    answer = model.infer({"x": array})["OUTPUT__0"]
    assert answer.dtype == DATATYPES[datatype].dtype
    assert answer.tobytes() == array.tobytes()


def load_dtype(array: Any) -> Any:
    return torch.bfloat16 if array.dtype.kind == "V" else torch.from_numpy(array.copy()).dtype


def test_a_scalar(tmp_path: Path) -> None:
    model = load(export(tmp_path / "model.pt2", Program(lambda _, x: x.sum()), torch.tensor(2.5)))
    assert specs((*model.inputs, *model.outputs)) == [("x", "FP32", []), ("OUTPUT__0", "FP32", [])]
    assert lists(model.infer({"x": np.array(4, "f4")})) == {"OUTPUT__0": 4}


A, B, C = torch.zeros(1), torch.ones(1), torch.ones(1)
"""Examples: of one tensor in two places torch makes one input."""


@pytest.mark.parametrize(
    ("result", "answer"),
    [
        (lambda x: x + 1, {"OUTPUT__0": [1]}),
        (lambda x: (x + 1,), {"OUTPUT__0": [1]}),
        (lambda x: (x + 1, x.clone()), {"OUTPUT__0": [1], "OUTPUT__1": [0]}),
        (lambda x: [x + 1, None, x.clone()], {"OUTPUT__0": [1], "OUTPUT__2": [0]}),
        (lambda x: {"b": x + 1, "a": x.clone()}, {"b": [1], "a": [0]}),
        (lambda x: {"b": None, "a": x.clone()}, {"a": [0]}),
        (lambda x: {"a": (x + 1, x.clone())}, {"OUTPUT__0": [1], "OUTPUT__1": [0]}),
        (lambda x: (x + 1, {"a": [x.clone()]}), {"OUTPUT__0": [1], "OUTPUT__1": [0]}),
        (lambda x: {0: x + 1}, {"OUTPUT__0": [1]}),
    ],
)
def test_names_of_outputs(tmp_path: Path, result: Any, answer: dict[str, Any]) -> None:
    model = load(export(tmp_path / "model.pt2", Program(lambda _, x: result(x)), A))
    assert [spec.name for spec in model.outputs] == list(answer)
    assert lists(model.infer({"x": fp32(0)})) == answer


@pytest.mark.parametrize(
    ("named", "inputs", "answer"),
    [
        ({}, {"a": fp32(3), "b": fp32(1)}, [2]),
        ({"bias": C}, {"bias": fp32(10), "b": fp32(1), "a": fp32(3)}, [12]),
        # What is no tensor is as it was in the example.
        ({"scale": 5}, {"a": fp32(3), "b": fp32(1)}, [10]),
        ({"scale": 5, "bias": C}, {"a": fp32(3), "b": fp32(1), "bias": fp32(10)}, [20]),
        ({"bias": None}, {"a": fp32(3), "b": fp32(1)}, [2]),
    ],
)
def test_names_of_inputs(tmp_path: Path, named: Any, inputs: dict[str, Any], answer: list[float]) -> None:
    model = load(export(tmp_path / "model.pt2", Pair(), A, B, **named))
    assert {spec.name for spec in model.inputs} == inputs.keys()
    assert lists(model.infer(inputs)) == {"OUTPUT__0": answer}


def test_inputs_in_dicts_and_lists(tmp_path: Path) -> None:
    program = Program(lambda _, x: x["k"] - x["l"][0] * x["l"][1])
    model = load(export(tmp_path / "model.pt2", program, {"k": A, "l": [B, C]}))
    assert [spec.name for spec in model.inputs] == ["x_k", "x_l_0", "x_l_1"]
    assert lists(model.infer({"x_k": fp32(9), "x_l_0": fp32(2), "x_l_1": fp32(4)})) == {"OUTPUT__0": [1]}


# --- memory ---


def test_inputs_that_the_program_changes(tmp_path: Path) -> None:
    model = load(export(tmp_path / "model.pt2", Program(lambda _, x: x.mul_(2) + 1), A))
    data = np.float32(7).tobytes()
    assert lists(model.infer({"x": np.frombuffer(data, "f4")})) == {"OUTPUT__0": [15]}
    assert data == np.float32(7).tobytes()


def test_an_answer_stays_when_the_next_call_changes_the_program(tmp_path: Path) -> None:
    model = load(export(tmp_path / "model.pt2", Program(lambda self, x: (self.count.add_(x), self.offset)), B))
    answers = [model.infer({"x": fp32(1)}) for _ in range(3)]
    assert [lists(answer) for answer in answers] == [
        {"OUTPUT__0": [count], "OUTPUT__1": [1]} for count in (1, 2, 3)
    ]


def test_closing_frees_the_program(tmp_path: Path) -> None:
    model = load(export(tmp_path / "model.pt2", torch.nn.Linear(1, 1), B))
    in_a_thread(lambda: model.infer({"input": fp32(1)}))
    program = model._programs[0]  # type: ignore[attr-defined]
    weights = [weakref.ref(weight) for weight in program._module.parameters()]
    assert all(weight() is not None for weight in weights)
    gc.disable()
    try:
        model.close()
        assert [weight() for weight in weights] == [None, None]
    finally:
        gc.enable()


def test_what_it_was_exported_with_is_not_kept(tmp_path: Path) -> None:
    """The file has inputs, too: examples, which move to the GPU with the program."""
    file = export(tmp_path / "model.pt2", Program(lambda _, x: x + 1), torch.ones(1234))
    gc.collect()
    gc.disable()
    try:
        model = load(file)
        assert not [
            tracked for tracked in gc.get_objects() if type(tracked) is torch.Tensor and tracked.shape == (1234,)
        ]
    finally:
        gc.enable()
    with pytest.raises(InvalidArgument, match=r"^Guard failed: |^Expected input at "):
        model.infer({"x": fp32(1)})


# --- configurations ---


def test_configured_names_and_shapes(tmp_path: Path) -> None:
    linear = torch.nn.Linear(3, 2)
    file = export(tmp_path / "model.pt2", linear, torch.rand(4, 3), dims=({0: ROWS},))
    for inputs, outputs in ((["input"], ["OUTPUT__0"]), (["x"], ["y"]), (["INPUT__0"], ["y__0"]), ([], [])):
        configured = ModelConfig(inputs=config(inputs).inputs, outputs=config([], outputs).outputs)
        model = load(file, configured)
        assert specs(model.inputs) == [(inputs[0] if inputs else "input", "FP32", [-1, 3])]
        assert specs(model.outputs) == [(outputs[0] if outputs else "OUTPUT__0", "FP32", [-1, 2])]
        answer = model.infer({model.inputs[0].name: np.ones((2, 3), "f4")})
        assert list(answer) == [spec.name for spec in model.outputs]


def test_a_batch_size(tmp_path: Path) -> None:
    file = export(tmp_path / "model.pt2", torch.nn.Linear(3, 2), torch.rand(4, 3), dims=({0: ROWS},))
    configured = ModelConfig(max_batch_size=4)
    model = load(file, configured)
    configure(model, configured)
    assert model.max_batch_size == 4
    assert list(model.inputs) == [TensorSpec("input", "FP32", (-1, 3))]


def test_configured_names_that_do_not_fit(tmp_path: Path) -> None:
    file = export(tmp_path / "model.pt2", Program(lambda _, x: {"b": x + 1, "a": x + 2}), A)
    found = refused(file, config(["x", "y"]), Code.INVALID_ARGUMENT)
    assert found == "input: expected the program's x; got x, y: the program has only 1"
    assert refused(file, config([], ["a", "c"]), Code.INVALID_ARGUMENT) == (
        "output: expected the program's b, a; got a, c: expected the program's own names, or "
        "<name>__<index> for all"
    )


# --- failures ---


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((17, 3), "Guard failed: input.size()[0] <= 16"),
        ((2, 4), "Guard failed: input.size()[1] == 3"),
        ((3,), "input 'input': expected 2 dims, got shape [3]"),
        ((1, 1, 3), "input 'input': expected 2 dims, got shape [1,1,3]"),
    ],
)
def test_shapes_that_it_was_not_exported_for(tmp_path: Path, shape: tuple[int, ...], text: str) -> None:
    module = torch.nn.Linear(3, 2)
    model = load(export(tmp_path / "model.pt2", module, torch.rand(4, 3), dims=({0: ROWS},)))
    with pytest.raises(InvalidArgument) as caught:
        model.infer({"input": np.zeros(shape, "f4")})
    assert caught.value.message == text


def test_dims_that_contradict_each_other(tmp_path: Path) -> None:
    dims = {"a": {0: ROWS}, "b": {0: ROWS}}
    model = load(export(tmp_path / "model.pt2", Pair(), torch.ones(4), torch.ones(4), dims=dims))
    with pytest.raises(InvalidArgument, match=r"^Guard failed: "):
        model.infer({"a": fp32(1, 2), "b": fp32(1, 2, 3)})
    assert lists(model.infer({"a": fp32(1, 2), "b": fp32(1, 2)})) == {"OUTPUT__0": [0, 0]}


def test_missing_inputs(tmp_path: Path) -> None:
    model = load(export(tmp_path / "model.pt2", Pair(), A, B))
    with pytest.raises(InvalidArgument, match=r"^expected the inputs a, b; got a$"):
        model.infer({"a": fp32(1)})


def test_the_reason_of_a_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    index = torch.zeros(1, dtype=torch.int64)
    file = export(tmp_path / "model.pt2", Program(lambda self, x: self.offset[x]), index)
    model = load(file, config(groups=[ON_CPU]))
    with pytest.raises(Internal, match=r"^PyTorch execute failure: index 7 is out of bounds .*size 1$"):
        model.infer({"x": np.array([7])})
    assert str(tmp_path / "model.pt2") in caplog.text
    assert lists(model.infer({"x": np.array([0])})) == {"OUTPUT__0": [1]}


# --- instances and devices ---


@pytest.mark.parametrize("group", [ON_CPU, WHERE_SAVED, InstanceGroup("AUTO")])
def test_devices(tmp_path: Path, group: InstanceGroup) -> None:
    model = load(export(tmp_path / "model.pt2", Pair(), A, B), config(groups=[group, group]))
    assert (model.instances, model.places_instances) == (2 * max(1, torch.cuda.device_count()), True)
    assert lists(model.infer({"a": fp32(3), "b": fp32(1)})) == {"OUTPUT__0": [2]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu(tmp_path: Path) -> None:
    text = refused(export(tmp_path / "model.pt2", Pair(), A, B), config(groups=[InstanceGroup("GPU")]))
    assert text == "instance_group[0].kind: KIND_GPU, but the backend finds no usable GPU"


def test_programs_that_load_and_run_at_the_same_time(tmp_path: Path) -> None:
    """torch itself can load only one at a time."""
    file = export(tmp_path / "model.pt2", Pair(), A, B)
    wrong: list[Any] = []

    def call(number: int) -> None:
        try:
            for round_ in range(ROUNDS):
                model = load(file)
                answer = lists(model.infer({"a": fp32(number), "b": fp32(round_)}))
                model.close()
                if answer != {"OUTPUT__0": [number - round_]}:
                    wrong.append(answer)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=call, args=[number]) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
