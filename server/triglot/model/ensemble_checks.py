"""Checks that the steps of an ensemble can run, and that their models fit together (spec 5.3).

Each check raises `ValueError`, which names the step and the key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from triglot.core.types import TensorSpec
from triglot.model.reshaping import may_be_same
from triglot.model.scheduling import Step
from triglot.model.signature import Signature, shape_text


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of a step's fields in messages: as written in a configuration, or in Python."""

    step: str = "steps"
    model: str = "model"
    inputs: str = "inputs"
    outputs: str = "outputs"


IN_PYTHON = Keys()
IN_CONFIG = Keys("ensemble_scheduling.step", "model_name", "input_map", "output_map")


@dataclass(frozen=True, slots=True)
class Part:
    """What an ensemble has to know about the model of a step."""

    signature: Signature
    decoupled: bool = False


@dataclass(frozen=True, slots=True)
class _Source:
    """The origin of a tensor and its declaration; `spec` None means undeclared."""

    where: str
    spec: TensorSpec | None
    signature: Signature


def check_steps(steps: Sequence[Step], signature: Signature, keys: Keys) -> None:
    """Check that tensors are produced once, that all inputs are used and outputs produced, without a cycle."""
    if not steps:
        raise ValueError(f"{keys.step}: expected at least one step, got none")
    given = {spec.name: f"input '{spec.name}' of the ensemble" for spec in signature.inputs}
    for kind, specs in (("input", signature.inputs), ("output", signature.outputs)):
        if not specs:
            raise ValueError(f"{kind}: expected at least one, got none")
    for at, step in enumerate(steps):
        for key, names in ((keys.inputs, step.inputs), (keys.outputs, step.outputs)):
            if not names:
                raise ValueError(f"{keys.step}[{at}].{key}: expected at least one tensor, got none")
        for name, tensor in step.outputs.items():
            where = f"{keys.step}[{at}].{keys.outputs}[{name}]"
            if tensor in given:
                raise ValueError(f"{where}: tensor '{tensor}' is already {given[tensor]}")
            given[tensor] = where
    _check_taken(steps, signature, given, keys)
    _check_order(steps, signature, keys)


def _check_taken(steps: Sequence[Step], signature: Signature, given: Mapping[str, str], keys: Keys) -> None:
    for at, step in enumerate(steps):
        for name, tensor in step.inputs.items():
            if tensor not in given:
                raise ValueError(
                    f"{keys.step}[{at}].{keys.inputs}[{name}]: tensor '{tensor}' is neither an input of the "
                    f"ensemble "
                    "nor an output of a step"
                )
    outputs = {tensor for step in steps for tensor in step.outputs.values()}
    for at, spec in enumerate(signature.outputs):
        if spec.name not in outputs:
            raise ValueError(f"output[{at}]: no step produces the ensemble's output '{spec.name}'")
    taken = {tensor for step in steps for tensor in step.inputs.values()}
    for at, spec in enumerate(signature.inputs):
        if spec.name not in taken:
            raise ValueError(f"input[{at}]: no step uses the ensemble's input '{spec.name}'")


def _check_order(steps: Sequence[Step], signature: Signature, keys: Keys) -> None:
    available = {spec.name for spec in signature.inputs}
    remaining = dict(enumerate(steps))
    while ready := [at for at, step in remaining.items() if available.issuperset(step.inputs.values())]:
        for at in ready:
            available.update(remaining.pop(at).outputs.values())
    if remaining:
        names = ", ".join(f"{keys.step}[{at}] ('{step.model}')" for at, step in remaining.items())
        raise ValueError(f"{keys.step}: steps depend on each other in a cycle: {names}")


def check_fit(steps: Sequence[Step], signature: Signature, parts: Sequence[Part], keys: Keys) -> None:
    """Check that the models of the steps, `parts`, accept the tensors that they are given."""
    sources = {
        spec.name: _Source(f"input '{spec.name}' of the ensemble", spec, signature) for spec in signature.inputs
    }
    for at, (step, part) in enumerate(zip(steps, parts, strict=True)):
        where = f"{keys.step}[{at}]"
        limit = part.signature.max_batch_size
        if 0 < limit < signature.max_batch_size:
            raise ValueError(
                f"{where}.{keys.model}: expected a model with a max_batch_size of at least the ensemble's "
                f"{signature.max_batch_size}, '{step.model}' has {limit}"
            )
        _check_names(where, step, part.signature, keys)
        _check_needs(where, step, part.signature, signature, keys)
        for name, tensor in step.outputs.items():
            rule = part.signature.output_rules.get(name)
            spec = None if rule is None else rule.spec
            sources[tensor] = _Source(f"output '{name}' of '{step.model}'", spec, part.signature)
    _check_streams(steps, signature, parts, keys)
    for where, tensor, taken, taking in _taken_tensors(steps, signature, parts, keys):
        _check_tensor(where, sources[tensor], taken, taking)


