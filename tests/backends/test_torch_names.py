"""The names of a TorchScript program's inputs and outputs, without a configuration and with one."""

# ruff: noqa: E402 — without the library there is nothing to import.

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from triglot.core.errors import Code, Internal, InvalidArgument
from triglot.core.types import TensorSpec
from triglot.model.config import NO_CONFIG, ModelConfig
from triglot.model.configure import configure
from triglot.model.model import signatures_of
from triglot.model.scheduling import ControlInput, SequenceBatching, SequenceState
from triglot.model.signature import DEFAULT_SIGNATURE

torch = pytest.importorskip("torch", reason="the torch environment has it")

from tests.backends.grps_torch_scripts import script
from tests.backends.torch_files import config, forward, fp32, lists, load, refused

# --- names without a configuration ---


def test_what_it_declares(tmp_path: Path) -> None:
    model = load(script(tmp_path / "model.pt"))
    assert model.platform == "pytorch_libtorch"
    assert model.any_tensors
    assert (model.instances, model.places_instances) == (max(1, torch.cuda.device_count()), False)


A, B = fp32(1), fp32(3)
DIFFERENCE = forward(
    "a: Tensor, b: Optional[Tensor] = None, scale: int = 2", "return (a if b is None else a - b) * scale"
)


@pytest.mark.parametrize(
    ("inputs", "answer"),
    [
        ({"a": A, "b": B}, -4),
        ({"b": B, "a": A}, -4),
        ({"a": A}, 2),
        ({"INPUT__0": A, "INPUT__1": B}, -4),
        ({"z__1": B, "a__0": A}, -4),
        ({"one__more__0": A}, 2),
        ({"input_0": A, "input_1": B}, -4),
        ({"": A}, 2),
    ],
)
def test_names_of_inputs(tmp_path: Path, inputs: dict[str, Any], answer: float) -> None:
    model = load(script(tmp_path / "model.pt", DIFFERENCE))
    assert lists(model.infer(inputs)) == {"OUTPUT__0": [answer]}


@pytest.mark.parametrize(
    ("names", "got"),
    [
        ([], "none"),
        (["b"], "b"),
        (["c"], "c"),
        (["a", "c"], "a, c"),
        (["a", "b", "c"], "a, b, c"),
        (["a", "scale"], "a, scale"),
        (["INPUT__1"], "INPUT__1"),
        (["INPUT__0", "INPUT__2"], "INPUT__0, INPUT__2"),
        (["x__0", "y__0"], "x__0, y__0"),
        (["INPUT__0", "b"], "INPUT__0, b"),
        (["input_0", "input_00"], "input_0, input_00"),
        (["INPUT__99999999999999999999"], "INPUT__99999999999999999999"),
        (["INPUT__-1"], "INPUT__-1"),
        (["", "b"], ", b"),
    ],
)
def test_names_that_are_no_inputs(tmp_path: Path, names: list[str], got: str) -> None:
    model = load(script(tmp_path / "model.pt", DIFFERENCE))
    with pytest.raises(InvalidArgument) as caught:
        model.infer(dict.fromkeys(names, A))
    assert caught.value.message == f"expected the inputs a, b (optional); got {got}"


def test_a_dict_of_inputs(tmp_path: Path) -> None:
    source = forward("x: Dict[str, Tensor]", "return {'sum': x['a'] + x['b'], 'count': torch.tensor(len(x))}")
    for configured in (NO_CONFIG, config(["b", "a"], ["count", "sum"])):
        model = load(script(tmp_path / "model.pt", source), configured)
        assert lists(model.infer({"a": A, "b": B})) == {"sum": [4], "count": 2}
    with pytest.raises(Internal, match=r"^PyTorch execute failure: "):
        load(tmp_path / "model.pt").infer({"a": A})


@pytest.mark.parametrize(
    ("result", "answer"),
    [
        ("x", {"OUTPUT__0": [1]}),
        ("(x,)", {"OUTPUT__0": [1]}),
        ("(x, x + 1)", {"OUTPUT__0": [1], "OUTPUT__1": [2]}),
        ("[x, x + 1, x]", {"OUTPUT__0": [1], "OUTPUT__1": [2], "OUTPUT__2": [1]}),
        ("{'b': x, 'a': x + 1}", {"a": [2], "b": [1]}),
    ],
)
def test_names_of_outputs(tmp_path: Path, result: str, answer: dict[str, Any]) -> None:
    model = load(script(tmp_path / "model.pt", forward("x: Tensor", f"return {result}")))
    assert lists(model.infer({"x": A})) == answer


