"""Triton's model configurations: sequence batching as a value."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.repository.reading_configs import read, wrong
from triglot.model.scheduling import (
    CONTROL_DATATYPES,
    ControlInput,
    DirectStrategy,
    InitialState,
    OldestStrategy,
    SequenceBatching,
    SequenceState,
)
from triglot.repository.scan.source import named_files

SEQUENCES = """
max_batch_size: 4
output { name: 'LAST' data_type: TYPE_STRING dims: 1 }
sequence_batching {
  max_sequence_idle_microseconds: 250000
  control_input { name: 'S' control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 7 ] } }
  control_input { name: 'R' control { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ -1, 0.5 ] } }
  control_input { name: 'E' control { kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] } }
  control_input { name: 'I' control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }
  state { input_name: 'SUM_IN' output_name: 'SUM' data_type: TYPE_FP32 dims: [ 2, -1 ]
    initial_state { name: 'first' data_type: TYPE_FP32 dims: [ 2, 3 ] data_file: 'sums' } }
  state { input_name: 'LAST_IN' output_name: 'LAST' data_type: TYPE_STRING dims: 1
    initial_state { data_type: TYPE_STRING dims: 1 zero_data: true } }
  oldest {
    max_candidate_sequences: 9 preferred_batch_size: [ 4, 2 ] max_queue_delay_microseconds: 10
    preserve_ordering: true
  }
}
"""


def state_file(folder: Path, size: int = 24) -> Path:
    file = folder / "m" / "initial_state" / "sums"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bytes(size))
    return file


def test_everything_that_sequence_batching_says(tmp_path: Path) -> None:
    file = state_file(tmp_path)
    config = read(tmp_path, SEQUENCES)
    assert config.sequence_batching == SequenceBatching(
        max_idle=0.25,
        controls=(
            ControlInput("S", "START", "INT32", 0, 7),
            ControlInput("R", "READY", "FP32", -1, 0.5),
            ControlInput("E", "END", "BOOL", 0, 1),
            ControlInput("I", "CORRID", "BYTES"),
        ),
        states=(
            SequenceState("SUM_IN", "SUM", "FP32", (2, -1), InitialState("FP32", (2, 3), file, "first")),
            SequenceState("LAST_IN", "LAST", "BYTES", (1,), InitialState("BYTES", (1,)), returned=True),
        ),
        strategy=OldestStrategy(9, (2, 4), 10e-6, preserve_ordering=True),
    )
    assert named_files(config) == [file]


@pytest.mark.parametrize(
    ("text", "batching"),
    [
        ("", SequenceBatching(max_idle=1.0)),
        ("direct {}", SequenceBatching()),
        (
            "direct { max_queue_delay_microseconds: 5000 minimum_slot_utilization: 0.5 }",
            SequenceBatching(strategy=DirectStrategy(0.005, 0.5)),
        ),
        ("oldest {}", SequenceBatching(strategy=OldestStrategy())),
    ],
)
def test_strategies(tmp_path: Path, text: str, batching: SequenceBatching) -> None:
    assert read(tmp_path, f"sequence_batching {{ {text} }}").sequence_batching == batching


@pytest.mark.parametrize("datatype", CONTROL_DATATYPES["CORRID"])
def test_datatypes_of_ids(tmp_path: Path, datatype: str) -> None:
    config_type = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
    text = f"control_input {{ name: 'I' control {{ kind: CONTROL_SEQUENCE_CORRID data_type: {config_type} }} }}"
    batching = read(tmp_path, f"sequence_batching {{ {text} }}").sequence_batching
    assert batching is not None
    assert list(batching.controls) == [ControlInput("I", "CORRID", datatype)]


START = "control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }"


def _state(text: str = "", name: str = "a") -> str:
    return f"state {{ input_name: '{name}' output_name: '{name}2' data_type: TYPE_FP32 dims: [ 3, -1 ] {text} }}"


def _initial(text: str) -> str:
    return _state(f"initial_state {{ {text} }}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("control_input { name: 'a' }", ".control_input[0].control: expected one, got 0"),
        (
            f"control_input {{ name: 'a' {START} {START.replace('START', 'END')} }}",
            ".control_input[0].control: expected one, got 2",
        ),
        ("oldest { max_candidate_sequences: -1 }", ".oldest.max_candidate_sequences: expected at least 0, got -1"),
        (
            "state { output_name: 'b' data_type: TYPE_FP32 dims: 1 }",
            ".state[0].input_name: expected a name, got ''",
        ),
        (
            "state { input_name: 'a' data_type: TYPE_FP32 dims: 1 }",
            ".state[0].output_name: expected a name, got ''",
        ),
        (
            "state { input_name: 'a' output_name: 'b' data_type: TYPE_FP32 dims: 0 }",
            ".state[0].dims[0]: expected at least 1, got 0",
        ),
        (_state() + _state(), ".state: expected different names, got 'a' twice"),
        (
            f"control_input {{ name: 'a' {START} }} {_state()}",
            ".state: expected different names, got 'a' twice",
        ),
        (_state("initial_state {} initial_state {}"), ".state[0].initial_state: expected at most one, got 2"),
        (
            _initial("data_type: TYPE_FP32 dims: 1"),
            ".state[0].initial_state[0]: expected zero_data or data_file, got none",
        ),
        (
            _initial("data_type: TYPE_FP64 dims: [ 3, 1 ] zero_data: true"),
            ".state[0].initial_state[0].data_type: expected the state's FP32, got FP64",
        ),
        (
            _initial("data_type: TYPE_FP32 dims: [ 3 ] zero_data: true"),
            ".state[0].initial_state[0].dims: expected dims that match the state's [3, -1], got [3]",
        ),
        (
            _initial("data_type: TYPE_FP32 dims: [ 2, 3 ] zero_data: true"),
            ".state[0].initial_state[0].dims: expected dims that match the state's [3, -1], got [2, 3]",
        ),
        (
            _initial("data_type: TYPE_FP32 dims: [ 3, -1 ] zero_data: true"),
            ".state[0].initial_state[0].dims[1]: expected at least 1, got -1",
        ),
        (
            _initial("data_type: TYPE_FP32 dims: [ 3, 1 ] data_file: 'none'"),
            ".state[0].initial_state[0].data_file: expected a file in {}/m/initial_state, got 'none'",
        ),
        (
            _initial("data_type: TYPE_FP32 dims: [ 3, 1 ] data_file: '../sums'"),
            ".state[0].initial_state[0].data_file: expected a path inside {}/m/initial_state, got '../sums'",
        ),
        (
            _initial("data_type: TYPE_FP32 dims: [ 3, 1 ] data_file: 'sums'"),
            ".state[0].initial_state[0].data_file: expected 12 bytes for FP32 and its dims, got 24 in "
            "{}/m/initial_state/sums",
        ),
    ],
)
def test_wrong_sequences(tmp_path: Path, text: str, message: str) -> None:
    state_file(tmp_path)
    problem = wrong(tmp_path, f"sequence_batching {{ {text} }}")
    assert problem == f"sequence_batching{message.format(tmp_path)}"