def streams_of(steps: Sequence[Step], parts: Sequence[Part]) -> dict[str, int | None]:
    """Return, per tensor, the decoupled step that produces one per response; None: one per request."""
    producers = {tensor: at for at, step in enumerate(steps) for tensor in step.outputs.values()}

    def stream_of(tensor: str) -> int | None:
        while (at := producers.get(tensor)) is not None and not parts[at].decoupled:
            tensor = next(iter(steps[at].inputs.values()))
        return at

    tensors = {tensor for step in steps for tensor in (*step.inputs.values(), *step.outputs.values())}
    return {tensor: stream_of(tensor) for tensor in tensors}


def _check_streams(steps: Sequence[Step], signature: Signature, parts: Sequence[Part], keys: Keys) -> None:
    """Check that the tensors that are taken together belong to the same responses."""
    streams = streams_of(steps, parts)
    taken = [(f"{keys.step}[{at}].{keys.inputs}", list(step.inputs.values())) for at, step in enumerate(steps)]
    taken.append(("output", [spec.name for spec in signature.outputs]))
    for where, (first, *others) in taken:
        for other in others:
            if streams[first] != streams[other]:
                stream, other_stream = (_when(streams[name], steps) for name in (first, other))
                raise ValueError(
                    f"{where}: expected tensors of the same responses, '{first}' comes {stream}, "
                    f"'{other}' {other_stream}"
                )


def _when(stream: int | None, steps: Sequence[Step]) -> str:
    return "once" if stream is None else f"with each response of the decoupled '{steps[stream].model}'"


def _check_names(where: str, step: Step, signature: Signature, keys: Keys) -> None:
    if signature.any_tensors:
        return
    for key, kind, names, rules in (
        (keys.inputs, "inputs", step.inputs, signature.input_rules),
        (keys.outputs, "outputs", step.outputs, signature.output_rules),
    ):
        for name in names:
            if name not in rules:
                has = ", ".join(f"'{rule}'" for rule in rules) or "none"
                raise ValueError(f"{where}.{key}[{name}]: the {kind} of '{step.model}' are {has}")
    for name in signature.input_rules:
        if name not in step.inputs and name not in signature.may_lack:
            raise ValueError(f"{where}.{keys.inputs}: '{step.model}' also requires input '{name}'")


def _check_needs(where: str, step: Step, taking: Signature, ensemble: Signature, keys: Keys) -> None:
    """Check that a step can run without the inputs that a request may omit."""
    for name, tensor in step.inputs.items():
        rule = ensemble.input_rules.get(tensor)
        if rule is not None and rule.spec.optional and name not in taking.may_lack and not taking.any_tensors:
            raise ValueError(
                f"{where}.{keys.inputs}[{name}]: '{step.model}' requires it, but input '{tensor}' of the "
                f"ensemble is "
                "optional"
            )


def _taken_tensors(
    steps: Sequence[Step], signature: Signature, parts: Sequence[Part], keys: Keys
) -> Iterator[tuple[str, str, TensorSpec, Signature]]:
    """Yield where each tensor is taken, its name, its expected spec, and the signature that this is from."""
    for at, (step, part) in enumerate(zip(steps, parts, strict=True)):
        for name, tensor in step.inputs.items():
            if (rule := part.signature.input_rules.get(name)) is not None:
                yield f"{keys.step}[{at}].{keys.inputs}[{name}]: '{step.model}'", tensor, rule.spec, part.signature
    for at, spec in enumerate(signature.outputs):
        yield f"output[{at}]: the ensemble's output '{spec.name}'", spec.name, spec, signature


def _check_tensor(where: str, source: _Source, taken: TensorSpec, taking: Signature) -> None:
    """Check datatype and shape; if a model batches, the shapes may differ by its batch dim."""
    given = source.spec
    if given is None:
        return
    if given.datatype != taken.datatype:
        raise ValueError(f"{where} is {taken.datatype}, {source.where} is {given.datatype}")
    if given.shape is None or taken.shape is None:
        return
    dims, taken_dims = source.signature.dims(given), taking.dims(taken)
    if not may_be_same(given.shape, taken.shape) and not may_be_same(dims or (), taken_dims or ()):
        raise ValueError(
            f"{where} has shape {shape_text(taken.shape)}, {source.where} has {shape_text(given.shape)}"
        )
