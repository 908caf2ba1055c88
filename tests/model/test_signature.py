"""What a model declares, and what it answers, against each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from triglot.core.errors import Internal
from triglot.core.tensor import DATATYPES, bytes_elements
from triglot.core.types import TensorSpec
from triglot.model.signature import Signature
from triglot.model.validation import bind_outputs

TO = Signature([], [TensorSpec("y", "FP32", [-1, 3]), TensorSpec("t", "BYTES", [-1])])
GOOD = {"y": np.ones((2, 3), "f4"), "t": np.array([b"a"], dtype=object)}
RETURNED = "model 'm' returned output 'y'"


# numpy has it since 2.0.
VARIABLE_TEXT = [np.dtypes.StringDType] if hasattr(np.dtypes, "StringDType") else []

CAST = "its signature says FP32: return it as .astype(np.float32)"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (None, "model 'm' returned NoneType, expected a dict of outputs by name"),
        (np.ones(3), "model 'm' returned ndarray, expected a dict of outputs by name"),
        ({"t": GOOD["t"], "z": 1}, "model 'm' returned no output 'y', only ['t', 'z']"),
        (GOOD | {"y": np.ones((2, 3))}, f"{RETURNED} as FP64, {CAST}"),
        (GOOD | {"y": [[1.0, 2.0, 3.0]]}, f"{RETURNED} as FP64, {CAST}"),
        (GOOD | {"y": np.ones((2, 3), "i4")}, f"{RETURNED} as INT32, its signature says FP32"),
        (GOOD | {"y": np.array([["a"] * 3])}, f"{RETURNED} as BYTES, its signature says FP32"),
        (GOOD | {"y": np.ones((2, 4), "f4")}, f"{RETURNED} with shape [2,4], its signature says [-1,3]"),
        (GOOD | {"y": np.ones(3, "f4")}, f"{RETURNED} with shape [3], its signature says [-1,3]"),
        (GOOD | {"y": np.float32(1)}, f"{RETURNED} with shape [], its signature says [-1,3]"),
        (
            GOOD | {"y": np.zeros((2, 3), "M8[s]")},
            f"{RETURNED}: numpy dtype datetime64[s] has no datatype; use one of {', '.join(DATATYPES)}",
        ),
    ],
)
def test_an_answer_that_does_not_fit(answer: object, text: str) -> None:
    with pytest.raises(Internal) as caught:
        bind_outputs(TO, answer, (), "m")
    assert caught.value.message == text


@pytest.mark.parametrize(("requested", "names"), [([], ["y", "t"]), (["t"], ["t"]), (["t", "y"], ["y", "t"])])
def test_the_requested_outputs_in_the_order_of_the_signature(requested: list[str], names: list[str]) -> None:
    outputs = bind_outputs(TO, GOOD | {"unknown": 1}, requested, "m")
    assert [output.name for output in outputs] == names


def test_unrequested_output_may_be_missing() -> None:
    assert [output.name for output in bind_outputs(TO, {"y": GOOD["y"]}, ["y"], "m")] == ["y"]


@pytest.mark.parametrize(
    "array",
    [
        np.ones((3, 2), "f4").T,
        np.ones((2, 3), ">f4"),
        np.ones((0, 3), "f4"),
        np.broadcast_to(np.float32(1), (4, 3)),
    ],
)
def test_arrays_are_taken_as_they_are(array: Any) -> None:
    output = bind_outputs(TO, {"y": array}, ["y"], "m")[0]
    assert output.array is array
    assert output.datatype == "FP32"


@pytest.mark.parametrize(
    ("value", "elements"),
    [
        (np.array(["a", "é"]), [b"a", "é".encode()]),
        (np.array([b"a", b"\xff"]), [b"a", b"\xff"]),
        (["a", "b"], [b"a", b"b"]),
        *((np.array(["a"], dtype=kind()), [b"a"]) for kind in VARIABLE_TEXT),
        (np.array([b"\0a\0"], dtype=object), [b"\0a\0"]),
    ],
)
def test_text_becomes_bytes(value: Any, elements: list[bytes]) -> None:
    output = bind_outputs(TO, {"t": value}, ["t"], "m")[0]
    assert output.datatype == "BYTES"
    assert bytes_elements(output.array) == elements


@pytest.mark.parametrize(
    ("name", "datatype", "shape", "text"),
    [
        ("x", "FP31", [1], "x: datatype 'FP31' is none of BOOL, "),
        ("x", "fp32", [1], "x: datatype 'fp32' is none of BOOL, "),
        ("x", "FP32", [-2], r"x: a dim of shape \[-2\] is below -1"),
        ("\ud800", "FP32", [1], r"the name of a tensor: expected Unicode text, got '\\ud800'"),
        (5, "FP32", [1], "the name of a tensor: expected Unicode text, got 5"),
    ],
)
def test_a_wrong_spec(name: Any, datatype: str, shape: list[int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TensorSpec(name, datatype, shape)


def test_a_spec_keeps_its_shape_as_ints() -> None:
    shape: Any = np.array([-1, 3])
    assert TensorSpec("x", "FP32", shape).shape == (-1, 3)


@pytest.mark.parametrize("kind", ["input", "output"])
def test_two_tensors_of_one_name(kind: str) -> None:
    specs = [TensorSpec("x", "FP32", [1]), TensorSpec("x", "INT8", [1])]
    with pytest.raises(ValueError, match=rf"two {kind}s have the same name: \['x', 'x'\]"):
        Signature(specs, []) if kind == "input" else Signature([], specs)


@pytest.mark.parametrize("shape", [[], [3], [1, -1], [0]])
def test_a_model_that_batches_must_say_where(shape: list[int]) -> None:
    Signature([TensorSpec("x", "FP32", shape)], [], 0)
    with pytest.raises(ValueError, match="input 'x': max_batch_size is 8, so the shape must begin with -1"):
        Signature([TensorSpec("x", "FP32", shape)], [], 8)
