"""What a model's class may say of its scheduling: values that are checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from triglot.model.scheduling import (
    AUTO_REMOVED,
    ControlInput,
    DirectStrategy,
    DynamicBatching,
    InitialState,
    OldestStrategy,
    QueuePolicy,
    SequenceBatching,
    SequenceState,
)

SECONDS = "0 to 3.1536e+07 seconds"


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        (QueuePolicy, {"timeout": -1}, f"timeout: expected {SECONDS}, got -1"),
        (QueuePolicy, {"timeout": "1"}, "timeout: expected seconds, got '1'"),
        (QueuePolicy, {"delay_expired": 1}, "delay_expired: expected True or False, got 1"),
        (
            QueuePolicy,
            {"allow_timeout_override": None},
            "allow_timeout_override: expected True or False, got None",
        ),
        (QueuePolicy, {"max_queue_size": 1.5}, "max_queue_size: expected an integer, got 1.5"),
        (QueuePolicy, {"max_queue_size": True}, "max_queue_size: expected an integer, got True"),
        (DynamicBatching, {"preferred_sizes": 4}, "preferred_sizes: expected a list of integers, got 4"),
        (DynamicBatching, {"preferred_sizes": "48"}, "preferred_sizes: expected a list of integers, got '48'"),
        (DynamicBatching, {"preferred_sizes": [4, 0]}, "preferred_sizes[1]: expected at least 1, got 0"),
        (DynamicBatching, {"allowed_sizes": [1.0]}, "allowed_sizes[0]: expected an integer, got 1.0"),
        (DynamicBatching, {"max_queue_delay": None}, "max_queue_delay: expected seconds, got None"),
        (
            DynamicBatching,
            {"max_queue_delay": "often"},
            "max_queue_delay: expected seconds, got 'often'",
        ),
        (DynamicBatching, {"max_queue_delay": -0.5}, f"max_queue_delay: expected {SECONDS}, got -0.5"),
        (DynamicBatching, {"max_queue_delay": float("nan")}, f"max_queue_delay: expected {SECONDS}, got nan"),
        (DynamicBatching, {"max_queue_delay": float("inf")}, f"max_queue_delay: expected {SECONDS}, got inf"),
        (DynamicBatching, {"max_queue_delay": "auto"}, f"max_queue_delay: {AUTO_REMOVED}"),
        (
            DynamicBatching,
            {"max_queue_delay": "auto", "latency_objective": 0.1},
            f"latency_objective: {AUTO_REMOVED} as max_queue_delay",
        ),
        (DynamicBatching, {"priority_levels": -1}, "priority_levels: expected at least 0, got -1"),
        (
            DynamicBatching,
            {"priority_levels": 2, "default_priority_level": 3},
            "default_priority_level: expected a level from 1 to priority_levels 2, got 3",
        ),
        (
            DynamicBatching,
            {"priority_levels": 2, "default_priority_level": 1, "policies": {0: QueuePolicy()}},
            "policies[0]: expected a level from 1 to priority_levels 2, got 0",
        ),
        (DynamicBatching, {"policies": {"1": QueuePolicy()}}, "policies['1']: expected an integer, got '1'"),
        (DynamicBatching, {"policies": {1: 5}}, "policies[1]: expected QueuePolicy, got 5"),
        (DynamicBatching, {"policies": [QueuePolicy()]}, f"policies: expected Mapping, got {[QueuePolicy()]}"),
        (DynamicBatching, {"policy": 5}, "policy: expected QueuePolicy, got 5"),
        (
            DynamicBatching,
            {"preserve_ordering": True, "priority_levels": 2, "default_priority_level": 1},
            "priority_levels: expected at most 1 with preserve_ordering, got 2",
        ),
        (
            DynamicBatching,
            {"preserve_ordering": True, "policy": QueuePolicy(timeout=1, delay_expired=True)},
            "policy.delay_expired: expected False with preserve_ordering, got True",
        ),
        (DynamicBatching, {"signatures": "a"}, "signatures: expected a list of names, got 'a'"),
        (ControlInput, {"name": "", "kind": "START", "datatype": "BOOL"}, "name: expected a name, got ''"),
        (
            ControlInput,
            {"name": "a", "kind": "BEGIN", "datatype": "BOOL"},
            "kind: expected one of START, READY, END, CORRID, got 'BEGIN'",
        ),
        (
            ControlInput,
            {"name": "a", "kind": "END", "datatype": "INT64"},
            "datatype: expected one of INT32, FP32, BOOL, got 'INT64'",
        ),
        (
            ControlInput,
            {"name": "a", "kind": "START", "datatype": "BOOL", "true": "yes"},
            "true: expected a number, got 'yes'",
        ),
        (
            SequenceState,
            {"input_name": "a", "output_name": "b", "datatype": "FLOAT", "dims": [1]},
            "datatype: expected one of BOOL",
        ),
        (
            SequenceState,
            {"input_name": "a", "output_name": "b", "datatype": "FP32", "dims": [-2]},
            "dims[0]: expected at least 1, got -2",
        ),
        (
            SequenceState,
            {"input_name": "a", "output_name": "b", "datatype": "FP32", "dims": [1], "initial": 0},
            "initial: expected InitialState, got 0",
        ),
        (InitialState, {"datatype": "FP32", "dims": [-1]}, "dims[0]: expected at least 1, got -1"),
        (InitialState, {"datatype": "FP32", "dims": [], "file": "a"}, "file: expected Path or NoneType, got 'a'"),
        (DirectStrategy, {"minimum_slot_utilization": 2}, "minimum_slot_utilization: expected 0 to 1, got 2"),
        (
            OldestStrategy,
            {"max_candidate_sequences": "4"},
            "max_candidate_sequences: expected an integer, got '4'",
        ),
        (SequenceBatching, {"max_idle": 0}, "max_idle: expected more than 0 seconds, got 0"),
        (SequenceBatching, {"controls": ["START"]}, "controls[0]: expected ControlInput, got 'START'"),
        (
            SequenceBatching,
            {"strategy": "oldest"},
            "strategy: expected DirectStrategy or OldestStrategy, got 'oldest'",
        ),
        (
            SequenceBatching,
            {"controls": [ControlInput("a", "START", "BOOL"), ControlInput("b", "START", "BOOL")]},
            "controls: expected different names, got 'START' twice",
        ),
    ],
)
def test_a_value_that_cannot_be(make: Callable[..., Any], values: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=": expected ") as caught:
        make(**values)
    blocks = ((DynamicBatching, "dynamic_batching."), (SequenceBatching, "sequence_batching."))
    block = next((key for kind, key in blocks if kind is make), "")
    assert str(caught.value).startswith(f"{block}{message}")


def test_values_on_the_bounds() -> None:
    assert DynamicBatching(preferred_sizes=[8, 4, 8]).preferred_sizes == (4, 8)
    assert DynamicBatching(max_queue_delay=1, policies={7: QueuePolicy()}).priority_levels == 0
    assert DirectStrategy(minimum_slot_utilization=1).minimum_slot_utilization == 1
    state = SequenceState("a", "b", "FP32", [2, -1], InitialState("FP32", (2, 5), Path("file")))
    assert (state.dims, state.initial and state.initial.dims) == ((2, -1), (2, 5))