def test_outputs_that_are_none(tmp_path: Path) -> None:
    source = "def forward(self, x: Tensor) -> Tuple[Optional[Tensor], Tensor]:\n    return (None, x)"
    assert lists(load(script(tmp_path / "model.pt", source)).infer({"x": A})) == {"OUTPUT__1": [1]}


@pytest.mark.parametrize("result", ["x", "(x,)", "{'OUTPUT__0': x}"])
def test_outputs_of_any_type(tmp_path: Path, result: str) -> None:
    source = f"def forward(self, x: Tensor) -> Any:\n    return {result}"
    assert lists(load(script(tmp_path / "model.pt", source)).infer({"x": A})) == {"OUTPUT__0": [1]}


def test_a_result_that_turns_out_to_be_none_of_tensors(tmp_path: Path) -> None:
    source = "def forward(self, x: Tensor) -> Any:\n    return (x, 'text')"
    with pytest.raises(
        Internal, match=r"^PyTorch execute failure: result 'OUTPUT__1' is str; expected a Tensor, a "
    ):
        load(script(tmp_path / "model.pt", source)).infer({"x": A})


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [("x.to(torch.float8_e4m3fn)", "torch.float8_e4m3fn"), ("x.to_sparse()", "torch.sparse_coo")],
)
def test_results_that_no_array_can_hold(tmp_path: Path, tensor: str, kind: str) -> None:
    model = load(script(tmp_path / "model.pt", forward("x: Tensor", f"return {tensor}")))
    with pytest.raises(Internal, match=f"^output 'OUTPUT__0' is .*{kind}"):
        model.infer({"x": A})


# --- names in a configuration ---

PAIR = forward("a: Tensor, b: Tensor", "return (a - b, a + b)")


@pytest.mark.parametrize(
    ("inputs", "answer"),
    [
        ({"a": 1, "b": 3}, {"OUTPUT__0": [-2], "OUTPUT__1": [4]}),
        ({"b": 3, "a": 1}, {"OUTPUT__1": [4], "OUTPUT__0": [-2]}),
        ({"INPUT__1": 3, "INPUT__0": 1}, {"y__1": [4]}),
        ({"x": 1, "y": 3}, {"difference": [-2], "sum": [4]}),
        ({"b": 1, "x": 3}, {"difference": [-2]}),
        ({"x__1": 1, "y": 3}, {"first__1": [-2], "second": [4]}),
    ],
)
def test_configured_names(tmp_path: Path, inputs: dict[str, float], answer: dict[str, Any]) -> None:
    configured = config(list(inputs), list(answer))
    model = load(script(tmp_path / "model.pt", PAIR), configured)
    configure(model, configured)
    assert not model.any_tensors
    assert [spec.name for spec in model.inputs] == list(inputs)
    assert lists(model.infer({name: fp32(value) for name, value in inputs.items()})) == answer


SEQUENCES = SequenceBatching(
    controls=[ControlInput("START__2", "START", "FP32")],
    states=[SequenceState("SUM__1", "NEW__1", "FP32", (1,))],
)
SUMS = forward("x: Tensor, total: Tensor, start: Tensor", "return (x + start, total + x)")


@pytest.mark.parametrize("x", ["INPUT__0", "x", "image"])
@pytest.mark.parametrize("y", ["OUTPUT__0", "y"])
def test_controls_and_states_of_sequences(tmp_path: Path, x: str, y: str) -> None:
    """They say their position, whatever the clients' tensors are called."""
    configured = replace(config([x], [y], batch=4), sequence_batching=SEQUENCES)
    model = load(script(tmp_path / "model.pt", SUMS), configured)
    configure(model, configured)
    assert list(model.inputs) == [
        TensorSpec(x, "FP32", (-1, -1)),
        TensorSpec("START__2", "FP32", (-1, 1)),
        TensorSpec("SUM__1", "FP32", (-1, 1)),
    ]
    assert [spec.name for spec in signatures_of(model)[DEFAULT_SIGNATURE].inputs] == [x]
    answer = model.infer({x: fp32(3)[None], "SUM__1": fp32(10)[None], "START__2": fp32(1)[None]})
    assert lists(answer) == {y: [[4]], "NEW__1": [[13]]}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("START", "got x, START, SUM__1: expected the program's own names, or <name>__<index> for all"),
        ("START__0", "got x, START__0, SUM__1: two names have the same index"),
        ("START__3", "got x, START__3, SUM__1: the program has only 3"),
    ],
)
def test_controls_that_are_no_inputs(tmp_path: Path, name: str, text: str) -> None:
    sequences = replace(SEQUENCES, controls=[ControlInput(name, "START", "FP32")])
    configured = replace(config(["x"], ["y"]), sequence_batching=sequences)
    file = script(tmp_path / "model.pt", SUMS)
    expected = f"input: expected the program's x, total, start; {text}"
    assert refused(file, configured, Code.INVALID_ARGUMENT) == expected


