"""Reads batching, sequences and response cache of Triton's model configuration (spec 5.1, 5.2, 5.4).

The rules for values are in `model.scheduling`; their errors are translated to Triton's keys. This module converts
units and differing representations. Its functions raise `ValueError`, which names the key; enums have been checked
before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from triglot.core.tensor import DATATYPES, element_count
from triglot.model.scheduling import (
    CONTROL_DATATYPES,
    MAX_SECONDS,
    ControlInput,
    ControlKind,
    DirectStrategy,
    DynamicBatching,
    InitialState,
    OldestStrategy,
    QueuePolicy,
    SequenceBatching,
    SequenceState,
)
from triglot.pb.kserve import model_config_pb2 as pb
from triglot.repository.config.values import datatype_of, either, existing

INITIAL_STATE_FOLDER = "initial_state"
DEFAULT_IDLE = 1_000_000
"""In microseconds (spec 5.2)."""

_DYNAMIC = "dynamic_batching"
_SEQUENCE = "sequence_batching"
_KEYS = {
    "initial": "initial_state[0]",
    "policies": "priority_queue_policy",
    "policy": "default_queue_policy",
    "preferred_sizes": "preferred_batch_size",
    "controls": "control_input",
    "datatype": "data_type",
    "max_idle": "max_sequence_idle_microseconds",
    "states": "state",
}
"""Triton's keys of fields, where the names differ."""
_PAIRS = {"int32_false_true": "INT32", "fp32_false_true": "FP32", "bool_false_true": "BOOL"}


@contextmanager
def _with_config_keys(key: str) -> Iterator[None]:
    """Translate field names in the block's `ValueError`s to Triton's keys, below `key`."""
    try:
        yield
    except ValueError as error:
        field, colon, rest = str(error).removeprefix(f"{key}.").partition(":")
        field = re.sub("[a-z_]+", lambda found: _KEYS.get(found[0], found[0]), field)
        raise ValueError(f"{key}.{field}{colon}{rest}") from None


def _seconds(microseconds: int) -> float:
    return min(microseconds / 1e6, MAX_SECONDS)


def _check_sizes(key: str, sizes: Iterable[int], largest: int) -> None:
    for at, size in enumerate(sizes):
        # Without a configured max_batch_size, the model may declare one.
        if size < 1 or size > largest > 0:
            expected = f"1 to the max_batch_size {largest}" if largest > 0 else "at least 1"
            raise ValueError(f"{key}[{at}]: expected {expected}, got {size}")


# --- dynamic batching ---


def dynamic_batching(config: pb.ModelConfig) -> DynamicBatching | None:
    """Return the configured `dynamic_batching`; None without it."""
    if not config.HasField(_DYNAMIC):
        return None
    batching = config.dynamic_batching
    _check_sizes(f"{_DYNAMIC}.preferred_batch_size", batching.preferred_batch_size, config.max_batch_size)
    policy = _policy("default_queue_policy", batching.default_queue_policy, batching)
    levels = batching.priority_queue_policy
    policies = {
        level: _policy(f"priority_queue_policy[{level}]", levels[level], batching) for level in sorted(levels)
    }
    with _with_config_keys(_DYNAMIC):
        return DynamicBatching(
            preferred_sizes=batching.preferred_batch_size,
            max_queue_delay=_seconds(batching.max_queue_delay_microseconds),
            preserve_ordering=batching.preserve_ordering,
            priority_levels=batching.priority_levels,
            default_priority_level=batching.default_priority_level,
            policy=policy,
            policies=policies,
        )


def _policy(key: str, policy: pb.ModelQueuePolicy, batching: pb.ModelDynamicBatching) -> QueuePolicy:
    delays = policy.timeout_action == pb.ModelQueuePolicy.DELAY
    if (
        batching.preserve_ordering
        and batching.priority_levels <= 1
        and delays
        and policy.default_timeout_microseconds
    ):
        raise ValueError(f"{_DYNAMIC}.{key}.timeout_action: expected REJECT with preserve_ordering, got DELAY")
    return QueuePolicy(
        timeout=_seconds(policy.default_timeout_microseconds),
        delay_expired=delays,
        allow_timeout_override=policy.allow_timeout_override,
        max_queue_size=policy.max_queue_size,
    )


# --- sequences ---


def sequence_batching(config: pb.ModelConfig, folder: Path) -> SequenceBatching | None:
    """Return the configured `sequence_batching`; None without it. Initial states are files below `folder`."""
    if not config.HasField(_SEQUENCE):
        return None
    batching = config.sequence_batching
    strategy = _strategy(batching, config.max_batch_size)
    controls = _controls(batching.control_input)
    outputs = {output.name for output in config.output}
    states = [
        replace(_state(f"{_SEQUENCE}.state[{at}]", state, folder), returned=state.output_name in outputs)
        for at, state in enumerate(batching.state)
    ]
    with _with_config_keys(_SEQUENCE):
        return SequenceBatching(
            _seconds(batching.max_sequence_idle_microseconds or DEFAULT_IDLE),
            controls,
            states,
            strategy,
            batching.iterative_sequence,
        )


