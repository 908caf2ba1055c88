"""Checks a model's scheduling attributes against each other and the rest of the model (spec 5.1, 5.2, 5.4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from types import MappingProxyType

from triglot.core import checks
from triglot.model.config import EXECUTIONS, INLINE_REMOVED, REMOTE_EXECUTIONS
from triglot.model.model import AUTO, Model, is_async, is_decoupled
from triglot.model.ray_options import RayOptions
from triglot.model.scheduling import DynamicBatching, OldestStrategy, SequenceBatching
from triglot.model.signature import Signature

CONFIG_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "dynamic_batching.preferred_sizes": "dynamic_batching.preferred_batch_size",
        "sequence_batching.strategy.preferred_sizes": "sequence_batching.oldest.preferred_batch_size",
        "response_cache": "response_cache.enable",
        "execution": "parameters[execution]",
        "cpus": "parameters[cpus]",
        "hang_seconds": "parameters[hang_seconds]",
        "longest_run": "parameters[longest_run_seconds]",
        "idempotent": "parameters[idempotent]",
        "inputs_in_place": "parameters[inputs_in_place]",
    }
)
"""Configuration keys of a model's attributes, where the names differ."""


def check_scheduling(model: Model, keys: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raise `ValueError` for an invalid attribute; the text has its name, or the one that `keys` has for it."""
    named: Callable[[str], str] = lambda name: keys.get(name, name)  # noqa: E731
    dynamic, sequences = model.dynamic_batching, model.sequence_batching
    if dynamic is not None:
        checks.kind("dynamic_batching", dynamic, DynamicBatching)
        _check_dynamic(model, dynamic, named)
    if sequences is not None:
        checks.kind("sequence_batching", sequences, SequenceBatching)
        _check_sequences(model, sequences, named)
    if dynamic is not None and sequences is not None:
        raise ValueError("sequence_batching: expected none with dynamic_batching, got both")
    checks.flag(named("response_cache"), model.response_cache)
    checks.flag(named("idempotent"), model.idempotent)
    checks.flag(named("inputs_in_place"), model.inputs_in_place)
    for reason, applies in (
        ("with sequence_batching", sequences is not None),
        ("for a decoupled model", is_decoupled(model.infer)),
    ):
        if model.response_cache and applies:
            raise ValueError(f"{named('response_cache')}: expected false {reason}, got true")
    if model.execution == "inline":
        raise ValueError(f"{named('execution')}: {INLINE_REMOVED}")
    checks.choice(named("execution"), model.execution, EXECUTIONS)
    checks.kind("ray", model.ray, RayOptions)
    check_cpus(named("cpus"), model.cpus)
    # The process attributes of the class may stay set when the configuration selects threads.
    if model.cpus and not {model.execution, type(model).execution} & {*REMOTE_EXECUTIONS}:
        raise ValueError(f"{named('cpus')}: expected none without execution 'process', got {list(model.cpus)}")
    check_seconds(named("hang_seconds"), model.hang_seconds)
    check_seconds(named("longest_run"), model.longest_run)


def check_ray(model_class: type[Model]) -> None:
    """Raise `ValueError` for invalid options of a class whose instances are actors."""
    checks.kind("ray", model_class.ray, RayOptions)
    instances, most = model_class.instances, model_class.ray.max_instances
    if (instances == AUTO) != bool(most):
        what = "an integer without" if instances == AUTO else f"{AUTO!r} with"
        raise checks.expected("instances", f"{what} ray.max_instances", instances)


def check_cpus(key: str, cpus: object) -> None:
    """Raise `ValueError` for anything but a list of CPU numbers."""
    for at, cpu in enumerate(checks.items(key, cpus, "CPU numbers")):
        checks.count(f"{key}[{at}]", cpu)


def check_seconds(key: str, seconds: object) -> None:
    """Raise `ValueError` for anything but a finite number of seconds, 0 for no limit."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < inf:
        raise checks.expected(key, "a number of seconds, 0 for no limit", seconds)


def _check_sizes(key: str, sizes: Sequence[int], largest: int, what: str) -> None:
    """Check that no size exceeds `largest`; without batching (0) no size is allowed."""
    if sizes and not largest:
        raise ValueError(f"{key}: expected none without a max_batch_size, got {list(sizes)}")
    if sizes and max(sizes) > largest:
        raise ValueError(f"{key}: expected at most the {what} {largest}, got {max(sizes)}")


def _check_dynamic(model: Model, batching: DynamicBatching, named: Callable[[str], str]) -> None:
    key, own = "dynamic_batching", model.max_batch_size
    if own and batching.max_batch_size > own:
        raise ValueError(
            f"{key}.max_batch_size: expected at most the model's {own}, got {batching.max_batch_size}"
        )
    request = batching.max_batch_size or own
    split = [batching.max_execution_size] if batching.max_execution_size else []
    _check_sizes(f"{key}.max_execution_size", split, request, "max_batch_size")
    largest, what = (split[0], "max_execution_size") if split else (request, "max_batch_size")
    _check_sizes(named(f"{key}.preferred_sizes"), batching.preferred_sizes, largest, what)
    _check_sizes(f"{key}.allowed_sizes", batching.allowed_sizes, largest, what)
    if batching.allowed_sizes and batching.allowed_sizes[-1] != largest:
        raise ValueError(
            f"{key}.allowed_sizes: expected the {what} {largest} as the last size, got "
            f"{batching.allowed_sizes[-1]}"
        )


def _check_sequences(model: Model, batching: SequenceBatching, named: Callable[[str], str]) -> None:
    if is_async(model.infer):
        raise ValueError("sequence_batching: expected a plain infer (def), got async def")
    if isinstance(batching.strategy, OldestStrategy):
        key = named("sequence_batching.strategy.preferred_sizes")
        _check_sizes(key, batching.strategy.preferred_sizes, model.max_batch_size, "max_batch_size")
    if not model.any_tensors:
        _check_declared(model, batching)


def _check_declared(model: Model, batching: SequenceBatching) -> None:
    """Check that controls and states have the datatypes that the model declares for them.

    Python code need not declare them; a model file must have them as inputs and outputs.
    """
    declared = [*model.signatures.values(), Signature(tuple(model.inputs), tuple(model.outputs))]
    inputs = {spec.name: spec for signature in declared for spec in signature.inputs}
    outputs = {spec.name: spec for signature in declared for spec in signature.outputs}
    used = [("controls", "input", control.name, control.datatype, inputs) for control in batching.controls]
    for state in batching.states:
        used.append(("states", "input", state.input_name, state.datatype, inputs))
        used.append(("states", "output", state.output_name, state.datatype, outputs))
    for key, kind, name, datatype, specs in used:
        if name in specs and specs[name].datatype != datatype:
            has = specs[name].datatype
            raise ValueError(f"sequence_batching.{key}: {name!r}: expected the model's {has}, got {datatype}")
        if name not in specs and specs and model.platform != "python":
            has = ", ".join(map(repr, specs))
            raise ValueError(f"sequence_batching.{key}: expected an {kind} of the model ({has}), got {name!r}")
