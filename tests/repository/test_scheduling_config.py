"""Triton's model configurations: batching, sequences, the response cache, and our own parameters, as values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triglot.core.configure import configure
from triglot.core.errors import Code, ModelLoadError
from triglot.core.model import Model
from triglot.core.model_config import ModelConfig
from triglot.core.scheduling import (
    AUTO,
    CONTROL_DATATYPES,
    LONGEST_SECONDS,
    ControlInput,
    DirectStrategy,
    DynamicBatching,
    InitialState,
    OldestStrategy,
    QueuePolicy,
    SequenceBatching,
    SequenceState,
)
from triglot.pb.kserve import model_config_pb2 as pb
from triglot.repository.model_config import CONFIG_FILE, config_of, read_config
from triglot.repository.source import named_files


def read(folder: Path, text: str) -> ModelConfig:
    """What a configuration of model `m` says; nothing is warned of."""
    (folder / "m").mkdir(exist_ok=True)
    (folder / "m" / CONFIG_FILE).write_text(text)
    warnings: list[str] = []
    config = read_config(folder / "m", warnings)
    assert warnings == []
    return config


def wrong(folder: Path, text: str) -> str:
    """What is said of a configuration, without the file in front."""
    with pytest.raises(ModelLoadError) as caught:
        read(folder, text)
    assert caught.value.code is Code.INVALID_ARGUMENT
    return str(caught.value).removeprefix(f"{folder / 'm' / CONFIG_FILE}: ")


# --- dynamic batching ---

DYNAMIC = """
max_batch_size: 16
dynamic_batching {
  preferred_batch_size: [ 8, 4 ]
  max_queue_delay_microseconds: 1500
  preserve_ordering: false
  priority_levels: 3
  default_priority_level: 2
  default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 2000000 allow_timeout_override: true }
  priority_queue_policy { key: 1 value { max_queue_size: 7 } }
}
"""


def test_everything_that_dynamic_batching_says(tmp_path: Path) -> None:
    batching = read(tmp_path, DYNAMIC).dynamic_batching
    assert batching == DynamicBatching(
        preferred_sizes=(4, 8),
        max_queue_delay=0.0015,
        priority_levels=3,
        default_priority_level=2,
        policy=QueuePolicy(timeout=2.0, delay_expired=True, allow_timeout_override=True),
        policies={1: QueuePolicy(max_queue_size=7)},
    )
    assert [batching.level(priority) for priority in (0, 1, 3, 4)] == [2, 1, 3, 2]
    assert [batching.policy_of(level).max_queue_size for level in (1, 2)] == [7, 0]


@pytest.mark.parametrize("text", ["", "max_batch_size: 4"])
def test_batching_is_asked_for(tmp_path: Path, text: str) -> None:
    config = read(tmp_path, text)
    assert (config.dynamic_batching, config.sequence_batching, config.response_cache) == (None, None, False)
    assert read(tmp_path, "max_batch_size: 4 dynamic_batching {}").dynamic_batching == DynamicBatching()


def test_times_longer_than_a_wait_can_be(tmp_path: Path) -> None:
    batching = read(
        tmp_path,
        "dynamic_batching { max_queue_delay_microseconds: 18446744073709551615 "
        "default_queue_policy { default_timeout_microseconds: 18446744073709551615 } }",
    ).dynamic_batching
    assert batching is not None
    assert (batching.max_queue_delay, batching.policy.timeout) == (LONGEST_SECONDS, LONGEST_SECONDS)


def test_too_many_priority_levels(tmp_path: Path) -> None:
    said = wrong(tmp_path, "dynamic_batching { priority_levels: 1001 default_priority_level: 1 }")
    assert said == "dynamic_batching.priority_levels: expected at most 1000, got 1001"


@given(
    sizes=st.lists(st.integers(1, 64), max_size=4),
    delay=st.integers(0, 2**40),
    levels=st.integers(0, 5),
    ordered=st.booleans(),
    policies=st.dictionaries(
        st.integers(1, 5), st.tuples(st.booleans(), st.integers(0, 2**40), st.integers(0, 2**32 - 1)), max_size=3
    ),
    default=st.integers(0, 6),
)
def test_any_dynamic_batching_is_taken_as_it_is_said_or_refused(
    sizes: list[int],
    delay: int,
    levels: int,
    ordered: bool,
    policies: dict[int, tuple[bool, int, int]],
    default: int,
) -> None:
    message: Any = pb.ModelConfig(max_batch_size=32)
    said = message.dynamic_batching
    said.preferred_batch_size.extend(sizes)
    said.max_queue_delay_microseconds, said.preserve_ordering = delay, ordered
    said.priority_levels, said.default_priority_level = levels, default
    for level, (delays, timeout, most) in policies.items():
        policy = said.priority_queue_policy[level]
        policy.timeout_action, policy.default_timeout_microseconds = int(delays), timeout
        policy.max_queue_size = most
    fine = (
        all(size <= 32 for size in sizes)
        and (not levels or (1 <= default <= levels and all(level <= levels for level in policies)))
        and not (ordered and (levels > 1 or any(delays and timeout for delays, timeout, _ in policies.values())))
    )
    if not fine:
        with pytest.raises(ModelLoadError, match=r"^config: dynamic_batching\."):
            config_of(message, Path(), "config", [])
        return
    batching = config_of(message, Path(), "config", []).dynamic_batching
    assert batching is not None
    assert batching.preferred_sizes == tuple(sorted(set(sizes)))
    assert batching.max_queue_delay == min(delay / 1e6, LONGEST_SECONDS)
    assert {level: policy.max_queue_size for level, policy in batching.policies.items()} == {
        level: most for level, (_, _, most) in policies.items()
    }


# --- our own parameters ---


def parameters(**texts: str) -> str:
    return "".join(
        f"parameters {{ key: '{name}' value {{ string_value: '{text}' }} }}\n" for name, text in texts.items()
    )


def test_a_delay_that_is_found(tmp_path: Path) -> None:
    text = parameters(max_queue_delay="auto", latency_objective_ms="12.5", own="1")
    config = read(tmp_path, f"max_batch_size: 4 dynamic_batching {{}} {text}")
    assert config.dynamic_batching == DynamicBatching(max_queue_delay=AUTO, latency_objective=0.0125)
    assert config.parameters == {"own": "1"}


@pytest.mark.parametrize("execution", ["thread", "process"])
def test_what_instances_are(tmp_path: Path, execution: str) -> None:
    config = read(tmp_path, parameters(execution=execution, own="1"))
    assert (config.execution, config.parameters) == (execution, {"own": "1"})
    assert read(tmp_path, parameters(own="1")).execution == ""


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0", (0,)), ("3,1", (3, 1)), ("0-2", (0, 1, 2)), (" 0 , 2-3,1 ", (0, 2, 3, 1)), ("1,1-2", (1, 2))],
)
def test_cpus(tmp_path: Path, text: str, cpus: tuple[int, ...]) -> None:
    assert read(tmp_path, parameters(cpus=text)).cpus == cpus


def test_seconds_of_processes(tmp_path: Path) -> None:
    config = read(tmp_path, parameters(hang_seconds="2", longest_run_seconds="0.5", own="1"))
    assert (config.hang_seconds, config.longest_run, config.parameters) == (2, 0.5, {"own": "1"})
    model = Model()
    configure(model, config)
    assert (model.hang_seconds, model.longest_run) == (2, 0.5)
    assert read(tmp_path, parameters(own="1")).longest_run is None


@pytest.mark.parametrize("text", ["", "-1", "nan", "inf", "long"])
def test_seconds_that_are_none(tmp_path: Path, text: str) -> None:
    expected = f"parameters[longest_run_seconds]: expected a number of seconds, 0 for no limit, got {text!r}"
    assert wrong(tmp_path, parameters(longest_run_seconds=text)) == expected


CPUS = "numbers of CPUs like 0,2-3"
RANGES = "numbers from 0 to 4095, in ranges the lower one first"


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            {"execution": "proces"},
            "[execution]: expected thread or process, got 'proces', did you mean 'process'?",
        ),
        ({"execution": ""}, "[execution]: expected thread or process, got ''"),
        ({"cpus": ""}, f"[cpus]: expected {CPUS}, got ''"),
        ({"cpus": "0,"}, f"[cpus]: expected {CPUS}, got '0,'"),
        ({"cpus": "-1"}, f"[cpus]: expected {CPUS}, got '-1'"),
        ({"cpus": "all"}, f"[cpus]: expected {CPUS}, got 'all'"),
        ({"cpus": "3-1"}, f"[cpus]: expected {RANGES}, got '3-1'"),
        ({"cpus": "4096"}, f"[cpus]: expected {RANGES}, got '4096'"),
        ({"cpus": "0-99999999999999999999"}, f"[cpus]: expected {RANGES}, got '0-99999999999999999999'"),
        (
            {"latency_objective_ms": "5"},
            "[latency_objective_ms]: expected max_queue_delay 'auto' with it, got none",
        ),
        (
            {"max_queue_delay": "auto"},
            "[latency_objective_ms]: expected milliseconds with max_queue_delay 'auto', got none",
        ),
        (
            {"max_queue_delay": "100"},
            "[max_queue_delay]: expected 'auto', got '100' (dynamic_batching.max_queue_delay_microseconds is for "
            "a delay that does not change)",
        ),
        *(
            (
                {"max_queue_delay": "auto", "latency_objective_ms": text},
                f"[latency_objective_ms]: expected a number of milliseconds above 0, got {text!r}",
            )
            for text in ("", "0", "0.0", "-1", "inf", "nan", "1e3", "fast")
        ),
    ],
)
def test_a_wrong_parameter_of_ours(tmp_path: Path, texts: dict[str, str], message: str) -> None:
    assert wrong(tmp_path, f"dynamic_batching {{}} {parameters(**texts)}") == f"parameters{message}"


AUTOMATIC = parameters(max_queue_delay="auto", latency_objective_ms="5")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "parameters[max_queue_delay]: expected dynamic_batching with it, got none"),
        ("sequence_batching {}", "parameters[max_queue_delay]: expected dynamic_batching with it, got none"),
        (
            "dynamic_batching { max_queue_delay_microseconds: 7 }",
            "dynamic_batching.max_queue_delay_microseconds: expected none with parameters[max_queue_delay], got 7",
        ),
    ],
)
def test_a_delay_that_cannot_be_found(tmp_path: Path, text: str, message: str) -> None:
    assert wrong(tmp_path, text + AUTOMATIC) == message


@given(text=st.text(st.sampled_from("0123456789,-. "), max_size=12))
def test_any_list_of_cpus_is_one_or_an_error(text: str) -> None:
    message: Any = pb.ModelConfig()
    message.parameters["cpus"].string_value = text
    cpus: Sequence[int] = ()
    said = ""
    try:
        cpus = config_of(message, Path(), "config", []).cpus
    except ModelLoadError as error:
        said = str(error)
    if not cpus:
        assert said.startswith("config: parameters[cpus]: expected numbers")
        return
    numbers = {int(number) for part in text.split(",") for number in part.split("-")}
    assert numbers <= set(cpus)
    assert len(cpus) == len(set(cpus))
    assert max(cpus) == max(numbers)


# --- sequences ---

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
    said = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
    text = f"control_input {{ name: 'I' control {{ kind: CONTROL_SEQUENCE_CORRID data_type: {said} }} }}"
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
            ".state[0].initial_state[0].dims: expected what fits the state's [3, -1], got [3]",
        ),
        (
            _initial("data_type: TYPE_FP32 dims: [ 2, 3 ] zero_data: true"),
            ".state[0].initial_state[0].dims: expected what fits the state's [3, -1], got [2, 3]",
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
            ".state[0].initial_state[0].data_file: expected 12 bytes, as FP32 and its dims have, got 24 in "
            "{}/m/initial_state/sums",
        ),
    ],
)
def test_wrong_sequences(tmp_path: Path, text: str, message: str) -> None:
    state_file(tmp_path)
    said = wrong(tmp_path, f"sequence_batching {{ {text} }}")
    assert said == f"sequence_batching{message.format(tmp_path)}"


# --- the response cache ---


@pytest.mark.parametrize("enabled", [True, False])
def test_the_response_cache(tmp_path: Path, enabled: bool) -> None:
    text = f"dynamic_batching {{}} response_cache {{ enable: {str(enabled).lower()} }}"
    assert read(tmp_path, text).response_cache is enabled
