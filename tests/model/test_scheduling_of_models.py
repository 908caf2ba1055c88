"""What a model may say of its scheduling: what fits the rest of it, and what a configuration says in its place."""

from __future__ import annotations

from typing import Any

import pytest

from tests.model.scheduled_models import (
    ROWS,
    SEQUENCES,
    OfFile,
    OnLoop,
    Plain,
    Streaming,
    StreamingOnLoop,
    model_of,
)
from triglot.core.types import TensorSpec
from triglot.model.config import INLINE_REMOVED, ModelConfig
from triglot.model.configure import configure
from triglot.model.model import Model, signatures_of
from triglot.model.scheduling import (
    DynamicBatching,
    OldestStrategy,
    QueuePolicy,
    SequenceBatching,
    SequenceState,
)
from triglot.model.scheduling_rules import check_scheduling
from triglot.model.signature import DEFAULT_SIGNATURE, Signature

NO_SECONDS = "expected a number of seconds, 0 for no limit"


@pytest.mark.parametrize(
    ("kind", "attributes", "message"),
    [
        (Plain, {"dynamic_batching": True}, "dynamic_batching: expected DynamicBatching, got True"),
        (
            Plain,
            {"dynamic_batching": SEQUENCES},
            "dynamic_batching: expected DynamicBatching, got SequenceBatching(",
        ),
        (Plain, {"sequence_batching": {}}, "sequence_batching: expected SequenceBatching, got {}"),
        (
            Plain,
            {"dynamic_batching": DynamicBatching(), "sequence_batching": SequenceBatching()},
            "sequence_batching: expected none with dynamic_batching, got both",
        ),
        (
            Plain,
            {"dynamic_batching": DynamicBatching(preferred_sizes=[4])},
            "dynamic_batching.preferred_sizes: expected none without a max_batch_size, got [4]",
        ),
        (
            Plain,
            {"dynamic_batching": DynamicBatching(preferred_sizes=[4, 9]), "max_batch_size": 8},
            "dynamic_batching.preferred_sizes: expected at most the max_batch_size 8, got 9",
        ),
        (
            Plain,
            {"dynamic_batching": DynamicBatching(max_batch_size=9), "max_batch_size": 8},
            "dynamic_batching.max_batch_size: expected at most the model's 8, got 9",
        ),
        (
            Plain,
            {"dynamic_batching": DynamicBatching(allowed_sizes=[2, 4]), "max_batch_size": 8},
            "dynamic_batching.allowed_sizes: expected the max_batch_size 8 as the last size, got 4",
        ),
        (
            Plain,
            {"dynamic_batching": DynamicBatching(max_execution_size=9), "max_batch_size": 8},
            "dynamic_batching.max_execution_size: expected at most the max_batch_size 8, got 9",
        ),
        (
            Plain,
            {"dynamic_batching": DynamicBatching(max_execution_size=4, allowed_sizes=[8]), "max_batch_size": 8},
            "dynamic_batching.allowed_sizes: expected at most the max_execution_size 4, got 8",
        ),
        (
            Plain,
            {"sequence_batching": SequenceBatching(strategy=OldestStrategy(preferred_sizes=[2]))},
            "sequence_batching.strategy.preferred_sizes: expected none without a max_batch_size, got [2]",
        ),
        (
            OnLoop,
            {"sequence_batching": SequenceBatching()},
            "sequence_batching: expected a plain infer (def), got async def",
        ),
        (
            Plain,
            {"sequence_batching": SEQUENCES, "inputs": [ROWS, TensorSpec("start", "BOOL", [-1])]},
            "sequence_batching.controls: 'start': expected the model's BOOL, got INT32",
        ),
        (
            Plain,
            {"sequence_batching": SEQUENCES, "outputs": [TensorSpec("sum_out", "FP64", [-1])]},
            "sequence_batching.states: 'sum_out': expected the model's FP64, got FP32",
        ),
        (
            OfFile,
            {"sequence_batching": SEQUENCES},
            "sequence_batching.controls: expected an input of the model ('x'), got 'start'",
        ),
        (
            Plain,
            {"sequence_batching": SequenceBatching(), "response_cache": True},
            "response_cache: expected false with sequence_batching, got true",
        ),
        (Streaming, {"response_cache": True}, "response_cache: expected false for a decoupled model, got true"),
        (
            StreamingOnLoop,
            {"response_cache": True},
            "response_cache: expected false for a decoupled model, got true",
        ),
        (Plain, {"response_cache": 1}, "response_cache: expected True or False, got 1"),
        (Plain, {"idempotent": "yes"}, "idempotent: expected True or False, got 'yes'"),
        (Plain, {"inputs_in_place": 1}, "inputs_in_place: expected True or False, got 1"),
        (Plain, {"execution": "inline"}, f"execution: {INLINE_REMOVED}"),
        (Plain, {"execution": "fork"}, "execution: expected one of thread, process, ray, got 'fork'"),
        (Plain, {"cpus": "0,1"}, "cpus: expected a list of CPU numbers, got '0,1'"),
        (Plain, {"cpus": [0, -1]}, "cpus[1]: expected at least 0, got -1"),
        (Plain, {"hang_seconds": "x"}, f"hang_seconds: {NO_SECONDS}, got 'x'"),
        (Plain, {"hang_seconds": None}, f"hang_seconds: {NO_SECONDS}, got None"),
        (Plain, {"longest_run": "x"}, f"longest_run: {NO_SECONDS}, got 'x'"),
        (Plain, {"longest_run": -1}, f"longest_run: {NO_SECONDS}, got -1"),
        (Plain, {"longest_run": float("inf")}, f"longest_run: {NO_SECONDS}, got inf"),
        (Plain, {"hang_seconds": True}, f"hang_seconds: {NO_SECONDS}, got True"),
        (Plain, {"hang_seconds": -0.1}, f"hang_seconds: {NO_SECONDS}, got -0.1"),
        (Plain, {"hang_seconds": float("nan")}, f"hang_seconds: {NO_SECONDS}, got nan"),
        (Plain, {"hang_seconds": float("inf")}, f"hang_seconds: {NO_SECONDS}, got inf"),
    ],
)
def test_what_a_model_cannot_say(kind: type[Model], attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=": expected ") as caught:
        check_scheduling(model_of(kind, **attributes))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("kind", "attributes"),
    [
        (Plain, {}),
        (Plain, {"dynamic_batching": DynamicBatching(policy=QueuePolicy(timeout=1))}),
        (Plain, {"dynamic_batching": DynamicBatching([8, 2], 0.1, allowed_sizes=[3, 8]), "max_batch_size": 8}),
        (Plain, {"dynamic_batching": DynamicBatching(max_batch_size=4, max_execution_size=2, allowed_sizes=[2])}),
        (OnLoop, {"dynamic_batching": DynamicBatching(), "response_cache": True}),
        (Streaming, {"sequence_batching": SEQUENCES}),
        (Plain, {"sequence_batching": SEQUENCES, "any_tensors": True}),
        (OfFile, {"sequence_batching": SEQUENCES, "inputs": (), "outputs": ()}),
        (Plain, {"execution": "process", "cpus": (0, 3)}),
        (Plain, {"hang_seconds": 0}),
        (Plain, {"hang_seconds": 2.5}),
        (Plain, {"longest_run": 90}),
    ],
)
def test_what_a_model_can_say(kind: type[Model], attributes: dict[str, Any]) -> None:
    check_scheduling(model_of(kind, **attributes))


