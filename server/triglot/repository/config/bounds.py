"""What the configuration in a client's request may ask for: one table of amounts, each with its bound.

What the owner wrote on disk is not bounded, and a request may ask for as much as that does: who can write there
can run code.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from triglot.core.errors import Code, InvalidArgument, ModelLoadError
from triglot.core.tensor import DATATYPES
from triglot.model.config import MAX_INSTANCES, ModelConfig
from triglot.pb.kserve import model_config_pb2 as pb
from triglot.repository.config.values import datatype_of

THREAD_COUNTS = ("intra_op_thread_count", "inter_op_thread_count")
"""Parameters of the ONNX backend that set the number of threads per instance."""
MAX_METRIC_TAGS = 100
"""Labels that each metric of the model gets; no option, as monitoring systems take fewer."""
MAX_BUCKETS = 1000
TEXT_BYTES = 64
"""Memory that an element of BYTES needs: a pointer and a small object."""
_LARGEST = 2**63
_DIGITS = 18


FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
"""The only metric with configurable buckets."""


def first_response_buckets(config: pb.ModelConfig) -> tuple[float, ...]:
    """Return the upper bounds of its buckets, in milliseconds; empty if not configured.

    Raise `ValueError` for missing or invalid values, as Triton does for missing ones.
    """
    buckets: tuple[float, ...] = ()
    for at, control in enumerate(config.model_metrics.metric_control):
        key = f"model_metrics.metric_control[{at}]"
        if not control.metric_identifier.family:
            raise ValueError(f"{key}.metric_identifier.family: expected a name, got none")
        given = tuple(control.histogram_options.buckets)
        if not given:
            raise ValueError(f"{key}.histogram_options.buckets: expected at least one, got none")
        if not all(map(math.isfinite, given)) or any(lower >= upper for lower, upper in pairwise(given)):
            raise ValueError(f"{key}.histogram_options.buckets: expected ascending numbers, got {list(given)}")
        if control.metric_identifier.family == FIRST_RESPONSE:
            buckets = given
    return buckets


def other_metrics(config: pb.ModelConfig) -> Iterator[str]:
    """Yield a note for each metric whose buckets are not configurable."""
    for at, control in enumerate(config.model_metrics.metric_control):
        if (family := control.metric_identifier.family) != FIRST_RESPONSE:
            key = f"model_metrics.metric_control[{at}].metric_identifier.family"
            yield f"{key}: expected {FIRST_RESPONSE}, got {family!r}, ignored"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bounds that options set: `instances` is that of `--max-requested-instances`, and so on.

    Attributes:
        instances: Instances, threads or processes, of a model, and threads that an instance computes with.
        batch_size: `max_batch_size`.
        sequences: Open sequences on each instance.
        entries: Entries of all lists and tables together, at any depth.
        warm_up_runs: Runs of all warm-up requests.
        bytes: Bytes of one warm-up request's tensors, and of one sequence's states.
    """

    instances: int
    batch_size: int
    sequences: int
    entries: int
    warm_up_runs: int
    bytes: int


UNBOUNDED = Bounds(
    instances=MAX_INSTANCES,
    batch_size=sys.maxsize,
    sequences=sys.maxsize,
    entries=sys.maxsize,
    warm_up_runs=sys.maxsize,
    bytes=sys.maxsize,
)
"""For models that are loaded by the program itself."""


def check_bounds(message: pb.ModelConfig, own: ModelConfig, bounds: Bounds, source: str) -> None:
    """Raise `ModelLoadError` for a client's configuration that asks for more than `bounds` and the `own` one."""
    of_own: pb.ModelConfig | None = None
    for amount in AMOUNTS:
        asked, most = amount.of(message), amount.most or getattr(bounds, amount.bound)
        if asked <= most:
            continue
        if of_own is None:
            of_own = json_format.Parse(own.text, pb.ModelConfig()) if own.text else pb.ModelConfig()
        most = max(most, amount.of(of_own))
        if asked > most:
            text = amount.error(most, asked)
            raise ModelLoadError(f"{source}: {text}{amount.hint(message)}", Code.INVALID_ARGUMENT)


def instances_of(config: ModelConfig) -> int:
    """Return the most instances that a configuration asks for, GPUs that are not listed aside."""
    return _instances(json_format.Parse(config.text, pb.ModelConfig())) if config.text else 0


def check_entries(message: Message, most: int, source: str) -> None:
    """Raise `InvalidArgument` for a client's list of models with more than `most` entries in all its lists."""
    if (asked := _entries(message)) > most:
        option = "; set TRIGLOT_MAX_REQUESTED_ENTRIES for more"
        raise InvalidArgument(f"{source}: {ENTRIES.error(most, asked)}{ENTRIES.detail(message)}{option}")


# --- amounts ---


def _entries(message: Message) -> int:
    return sum(_entries_by_field(message).values())


def _entries_by_field(message: Message) -> Counter[str]:
    counts: Counter[str] = Counter()
    for path, count in _lists(message, ""):
        counts[path] += count
    return counts


