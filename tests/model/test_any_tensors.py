"""Models that declare no tensors: what a request says counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from triglot.core.errors import Internal
from triglot.core.types import InferenceRequest, InputTensor
from triglot.model.model import Model, signatures_of
from triglot.model.signature import DEFAULT_SIGNATURE, Signature
from triglot.model.validation import InvalidRequest, bind_inputs, bind_outputs, check_requested_outputs

ANY = Signature((), (), any_tensors=True)


def request(*inputs: InputTensor, outputs: tuple[str, ...] = ()) -> InferenceRequest:
    return InferenceRequest("m", inputs=list(inputs), outputs=outputs)


def test_such_a_model_has_one_signature() -> None:
    class Taker(Model):
        any_tensors = True

    assert signatures_of(Taker()) == {DEFAULT_SIGNATURE: ANY}


def test_inputs_are_taken_as_they_say_that_they_are() -> None:
    raw = np.arange(6, dtype="<i4").tobytes()
    bound = bind_inputs(
        ANY,
        request(
            InputTensor("a", "INT32", (2, 3), raw),
            InputTensor("b", "BOOL", (), b"\x01"),
            InputTensor("c", "BYTES", (1,), b"\x02\0\0\0hi"),
        ),
    )
    assert bound["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert np.shares_memory(bound["a"], np.frombuffer(raw, "<i4"))
    assert bound["b"].item() is True
    assert bound["c"].tolist() == [b"hi"]


def test_no_inputs_are_fine() -> None:
    assert bind_inputs(ANY, request()) == {}


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ([InputTensor("a", "FP31", (1,), b"....")], "'a' data-type is 'FP31', which is none of BOOL, "),
        (
            [InputTensor("a", "INT8", (2,), b".")],
            "input byte size mismatch for input 'a' for model 'm'",
        ),
        ([InputTensor("a", "INT8", (-1,), b".")], "input 'a' has a dim below 0: [-1]"),
        ([InputTensor("a", "INT8", (2**62, 4), b".")], "too many elements"),
        ([InputTensor("a", "INT8", (1,), b".")] * 2, "input 'a' already exists in request"),
        ([InputTensor("a", "BOOL", (1,), b"\x02")], "its bytes must be 0 or 1"),
    ],
)
def test_what_contradicts_itself_is_refused(inputs: list[InputTensor], text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        bind_inputs(ANY, request(*inputs))
    assert text in caught.value.message


def test_outputs_are_given_as_they_are() -> None:
    answer: dict[str, Any] = {"y": np.ones((2, 1), "f8"), "t": np.array(["a"]), "n": 3}
    check_requested_outputs(ANY, request(outputs=("y",)))
    outputs = bind_outputs(ANY, answer, (), "m")
    assert [(output.name, output.datatype, output.array.shape) for output in outputs] == [
        ("y", "FP64", (2, 1)),
        ("t", "BYTES", (1,)),
        ("n", "INT64", ()),
    ]
    assert [bound.name for bound in bind_outputs(ANY, answer, ("n", "y"), "m")] == ["n", "y"]


def test_an_output_that_was_not_given_is_the_callers_mistake() -> None:
    with pytest.raises(
        InvalidRequest, match=r"unexpected inference output 'z' for model 'm', which returned \['y'\]"
    ):
        bind_outputs(ANY, {"y": 1}, ("z",), "m")


def test_an_output_without_a_datatype_is_the_models_mistake() -> None:
    with pytest.raises(Internal, match="returned output 'y': numpy dtype"):
        bind_outputs(ANY, {"y": np.array(["2026-01-01"], "M8[D]")}, (), "m")
