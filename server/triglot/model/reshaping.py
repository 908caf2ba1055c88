"""Tensors whose elements stay as they are while their shape changes (spec 1.4, 5.3).

`reshape` of a configuration: clients have `dims`, the model another shape. Between the steps of an ensemble, of
which some models batch and some do not: the batch dim.
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
    """From shapes like `source` to ones like `target`; sizes of the dims that are -1 go over in their order.

    `batch`: there is a first dim before these, which stays.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    batch: bool

    def __call__(self, array: Array) -> Array:
        """The elements in the other shape; an array of an unlike shape as it is, for who checks it later."""
        own = array.shape[1:] if self.batch else array.shape
        if len(own) != len(self.source) or (self.batch and not array.shape):
            return array
        sizes = iter([size for size, dim in zip(own, self.source, strict=True) if dim == -1])
        shape = [*array.shape[: self.batch], *(next(sizes) if dim == -1 else dim for dim in self.target)]
        return array.reshape(shape) if math.prod(shape) == array.size else array


@dataclass(frozen=True, slots=True)
class Reshaping:
    """The inputs and outputs of a model that are reshaped, and how."""

    inputs: Mapping[str, Reshape]
    outputs: Mapping[str, Reshape]

    def given(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """The model's inputs of a client's."""
        return all_of(self.inputs, inputs)

    def made(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """A client's outputs of the model's."""
        return all_of(self.outputs, outputs)

    def inside(self, signature: Signature) -> Signature:
        """The model's of a client's."""
        inputs = {name: (*(-1,) * one.batch, *one.target) for name, one in self.inputs.items()}
        outputs = {name: (*(-1,) * one.batch, *one.source) for name, one in self.outputs.items()}
        return replace(
            signature, inputs=_shaped(signature.inputs, inputs), outputs=_shaped(signature.outputs, outputs)
        )


def _shaped(specs: Sequence[TensorSpec], shapes: Mapping[str, Sequence[int]]) -> list[TensorSpec]:
    return [replace(spec, shape=shapes.get(spec.name, spec.shape)) for spec in specs]


@dataclass(frozen=True, slots=True)
class Rebatch:
    """Gives a tensor the batch dim of the model that takes it, or takes it away, where its shape says so.

    `dims` are that model's, without the batch dim; `batched`: it has one.
    """

    dims: Sequence[int]
    batched: bool

    def __call__(self, array: Array) -> Array:
        """The same elements: as a batch of one, or those of a batch of one. Any other array as it is."""
        shape, fits = array.shape, may_be_same(array.shape, self.dims)
        if self.batched and fits:
            return array.reshape(1, *shape)
        return array.reshape(shape[1:]) if not self.batched and not fits and shape[:1] == (1,) else array


def may_be_same(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes can be those of one array, -1 being any size."""
    return len(shape) == len(other) and all(
        -1 in dims or dims[0] == dims[1] for dims in zip(shape, other, strict=True)
    )


def all_of(changes: Mapping[str, Reshape | Rebatch], arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays, those changed that are named."""
    return {name: changes[name](array) if name in changes else array for name, array in arrays.items()}


def reshaped(
    file: Path, config: ModelConfig, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> tuple[list[TensorSpec], list[TensorSpec], Reshaping | None]:
    """What clients have of a model's inputs and outputs, and what lies between; None where nothing is reshaped.

    Raises `ModelLoadError`, which names the key, for a shape that is not the model's.
    """
    if not any(_configured(config)):
        return list(inputs), list(outputs), None
    shapes, theirs = [], []
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
        theirs.append(list(seen.values()))
    return theirs[0], theirs[1], Reshaping(*shapes)


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
    """Name what a backend that does not reshape passes over in the log."""
    for key in _configured(config):
        log.warning("%s: %s: not supported by this backend, ignored", config.source or file, key)


def _configured(config: ModelConfig) -> Iterator[str]:
    for kind, tensors in (("input", config.inputs), ("output", config.outputs)):
        yield from (f"{kind}[{at}].reshape" for at, tensor in enumerate(tensors) if tensor.reshape is not None)
