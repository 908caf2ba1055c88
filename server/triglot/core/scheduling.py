"""How a model's requests are put together, ordered and held back, as values (spec 5.1-5.4; tfs 6.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from triglot.core.errors import InvalidArgument

AUTO: Literal["auto"] = "auto"
"""A delay that the batcher finds by itself."""


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """What becomes of requests of one priority level that wait too long, or are too many (spec 5.1).

    `timeout` is in seconds, 0 is none; a request that has waited longer is refused, or, with `delay_expired`, runs
    after all that have not. `allow_timeout_override`: a request's own, shorter timeout counts. `max_queue_size` 0:
    as many as the model's queue takes.
    """

    timeout: float = 0.0
    delay_expired: bool = False
    allow_timeout_override: bool = False
    max_queue_size: int = 0


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """Requests that wait at the same time are executed together, joined along the batch dim (spec 5.1).

    - `preferred_sizes`: batch sizes worth waiting for; none: the model's max_batch_size.
    - `max_queue_delay`: seconds that an idle instance waits for more requests; `AUTO`: what keeps 99 % of the
      requests within `latency_objective` (seconds) at the highest throughput.
    - `preserve_ordering`: answers leave in the order in which the requests came.
    - `priority_levels`: 1 is the highest; 0: all are alike.
    - `allowed_sizes`: a batch is padded to the next of these by repeating a row; none: no padding (tfs 6.5).
    - `max_execution_size`: a request with more rows is executed in parts of so many; 0: requests are never split.
    - `pad_variable_lengths`: inputs that differ in other dims are padded with zeros, up to the longest (tfs 6.5).
    - `max_waiting_batches`: batches of max_batch_size that may wait; 0: the model's bound on requests is all.

    Raises `ValueError` for a value that there cannot be.
    """

    preferred_sizes: Sequence[int] = ()
    max_queue_delay: float | Literal["auto"] = 0.0
    latency_objective: float = 0.0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    policy: QueuePolicy = QueuePolicy()
    policies: Mapping[int, QueuePolicy] = field(default_factory=dict)
    allowed_sizes: Sequence[int] = ()
    max_execution_size: int = 0
    pad_variable_lengths: bool = False
    max_waiting_batches: int = 0

    def __post_init__(self) -> None:
        delay, objective = self.max_queue_delay, self.latency_objective
        if isinstance(delay, str):
            if delay != AUTO:
                raise ValueError(f"max_queue_delay: expected seconds or {AUTO!r}, got {delay!r}")
            if objective <= 0:
                raise ValueError(
                    f"latency_objective: expected seconds above 0 with max_queue_delay {AUTO!r}, got {objective:g}"
                )
        elif delay < 0:
            raise ValueError(f"max_queue_delay: expected at least 0 seconds, got {delay:g}")
        elif objective:
            raise ValueError(f"latency_objective: expected max_queue_delay {AUTO!r} with it, got {delay:g}")
        for name in ("preferred_sizes", "allowed_sizes"):
            sizes = tuple(getattr(self, name))
            if any(size < 1 for size in sizes):
                raise ValueError(f"{name}: expected sizes of at least 1, got {list(sizes)}")
            object.__setattr__(self, name, tuple(sorted(set(sizes))))

    def level(self, priority: int) -> int:
        """The level of a request that asks for `priority` (0: for none)."""
        if not self.priority_levels:
            return 0
        return priority if 1 <= priority <= self.priority_levels else self.default_priority_level

    def policy_of(self, level: int) -> QueuePolicy:
        """The policy of a level."""
        return self.policies.get(level, self.policy)


# --- sequences ---

ControlKind = Literal["START", "READY", "END", "CORRID"]


@dataclass(frozen=True, slots=True)
class ControlInput:
    """An input that the server adds: whether a request starts or ends its sequence, is there, or its id.

    `false` and `true` are the values of the first three kinds.
    """

    name: str
    kind: ControlKind
    datatype: str
    false: float = 0
    true: float = 1


@dataclass(frozen=True, slots=True)
class InitialState:
    """What a state is at a sequence's start: zeros of `dims`, or what `file` holds."""

    datatype: str
    dims: Sequence[int]
    file: Path | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class SequenceState:
    """An output of one request that is an input of the sequence's next one; `dims` without the batch dim."""

    input_name: str
    output_name: str
    datatype: str
    dims: Sequence[int]
    initial: InitialState | None = None


@dataclass(frozen=True, slots=True)
class DirectStrategy:
    """Each sequence has one row of one instance's batch for itself (spec 5.2); the delay is in seconds."""

    max_queue_delay: float = 0.0
    minimum_slot_utilization: float = 0.0


@dataclass(frozen=True, slots=True)
class OldestStrategy:
    """The oldest waiting requests of up to `max_candidate_sequences` per instance are batched (spec 5.2)."""

    max_candidate_sequences: int = 0
    preferred_sizes: Sequence[int] = ()
    max_queue_delay: float = 0.0
    preserve_ordering: bool = False


@dataclass(frozen=True, slots=True)
class SequenceBatching:
    """Requests with the same sequence id reach the same instance, in their order (spec 5.2).

    `max_idle`: seconds after which a sequence without a request is over.
    """

    max_idle: float = 1.0
    controls: Sequence[ControlInput] = ()
    states: Sequence[SequenceState] = ()
    strategy: DirectStrategy | OldestStrategy = DirectStrategy()


# --- ensembles ---


@dataclass(frozen=True, slots=True)
class Step:
    """One model of an ensemble (spec 5.3): its inputs and outputs, and what the ensemble calls these tensors.

    `version` 0: the highest that serves.
    """

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    version: int = 0


# --- what a request says ---


@dataclass(frozen=True, slots=True)
class Scheduling:
    """What a request says of its scheduling (spec 2.5). `timeout` is in seconds, 0: none.

    `sequence_id` 0 and "": it belongs to no sequence.
    """

    priority: int = 0
    timeout: float = 0.0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False


PLAIN = Scheduling()
"""Of a request that says nothing."""
_MAX_ID = 2**64 - 1
_RESERVED = ("priority", "timeout", "sequence_id", "sequence_start", "sequence_end")


def scheduling_of(parameters: Mapping[str, object]) -> Scheduling:
    """What a request's parameters say (spec 2.5); `timeout` is in microseconds there.

    Raises `InvalidArgument` for a parameter of another type, or out of range.
    """
    if not any(name in parameters for name in _RESERVED):
        return PLAIN
    return Scheduling(
        priority=_number(parameters, "priority"),
        timeout=_number(parameters, "timeout") / 1e6,
        sequence_id=_sequence_id(parameters.get("sequence_id", 0)),
        sequence_start=_flag(parameters, "sequence_start"),
        sequence_end=_flag(parameters, "sequence_end"),
    )


def _number(parameters: Mapping[str, object], name: str) -> int:
    value = parameters.get(name, 0)
    if type(value) is not int or not 0 <= value <= _MAX_ID:
        raise InvalidArgument(f"parameter '{name}': expected an integer of at least 0, got {value!r}")
    return value


def _flag(parameters: Mapping[str, object], name: str) -> bool:
    value = parameters.get(name, False)
    if type(value) is not bool:
        raise InvalidArgument(f"parameter '{name}': expected true or false, got {value!r}")
    return value


def _sequence_id(value: object) -> int | str:
    if type(value) is str:
        return value
    if type(value) is not int or not 0 <= value <= _MAX_ID:
        raise InvalidArgument(
            f"parameter 'sequence_id': expected an integer from 0 to 2^64-1 or a text, got {value!r}"
        )
    return value
