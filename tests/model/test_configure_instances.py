"""A model and its configuration: how many instances, and whether it is decoupled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.model.models_to_configure import (
    Awaited,
    Counting,
    CountingOnLoop,
    Echo,
    Scikit,
    model_of,
    wrong,
)
from triglot.model.config import InstanceGroup, ModelConfig
from triglot.model.configure import configure
from triglot.model.model import Model


@pytest.mark.parametrize(
    ("groups", "instances"),
    [
        ([InstanceGroup("CPU", 3)], 3),
        ([InstanceGroup("AUTO", 2), InstanceGroup("MODEL", 1)], 3),
        ([InstanceGroup("GPU", 2, (0, 1, 3)), InstanceGroup("GPU", 1)], 7),
        ([], 5),
    ],
)
def test_instances_are_the_sum_of_the_groups(groups: Sequence[InstanceGroup], instances: int) -> None:
    model = model_of([], instances=5)
    configure(model, ModelConfig(instance_groups=groups))
    assert model.instances == instances


def test_a_gpu_for_a_model_that_runs_on_cpus() -> None:
    config = ModelConfig(instance_groups=[InstanceGroup("AUTO"), InstanceGroup("GPU")])
    assert wrong(Scikit(), config) == "instance_group[1].kind: KIND_GPU, but sklearn models run on CPUs only"


def test_a_model_that_has_placed_its_instances_says_how_many() -> None:
    model = Scikit()
    model.places_instances, model.instances = True, 2
    configure(model, ModelConfig(instance_groups=[InstanceGroup("GPU", 9)]))
    assert model.instances == 2


@pytest.mark.parametrize(
    ("kind", "decoupled"),
    [(Echo, False), (Awaited, False), (Counting, True), (CountingOnLoop, True)],
)
def test_decoupled_must_be_what_the_model_is(kind: Callable[[], Model], decoupled: bool) -> None:
    configure(kind(), ModelConfig(decoupled=decoupled))
    configured, has = ("false", "yields responses") if decoupled else ("true", "returns one response")
    assert wrong(kind(), ModelConfig(decoupled=not decoupled)) == (
        f"model_transaction_policy.decoupled: the configuration says {configured}, the model's infer {has}"
    )


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_model_of_messages_answers_either_way(decoupled: bool) -> None:
    model = model_of([], takes_messages=True)
    configure(model, ModelConfig(decoupled=decoupled))
    assert model.takes_messages
