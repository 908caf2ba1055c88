"""A model and its configuration: what each completes of the other, and what contradicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.model.models_to_configure import (
    BATCHED,
    Anything,
    Awaited,
    Counting,
    CountingOnLoop,
    Echo,
    Pair,
    model_of,
    signature_of,
    wrong,
)
from triglot.core.types import TensorSpec
from triglot.model.config import NO_CONFIG, InstanceGroup, ModelConfig, TensorConfig
from triglot.model.configure import configure
from triglot.model.model import Model, signatures_of
from triglot.model.signature import DEFAULT_SIGNATURE, Signature


@pytest.mark.parametrize("kind", [Echo, Anything, Pair, Counting, CountingOnLoop, Awaited])
def test_without_a_configuration_a_model_stays_as_it_is(kind: Callable[[], Model]) -> None:
    model, before = kind(), signatures_of(kind())
    configure(model, NO_CONFIG)
    assert signatures_of(model) == before
    assert (model.max_batch_size, model.instances) == (0, 1)


def test_the_class_stays_as_it_is() -> None:
    config = ModelConfig(
        max_batch_size=8,
        inputs=[TensorConfig("x", "FP32", [3])],
        outputs=[TensorConfig("z", "INT64", [2])],
        instance_groups=[InstanceGroup(count=2)],
    )
    model, other = Pair(), Pair()
    configure(model, config)
    assert (other.max_batch_size, other.instances) == (0, 1)
    assert other.outputs[1].shape is None
    configured, another = Anything(), Anything()
    configure(configured, config)
    assert (configured.any_tensors, another.any_tensors) == (False, True)


# --- max_batch_size ---


def test_a_batch_dim_that_all_shapes_have() -> None:
    model = model_of([TensorSpec("x", "FP32", [-1, 3])], [TensorSpec("y", "FP32", [-1])])
    configure(model, BATCHED)
    assert model.max_batch_size == 8
    assert signature_of(model).max_batch_size == 8


@pytest.mark.parametrize("own", [0, 4])
def test_zero_leaves_the_models_own(own: int) -> None:
    model = model_of([TensorSpec("x", "FP32", [-1])], max_batch_size=own)
    configure(model, ModelConfig())
    assert model.max_batch_size == own


def test_the_models_own_must_be_the_same() -> None:
    model = model_of([TensorSpec("x", "FP32", [-1])], max_batch_size=8)
    configure(model, BATCHED)
    assert wrong(model, ModelConfig(max_batch_size=4)) == (
        "max_batch_size: the configuration says 4, the model has 8"
    )


@pytest.mark.parametrize(
    ("shape", "shown"), [([1, 3], "[1,3]"), ([], "[]"), (None, "any")], ids=["fixed", "scalar", "any rank"]
)
@pytest.mark.parametrize("kind", ["input", "output"])
def test_a_shape_without_a_batch_dim(kind: str, shape: Sequence[int] | None, shown: str) -> None:
    specs = [TensorSpec("a", "FP32", [-1]), TensorSpec("b", "FP32", shape)]
    model = model_of(specs, specs[:1]) if kind == "input" else model_of(specs[:1], specs)
    assert wrong(model, BATCHED) == (
        "max_batch_size: the configuration says 8, so every shape must begin with -1 (the batch), "
        f"the model's {kind} 'b' has {shown}"
    )


def test_the_batch_dim_of_other_signatures() -> None:
    other = Signature([TensorSpec("x", "FP32", [-1])], [TensorSpec("scores", "FP32", [1])])
    model = model_of([TensorSpec("x", "FP32", [-1])], signatures={"other": other})
    assert wrong(model, BATCHED).endswith("the model's output 'scores' in signature 'other' has [1]")


def test_a_model_that_declares_nothing_may_have_a_batch() -> None:
    for model in (Echo(), Anything()):
        configure(model, BATCHED)
        assert model.max_batch_size == 8
        signatures_of(model)


# --- inputs and outputs ---


def test_configured_dims_narrow_the_models() -> None:
    model = Pair()
    config = ModelConfig(
        inputs=[TensorConfig("names", "BYTES", [-1, 2])],
        outputs=[TensorConfig("z", "INT64", [4, -1]), TensorConfig("y", "FP32", [7, 5])],
    )
    configure(model, config)
    assert signature_of(model) == Signature(
        (TensorSpec("x", "FP32", [-1, 3]), TensorSpec("names", "BYTES", [-1, 2])),
        (TensorSpec("y", "FP32", [7, 5]), TensorSpec("z", "INT64", [4, -1])),
    )


def test_with_a_max_batch_size_dims_leave_the_batch_out() -> None:
    model = Pair()
    config = ModelConfig(
        max_batch_size=8,
        inputs=[TensorConfig("x", "FP32", [3])],
        outputs=[TensorConfig("z", "INT64", [2, 2])],
    )
    configure(model, config)
    assert signature_of(model) == Signature(
        (TensorSpec("x", "FP32", [-1, 3]), TensorSpec("names", "BYTES", [-1, -1])),
        (TensorSpec("y", "FP32", [-1, -1]), TensorSpec("z", "INT64", [-1, 2, 2])),
        max_batch_size=8,
    )


@pytest.mark.parametrize("largest", [0, 8])
def test_what_is_left_out_of_a_tensor_is_the_models(largest: int) -> None:
    model = Pair()
    before = signature_of(model)
    names = [TensorConfig("names", "BYTES", None), TensorConfig("x", "", [3] if largest else [-1, 3])]
    outputs = [TensorConfig("y", "", None), TensorConfig("z", "", [2])]
    configure(model, ModelConfig(max_batch_size=largest, inputs=names, outputs=outputs))
    after = signature_of(model)
    assert (after.inputs, after.outputs[0]) == (before.inputs, before.outputs[0])


def test_any_shape_cannot_be_batched() -> None:
    model = model_of([TensorSpec("x", "FP32", None)])
    assert wrong(model, ModelConfig(max_batch_size=8, inputs=[TensorConfig("x", "FP32", None)])) == (
        "max_batch_size: the configuration says 8, so every shape must begin with -1 (the batch), the model's "
        "input 'x' has any"
    )


@pytest.mark.parametrize(
    ("tensor", "key"), [(TensorConfig("x", "", [2]), "data_type"), (TensorConfig("x", "INT8", None), "dims")]
)
def test_a_model_that_declares_nothing_needs_all_of_a_tensor(tensor: TensorConfig, key: str) -> None:
    assert wrong(Echo(), ModelConfig(inputs=[TensorConfig("w", "INT8", [1]), tensor])) == (
        f"input[1].{key}: expected a value, as the model declares none, got none"
    )


@pytest.mark.parametrize("name", [DEFAULT_SIGNATURE, "predict"])
def test_the_default_signature_is_narrowed_and_the_others_stay(name: str) -> None:
    specs = [TensorSpec("x", "FP32", [-1])]
    default = Signature(specs, specs, method="regress", defaults={"x": np.zeros(3, "f4")})
    other = Signature(specs, [])
    model = model_of((), signatures={name: default, "other": other})
    configure(model, ModelConfig(outputs=[TensorConfig("x", "FP32", [4])]))
    narrowed = model.signatures[name]
    assert (narrowed.inputs, narrowed.outputs) == (tuple(specs), (TensorSpec("x", "FP32", [4]),))
    assert (narrowed.method, list(narrowed.defaults)) == ("regress", ["x"])
    assert model.signatures["other"] == other
    assert (model.inputs, model.outputs) == ((), ())


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (ModelConfig(inputs=[TensorConfig("x", "INT8", [2])]), (2,)),
        (ModelConfig(inputs=[TensorConfig("x", "INT8", [2])], max_batch_size=8), (-1, 2)),
    ],
)
def test_a_model_that_declares_nothing_takes_what_is_configured(config: ModelConfig, shape: Sequence[int]) -> None:
    model = Echo()
    configure(model, config)
    assert signature_of(model) == Signature(
        (TensorSpec("x", "INT8", shape),), (), max_batch_size=config.max_batch_size
    )


def test_a_model_that_takes_anything_takes_what_is_configured() -> None:
    model = Anything()
    config = ModelConfig(
        max_batch_size=2, inputs=[TensorConfig("x", "INT8", [2])], outputs=[TensorConfig("y", "BYTES", [-1])]
    )
    configure(model, config)
    assert signature_of(model) == Signature(
        (TensorSpec("x", "INT8", [-1, 2]),), (TensorSpec("y", "BYTES", [-1, -1]),), max_batch_size=2
    )


@pytest.mark.parametrize(("given", "missing"), [("input", "output"), ("output", "input")])
def test_a_model_that_takes_anything_needs_both(given: str, missing: str) -> None:
    tensors: Any = {f"{given}s": [TensorConfig("x", "INT8", [2])]}
    assert wrong(Anything(), ModelConfig(**tensors)) == (
        f"{missing}: expected the {missing}s, as the {given}s are configured, got none"
    )


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (TensorConfig("w", "FP32", [3]), "name: the configuration says 'w', the model has 'x', 'names'"),
        (
            TensorConfig("x", "INT32", [3]),
            "data_type: the configuration says TYPE_INT32 (INT32), the model has FP32",
        ),
        (
            TensorConfig("x", "BYTES", [3]),
            "data_type: the configuration says TYPE_STRING (BYTES), the model has FP32",
        ),
        (TensorConfig("x", "FP32", [-1, 4]), "dims: the configuration says [-1,4], the model has [-1,3]"),
        (TensorConfig("x", "FP32", [-1, -1]), "dims: the configuration says [-1,-1], the model has [-1,3]"),
        (TensorConfig("x", "FP32", [1, 1, 3]), "dims: the configuration says [1,1,3], the model has [-1,3]"),
        (
            TensorConfig("x", "FP32", [3]),
            "dims: the configuration says [3], the model has [-1,3] (dims omit the batch only with a "
            "max_batch_size)",
        ),
    ],
)
def test_an_input_that_the_model_contradicts(tensor: TensorConfig, message: str) -> None:
    config = ModelConfig(inputs=[TensorConfig("names", "BYTES", [-1, -1]), tensor])
    assert wrong(Pair(), config) == f"input[1].{message}"


def test_an_output_that_the_model_contradicts() -> None:
    config = ModelConfig(max_batch_size=8, outputs=[TensorConfig("y", "FP32", [-1, 3])])
    model = model_of([], [TensorSpec("y", "FP32", [-1, 3])])
    assert wrong(model, config) == (
        "output[0].dims: the configuration says [-1,3], [-1,-1,3] with the batch, the model has [-1,3]"
    )


def test_an_output_of_a_model_that_has_none() -> None:
    config = ModelConfig(outputs=[TensorConfig("y", "FP32", [1])])
    assert wrong(model_of([TensorSpec("x", "FP32", [1])]), config) == (
        "output[0].name: the configuration says 'y', the model has none"
    )


def test_dims_that_fix_the_batch_of_the_models_own_max_batch_size() -> None:
    model = model_of([TensorSpec("x", "FP32", [-1, 3])], max_batch_size=4)
    assert wrong(model, ModelConfig(inputs=[TensorConfig("x", "FP32", [2, 3])])) == (
        "input[0].dims: the model's max_batch_size is 4, so the shape must begin with -1 (the batch), "
        "the configuration says [2,3]"
    )
