"""How a model's requests are put together, ordered and held back, as values (spec 5.1-5.4; tfs 6.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from types import NoneType
from typing import Literal

from triglot.core import checks
from triglot.core.tensor import DATATYPES

AUTO_REMOVED = "the automatic delay was removed: expected seconds, 0 (the default) or more"
MAX_PRIORITY_LEVELS = 2**64 - 1
LONGEST_SECONDS = 365 * 24 * 3600.0
"""What a wait may take; the system's own waiting functions have a limit, too."""


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """What becomes of requests of one priority level that wait too long, or are too many (spec 5.1).

    `timeout` is in seconds, 0 is none; a request that has waited longer is refused, or, with `delay_expired`, runs
    after all that have not. `allow_timeout_override`: a request's own, shorter timeout counts. `max_queue_size` 0:
    as many as the model's queue takes. Raises `ValueError`, which names the field, as all of these values do.
    """

    timeout: float = 0.0
    delay_expired: bool = False
    allow_timeout_override: bool = False
    max_queue_size: int = 0

    def __post_init__(self) -> None:
        _check_seconds("timeout", self.timeout)
        checks.flag("delay_expired", self.delay_expired)
        checks.flag("allow_timeout_override", self.allow_timeout_override)
        checks.count("max_queue_size", self.max_queue_size)


def _check_seconds(name: str, value: object) -> None:
    checks.number(name, value, 0, LONGEST_SECONDS, "seconds")


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """Requests that wait at the same time are executed together, joined along the batch dim (spec 5.1).

    - `preferred_sizes`: batch sizes worth waiting for; none: the model's max_batch_size.
    - `max_queue_delay`: seconds that an idle instance waits for more requests.
    - `preserve_ordering`: answers leave in the order in which the requests came.
    - `priority_levels`: 1 is the highest; 0: all are alike.
    - `allowed_sizes`: a batch is padded to the next of these by repeating a row; none: no padding (tfs 6.5).
    - `max_execution_size`: a request with more rows is executed in parts of so many; 0: requests are never split.
    - `pad_variable_lengths`: inputs that differ in other dims are padded with zeros, up to the longest (tfs 6.5).
    - `max_waiting_batches`: batches of max_batch_size that may wait; 0: the model's bound on requests is all.
    - `max_batch_size`: most rows of a batch and of a request, where the model has no `max_batch_size` (tfs 6.5).
    - `signatures`: those whose requests are joined, the others are executed one by one; none: all are joined.

    Raises `ValueError`, which names the field, for a value that cannot be.
    """

    preferred_sizes: Sequence[int] = ()
    max_queue_delay: float = 0.0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    policy: QueuePolicy = QueuePolicy()
    policies: Mapping[int, QueuePolicy] = field(default_factory=dict)
    allowed_sizes: Sequence[int] = ()
    max_execution_size: int = 0
    pad_variable_lengths: bool = False
    max_waiting_batches: int = 0
    max_batch_size: int = 0
    signatures: Sequence[str] = ()
    latency_objective: InitVar[object] = None

    def __post_init__(self, latency_objective: object) -> None:
        with checks.within("dynamic_batching"):
            if latency_objective is not None:
                raise ValueError(f"latency_objective: {AUTO_REMOVED} as max_queue_delay")
            self._check()

    def _check(self) -> None:
        for name in ("preferred_sizes", "allowed_sizes"):
            object.__setattr__(self, name, checks.sizes(name, getattr(self, name)))
        object.__setattr__(self, "signatures", checks.items("signatures", self.signatures, "names"))
        for name in ("max_execution_size", "max_waiting_batches", "max_batch_size"):
            checks.count(name, getattr(self, name))
        for name in ("preserve_ordering", "pad_variable_lengths"):
            checks.flag(name, getattr(self, name))
        delay: object = self.max_queue_delay
        if delay == "auto":
            raise ValueError(f"max_queue_delay: {AUTO_REMOVED}")
        _check_seconds("max_queue_delay", delay)
        self._check_levels()

    def _check_levels(self) -> None:
        levels = self.priority_levels
        checks.count("priority_levels", levels, most=MAX_PRIORITY_LEVELS)
        checks.kind("policy", self.policy, QueuePolicy)
        checks.kind("policies", self.policies, Mapping)
        used = {"default_priority_level": self.default_priority_level}
        used |= {f"policies[{level!r}]": level for level in self.policies}
        for name, level in used.items():
            checks.count(name, level)
            if levels and not 1 <= level <= levels:
                raise ValueError(f"{name}: expected a level from 1 to priority_levels {levels}, got {level}")
        if self.preserve_ordering and levels > 1:
            raise ValueError(f"priority_levels: expected at most 1 with preserve_ordering, got {levels}")
        policies = {"policy": self.policy} | {
            f"policies[{level}]": self.policies[level] for level in self.policies
        }
        for name, policy in policies.items():
            checks.kind(name, policy, QueuePolicy)
            if self.preserve_ordering and policy.timeout and policy.delay_expired:
                raise ValueError(f"{name}.delay_expired: expected False with preserve_ordering, got True")

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
_FLAGS, _IDS = ("INT32", "FP32", "BOOL"), ("UINT64", "INT64", "UINT32", "INT32", "BYTES")
CONTROL_DATATYPES = {"START": _FLAGS, "READY": _FLAGS, "END": _FLAGS, "CORRID": _IDS}
"""The datatypes that an input of each kind may have."""


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

    def __post_init__(self) -> None:
        checks.name("name", self.name)
        checks.choice("kind", self.kind, CONTROL_DATATYPES)
        checks.choice("datatype", self.datatype, CONTROL_DATATYPES[self.kind])
        for name in ("false", "true"):
            if type(value := getattr(self, name)) not in (bool, int, float):
                raise checks.expected(name, "a number", value)


