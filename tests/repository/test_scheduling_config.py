"""Triton's model configurations: batching, the response cache, and our own parameters, as values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.repository.reading_configs import read, wrong
from triglot.core.errors import ModelLoadError
from triglot.model.config import INLINE_REMOVED
from triglot.model.configure import configure
from triglot.model.model import Model
from triglot.model.scheduling import AUTO_REMOVED, MAX_SECONDS, DynamicBatching, QueuePolicy
from triglot.pb.kserve import model_config_pb2 as pb
from triglot.repository.config.model_config import config_of

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
    assert (batching.max_queue_delay, batching.policy.timeout) == (MAX_SECONDS, MAX_SECONDS)


def test_as_many_priority_levels_as_a_request_can_name(tmp_path: Path) -> None:
    most = 2**64 - 1
    text = f"dynamic_batching {{ priority_levels: {most} default_priority_level: {most - 1} }}"
    batching = read(tmp_path, text).dynamic_batching
    assert batching is not None
    assert [batching.level(priority) for priority in (0, 1, 1001, most)] == [most - 1, 1, 1001, most]


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
def test_any_dynamic_batching_is_taken_as_written_or_refused(
    sizes: list[int],
    delay: int,
    levels: int,
    ordered: bool,
    policies: dict[int, tuple[bool, int, int]],
    default: int,
) -> None:
    message: Any = pb.ModelConfig(max_batch_size=32)
    message_batching = message.dynamic_batching
    message_batching.preferred_batch_size.extend(sizes)
    message_batching.max_queue_delay_microseconds, message_batching.preserve_ordering = delay, ordered
    message_batching.priority_levels, message_batching.default_priority_level = levels, default
    for level, (delays, timeout, most) in policies.items():
        policy = message_batching.priority_queue_policy[level]
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
    assert batching.max_queue_delay == min(delay / 1e6, MAX_SECONDS)
    assert {level: policy.max_queue_size for level, policy in batching.policies.items()} == {
        level: most for level, (_, _, most) in policies.items()
    }


# --- our own parameters ---


def parameters(**texts: str) -> str:
    return "".join(
        f"parameters {{ key: '{name}' value {{ string_value: '{text}' }} }}\n" for name, text in texts.items()
    )


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


FLAGS = pytest.mark.parametrize("name", ["idempotent", "inputs_in_place"])


@FLAGS
@pytest.mark.parametrize(("text", "expected"), [("true", True), ("false", False)])
def test_flags(tmp_path: Path, name: str, text: str, expected: bool) -> None:
    config = read(tmp_path, parameters(**{name: text}, own="1"))
    assert (getattr(config, name), config.parameters) == (expected, {"own": "1"})
    model = Model()
    setattr(model, name, not expected)
    configure(model, read(tmp_path, parameters(own="1")))
    assert getattr(model, name) is not expected
    configure(model, config)
    assert getattr(model, name) is expected


@FLAGS
@pytest.mark.parametrize("text", ["", "1", "True", "yes"])
def test_what_is_no_flag(tmp_path: Path, name: str, text: str) -> None:
    problem = wrong(tmp_path, parameters(**{name: text}))
    assert problem.startswith(f"parameters[{name}]: expected true or false, got {text!r}")


CPUS = "CPU numbers like 0,2-3"
RANGES = "numbers from 0 to 4095, and ascending ranges"


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            {"execution": "proces"},
            "[execution]: expected thread, process or ray, got 'proces', did you mean 'process'?",
        ),
        ({"execution": ""}, "[execution]: expected thread, process or ray, got ''"),
        ({"execution": "inline"}, f"[execution]: {INLINE_REMOVED}"),
        ({"cpus": ""}, f"[cpus]: expected {CPUS}, got ''"),
        ({"cpus": "0,"}, f"[cpus]: expected {CPUS}, got '0,'"),
        ({"cpus": "-1"}, f"[cpus]: expected {CPUS}, got '-1'"),
        ({"cpus": "all"}, f"[cpus]: expected {CPUS}, got 'all'"),
        ({"cpus": "3-1"}, f"[cpus]: expected {RANGES}, got '3-1'"),
        ({"cpus": "4096"}, f"[cpus]: expected {RANGES}, got '4096'"),
        ({"cpus": "0-99999999999999999999"}, f"[cpus]: expected {RANGES}, got '0-99999999999999999999'"),
        *(
            ({name: text}, f"[{name}]: {AUTO_REMOVED}, as dynamic_batching.max_queue_delay_microseconds")
            for name, text in (("max_queue_delay", "auto"), ("latency_objective_ms", "5"))
        ),
    ],
)
def test_a_wrong_parameter_of_ours(tmp_path: Path, texts: dict[str, str], message: str) -> None:
    assert wrong(tmp_path, f"dynamic_batching {{}} {parameters(**texts)}") == f"parameters{message}"


@given(text=st.text(st.sampled_from("0123456789,-. "), max_size=12))
def test_any_list_of_cpus_is_one_or_an_error(text: str) -> None:
    message: Any = pb.ModelConfig()
    message.parameters["cpus"].string_value = text
    cpus: Sequence[int] = ()
    problem = ""
    try:
        cpus = config_of(message, Path(), "config", []).cpus
    except ModelLoadError as error:
        problem = str(error)
    if not cpus:
        assert problem.startswith(
            ("config: parameters[cpus]: expected CPU numbers", "config: parameters[cpus]: expected numbers")
        )
        return
    numbers = {int(number) for part in text.split(",") for number in part.split("-")}
    assert numbers <= set(cpus)
    assert len(cpus) == len(set(cpus))
    assert max(cpus) == max(numbers)


# --- the response cache ---


@pytest.mark.parametrize("enabled", [True, False])
def test_the_response_cache(tmp_path: Path, enabled: bool) -> None:
    text = f"dynamic_batching {{}} response_cache {{ enable: {str(enabled).lower()} }}"
    assert read(tmp_path, text).response_cache is enabled