def test_what_a_configuration_declares(tmp_path: Path) -> None:
    script(tmp_path / "model.pt")
    for batch, shape in ((0, (-1,)), (8, (-1, -1))):
        configured = config(["x"], ["y"], batch=batch)
        model = load(tmp_path / "model.pt", configured)
        assert model.inputs == [TensorSpec("x", "FP32", shape)]
        assert model.outputs == [TensorSpec("y", "FP32", shape)]
        configure(model, configured)
        assert model.max_batch_size == batch


@pytest.mark.parametrize(
    ("configured", "text"),
    [
        (config(["a"], ["y"]), "input: expected the program's a, b; got a: missing b"),
        (config(["x"], ["y"]), "input: expected the program's a, b; got x: missing b"),
        (
            config(["x", "y", "z"], ["y"]),
            "input: expected the program's a, b; got x, y, z: the program has only 2",
        ),
        (
            config(["x__0", "y__0"], ["y"]),
            "input: expected the program's a, b; got x__0, y__0: two names have the same index",
        ),
        (
            config(["x__0", "y__7"], ["y"]),
            "input: expected the program's a, b; got x__0, y__7: the program has only 2",
        ),
        (
            config(["a", "b"], ["x", "y", "z"]),
            "output: expected the program's OUTPUT__0, OUTPUT__1; got x, y, z: the program has only 2",
        ),
        (
            config(["a", "b"], ["x__2"]),
            "output: expected the program's OUTPUT__0, OUTPUT__1; got x__2: the program has only 2",
        ),
    ],
)
def test_configurations_that_do_not_fit(tmp_path: Path, configured: ModelConfig, text: str) -> None:
    assert refused(script(tmp_path / "model.pt", PAIR), configured, Code.INVALID_ARGUMENT) == text


@pytest.mark.parametrize(
    ("result", "outputs", "answer"),
    [
        ("{'b': x, 'a': x + 1}", ["a", "b"], {"a": [2], "b": [1]}),
        ("{'b': x, 'a': x + 1}", ["a"], {"a": [2]}),
        ("{'b': x, 'a': x + 1}", ["y__1"], {"y__1": [2]}),
        ("{'b': x}", ["y"], {"y": [1]}),
        ("[x, x + 1]", ["first", "second"], {"first": [1], "second": [2]}),
        ("[x, x + 1]", ["OUTPUT__1"], {"OUTPUT__1": [2]}),
    ],
)
def test_configured_outputs_that_each_call_names(
    tmp_path: Path, result: str, outputs: list[str], answer: dict[str, Any]
) -> None:
    file = script(tmp_path / "model.pt", forward("x: Tensor", f"return {result}"))
    assert lists(load(file, config(["x"], outputs)).infer({"x": A})) == answer


@pytest.mark.parametrize(
    ("result", "outputs", "text"),
    [
        (
            "{'b': x, 'a': x}",
            ["a", "c"],
            "output: expected the program's b, a; got a, c: expected the program's own names, or ",
        ),
        (
            "[x, x]",
            ["a", "b", "c"],
            "output: expected the program's OUTPUT__0, OUTPUT__1; got a, b, c: the program has only",
        ),
    ],
)
def test_a_result_that_does_not_fit_its_configuration(
    tmp_path: Path, result: str, outputs: list[str], text: str
) -> None:
    file = script(tmp_path / "model.pt", forward("x: Tensor", f"return {result}"))
    with pytest.raises(Internal) as caught:
        load(file, config(["x"], outputs)).infer({"x": A})
    assert caught.value.message.startswith(f"the program's outputs do not match the configuration: {text}")


def test_other_names_than_the_configured_ones(tmp_path: Path) -> None:
    model = load(script(tmp_path / "model.pt"), config(["image"], ["y"]))
    assert lists(model.infer({"image": A})) == {"y": [1]}
    with pytest.raises(InvalidArgument, match=r"^expected the inputs image; got x$"):
        model.infer({"x": A})


def test_parameters_have_no_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(script(tmp_path / "model.pt"), replace(config(), parameters={"INFERENCE_MODE": "true"}))
    assert caplog.messages == [
        "config.pbtxt: parameters: INFERENCE_MODE: unknown, ignored; the torch backend knows none"
    ]
