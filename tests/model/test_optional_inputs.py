"""Inputs that a request may omit: what signatures, requests, configurations and ensembles make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triglot.core.call import Call
from triglot.core.types import InferenceRequest, InputTensor, TensorSpec
from triglot.model.config import ModelConfig, TensorConfig
from triglot.model.configure import configure
from triglot.model.ensemble_checks import IN_CONFIG, Part, check_fit
from triglot.model.model import Model, signatures_of
from triglot.model.scheduling import DynamicBatching, Step
from triglot.model.signature import Signature
from triglot.model.validation import InvalidRequest, bind_inputs
from triglot.repository.config.model_config import config_of, parse_override
from triglot.scheduling.batch_keys import BatchKeys

X = TensorSpec("x", "INT32", [-1])
NAMES = ("a", "b", "c", "d")


def input_of(name: str, *values: int) -> InputTensor:
    return InputTensor(name, "INT32", (len(values),), np.array(values, "i4"))


def optional(name: str, shape: Sequence[int] = (-1,)) -> TensorSpec:
    return TensorSpec(name, "INT32", shape, optional=True)


@given(
    declared=st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["required", "optional", "default"])),
    sent=st.sets(st.sampled_from(NAMES)),
)
def test_a_request_needs_what_is_required_and_gets_what_it_sends_and_the_defaults(
    declared: dict[str, str], sent: set[str]
) -> None:
    signature = Signature(
        [TensorSpec(name, "INT32", [-1], optional=kind == "optional") for name, kind in declared.items()],
        [],
        defaults={name: np.array([7], "i4") for name, kind in declared.items() if kind == "default"},
    )
    request = InferenceRequest("m", inputs=[input_of(name, 1) for name in sorted(sent)])
    required = {name for name, kind in declared.items() if kind == "required"}
    defaults = {name for name, kind in declared.items() if kind == "default"}
    assert signature.may_lack == declared.keys() - required
    if not required <= sent <= declared.keys():
        with pytest.raises(InvalidRequest):
            bind_inputs(signature, request)
        return
    arrays = bind_inputs(signature, request)
    expected = {name: [1] if name in sent else [7] for name in sent | defaults}
    assert {name: array.tolist() for name, array in arrays.items()} == expected


def test_the_error_names_only_what_is_missing() -> None:
    signature = Signature([X, optional("bias"), TensorSpec("scale", "INT32", [1])], [])
    with pytest.raises(InvalidRequest) as caught:
        bind_inputs(signature, InferenceRequest("m", inputs=[input_of("bias", 1)]))
    assert caught.value.message == (
        "expected number of inputs between 2 and 3 but got 1 inputs for model 'm'. Got input(s) ['bias'], but "
        "missing required input(s) ['x','scale']. Please provide all required input(s)."
    )


def test_an_output_is_never_optional() -> None:
    with pytest.raises(ValueError, match="output 'y': optional: only inputs can be optional"):
        Signature([X], [optional("y")])


# --- batches ---


class Adding(Model):
    inputs = [TensorSpec("x", "INT32", [-1, 1]), optional("bias", [-1, 1])]
    outputs = [TensorSpec("y", "INT32", [-1, 1])]
    max_batch_size = 8

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"y": inputs["x"] + inputs.get("bias", 0)}


class AddingListed(Adding):
    def infer_batch(self, inputs: Sequence[Mapping[str, Any]], _: object) -> list[dict[str, Any]]:
        return [self.infer(each) for each in inputs]


@pytest.mark.parametrize("model", [Adding(), AddingListed()])
@pytest.mark.parametrize("pad", [False, True])
def test_requests_with_unlike_inputs_share_no_batch(model: Model, pad: bool) -> None:
    kinds = BatchKeys(model, DynamicBatching(pad_variable_lengths=pad))
    call = Call()
    call.signature_name = "serving_default"
    x, bias = np.ones((2, 1), "i4"), np.ones((2, 1), "i4")
    plain, with_bias = kinds.of({"x": x}, call), kinds.of({"x": x, "bias": bias}, call)
    assert plain[0] == with_bias[0] == 2
    assert plain[1] == kinds.of({"x": x}, call)[1]
    assert with_bias[1] == kinds.of({"bias": bias, "x": x}, call)[1]
    assert plain[1] != with_bias[1]


def test_a_request_without_any_input_runs_alone() -> None:
    kinds = BatchKeys(Adding(), DynamicBatching())
    assert kinds.of({}, Call()) == (1, None)


# --- configurations ---


def configured(text: str) -> ModelConfig:
    warnings: list[str] = []
    config = config_of(parse_override(text, "m"), Path("m"), "config", warnings)
    assert warnings == []
    return config


def test_a_configuration_says_which_inputs_are_optional() -> None:
    config = configured(
        '{"max_batch_size": 4, "backend": "python", "input": ['
        '{"name": "x", "data_type": "TYPE_INT32", "dims": [1]},'
        '{"name": "bias", "data_type": "TYPE_INT32", "dims": [1], "optional": true}],'
        '"output": [{"name": "y", "data_type": "TYPE_INT32", "dims": [1]}]}'
    )
    assert [tensor.optional for tensor in (*config.inputs, *config.outputs)] == [False, True, False]

    class Bare(Model):
        def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
            return {"y": inputs["x"]}

    model = Bare()
    configure(model, config)
    assert list(model.inputs) == [TensorSpec("x", "INT32", [-1, 1]), optional("bias", [-1, 1])]
    assert signatures_of(model)["serving_default"].may_lack == {"bias"}


@pytest.mark.parametrize("optional_in_config", [False, True])
def test_what_the_model_declares_optional_stays_so(optional_in_config: bool) -> None:
    model = Adding()
    configure(
        model,
        ModelConfig(max_batch_size=8, inputs=[TensorConfig("bias", "INT32", [1], optional=optional_in_config)]),
    )
    assert [spec.optional for spec in model.inputs] == [False, True]


def test_code_may_do_without_an_input_and_a_fixed_model_may_not() -> None:
    config = ModelConfig(max_batch_size=8, inputs=[TensorConfig("x", "INT32", [1], optional=True)])
    model = Adding()
    configure(model, config)
    assert [spec.optional for spec in model.inputs] == [True, True]

    class Fixed(Adding):
        platform = "onnxruntime_onnx"

    with pytest.raises(
        ValueError, match=r"input\[0\]\.optional: the configuration says true, but the model requires"
    ):
        configure(Fixed(), config)


# --- ensembles ---


def fit(ensemble: Sequence[TensorSpec], taking: Signature, **inputs: str) -> None:
    signature = Signature(ensemble, [TensorSpec("out", "INT32", [-1])])
    check_fit([Step("part", inputs, {"y": "out"})], signature, [Part(taking)], IN_CONFIG)


TAKING = Signature([X, optional("bias")], [TensorSpec("y", "INT32", [-1])])


def test_a_step_runs_without_what_it_may_lack() -> None:
    fit([X], TAKING, x="x")
    fit([X, optional("offset")], TAKING, x="x", bias="offset")
    fit([optional("x")], Signature((), (), any_tensors=True), anything="x")


def test_what_a_step_needs_must_come_with_every_request() -> None:
    with pytest.raises(ValueError, match=r"input_map: 'part' also requires input 'x'"):
        fit([X], TAKING, bias="x")
    with pytest.raises(
        ValueError, match=r"input_map\[x\]: 'part' requires it, but input 'given' of the ensemble is optional"
    ):
        fit([optional("given")], TAKING, x="given")
