"""Combines a loaded model with its configuration: each completes the other, and they must agree (spec 1.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from triglot.core.types import TensorSpec
from triglot.model.config import REMOTE_EXECUTIONS, ModelConfig, TensorConfig
from triglot.model.ensemble import Ensemble
from triglot.model.model import Model, is_decoupled, signatures_of
from triglot.model.scheduling_rules import CONFIG_KEYS, check_scheduling
from triglot.model.signature import Signature, default_of, shape_text

ANY_RANK = (-1,)
"""Dims for any rank, of a tensor whose rank the model does not say."""


def configure(model: Model, config: ModelConfig) -> None:
    """Complete a loaded model with its configuration, before it serves.

    Raise `ValueError`, which names the key, where the configuration contradicts the model.
    """
    _check_decoupled(model, config)
    if config.max_batch_size and model.max_batch_size not in (0, config.max_batch_size):
        raise ValueError(
            f"max_batch_size: the configuration says {config.max_batch_size}, the model has {model.max_batch_size}"
        )
    if model.any_tensors or not (model.inputs or model.outputs or model.signatures):
        _declare(model, config)
    elif config.max_batch_size or config.inputs or config.outputs:
        _narrow(model, config)
    if config.max_batch_size:
        model.max_batch_size = config.max_batch_size
    _set_instances(model, config)
    _set_scheduling(model, config)


def _set_scheduling(model: Model, config: ModelConfig) -> None:
    """Override the model's scheduling attributes with the configured ones and check the result."""
    if config.dynamic_batching is not None or config.sequence_batching is not None:
        model.dynamic_batching, model.sequence_batching = config.dynamic_batching, config.sequence_batching
    if config.response_cache:
        model.response_cache = True
    if config.execution:
        model.execution = config.execution
    if config.cpus:
        model.cpus = config.cpus
    if config.hang_seconds is not None:
        model.hang_seconds = config.hang_seconds
    if config.longest_run is not None:
        model.longest_run = config.longest_run
    if config.idempotent is not None:
        model.idempotent = config.idempotent
    if config.inputs_in_place is not None:
        model.inputs_in_place = config.inputs_in_place
    if config.dynamic_batching or config.sequence_batching or config.response_cache or config.cpus:
        check_scheduling(model, CONFIG_KEYS)


def _check_decoupled(model: Model, config: ModelConfig) -> None:
    if config.decoupled is None or model.takes_messages or isinstance(model, Ensemble):
        return  # Whether an ensemble is decoupled depends on the models of its steps.
    decoupled = is_decoupled(model.infer)
    if config.decoupled != decoupled:
        raise ValueError(
            f"model_transaction_policy.decoupled: the configuration says {str(config.decoupled).lower()}, "
            f"the model's infer {'yields responses' if decoupled else 'returns one response'}"
        )


def _set_instances(model: Model, config: ModelConfig) -> None:
    if not model.places_instances and config.instance_groups:
        model.instances = configured_instances(model, config)


def configured_instances(model: Model, config: ModelConfig) -> int:
    """Return how many instances the groups give a model that does not place them itself.

    Raise `ValueError` as `configure` does.
    """
    # Whether a Python model runs on a GPU is up to its own code.
    on_gpu = "python" in (model.platform, config.backend)
    instances = 0
    for at, group in enumerate(config.instance_groups):
        if group.kind == "GPU" and not on_gpu:
            raise ValueError(f"instance_group[{at}].kind: KIND_GPU, but {model.platform} models run on CPUs only")
        instances += group.count * (len(group.gpus) or 1 if group.kind == "GPU" else 1)
    return instances


def change_instances(model: Model, config: ModelConfig) -> tuple[int, int] | None:
    """Apply changed instance groups to any loaded model and return what `Model.change_instances` returns.

    Raise `ValueError` as `configure` does, and the errors of starting an instance.
    """
    if not config.instance_groups:
        return None  # The model decides.
    if model.places_instances or model.execution in REMOTE_EXECUTIONS:
        return model.change_instances(config)
    before, model.instances = model.instances, configured_instances(model, config)
    return max(0, model.instances - before), max(0, before - model.instances)


# --- inputs and outputs ---


def _shape(dims: Sequence[int], config: ModelConfig) -> tuple[int, ...]:
    return (-1, *dims) if config.max_batch_size else tuple(dims)


def _declare(model: Model, config: ModelConfig) -> None:
    """Give a model without declared inputs and outputs the configured ones."""
    if not config.inputs and not config.outputs:
        return
    if model.any_tensors and not (config.inputs and config.outputs):
        missing, given = ("output", "input") if config.inputs else ("input", "output")
        raise ValueError(f"{missing}: expected the {missing}s, as the {given}s are configured, got none")
    model.any_tensors = False
    model.inputs, model.outputs = (
        tuple(_declared(f"{kind}[{at}]", tensor, config) for at, tensor in enumerate(tensors))
        for kind, tensors in (("input", config.inputs), ("output", config.outputs))
    )


def _declared(key: str, tensor: TensorConfig, config: ModelConfig) -> TensorSpec:
    if not tensor.datatype or tensor.dims is None:
        missing = "dims" if tensor.datatype else "data_type"
        raise ValueError(f"{key}.{missing}: expected a value, as the model declares none, got none")
    return TensorSpec(tensor.name, tensor.datatype, _shape(tensor.dims, config), tensor.optional)