@dataclass(frozen=True, slots=True)
class InitialState:
    """What a state is at a sequence's start: zeros of `dims`, or what `file` holds."""

    datatype: str
    dims: Sequence[int]
    file: Path | None = None
    name: str = ""

    def __post_init__(self) -> None:
        checks.choice("datatype", self.datatype, DATATYPES)
        object.__setattr__(self, "dims", checks.dims("dims", self.dims, any_size=False))
        checks.kind("file", self.file, Path, NoneType)


@dataclass(frozen=True, slots=True)
class SequenceState:
    """An output of one request that is an input of the sequence's next one; `dims` without the batch dim.

    `returned`: the output is for the clients, too.
    """

    input_name: str
    output_name: str
    datatype: str
    dims: Sequence[int]
    initial: InitialState | None = None
    returned: bool = False

    def __post_init__(self) -> None:
        checks.name("input_name", self.input_name)
        checks.name("output_name", self.output_name)
        checks.choice("datatype", self.datatype, DATATYPES)
        checks.flag("returned", self.returned)
        own = checks.dims("dims", self.dims, any_size=True)
        object.__setattr__(self, "dims", own)
        if self.initial is None:
            return
        checks.kind("initial", self.initial, InitialState)
        if self.initial.datatype != self.datatype:
            raise ValueError(
                f"initial.datatype: expected the state's {self.datatype}, got {self.initial.datatype}"
            )
        first = self.initial.dims
        if len(first) != len(own) or any(dim not in (-1, given) for dim, given in zip(own, first, strict=True)):
            raise ValueError(f"initial.dims: expected dims that match the state's {list(own)}, got {list(first)}")


@dataclass(frozen=True, slots=True)
class DirectStrategy:
    """Each sequence has one row of one instance's batch for itself (spec 5.2); the delay is in seconds."""

    max_queue_delay: float = 0.0
    minimum_slot_utilization: float = 0.0

    def __post_init__(self) -> None:
        _check_seconds("max_queue_delay", self.max_queue_delay)
        checks.number("minimum_slot_utilization", self.minimum_slot_utilization, 0, 1)


@dataclass(frozen=True, slots=True)
class OldestStrategy:
    """The oldest waiting requests of up to `max_candidate_sequences` per instance are batched (spec 5.2).

    `preserve_ordering`: answers leave in the order in which their requests began to run.
    """

    max_candidate_sequences: int = 0
    preferred_sizes: Sequence[int] = ()
    max_queue_delay: float = 0.0
    preserve_ordering: bool = False

    def __post_init__(self) -> None:
        checks.count("max_candidate_sequences", self.max_candidate_sequences)
        object.__setattr__(self, "preferred_sizes", checks.sizes("preferred_sizes", self.preferred_sizes))
        _check_seconds("max_queue_delay", self.max_queue_delay)
        checks.flag("preserve_ordering", self.preserve_ordering)


@dataclass(frozen=True, slots=True)
class SequenceBatching:
    """Requests with the same sequence id reach the same instance, in their order (spec 5.2).

    `max_idle`: seconds after which a sequence without a request is over. `iterative`: each request is a sequence
    of its own, whatever it says, and needs no id (those with the same one follow each other); a Triton Python
    model may take it up again before it answers.
    """

    max_idle: float = 1.0
    controls: Sequence[ControlInput] = ()
    states: Sequence[SequenceState] = ()
    strategy: DirectStrategy | OldestStrategy = DirectStrategy()
    iterative: bool = False

    def __post_init__(self) -> None:
        with checks.within("sequence_batching"):
            self._check()

    def _check(self) -> None:
        _check_seconds("max_idle", self.max_idle)
        if not self.max_idle:
            raise checks.expected("max_idle", "more than 0 seconds", self.max_idle)
        for name, kind in (("controls", ControlInput), ("states", SequenceState)):
            values = checks.items(name, getattr(self, name), f"{kind.__name__}s")
            for at, value in enumerate(values):
                checks.kind(f"{name}[{at}]", value, kind)
            object.__setattr__(self, name, values)
        checks.kind("strategy", self.strategy, DirectStrategy, OldestStrategy)
        checks.kind("iterative", self.iterative, bool)
        checks.different("controls", [control.kind for control in self.controls])
        checks.different(
            "states",
            [control.name for control in self.controls] + [state.input_name for state in self.states],
        )
        checks.different("states", [state.output_name for state in self.states])


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