def _strategy(batching: pb.ModelSequenceBatching, largest: int) -> DirectStrategy | OldestStrategy:
    if batching.WhichOneof("strategy_choice") != "oldest":
        direct = batching.direct
        with _with_config_keys(f"{_SEQUENCE}.direct"):
            return DirectStrategy(_seconds(direct.max_queue_delay_microseconds), direct.minimum_slot_utilization)
    oldest = batching.oldest
    _check_sizes(f"{_SEQUENCE}.oldest.preferred_batch_size", oldest.preferred_batch_size, largest)
    with _with_config_keys(f"{_SEQUENCE}.oldest"):
        return OldestStrategy(
            oldest.max_candidate_sequences,
            oldest.preferred_batch_size,
            _seconds(oldest.max_queue_delay_microseconds),
            oldest.preserve_ordering,
        )


def _controls(tensors: Sequence[pb.ModelSequenceBatching.ControlInput]) -> list[ControlInput]:
    controls: list[ControlInput] = []
    for number, tensor in enumerate(tensors):
        key = f"{_SEQUENCE}.control_input[{number}]"
        if not tensor.name or tensor.name in [control.name for control in controls]:
            raise ValueError(f"{key}.name: expected a unique name, got {tensor.name!r}")
        if len(tensor.control) != 1:
            raise ValueError(f"{key}.control: expected one, got {len(tensor.control)}")
        control = _control(f"{key}.control[0]", tensor.name, tensor.control[0])
        if control.kind in [other.kind for other in controls]:
            kind = pb.ModelSequenceBatching.Control.Kind.Name(tensor.control[0].kind)
            raise ValueError(f"{key}.control[0].kind: expected each kind once, got {kind} again")
        controls.append(control)
    return controls


_KINDS: Mapping[int, ControlKind] = {
    pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_START: "START",
    pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_READY: "READY",
    pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_END: "END",
    pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID: "CORRID",
}


def _control(key: str, name: str, control: pb.ModelSequenceBatching.Control) -> ControlInput:
    kind = _KINDS[control.kind]
    pairs = {field: list(getattr(control, field)) for field in _PAIRS if getattr(control, field)}
    if kind == "CORRID":
        if pairs:
            raise ValueError(f"{key}: expected a data_type for CONTROL_SEQUENCE_CORRID, got {', '.join(pairs)}")
        allowed = [f"TYPE_{'STRING' if datatype == 'BYTES' else datatype}" for datatype in CONTROL_DATATYPES[kind]]
        if (datatype := pb.DataType.Name(control.data_type)) not in allowed:
            raise ValueError(f"{key}.data_type: expected {either(allowed)}, got {datatype}")
        return ControlInput(name, kind, datatype_of(f"{key}.data_type", control.data_type))
    if [len(pair) for pair in pairs.values()] != [2]:
        raise ValueError(f"{key}: expected two values in one of {', '.join(_PAIRS)}, got {pairs or 'none'}")
    [(field, (false, true))] = pairs.items()
    return ControlInput(name, kind, _PAIRS[field], false, true)


def _state(key: str, state: pb.ModelSequenceBatching.State, folder: Path) -> SequenceState:
    own = datatype_of(f"{key}.data_type", state.data_type)
    if len(state.initial_state) > 1:
        raise ValueError(f"{key}.initial_state: expected at most one, got {len(state.initial_state)}")
    initial = None
    for initial_state in state.initial_state:
        initial = _initial(f"{key}.initial_state[0]", initial_state, folder / INITIAL_STATE_FOLDER)
    with _with_config_keys(key):
        return SequenceState(state.input_name, state.output_name, own, tuple(state.dims), initial)


def _initial(key: str, initial: pb.ModelSequenceBatching.InitialState, folder: Path) -> InitialState:
    own = datatype_of(f"{key}.data_type", initial.data_type)
    choice = initial.WhichOneof("state_data")
    if choice is None:
        raise ValueError(f"{key}: expected zero_data or data_file, got none")
    file = None
    if choice == "data_file":
        file = existing(folder, initial.data_file, f"{key}.data_file")
    with _with_config_keys(key):
        made = InitialState(own, tuple(initial.dims), file, initial.name)
    size = element_count(made.dims) * DATATYPES[own].itemsize
    if file is not None and size and (found := file.stat().st_size) != size:
        raise ValueError(f"{key}.data_file: expected {size} bytes for {own} and its dims, got {found} in {file}")
    return made


# --- the response cache ---


def response_cache(config: pb.ModelConfig) -> bool:
    """Whether responses may be cached."""
    if config.response_cache.enable:
        if config.HasField(_SEQUENCE):
            raise ValueError("response_cache.enable: expected false with sequence_batching, got true")
        if config.model_transaction_policy.decoupled:
            raise ValueError("response_cache.enable: expected false for a decoupled model, got true")
    return config.response_cache.enable
