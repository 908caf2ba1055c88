"""Whether steps fit together, which is seen before an ensemble serves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from triglot import Signature, Step, TensorSpec
from triglot.model.ensemble_checks import IN_CONFIG, IN_PYTHON, Part, check_fit, check_steps


def spec(name: str, datatype: str = "FP32", shape: Sequence[int] | None = (-1,)) -> TensorSpec:
    return TensorSpec(name, datatype, shape)


XY = Signature([spec("x")], [spec("y")])
"""Of an ensemble, and of the models of steps where nothing else is said."""


def step(taken: str, given: str, model: str = "m") -> Step:
    return Step(model, {"x": taken}, {"y": given})


WRONG_STEPS: dict[str, tuple[list[Step], Signature, str]] = {
    "none": ([], XY, "ensemble_scheduling.step: expected at least one step, got none"),
    "no outputs of its own": (
        [step("x", "y")],
        Signature([spec("x")], []),
        "output: expected at least one, got none",
    ),
    "no inputs of its own": (
        [step("x", "y")],
        Signature([], [spec("y")]),
        "input: expected at least one, got none",
    ),
    "step without inputs": (
        [Step("m", {}, {"y": "y"})],
        XY,
        "ensemble_scheduling.step[0].input_map: expected at least one tensor, got none",
    ),
    "step without outputs": (
        [step("x", "y"), Step("m", {"x": "x"}, {})],
        XY,
        "ensemble_scheduling.step[1].output_map: expected at least one tensor, got none",
    ),
    "given twice": (
        [step("x", "y"), step("x", "y")],
        XY,
        "ensemble_scheduling.step[1].output_map[y]: tensor 'y' is already "
        "ensemble_scheduling.step[0].output_map[y]",
    ),
    "an input given again": (
        [step("x", "y"), step("y", "x")],
        XY,
        "ensemble_scheduling.step[1].output_map[y]: tensor 'x' is already input 'x' of the ensemble",
    ),
    "given by none": (
        [step("z", "y"), step("x", "q")],
        XY,
        "ensemble_scheduling.step[0].input_map[x]: tensor 'z' is neither an input of the ensemble nor an "
        "output of a step",
    ),
    "an output given by none": ([step("x", "q")], XY, "output[0]: no step produces the ensemble's output 'y'"),
    "an input is no output": (
        [step("x", "y")],
        Signature([spec("x")], [spec("y"), spec("x")]),
        "output[1]: no step produces the ensemble's output 'x'",
    ),
    "an input taken by none": (
        [step("x", "y")],
        Signature([spec("x"), spec("z")], [spec("y")]),
        "input[1]: no step uses the ensemble's input 'z'",
    ),
    "itself": (
        [step("x", "y"), step("q", "q", "n")],
        XY,
        "ensemble_scheduling.step: steps depend on each other in a cycle: ensemble_scheduling.step[1] ('n')",
    ),
    "a circle": (
        [Step("m", {"x": "x", "z": "q"}, {"y": "y"}), step("y", "p"), step("p", "q", "n")],
        XY,
        "ensemble_scheduling.step: steps depend on each other in a cycle: "
        "ensemble_scheduling.step[0] ('m'), ensemble_scheduling.step[1] ('m'), ensemble_scheduling.step[2] ('n')",
    ),
}


@pytest.mark.parametrize(("steps", "signature", "text"), WRONG_STEPS.values(), ids=WRONG_STEPS)
def test_wrong_steps(steps: list[Step], signature: Signature, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        check_steps(steps, signature, IN_CONFIG)


def test_keys_as_they_are_written_in_python() -> None:
    with pytest.raises(ValueError, match=r"^steps\[0\]\.inputs\[x\]: tensor 'z' is neither an input of"):
        check_steps([step("z", "y")], XY, IN_PYTHON)


def test_right_steps() -> None:
    """In any order; a tensor may be taken often, and twice by the same step."""
    steps = [step("b", "y"), Step("m", {"x": "a", "z": "a"}, {"y": "b", "u": "unused"}), step("x", "a")]
    check_steps(steps, XY, IN_CONFIG)


BATCHED = Signature([spec("x", shape=(-1, 2))], [spec("y", shape=(-1, 2))], max_batch_size=8)
CHAIN = [step("x", "m", "one"), step("m", "y", "two")]
WRONG_FIT: dict[str, tuple[Signature, Part, Part, str]] = {
    "small batches": (
        BATCHED,
        Part(BATCHED),
        Part(Signature(BATCHED.inputs, BATCHED.outputs, max_batch_size=4)),
        "[1].model_name: expected a model with a max_batch_size of at least the ensemble's 8, 'two' has 4",
    ),
    "no such input": (
        XY,
        Part(Signature([spec("a"), spec("b")], [spec("y")])),
        Part(XY),
        "[0].input_map[x]: the inputs of 'one' are 'a', 'b'",
    ),
    "no such output": (
        XY,
        Part(Signature([spec("x")], [])),
        Part(XY),
        "[0].output_map[y]: the outputs of 'one' are none",
    ),
    "an input too few": (
        XY,
        Part(XY),
        Part(Signature([spec("x"), spec("z")], [spec("y")])),
        "[1].input_map: 'two' also requires input 'z'",
    ),
    "datatype of an input": (
        XY,
        Part(Signature([spec("x", "INT32")], [spec("y")])),
        Part(XY),
        "[0].input_map[x]: 'one' is INT32, input 'x' of the ensemble is FP32",
    ),
    "datatype between steps": (
        XY,
        Part(Signature([spec("x")], [spec("y", "FP64")])),
        Part(XY),
        "[1].input_map[x]: 'two' is FP32, output 'y' of 'one' is FP64",
    ),
    "shape between steps": (
        XY,
        Part(Signature([spec("x")], [spec("y", shape=(-1, 3))])),
        Part(Signature([spec("x", shape=(-1, 4))], [spec("y")])),
        "[1].input_map[x]: 'two' has shape [-1,4], output 'y' of 'one' has [-1,3]",
    ),
    "shape with and without the batch": (
        XY,
        Part(Signature([spec("x", shape=(-1, -1))], [spec("y", shape=(-1, 3))], max_batch_size=8)),
        Part(Signature([spec("x", shape=(4,))], [spec("y")])),
        "[1].input_map[x]: 'two' has shape [4], output 'y' of 'one' has [-1,3]",
    ),
    "rank of an input": (
        XY,
        Part(Signature([spec("x", shape=(-1, 3))], [spec("y")])),
        Part(XY),
        "[0].input_map[x]: 'one' has shape [-1,3], input 'x' of the ensemble has [-1]",
    ),
}


@pytest.mark.parametrize(("signature", "first", "second", "text"), WRONG_FIT.values(), ids=WRONG_FIT)
def test_models_that_do_not_fit(signature: Signature, first: Part, second: Part, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'ensemble_scheduling.step{text}')}$"):
        check_fit(CHAIN, signature, [first, second], IN_CONFIG)


def test_an_output_that_does_not_fit() -> None:
    last = Part(Signature([spec("x")], [spec("y", "FP64")]))
    text = r"^output\[0\]: the ensemble's output 'y' is FP32, output 'y' of 'two' is FP64$"
    with pytest.raises(ValueError, match=text):
        check_fit(CHAIN, XY, [Part(XY), last], IN_CONFIG)


XZ = Signature([spec("x"), spec("z")], [spec("y")])
STREAM = Part(XY, decoupled=True)
WRONG_STREAMS: dict[str, tuple[list[Step], list[Part], Signature, str]] = {
    "with an input": (
        [step("x", "m", "one"), Step("two", {"x": "x", "z": "m"}, {"y": "y"})],
        [STREAM, Part(XZ)],
        XY,
        "ensemble_scheduling.step[1].input_map: expected tensors of the same responses, 'x' comes once, 'm' with "
        "each response of the decoupled 'one'",
    ),
    "of two streams": (
        [step("x", "m", "one"), step("x", "n", "two"), Step("three", {"x": "m", "z": "n"}, {"y": "y"})],
        [STREAM, STREAM, Part(XZ)],
        XY,
        "ensemble_scheduling.step[2].input_map: expected tensors of the same responses, 'm' comes with each "
        "response of the decoupled 'one', 'n' with each response of the decoupled 'two'",
    ),
    "of one stream and what comes of it": (
        [step("x", "m", "one"), step("m", "n", "two"), Step("three", {"x": "n", "z": "m"}, {"y": "y"})],
        [STREAM, STREAM, Part(XZ)],
        XY,
        "ensemble_scheduling.step[2].input_map: expected tensors of the same responses, 'n' comes with each "
        "response of the decoupled 'two', 'm' with each response of the decoupled 'one'",
    ),
    "outputs": (
        [step("x", "m", "one"), step("m", "y", "two"), step("x", "z", "three")],
        [STREAM, Part(XY), Part(XY)],
        Signature([spec("x")], [spec("y"), spec("z")]),
        "output: expected tensors of the same responses, 'y' comes with each response of the decoupled "
        "'one', 'z' once",
    ),
}


@pytest.mark.parametrize(("steps", "parts", "signature", "text"), WRONG_STREAMS.values(), ids=WRONG_STREAMS)
def test_what_does_not_come_together(
    steps: list[Step], parts: list[Part], signature: Signature, text: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        check_fit(steps, signature, parts, IN_CONFIG)


ANY = Part(Signature((), (), any_tensors=True))
FITS: dict[str, tuple[Signature, Part, Part]] = {
    "the same": (XY, Part(XY), Part(XY)),
    "larger batches": (
        BATCHED,
        Part(Signature(BATCHED.inputs, BATCHED.outputs, max_batch_size=9)),
        Part(Signature(BATCHED.inputs, BATCHED.outputs)),
    ),
    "steps that batch": (
        Signature([spec("x", shape=(2,))], [spec("y", shape=(8, 2))]),
        Part(BATCHED),
        Part(BATCHED),
    ),
    "a step that does not batch": (
        BATCHED,
        Part(Signature([spec("x", shape=(2,))], [spec("y", shape=(-1, 2))])),
        Part(BATCHED),
    ),
    "any rank": (XY, Part(Signature([spec("x")], [spec("y", shape=None)])), Part(XY)),
    "any size": (
        XY,
        Part(Signature([spec("x", shape=(3,))], [spec("y", shape=(4,))])),
        Part(Signature([spec("x")], [spec("y", shape=(5,))])),
    ),
    "more outputs": (XY, Part(Signature([spec("x")], [spec("y"), spec("z")])), Part(XY)),
    "a default": (
        XY,
        Part(XY),
        Part(Signature([spec("x"), spec("z")], [spec("y")], defaults={"z": np.ones(1, np.float32)})),
    ),
    "what says nothing": (XY, ANY, ANY),
    "decoupled": (XY, STREAM, Part(XY)),
    "a stream of a stream": (XY, STREAM, STREAM),
}


@pytest.mark.parametrize(("signature", "first", "second"), FITS.values(), ids=FITS)
def test_models_that_fit(signature: Signature, first: Part, second: Part) -> None:
    check_fit(CHAIN, signature, [first, second], IN_CONFIG)


def test_steps_are_values() -> None:
    """Two configurations are the same when their steps are."""
    values: list[Any] = [step("x", "y"), step("x", "y")]
    assert values[0] == values[1]
