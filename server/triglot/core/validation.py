"""The one validator: every protocol's requests pass here before anything is allocated for them.

The texts are those that clients of the protocol match on (KServe V2, spec 1.5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from triglot.core.errors import Internal, InvalidArgument
from triglot.core.tensor import (
    DATATYPES,
    Array,
    BytesFramingError,
    array_over,
    datatype_of,
    element_count,
    is_addressable,
    object_array,
    unpack_bytes,
)
from triglot.core.types import InferenceRequest, InputTensor, OutputTensor, TensorSpec

MAX_KNOWN_SHAPES = 256


class InvalidRequest(InvalidArgument):
    """The request does not fit the model's signature."""


class TensorRule:
    """A `TensorSpec` ready for checking; remembers the shapes that it has passed."""

    __slots__ = ("dtype", "known_shapes", "plain", "spec")

    def __init__(self, spec: TensorSpec) -> None:
        datatype = DATATYPES[spec.datatype]
        self.spec = spec
        self.dtype = datatype.dtype
        # Any bytes are a tensor of these datatypes, if only there are enough of them.
        self.plain = bool(datatype.itemsize) and datatype.name != "BOOL"
        self.known_shapes: dict[tuple[int, ...], int] = {}

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether the dims are those of the spec."""
        wanted = self.spec.shape
        if wanted is None:
            return all(dim >= 0 for dim in shape)
        return len(shape) == len(wanted) and all(
            dim >= 0 and expected in (-1, dim) for dim, expected in zip(shape, wanted, strict=True)
        )

    def remember(self, shape: tuple[int, ...]) -> int:
        """The bytes of a tensor of this shape, which has been checked; 0 for BYTES."""
        if len(self.known_shapes) >= MAX_KNOWN_SHAPES:
            self.known_shapes.clear()
        size = self.known_shapes[shape] = element_count(shape) * DATATYPES[self.spec.datatype].itemsize
        return size


@dataclass(frozen=True, slots=True)
class Signature:
    """The named inputs and outputs of a model.

    Raises `ValueError` for what is no `TensorSpec`, when two tensors share a name, or when `max_batch_size` > 0
    and a shape does not begin with the batch dim -1.
    """

    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    max_batch_size: int = 0
    input_rules: Mapping[str, TensorRule] = field(init=False, repr=False)
    output_rules: Mapping[str, TensorRule] = field(init=False, repr=False)
    takes_bytes: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for kind, specs in (("input", self.inputs), ("output", self.outputs)):
            for spec in specs:
                if not isinstance(spec, TensorSpec):
                    raise ValueError(f"{kind}s: expected TensorSpecs, got {spec!r}")
            rules = {spec.name: TensorRule(spec) for spec in specs}
            if len(rules) != len(specs):
                raise ValueError(f"two {kind}s have the same name: {[spec.name for spec in specs]}")
            object.__setattr__(self, f"{kind}_rules", rules)
            for spec in specs if self.max_batch_size > 0 else ():
                if not spec.shape or spec.shape[0] != -1:
                    raise ValueError(
                        f"{kind} {spec.name!r}: max_batch_size is {self.max_batch_size}, so the shape must begin "
                        f"with -1 (the batch), got {_shape_text(spec.shape)}"
                    )
        object.__setattr__(self, "takes_bytes", any(spec.datatype == "BYTES" for spec in self.inputs))


def bind_inputs(signature: Signature, request: InferenceRequest) -> dict[str, Array]:
    """The request's inputs as arrays by name; numeric ones share memory with the request.

    Raises `InvalidRequest` for the first thing that does not fit.
    """
    rules = signature.input_rules
    tensors = request.inputs
    if len(tensors) != len(rules):
        _reject_input_count(signature, request)
    arrays: dict[str, Array] = {}
    batch = -1
    for tensor in tensors:
        name, shape, data = tensor.name, tensor.shape, tensor.data
        rule = rules.get(name)
        if rule is None or name in arrays:
            raise _name_error(name, rule is not None, request.model_name)
        if tensor.datatype != rule.spec.datatype:
            raise _datatype_error(tensor, rule.spec, request.model_name)
        if signature.max_batch_size:
            batch = _check_batch(tensor, batch, signature.max_batch_size, request.model_name)
        size = rule.known_shapes.get(shape)
        if size is None:
            size = _check_shape(tensor, rule, signature.max_batch_size, request.model_name)
        if not rule.plain or isinstance(data, np.ndarray):
            arrays[name] = _bind(tensor, rule.dtype, request.model_name)
        elif len(data) == size:
            arrays[name] = array_over(data, rule.dtype, shape)
        else:
            raise _byte_size_error(tensor, size, len(data), request.model_name)
    return arrays


def _name_error(name: str, known: bool, model: str) -> InvalidRequest:
    if known:
        return InvalidRequest(f"input '{name}' already exists in request")
    return InvalidRequest(f"unexpected inference input '{name}' for model '{model}'")


def _reject_input_count(signature: Signature, request: InferenceRequest) -> None:
    names = [tensor.name for tensor in request.inputs]
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidRequest(f"input '{name}' already exists in request")
        seen.add(name)
    missing = [name for name in signature.input_rules if name not in seen]
    got = f" Got input(s) {names}" if names else " Got no input"
    lacking = (
        f", but missing required input(s) {missing}. Please provide all required input(s)." if missing else "."
    )
    raise InvalidRequest(
        f"expected {len(signature.inputs)} inputs but got {len(names)} inputs for model "
        f"'{request.model_name}'.{got}{lacking}"
    )


def _datatype_error(tensor: InputTensor, spec: TensorSpec, model: str) -> InvalidRequest:
    if tensor.datatype not in DATATYPES:
        return InvalidRequest(
            f"inference input '{tensor.name}' data-type is '{tensor.datatype}', which is none of "
            f"{', '.join(DATATYPES)}; model '{model}' expects '{spec.datatype}'"
        )
    return InvalidRequest(
        f"inference input '{tensor.name}' data-type is '{tensor.datatype}', but model '{model}' expects "
        f"'{spec.datatype}'"
    )


def _check_batch(tensor: InputTensor, batch: int, max_batch_size: int, model: str) -> int:
    if not tensor.shape:
        raise InvalidRequest(
            f"input '{tensor.name}' has no shape but model requires batch dimension for '{model}'"
        )
    size = tensor.shape[0]
    if batch not in (-1, size):
        raise InvalidRequest(f"input '{tensor.name}' batch size does not match other inputs for '{model}'")
    if size > max_batch_size:
        raise InvalidRequest(f"inference request batch-size must be <= {max_batch_size} for '{model}'")
    if size < 1:
        raise InvalidRequest(f"inference request batch-size must be >= 1 for '{model}', got {size}")
    return size


def _check_shape(tensor: InputTensor, rule: TensorRule, max_batch_size: int, model: str) -> int:
    """The bytes that the tensor must have."""
    shape = tensor.shape
    if not rule.fits(shape):
        note = f"NOTE: max_batch_size is {max_batch_size}: the first dim is the batch." if max_batch_size else ""
        raise InvalidRequest(
            f"unexpected shape for input '{tensor.name}' for model '{model}'. "
            f"Expected {_shape_text(rule.spec.shape)}, got {_shape_text(shape)}. {note}"
        )
    if not is_addressable(shape, rule.dtype):
        raise InvalidRequest(
            f"input '{tensor.name}' for model '{model}' has too many elements: shape {_shape_text(shape)}"
        )
    return rule.remember(shape)


def _shape_text(shape: Sequence[int] | None) -> str:
    return "any" if shape is None else f"[{','.join(str(dim) for dim in shape)}]"


def _bind(tensor: InputTensor, dtype: np.dtype[Any], model: str) -> Array:
    """The array of a tensor whose bytes, or elements, have to be looked at."""
    count = element_count(tensor.shape)
    data = tensor.data
    if isinstance(data, np.ndarray):
        if data.size != count:
            raise _element_count_error(tensor, data, count, dtype, model)
        array = data.reshape(tensor.shape)
        array.flags.writeable = False
        return array
    if dtype.hasobject:
        try:
            return object_array(unpack_bytes(data, count), tensor.shape)
        except BytesFramingError as error:
            raise InvalidRequest(
                f"{error.message} for inference input '{tensor.name}' for model '{model}'"
            ) from None
    if len(data) != count * dtype.itemsize:
        raise _byte_size_error(tensor, count * dtype.itemsize, len(data), model)
    array = array_over(data, dtype, tensor.shape)
    if count and array.view(np.uint8).max() > 1:
        raise InvalidRequest(f"input '{tensor.name}' for model '{model}' is BOOL: its bytes must be 0 or 1")
    return array


def _element_count_error(
    tensor: InputTensor, elements: Array, count: int, dtype: np.dtype[Any], model: str
) -> InvalidRequest:
    if dtype.hasobject:
        return InvalidRequest(
            f"unexpected number of string elements {elements.size} for inference input '{tensor.name}' "
            f"for model '{model}', expecting {count}"
        )
    return _byte_size_error(tensor, count * dtype.itemsize, elements.nbytes, model)


def _byte_size_error(tensor: InputTensor, expected: int, got: int, model: str) -> InvalidRequest:
    return InvalidRequest(
        f"input byte size mismatch for input '{tensor.name}' for model '{model}'. Expected {expected}, got {got}"
    )


def check_requested_outputs(signature: Signature, request: InferenceRequest) -> None:
    """Raises `InvalidRequest` when an output is requested twice or is none of the model's."""
    seen: set[str] = set()
    for name in request.outputs:
        if name in seen:
            raise InvalidRequest(f"output '{name}' already exists in request")
        if name not in signature.output_rules:
            raise InvalidRequest(f"unexpected inference output '{name}' for model '{request.model_name}'")
        seen.add(name)