def _lists(message: Message, path: str) -> Iterator[tuple[str, int]]:
    for field, value in message.ListFields():
        name = path + field.name
        inner: Iterable[Any] = (value,)
        if isinstance(value, Mapping | MutableSequence):
            yield name, len(value)
            inner = value.values() if isinstance(value, Mapping) else value
        # All of a list have the same type.
        for inner_message in inner:
            if not isinstance(inner_message, Message):
                break
            yield from _lists(inner_message, name + ".")


def _largest(message: Message) -> str:
    [(name, count)] = _entries_by_field(message).most_common(1)
    return f"; {name} has {count}"


def _instances(message: pb.ModelConfig) -> int:
    groups = sum((group.count or 1) * max(1, len(group.gpus)) for group in message.instance_group)
    return max(groups, _parameter("ray_max_instances", message))


def _parameter(name: str, message: pb.ModelConfig) -> int:
    text = message.parameters[name].string_value if name in message.parameters else ""
    digits = text.lstrip("0")
    return (int(digits or 0) if len(digits) <= _DIGITS else _LARGEST) if text.isdecimal() else 0


def _sequences(message: pb.ModelConfig) -> int:
    """Return the sequences that each instance has slots for, see `strategy_of`."""
    if not message.HasField("sequence_batching"):
        return 0
    batching = message.sequence_batching
    return max(batching.oldest.max_candidate_sequences or message.max_batch_size, 0)


def _warm_up_runs(message: pb.ModelConfig) -> int:
    return sum(request.count or 1 for request in message.model_warmup)


def _warm_up_bytes(message: pb.ModelConfig) -> int:
    requests = (
        max(1, request.batch_size)
        * sum(_bytes(tensor.data_type, tensor.dims) for tensor in request.inputs.values())
        for request in message.model_warmup
    )
    return max(requests, default=0)


def _state_bytes(message: pb.ModelConfig) -> int:
    total = 0
    for state in message.sequence_batching.state:
        initial = [_bytes(initial_state.data_type, initial_state.dims) for initial_state in state.initial_state]
        total += max(_bytes(state.data_type, state.dims), *initial, 0)
    return total


def _bytes(data_type: int, dims: Iterable[int]) -> int:
    """Return the bytes of a tensor; a dim of any size counts as 1."""
    try:
        item = DATATYPES[datatype_of("", data_type)].itemsize or TEXT_BYTES
    except (KeyError, ValueError):  # It is refused elsewhere.
        item = 1
    return min(item * math.prod(max(dim, 0) if dim != -1 else 1 for dim in dims), _LARGEST)


def _buckets(message: pb.ModelConfig) -> int:
    controls = message.model_metrics.metric_control
    return max(
        (
            len(control.histogram_options.buckets)
            for control in controls
            if control.metric_identifier.family == FIRST_RESPONSE
        ),
        default=0,
    )


@dataclass(frozen=True, slots=True)
class Amount:
    """Something that a configuration asks for: `key` and `unit` in errors, and `of`, how much it is.

    Its bound is the field of `Bounds` of that name, or `most`, which no option widens.
    """

    key: str
    unit: str
    bound: str
    of: Callable[[Any], int]
    most: int = 0
    detail: Callable[[Any], str] = lambda _: ""

    def error(self, most: int, asked: int) -> str:
        """Return what is wrong with asking for more than `most`."""
        key, unit = (f"{self.key}: " if self.key else ""), (f" {self.unit}" if self.unit else "")
        return f"{key}expected at most {most}{unit}, got {asked}"

    def hint(self, message: Message) -> str:
        """Return what is largest in it, and the option that allows more."""
        option = self.bound.replace("_", "-")
        return self.detail(message) + (f"; raise the server's --max-requested-{option} for more" if option else "")


ENTRIES = Amount("", "entries in all lists and tables", "entries", _entries, detail=_largest)
AMOUNTS = (
    ENTRIES,
    Amount("instance_group", "in total", "instances", _instances),
    *(Amount(f"parameters[{name}]", "in total", "instances", partial(_parameter, name)) for name in THREAD_COUNTS),
    Amount("max_batch_size", "", "batch_size", lambda message: max(message.max_batch_size, 0)),
    Amount("sequence_batching", "sequences on each instance", "sequences", _sequences),
    Amount("model_warmup", "runs in total", "warm_up_runs", _warm_up_runs),
    Amount("model_warmup", "bytes in one request", "bytes", _warm_up_bytes),
    Amount("sequence_batching.state", "bytes for one sequence", "bytes", _state_bytes),
    Amount("metric_tags", "", "", lambda message: len(message.metric_tags), MAX_METRIC_TAGS),
    Amount(f"model_metrics: buckets of {FIRST_RESPONSE}", "", "", _buckets, MAX_BUCKETS),
)
"""All of them; a number of a configuration that is not here allocates nothing and is not counted up to."""
