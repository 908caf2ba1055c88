"""What ModelConfig says of scheduling: only how requests are really scheduled (spec 1.4, 4.6)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.protocols.configured_models import (
    EXPLICIT,
    SCHEDULING,
    SEQUENCES,
    Words,
    asked,
    configured,
)
from tests.protocols.control_clients import FINE, config_text, control_of, put, put_config
from tests.protocols.kserve_served import serve_models
from triglot.model.scheduling import DynamicBatching, QueuePolicy


def scheduling(config: dict[str, Any]) -> list[str]:
    return [key for key in SCHEDULING if key in config]


async def test_requests_that_are_not_batched(tmp_path: Path) -> None:
    assert scheduling(await configured(tmp_path, max_batch_size=8)) == []


@pytest.mark.parametrize(("fields", "is_configured"), [("", False), ("preserve_ordering: true", True)])
async def test_batching_without_a_largest_batch(fields: str, is_configured: bool, tmp_path: Path) -> None:
    """Nothing is joined, but what it says of the queue holds."""
    config = await configured(tmp_path, f"dynamic_batching {{ {fields} }}")
    assert scheduling(config) == ["dynamic_batching"] * is_configured
    assert config["max_batch_size"] == 0


async def test_a_stream_is_never_batched(tmp_path: Path) -> None:
    config = await configured(tmp_path, "max_batch_size: 4 dynamic_batching {}", Words)
    assert scheduling(config) == []
    assert config["model_transaction_policy"] == {"decoupled": True}


async def test_a_class_that_says_how_it_is_batched(tmp_path: Path) -> None:
    batching = DynamicBatching(
        preferred_sizes=(2, 4),
        max_queue_delay=0.25e-3,
        priority_levels=3,
        default_priority_level=2,
        policy=QueuePolicy(timeout=1.5, allow_timeout_override=True),
        policies={3: QueuePolicy(timeout=1.0, delay_expired=True, max_queue_size=9)},
    )
    config = await configured(tmp_path, max_batch_size=8, dynamic_batching=batching)
    assert scheduling(config) == ["dynamic_batching"]
    assert config["dynamic_batching"] == {
        "preferred_batch_size": [2, 4],
        "max_queue_delay_microseconds": 250,
        "preserve_ordering": False,
        "priority_levels": 3,
        "default_priority_level": 2,
        "default_queue_policy": {
            "timeout_action": "REJECT",
            "default_timeout_microseconds": 1_500_000,
            "allow_timeout_override": True,
            "max_queue_size": 0,
        },
        "priority_queue_policy": {
            "3": {
                "timeout_action": "DELAY",
                "default_timeout_microseconds": 1_000_000,
                "allow_timeout_override": False,
                "max_queue_size": 9,
            }
        },
    }


async def test_batches_of_a_model_that_has_no_largest_one_itself(tmp_path: Path) -> None:
    """As TensorFlow Serving batches: every shape begins with the batch, and the batcher says how large it gets."""
    config = await configured(tmp_path, dynamic_batching=DynamicBatching(max_batch_size=16))
    assert (config["max_batch_size"], config["input"][0]["dims"]) == (16, [3])
    assert config["dynamic_batching"]["preferred_batch_size"] == [16]


async def test_a_class_that_says_what_its_sequences_are(tmp_path: Path) -> None:
    config = await configured(tmp_path, max_batch_size=8, sequence_batching=SEQUENCES)
    assert scheduling(config) == ["sequence_batching"]
    sequences = config["sequence_batching"]
    assert sequences["max_sequence_idle_microseconds"] == 2_500_000
    assert [control["name"] for control in sequences["control_input"]] == ["start", "ready", "end", "id"]
    pairs = {"int32_false_true": [], "fp32_false_true": [], "bool_false_true": [], "data_type": "TYPE_INVALID"}
    assert [control["control"] for control in sequences["control_input"]] == [
        [{**pairs, "kind": "CONTROL_SEQUENCE_START", "fp32_false_true": [0.0, 1.0]}],
        [{**pairs, "kind": "CONTROL_SEQUENCE_READY", "bool_false_true": [False, True]}],
        [{**pairs, "kind": "CONTROL_SEQUENCE_END", "int32_false_true": [-1, 1]}],
        [{**pairs, "kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_STRING"}],
    ]
    assert sequences["state"] == [
        {
            "input_name": "in",
            "output_name": "out",
            "data_type": "TYPE_INT32",
            "dims": [-1, 2],
            "initial_state": [{"name": "first", "data_type": "TYPE_INT32", "dims": [1, 2], "zero_data": True}],
            "use_same_buffer_for_input_output": False,
            "use_growable_memory": False,
        }
    ]
    assert sequences["oldest"] == {
        "max_candidate_sequences": 4,
        "preferred_batch_size": [2],
        "max_queue_delay_microseconds": 1000,
        "preserve_ordering": True,
    }
    assert "direct" not in sequences


async def test_sequences_that_are_configured_get_their_defaults(tmp_path: Path) -> None:
    config = await configured(tmp_path, "max_batch_size: 4 sequence_batching {}")
    assert config["sequence_batching"] == {
        "max_sequence_idle_microseconds": 1_000_000,
        "control_input": [],
        "direct": {"max_queue_delay_microseconds": 0, "minimum_slot_utilization": 0.0},
        "state": [],
        "iterative_sequence": False,
    }


STEP = {
    "model_name": "a",
    "model_version": -1,
    "input_map": {"x": "x"},
    "output_map": {"y": "y"},
    "model_namespace": "",
}
TENSORS = 'input { name: "x" data_type: TYPE_INT32 dims: -1 } output { name: "y" data_type: TYPE_INT32 dims: -1 }'
ENSEMBLE_CONFIG = f"""
platform: "ensemble" {TENSORS}
ensemble_scheduling {{
  max_inflight_requests: 3
  step {{
    model_name: "a" model_version: -1
    input_map {{ key: "x" value: "x" }} output_map {{ key: "y" value: "y" }}
  }}
}}
"""
ENSEMBLE_CODE = """
import triglot

class Pipeline(triglot.Ensemble):
    inputs = [triglot.TensorSpec("x", "INT32", [-1])]
    outputs = [triglot.TensorSpec("y", "INT32", [-1])]
    steps = [triglot.Step("a", {{"x": "x"}}, {{"y": "y"}})]
    max_inflight_requests = 3
"""


@pytest.mark.parametrize("form", ["configuration", "code", "code, configured"])
async def test_an_ensemble(form: str, tmp_path: Path) -> None:
    put(tmp_path / "a" / "1", says=1)
    if form == "configuration":
        (tmp_path / "e" / "1").mkdir(parents=True)
        put_config(tmp_path / "e", ENSEMBLE_CONFIG)
    else:
        put(tmp_path / "e" / "1", text=ENSEMBLE_CODE)
    if form == "code, configured":
        put_config(tmp_path / "e", 'backend: "python" instance_group { count: 2 }')
    async with serve_models([tmp_path], **EXPLICIT) as served:
        config = await asked(served, "e")
        assert (config["platform"], config["backend"], config["instance_group"]) == ("ensemble", "", [])
        assert config["ensemble_scheduling"] == {"step": [STEP], "max_inflight_requests": 3}
        assert scheduling(config) == ["ensemble_scheduling"]
        assert [(tensor["name"], tensor["dims"]) for tensor in (*config["input"], *config["output"])] == [
            ("x", [-1]),
            ("y", [-1]),
        ]
        assert await control_of(served, "rest").load("e", config=config_text(**config)) == FINE
        assert await asked(served, "e") == config
