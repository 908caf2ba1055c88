"""Shape changes that keep the elements of a tensor (spec 1.4, 5.3).

`Reshape` implements `reshape` of a configuration: clients see `dims`, the model another shape. `Rebatch` adds or
removes the batch dim between the steps of an ensemble, of which some models batch and some do not.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from triglot.core.errors import Code, ModelLoadError
from triglot.core.tensor import Array
from triglot.core.types import TensorSpec
from triglot.model.config import ModelConfig, TensorConfig
from triglot.model.signature import Signature, shape_text

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reshape:
    """Reshapes arrays from `source` to `target`; the sizes of the -1 dims are carried over in order.

    `batch`: whether a batch dim precedes these dims; it stays.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    batch: bool

    def __call__(self, array: Array) -> Array:
        """Return the reshaped array; one that does not fit `source` unchanged, for a later check to reject."""
        own = array.shape[1:] if self.batch else array.shape
        if len(own) != len(self.source) or (self.batch and not array.shape):
            return array
        sizes = iter([size for size, dim in zip(own, self.source, strict=True) if dim == -1])
        shape = [*array.shape[: self.batch], *(next(sizes) if dim == -1 else dim for dim in self.target)]
        return array.reshape(shape) if math.prod(shape) == array.size else array


@dataclass(frozen=True, slots=True)
class Reshaping:
    """The reshapes of a model's inputs and outputs, by name."""

    inputs: Mapping[str, Reshape]
    outputs: Mapping[str, Reshape]

    def given(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the model's inputs for a client's."""
        return apply_changes(self.inputs, inputs)

    def made(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the client's outputs for a model's."""
        return apply_changes(self.outputs, outputs)

    def inside(self, signature: Signature) -> Signature:
        """Return the model's signature for the client's."""
        inputs = {name: (*(-1,) * tensor.batch, *tensor.target) for name, tensor in self.inputs.items()}
        outputs = {name: (*(-1,) * output.batch, *output.source) for name, output in self.outputs.items()}
        return replace(
            signature, inputs=_shaped(signature.inputs, inputs), outputs=_shaped(signature.outputs, outputs)
        )


def _shaped(specs: Sequence[TensorSpec], shapes: Mapping[str, Sequence[int]]) -> list[TensorSpec]:
    return [replace(spec, shape=shapes.get(spec.name, spec.shape)) for spec in specs]


@dataclass(frozen=True, slots=True)
class Rebatch:
    """Adds or removes the batch dim of a tensor, depending on its shape, for the model that takes it.

    `dims` are the dims that this model declares, without the batch dim; `batched`: whether it has a batch dim.
    """

    dims: Sequence[int]
    batched: bool

    def __call__(self, array: Array) -> Array:
        """Return the elements as a batch of one, or those of a batch of one; any other array unchanged."""
        shape, fits = array.shape, may_be_same(array.shape, self.dims)
        if self.batched and fits:
            return array.reshape(1, *shape)
        return array.reshape(shape[1:]) if not self.batched and not fits and shape[:1] == (1,) else array


def may_be_same(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes can be those of one array, where -1 stands for any size."""
    return len(shape) == len(other) and all(
        -1 in dims or dims[0] == dims[1] for dims in zip(shape, other, strict=True)
    )


def apply_changes(changes: Mapping[str, Reshape | Rebatch], arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays, with the changes applied to those that have one."""
    return {name: changes[name](array) if name in changes else array for name, array in arrays.items()}


def reshaped(
    file: Path, config: ModelConfig, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> tuple[list[TensorSpec], list[TensorSpec], Reshaping | None]:
    """Return the inputs and outputs that clients see of a model's, and the reshaping; None without any `reshape`.

    Raise `ModelLoadError`, which names the key, for a shape that does not fit the model's.
    """
    if not any(_configured(config)):
        return list(inputs), list(outputs), None
    shapes, client_specs = [], []
    for kind, specs, tensors in (("input", inputs, config.inputs), ("output", outputs, config.outputs)):
        found: dict[str, Reshape] = {}
        seen = {spec.name: spec for spec in specs}
        for at, tensor in enumerate(tensors):
            if tensor.reshape is None or tensor.dims is None or tensor.name not in seen:
                continue
            to_model = kind == "input"
            key = f"{config.source or file}: {kind}[{at}].reshape.shape"
            spec = _client_spec(key, tensor, seen[tensor.name], config)
            dims, shape = tuple(tensor.dims), tuple(tensor.reshape)
            batch = config.max_batch_size > 0
            found[spec.name] = Reshape(dims, shape, batch) if to_model else Reshape(shape, dims, batch)
            seen[spec.name] = spec
        shapes.append(found)
        client_specs.append(list(seen.values()))
    return client_specs[0], client_specs[1], Reshaping(*shapes)


def _client_spec(key: str, tensor: TensorConfig, spec: TensorSpec, config: ModelConfig) -> TensorSpec:
    batch = (-1,) if config.max_batch_size else ()
    shape = (*batch, *(tensor.reshape or ()))
    if spec.shape is not None and not (
        len(shape) == len(spec.shape)
        and all(dim in (-1, wanted) for dim, wanted in zip(spec.shape, shape, strict=True))
    ):
        with_batch = f", {shape_text(shape)} with the batch" if batch else ""
        raise ModelLoadError(
            f"{key}: the configuration says {shape_text(tensor.reshape)}{with_batch}, "
            f"the model has {shape_text(spec.shape)}",
            Code.INVALID_ARGUMENT,
        )
    return replace(spec, shape=(*batch, *(tensor.dims or ())))


def warn_of_reshapes(file: Path, config: ModelConfig) -> None:
    """Log a warning for each `reshape` that the model's backend does not support."""
    for key in _configured(config):
        log.warning("%s: %s: not supported by this backend, ignored", config.source or file, key)


def _configured(config: ModelConfig) -> Iterator[str]:
    for kind, tensors in (("input", config.inputs), ("output", config.outputs)):
        yield from (f"{kind}[{at}].reshape" for at, tensor in enumerate(tensors) if tensor.reshape is not None)
