"""What a model's class says of itself, and what it cannot say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.scheduling.scripted_models import Inputs, Scripted
from triglot import Call, DynamicBatching
from triglot.executors.declarations import check_declarations

MOST = 2**31 - 1
TAKES = "infer_batch: expected infer_batch(self, inputs, calls), got "


class Lists(Scripted):
    """Takes a batch as a list."""

    max_batch_size = 8
    dynamic_batching = DynamicBatching()

    def infer_batch(self, inputs: Sequence[Inputs], calls: Sequence[Call]) -> list[Any]:
        return [{"y": tensor["x"]} for tensor in inputs]


def declaring(name: str, value: Any) -> Scripted:
    """A model whose class has this attribute."""
    model: Scripted = type("Declaring", (Lists,), {name: value})()
    return model


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_batch_size", MOST + 1, f"max_batch_size: expected at most {MOST}, got {MOST + 1}"),
        ("max_batch_size", 2**70, f"max_batch_size: expected at most {MOST}, got {2**70}"),
        ("max_batch_size", True, "max_batch_size: expected an integer, got True"),
        ("max_batch_size", None, "max_batch_size: expected an integer, got None"),
        ("max_batch_size", -1, "max_batch_size: expected at least 0, got -1"),
        ("max_queue_size", False, "max_queue_size: expected an integer, got False"),
        ("infer_batch", 5, f"{TAKES}5"),
        ("infer_batch", lambda self: [], f"{TAKES}infer_batch()"),
        ("infer_batch", lambda self, inputs: [], f"{TAKES}infer_batch(inputs)"),
        ("infer_batch", lambda self, inputs, calls, more: [], f"{TAKES}infer_batch(inputs, calls, more)"),
        ("cpus", [0], "cpus: expected none without execution 'process', got [0]"),
    ],
)
def test_what_a_class_cannot_say(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected ") as caught:
        check_declarations(declaring(name, value))
    assert str(caught.value) == message


@pytest.mark.parametrize("value", [True, 0, "2"])
def test_instances_are_a_number(value: Any) -> None:
    model = Lists()
    model.instances = value
    with pytest.raises(ValueError, match=r"^instances: expected (an integer|at least 1), got "):
        check_declarations(model)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_batch_size", MOST),
        ("max_queue_size", None),
        ("infer_batch", None),
        ("infer_batch", lambda self, inputs, calls: []),
        ("infer_batch", lambda self, inputs, calls, more=None: []),
        ("infer_batch", lambda self, *batch: []),
    ],
)
def test_what_a_class_can_say(name: str, value: Any) -> None:
    check_declarations(declaring(name, value))


def test_a_configuration_that_takes_the_processes_away_keeps_the_cpus_of_the_class() -> None:
    """They are for another day."""
    model = type("OnCpus", (Lists,), {"execution": "process", "cpus": [0], "infer_batch": None})()
    model.execution = "thread"
    check_declarations(model)