def bind_outputs(signature: Signature, answer: object, requested: Sequence[str], model: str) -> list[OutputTensor]:
    """The requested outputs (all when none is named), checked against the signature.

    Raises `Internal` with a text for the model's author when an output is missing or has another datatype or
    shape than declared.
    """
    # The type is looked at first because an abstract class takes long to ask.
    if type(answer) is not dict and not isinstance(answer, Mapping):
        raise Internal(f"model '{model}' returned {type(answer).__name__}, expected a dict of outputs by name")
    outputs: list[OutputTensor] = []
    for name, rule in signature.output_rules.items():
        if requested and name not in requested:
            continue
        if name not in answer:
            raise Internal(f"model '{model}' returned no output '{name}', only {sorted(map(str, answer))}")
        outputs.append(_bind_output(rule, answer[name], model))
    return outputs


def _bind_output(rule: TensorRule, value: object, model: str) -> OutputTensor:
    spec = rule.spec
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    if array.dtype is not rule.dtype:
        _check_datatype(spec, array, model)
    shape = array.shape
    if shape not in rule.known_shapes:
        if not rule.fits(shape):
            raise Internal(
                f"model '{model}' returned output '{spec.name}' with shape {_shape_text(shape)}, its signature "
                f"says {_shape_text(spec.shape)}"
            )
        rule.remember(shape)
    return OutputTensor(spec.name, spec.datatype, array)


def _check_datatype(spec: TensorSpec, array: Array, model: str) -> None:
    try:
        datatype = datatype_of(array)
    except TypeError as error:
        raise Internal(f"model '{model}' returned output '{spec.name}': {error}") from None
    if datatype != spec.datatype:
        raise Internal(
            f"model '{model}' returned output '{spec.name}' as {datatype}, its signature says {spec.datatype}"
        )
