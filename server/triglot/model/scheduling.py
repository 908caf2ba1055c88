"""Scheduling options of a model: dynamic batching, sequences and ensemble steps (spec 5.1-5.4; tfs 6.5)."""

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
MAX_SECONDS = 365 * 24 * 3600.0
"""Limit on a configured delay or timeout; the system's wait functions have one, too."""


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Timeout and queue size of the requests of one priority level (spec 5.1).

    Attributes:
        timeout: Seconds that a request may be queued, 0 for no limit; then it is rejected or, with
            `delay_expired`, runs after all requests that have not expired.
        allow_timeout_override: Whether a request's own timeout applies if it is shorter.
        max_queue_size: Limit on queued requests; 0: only the limit of the model's queue.

    Raise `ValueError`, which names the field, for an invalid value, as all classes of this module do.
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
    checks.number(name, value, 0, MAX_SECONDS, "seconds")


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """Executes requests that are queued at the same time together, joined along the batch dim (spec 5.1).

    Attributes:
        preferred_sizes: Batch sizes that are worth a delay; empty: the model's max_batch_size.
        max_queue_delay: Seconds that an idle instance waits for more requests.
        preserve_ordering: Whether responses are sent in the order in which the requests arrived.
        priority_levels: Number of levels, 1 is the highest; 0: no priorities.
        allowed_sizes: Batches are padded to the next of these sizes by repeating a row; empty: no padding (tfs
            6.5).
        max_execution_size: A request with more rows is executed in parts of this size; 0: requests are not split.
        pad_variable_lengths: Whether inputs that differ in other dims are zero-padded to the longest (tfs 6.5).
        max_waiting_batches: Limit on queued batches of max_batch_size; 0: only the model's limit on requests.
        max_batch_size: Limit on the rows of a batch and of a request, for a model without `max_batch_size` (tfs
            6.5).
        limits_requests: Whether a request with more rows than that, or without a batch dim, is an error; otherwise
            it is executed alone.
        signatures: Signatures whose requests are batched, others are executed one by one; empty: all.

    Raise `ValueError`, which names the field, for an invalid value.
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
    limits_requests: bool = True
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
        for name in ("preserve_ordering", "pad_variable_lengths", "limits_requests"):
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
        """Return the level of a request with this `priority`; 0 stands for none."""
        if not self.priority_levels:
            return 0
        return priority if 1 <= priority <= self.priority_levels else self.default_priority_level

    def policy_of(self, level: int) -> QueuePolicy:
        """Return the policy of a level."""
        return self.policies.get(level, self.policy)


# --- sequences ---

ControlKind = Literal["START", "READY", "END", "CORRID"]
_FLAGS, _IDS = ("INT32", "FP32", "BOOL"), ("UINT64", "INT64", "UINT32", "INT32", "BYTES")
CONTROL_DATATYPES = {"START": _FLAGS, "READY": _FLAGS, "END": _FLAGS, "CORRID": _IDS}
"""Datatypes that a control input of each kind may have."""


@dataclass(frozen=True, slots=True)
class ControlInput:
    """A sequence control input that the server adds: the start, ready or end flag, or the correlation ID (CORRID).

    `false` and `true` are the values of the flags.
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
    """The value of a state at the start of a sequence: zeros of shape `dims`, or the contents of `file`."""

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
    """An implicit state: an output of one request that is an input of the sequence's next one.

    `dims` have no batch dim. `returned`: whether clients receive the output, too.
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
    """Assigns each sequence a batch slot of one instance (spec 5.2). `max_queue_delay` is in seconds."""

    max_queue_delay: float = 0.0
    minimum_slot_utilization: float = 0.0

    def __post_init__(self) -> None:
        _check_seconds("max_queue_delay", self.max_queue_delay)
        checks.number("minimum_slot_utilization", self.minimum_slot_utilization, 0, 1)


@dataclass(frozen=True, slots=True)
class OldestStrategy:
    """Batches the oldest queued requests of up to `max_candidate_sequences` sequences per instance (spec 5.2).

    `max_queue_delay` is in seconds. `preserve_ordering`: whether responses are sent in the order in which the
    requests were started.
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
    """Routes the requests of a sequence id to the same instance, in their order (spec 5.2).

    `max_idle`: seconds without a request after which a sequence ends. `iterative`: each request is a sequence of
    its own, whatever its flags, and needs no id (requests with the same id run one after the other); a Triton
    Python model may reschedule it before it responds.
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
    """A step of an ensemble (spec 5.3): a model, and the ensemble's tensor for each of its inputs and outputs.

    `version` 0 is the highest version that serves.
    """

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    version: int = 0
