"""Checks what Triton's model configuration says of schedulers and the response cache (spec 5.1, 5.2, 5.4)."""

from __future__ import annotations

from collections.abc import Iterable

from triglot.pb.kserve import model_config_pb2 as pb

_BOOLEANS = ("int32_false_true", "fp32_false_true", "bool_false_true")
_ID_TYPES = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")


def check_scheduling(config: pb.ModelConfig) -> None:
    """Raises `ValueError`, which names the key, for what Triton refuses, too. Enums are checked already."""
    _check_dynamic(config.dynamic_batching, config.max_batch_size)
    _check_sequence(config.sequence_batching, config.max_batch_size)
    if config.response_cache.enable:
        if config.HasField("sequence_batching"):
            raise ValueError("response_cache.enable: expected false with sequence_batching, got true")
        if config.model_transaction_policy.decoupled:
            raise ValueError("response_cache.enable: expected false for a decoupled model, got true")


def _check_sizes(key: str, sizes: Iterable[int], largest: int) -> None:
    for at, size in enumerate(sizes):
        # Without a max_batch_size, the model may have its own.
        if size < 1 or size > largest > 0:
            expected = f"1 to the max_batch_size {largest}" if largest > 0 else "at least 1"
            raise ValueError(f"{key}[{at}]: expected {expected}, got {size}")


def _check_dynamic(batching: pb.ModelDynamicBatching, largest: int) -> None:
    key = "dynamic_batching"
    _check_sizes(f"{key}.preferred_batch_size", batching.preferred_batch_size, largest)
    levels, policies = batching.priority_levels, batching.priority_queue_policy
    if levels:
        used = {f"{key}.default_priority_level": batching.default_priority_level}
        used |= {f"{key}.priority_queue_policy[{level}]": level for level in sorted(policies)}
        for name, level in used.items():
            if not 1 <= level <= levels:
                raise ValueError(f"{name}: expected a level from 1 to priority_levels {levels}, got {level}")
    if not batching.preserve_ordering:
        return
    if levels > 1:
        raise ValueError(f"{key}.priority_levels: expected at most 1 with preserve_ordering, got {levels}")
    named = {f"{key}.default_queue_policy": batching.default_queue_policy}
    named |= {f"{key}.priority_queue_policy[{level}]": policies[level] for level in sorted(policies)}
    for name, policy in named.items():
        if policy.default_timeout_microseconds and policy.timeout_action == pb.ModelQueuePolicy.DELAY:
            raise ValueError(f"{name}.timeout_action: expected REJECT with preserve_ordering, got DELAY")


def _check_sequence(batching: pb.ModelSequenceBatching, largest: int) -> None:
    key = "sequence_batching"
    _check_sizes(f"{key}.oldest.preferred_batch_size", batching.oldest.preferred_batch_size, largest)
    share = batching.direct.minimum_slot_utilization
    if not 0 <= share <= 1:
        raise ValueError(f"{key}.direct.minimum_slot_utilization: expected 0 to 1, got {share:g}")
    names: set[str] = set()
    kinds: set[str] = set()
    for number, tensor in enumerate(batching.control_input):
        at = f"{key}.control_input[{number}]"
        if not tensor.name or tensor.name in names:
            raise ValueError(f"{at}.name: expected a name of its own, got {tensor.name!r}")
        names.add(tensor.name)
        for place, control in enumerate(tensor.control):
            kind = pb.ModelSequenceBatching.Control.Kind.Name(control.kind)
            if kind in kinds:
                raise ValueError(f"{at}.control[{place}].kind: expected each kind once, got {kind} again")
            kinds.add(kind)
            _check_control(f"{at}.control[{place}]", kind, control)


def _check_control(key: str, kind: str, control: pb.ModelSequenceBatching.Control) -> None:
    pairs = {name: list(getattr(control, name)) for name in _BOOLEANS if getattr(control, name)}
    if kind != "CONTROL_SEQUENCE_CORRID":
        if [len(pair) for pair in pairs.values()] != [2]:
            raise ValueError(f"{key}: expected two values in one of {', '.join(_BOOLEANS)}, got {pairs or 'none'}")
    elif pairs:
        raise ValueError(f"{key}: expected a data_type for {kind}, got {', '.join(pairs)}")
    elif (datatype := pb.DataType.Name(control.data_type)) not in _ID_TYPES:
        raise ValueError(f"{key}.data_type: expected one of {', '.join(_ID_TYPES)}, got {datatype}")