def _narrow(model: Model, config: ModelConfig) -> None:
    """Set the configured shapes in the default signature; other signatures stay unchanged."""
    if model.unnamed is not None and [tensor.name for tensor in config.inputs] == [model.unnamed.name]:
        model.inputs = [model.unnamed]
    signatures = signatures_of(model)
    name = default_of(signatures)
    if config.max_batch_size:
        _check_batch_dims(signatures, name, config)
    _check_optional(signatures[name], model, config)
    inputs = _narrowed("input", signatures[name].inputs, config.inputs, model, config)
    outputs = _narrowed("output", signatures[name].outputs, config.outputs, model, config)
    if name in model.signatures:
        narrowed = replace(signatures[name], inputs=inputs, outputs=outputs)
        model.signatures = {**model.signatures, name: narrowed}
    else:
        model.inputs, model.outputs = inputs, outputs


def _check_optional(signature: Signature, model: Model, config: ModelConfig) -> None:
    """Check that the model can run without each optional input; not for Python models, whose code decides."""
    if "python" in (model.platform, config.backend):
        return
    for at, tensor in enumerate(config.inputs):
        if tensor.optional and tensor.name in signature.input_rules and tensor.name not in signature.may_lack:
            raise ValueError(
                f"input[{at}].optional: the configuration says true, but the model requires {tensor.name!r}"
            )


def _check_batch_dims(signatures: Mapping[str, Signature], default: str, config: ModelConfig) -> None:
    configured = {("input", tensor.name) for tensor in config.inputs if tensor.dims is not None}
    configured |= {("output", tensor.name) for tensor in config.outputs if tensor.dims is not None}
    for name, signature in signatures.items():
        for kind, specs in (("input", signature.inputs), ("output", signature.outputs)):
            for spec in specs:
                if spec.shape is None and name == default and (kind, spec.name) in configured:
                    continue  # The configuration gives the rank.
                if not spec.shape or spec.shape[0] != -1:
                    where = "" if name == default else f" in signature {name!r}"
                    raise ValueError(
                        f"max_batch_size: the configuration says {config.max_batch_size}, so every shape must "
                        f"begin with -1 (the batch), the model's {kind} {spec.name!r}{where} has "
                        f"{shape_text(spec.shape)}"
                    )


def _narrowed(
    kind: str, specs: Sequence[TensorSpec], tensors: Sequence[TensorConfig], model: Model, config: ModelConfig
) -> tuple[TensorSpec, ...]:
    """Return the model's tensors, with the configured shapes where a tensor is configured."""
    narrowed = {spec.name: spec for spec in specs}
    for at, tensor in enumerate(tensors):
        key = f"{kind}[{at}]"
        spec = narrowed.get(tensor.name)
        if spec is None:
            has = ", ".join(repr(name) for name in narrowed) or "none"
            reason = model.unservable_outputs.get(tensor.name) if kind == "output" else None
            why = "" if reason is None else f", and cannot return it: {reason}"
            raise ValueError(f"{key}.name: the configuration says {tensor.name!r}, the model has {has}{why}")
        if tensor.datatype not in ("", spec.datatype):
            configured = f"TYPE_{'STRING' if tensor.datatype == 'BYTES' else tensor.datatype} ({tensor.datatype})"
            raise ValueError(
                f"{key}.data_type: the configuration says {configured}, the model has {spec.datatype}"
            )
        shape = spec.shape
        stays_any = shape is None and tensor.dims == ANY_RANK and not config.max_batch_size
        if tensor.dims is not None and not stays_any:
            shape = _checked_shape(f"{key}.dims", tensor.dims, spec, model, config)
        narrowed[tensor.name] = replace(spec, shape=shape, optional=spec.optional or tensor.optional)
    return tuple(narrowed.values())


def _checked_shape(
    key: str, dims: Sequence[int], spec: TensorSpec, model: Model, config: ModelConfig
) -> tuple[int, ...]:
    shape = _shape(dims, config)
    # Triton has no rank 0: there such a tensor has the dims [1].
    fits = (
        spec.shape is None
        or (spec.shape == () and shape == (1,))
        or (
            len(shape) == len(spec.shape)
            and all(dim in (-1, wanted) for dim, wanted in zip(spec.shape, shape, strict=True))
        )
    )
    batch = f", {shape_text(shape)} with the batch" if config.max_batch_size else ""
    if not fits:
        has_batch = (
            spec.shape is not None and not batch and spec.shape[:1] == (-1,) and len(shape) < len(spec.shape)
        )
        hint = " (dims omit the batch only with a max_batch_size)" if has_batch else ""
        raise ValueError(
            f"{key}: the configuration says {shape_text(dims)}{batch}, "
            f"the model has {shape_text(spec.shape)}{hint}"
        )
    if model.max_batch_size and shape[:1] != (-1,):
        raise ValueError(
            f"{key}: the model's max_batch_size is {model.max_batch_size}, so the shape must begin with -1 "
            f"(the batch), the configuration says {shape_text(shape)}"
        )
    return shape
