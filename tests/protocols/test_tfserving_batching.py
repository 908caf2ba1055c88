"""TensorFlow Serving's batching parameters: what they say, what is said of wrong ones, which models they reach."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import triglot
from triglot.core.errors import InvalidArgument
from triglot.model.scheduling import MAX_SECONDS, DynamicBatching, SequenceBatching
from triglot.model.scheduling_rules import check_scheduling
from triglot.model.signature import Signature
from triglot.pb.tfserving.option_files_pb2 import BatchingParameters
from triglot.protocols.tfserving.batching import Parameters, batch, parameters_of
from triglot.repository.config.model_config import parse_text

FILE = """
max_batch_size { value: 128 }   # rows
batch_timeout_micros { value: 2500 }
max_enqueued_batches { value: 7 }
num_batch_threads { value: 3 }
thread_pool_name { value: "mine" }
allowed_batch_sizes: 16
allowed_batch_sizes: [ 64, 128 ]
pad_variable_length_inputs: true
"""


def read(text: str) -> Parameters:
    return parameters_of(parse_text(text.encode(), "batching.config", BatchingParameters), "batching.config")


def test_the_defaults_are_tensorflow_servings() -> None:
    assert read("") == Parameters(DynamicBatching(max_batch_size=1000, max_waiting_batches=10))


def test_everything_that_a_file_says() -> None:
    batching = DynamicBatching(
        max_batch_size=128,
        max_queue_delay=0.0025,
        max_waiting_batches=7,
        allowed_sizes=(16, 64, 128),
        pad_variable_lengths=True,
    )
    assert read(FILE) == Parameters(batching, threads=3)


@pytest.mark.parametrize(
    ("text", "largest", "execution", "allowed"),
    [
        ("", 1000, 1000, ()),
        ("max_batch_size { value: 8 }", 8, 8, ()),
        ("max_batch_size { value: 8 } max_execution_batch_size { value: 4 }", 8, 4, ()),
        (
            "max_batch_size { value: 8 } max_execution_batch_size { value: 4 } allowed_batch_sizes: [ 2, 4 ]",
            8,
            4,
            (2, 4),
        ),
    ],
)
def test_large_requests_are_split(text: str, largest: int, execution: int, allowed: tuple[int, ...]) -> None:
    batching = read(f"{text} enable_large_batch_splitting {{ value: true }}").batching
    assert (batching.max_batch_size, batching.max_execution_size) == (largest, execution)
    assert batching.allowed_sizes == allowed
    if not allowed:
        assert read(f"{text} enable_large_batch_splitting {{}}").batching.max_execution_size == 0


LAST = "allowed_batch_sizes: Last entry in allowed_batch_sizes must"
SPLIT = "enable_large_batch_splitting { value: true }"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batch_size { value: 0 }", "max_batch_size: expected 1 to 2147483647, got 0"),
        ("max_batch_size {}", "max_batch_size: expected 1 to 2147483647, got 0"),
        ("max_batch_size { value: 4294967296 }", "max_batch_size: expected 1 to 2147483647, got 4294967296"),
        ("batch_timeout_micros { value: -1 }", f"batch_timeout_micros: expected 0 to {2**63 - 1}, got -1"),
        ("max_enqueued_batches { value: 0 }", "max_enqueued_batches: expected 1 to 2147483647, got 0"),
        ("num_batch_threads { value: 0 }", "num_batch_threads: expected 1 to 1000, got 0"),
        ("num_batch_threads { value: 1001 }", "num_batch_threads: expected 1 to 1000, got 1001"),
        ("max_execution_batch_size { value: -2 }", "max_execution_batch_size: expected 1 to 2147483647, got -2"),
        (
            f"max_batch_size {{ value: 4 }} max_execution_batch_size {{ value: 5 }} {SPLIT}",
            "max_execution_batch_size: expected at most the max_batch_size 4 with enable_large_batch_splitting, "
            "got 5",
        ),
        ("allowed_batch_sizes: [ 2, 4 ]", f"{LAST} match max_batch_size; last entry was 4; expected 1000"),
        (
            f"max_execution_batch_size {{ value: 8 }} allowed_batch_sizes: 1000 {SPLIT}",
            f"{LAST} be equal to max_execution_batch_size; last entry was 1000; expected 8",
        ),
        (
            "allowed_batch_sizes: [ 4, 4, 1000 ]",
            "allowed_batch_sizes: expected numbers from 1, each larger than the last, got [4, 4, 1000]",
        ),
        (
            "allowed_batch_sizes: [ 0, 1000 ]",
            "allowed_batch_sizes: expected numbers from 1, each larger than the last, got [0, 1000]",
        ),
    ],
)
def test_wrong_parameters(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read(text)
    assert caught.value.message == f"batching.config: {message}"


def test_a_time_longer_than_a_wait_can_be() -> None:
    batching = read("batch_timeout_micros { value: 9223372036854775807 }").batching
    assert batching.max_queue_delay == MAX_SECONDS


# --- models ---

ROWS = triglot.TensorSpec("x", "FP32", [-1, 3])
ANY = triglot.TensorSpec("a", "FP32", None)
FIXED = triglot.TensorSpec("f", "FP32", [1, 3])
SCALAR = triglot.TensorSpec("s", "FP32", [])


class OfFile(triglot.Model):
    """As a backend makes one of a file."""

    platform = "onnxruntime_onnx"
    inputs, outputs = [ROWS], [ROWS]

    def infer(self, inputs: Any) -> Any:
        return inputs


class Own(OfFile):
    platform = "python"


class Streaming(OfFile):
    def infer(self, inputs: Any) -> Iterator[Any]:
        yield inputs


class StreamingOnLoop(OfFile):
    async def infer(self, inputs: Any) -> AsyncIterator[Any]:
        yield inputs


class OnLoop(OfFile):
    async def infer(self, inputs: Any) -> Any:
        return inputs


def model_of(kind: type[triglot.Model] = OfFile, **attributes: Any) -> triglot.Model:
    model = kind()
    vars(model).update(attributes)
    return model


PARAMETERS = Parameters(DynamicBatching(max_batch_size=8, max_waiting_batches=10), threads=3)


@pytest.mark.parametrize("kind", [OfFile, Own, OnLoop])
@pytest.mark.parametrize("tensors", [[ROWS], [ANY], [ROWS, ANY]], ids=["rows", "any", "both"])
def test_a_model_with_rows_is_batched(kind: type[triglot.Model], tensors: list[Any]) -> None:
    model = model_of(kind, inputs=tensors, outputs=tensors)
    assert batch(model, PARAMETERS) == []
    assert model.dynamic_batching == PARAMETERS.batching
    assert model.max_batch_size == 0
    check_scheduling(model)


def test_threads_are_for_what_can_bear_them() -> None:
    """A Python class says itself how many threads it bears, and what lies on devices is there once for each."""
    for attributes, kind, instances in (({}, OfFile, 3), ({}, Own, 1), ({"places_instances": True}, OfFile, 1)):
        model = model_of(kind, **attributes)
        batch(model, PARAMETERS)
        assert model.instances == instances
    model = model_of(instances=5)
    batch(model, Parameters(PARAMETERS.batching))
    assert model.instances == 5


@pytest.mark.parametrize(
    ("attributes", "note"),
    [
        ({"inputs": [FIXED]}, "signature 'serving_default': input 'f' is [1,3], expected -1 as its first dim"),
        ({"inputs": [ROWS, SCALAR]}, "signature 'serving_default': input 's' is [], expected -1 as its first dim"),
        ({"outputs": [SCALAR]}, "signature 'serving_default': output 's' is [], expected -1 as its first dim"),
        ({"inputs": []}, "signature 'serving_default': the signature has no inputs"),
        ({"any_tensors": True}, "the model does not declare its tensors"),
        ({"speaks_json": True}, "the model does not declare its tensors"),
        ({"takes_messages": True}, "the model does not declare its tensors"),
    ],
)
def test_a_model_without_rows_is_not(attributes: dict[str, Any], note: str) -> None:
    model = model_of(**attributes)
    assert batch(model, PARAMETERS) == [note]
    assert (model.dynamic_batching, model.instances) == (None, 1)


@pytest.mark.parametrize("kind", [Streaming, StreamingOnLoop])
def test_streams_are_not(kind: type[triglot.Model]) -> None:
    model = model_of(kind)
    assert batch(model, PARAMETERS) == ["the model returns streams"]
    assert model.dynamic_batching is None


def test_signatures_without_rows_run_alone() -> None:
    signatures = {"classes": Signature([ROWS], [ROWS]), "about": Signature([ROWS], [SCALAR])}
    model = model_of(signatures=signatures)
    assert batch(model, PARAMETERS) == [
        "signature 'about': output 's' is [], expected -1 as its first dim",
    ]
    assert model.dynamic_batching is not None
    assert list(model.dynamic_batching.signatures) == ["serving_default", "classes"]


@pytest.mark.parametrize(
    "attributes",
    [{"dynamic_batching": DynamicBatching(preferred_sizes=(2,))}, {"sequence_batching": SequenceBatching()}],
)
def test_a_model_that_says_it_itself(attributes: dict[str, Any]) -> None:
    model = model_of(Own, max_batch_size=4, **attributes)
    assert batch(model, PARAMETERS) == []
    assert {name: getattr(model, name) for name in attributes} == attributes


@given(
    own=st.integers(0, 40),
    largest=st.integers(1, 40),
    allowed=st.sets(st.integers(1, 40), max_size=4),
    execution=st.integers(0, 40),
)
def test_a_models_own_limit_holds_too(own: int, largest: int, allowed: set[int], execution: int) -> None:
    last = min(execution, largest) or largest
    sizes = sorted({size for size in allowed if size < last} | {last}) if allowed else []
    parameters = Parameters(
        DynamicBatching(
            max_batch_size=largest,
            max_execution_size=min(execution, largest),
            allowed_sizes=sizes,
        )
    )
    model = model_of(max_batch_size=own)
    assert batch(model, parameters) == []
    check_scheduling(model)
    assert model.dynamic_batching is not None
    assert model.dynamic_batching.max_batch_size == min(own or largest, largest)
    assert set(model.dynamic_batching.allowed_sizes) <= {*sizes, own}