# --- what no client sends or gets ---


def test_controls_and_states_are_in_no_signature() -> None:
    declared = [ROWS, TensorSpec("start", "INT32", [-1, 1]), TensorSpec("sum", "FP32", [-1, 1])]
    given = [TensorSpec("y", "FP32", [-1]), TensorSpec("sum_out", "FP32", [-1, 1])]
    model = model_of(
        inputs=declared,
        outputs=given,
        signatures={"other": Signature(declared, given)},
        sequence_batching=SEQUENCES,
        max_batch_size=4,
    )
    for signature in signatures_of(model).values():
        assert [spec.name for spec in signature.inputs] == ["x"]
        assert [spec.name for spec in signature.outputs] == ["y"]
        assert signature.max_batch_size == 4
    model.sequence_batching = SequenceBatching(
        states=[SequenceState("sum", "sum_out", "FP32", [1], returned=True)]
    )
    signature = signatures_of(model)[DEFAULT_SIGNATURE]
    assert [spec.name for spec in signature.inputs] == ["x", "start"]
    assert [spec.name for spec in signature.outputs] == ["y", "sum_out"]
    model.sequence_batching = None
    assert len(signatures_of(model)[DEFAULT_SIGNATURE].inputs) == 3


# --- a configuration ---

BATCHED = ModelConfig(max_batch_size=8, dynamic_batching=DynamicBatching(preferred_sizes=[4]))


def test_a_configuration_takes_the_place_of_the_classs_own() -> None:
    own = DynamicBatching(max_queue_delay=0.5)
    model = model_of(dynamic_batching=own)
    configure(model, ModelConfig())
    assert model.dynamic_batching is own
    configure(model, BATCHED)
    assert model.dynamic_batching is BATCHED.dynamic_batching
    configure(model, ModelConfig(sequence_batching=SEQUENCES, execution="process", cpus=(1,)))
    assert model.sequence_batching is SEQUENCES
    assert vars(model)["dynamic_batching"] is None
    assert (model.execution, model.cpus, model.response_cache) == ("process", (1,), False)
    configure(model_of(), ModelConfig(response_cache=True))


def test_the_models_own_limit_holds_for_a_configuration() -> None:
    model = model_of(max_batch_size=4)
    configure(model, ModelConfig(dynamic_batching=BATCHED.dynamic_batching))
    assert (model.max_batch_size, model.dynamic_batching) == (4, BATCHED.dynamic_batching)


@pytest.mark.parametrize(
    ("kind", "attributes", "config", "message"),
    [
        (
            Plain,
            {"max_batch_size": 2},
            ModelConfig(dynamic_batching=BATCHED.dynamic_batching),
            "dynamic_batching.preferred_batch_size: expected at most the max_batch_size 2, got 4",
        ),
        (
            Plain,
            {},
            ModelConfig(dynamic_batching=BATCHED.dynamic_batching),
            "dynamic_batching.preferred_batch_size: expected none without a max_batch_size, got [4]",
        ),
        (
            Plain,
            {},
            ModelConfig(sequence_batching=SequenceBatching(strategy=OldestStrategy(preferred_sizes=[4]))),
            "sequence_batching.oldest.preferred_batch_size: expected none without a max_batch_size, got [4]",
        ),
        (
            Streaming,
            {},
            ModelConfig(response_cache=True),
            "response_cache.enable: expected false for a decoupled model, got true",
        ),
        (
            OnLoop,
            {},
            ModelConfig(sequence_batching=SequenceBatching()),
            "sequence_batching: expected a plain infer (def), got async def",
        ),
    ],
)
def test_a_configuration_that_does_not_fit(
    kind: type[Model], attributes: dict[str, Any], config: ModelConfig, message: str
) -> None:
    with pytest.raises(ValueError, match=": expected ") as caught:
        configure(model_of(kind, **attributes), config)
    assert str(caught.value) == message
