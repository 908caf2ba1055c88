"""The one validator: every protocol's requests pass here before anything is allocated for them.

The texts are those that clients of the protocol match on (KServe V2, spec 1.5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from triglot.core.errors import Internal, InvalidArgument
from triglot.core.tensor import (
    DATATYPES,
    MAX_ELEMENTS,
    Array,
    BytesFramingError,
    DataType,
    array_over,
    bytes_elements,
    datatype_of,
    element_count,
    object_array,
    unpack_bytes,
)
from triglot.core.types import InferenceRequest, InputTensor, OutputTensor, TensorSpec


class InvalidRequest(InvalidArgument):
    """The request does not fit the model's signature."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The named inputs and outputs of a model.

    Raises `ValueError` when two tensors share a name, or when `max_batch_size` > 0 and a shape does not begin
    with the batch dim -1.
    """

    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    max_batch_size: int = 0
    input_by_name: Mapping[str, TensorSpec] = field(init=False, repr=False)
    output_by_name: Mapping[str, TensorSpec] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for kind, specs in (("input", self.inputs), ("output", self.outputs)):
            by_name = {spec.name: spec for spec in specs}
            if len(by_name) != len(specs):
                raise ValueError(f"two {kind}s have the same name: {[spec.name for spec in specs]}")
            object.__setattr__(self, f"{kind}_by_name", by_name)
            for spec in specs if self.max_batch_size > 0 else ():
                if not spec.shape or spec.shape[0] != -1:
                    raise ValueError(
                        f"{kind} {spec.name!r}: max_batch_size is {self.max_batch_size}, so the shape must begin "
                        f"with -1 (the batch), got {list(spec.shape)}"
                    )


def bind_inputs(signature: Signature, request: InferenceRequest) -> dict[str, Array]:
    """The request's inputs as arrays by name; numeric ones share memory with the request.

    Raises `InvalidRequest` for the first thing that does not fit.
    """
    specs = signature.input_by_name
    tensors = request.inputs
    if len(tensors) != len(specs):
        _reject_input_count(signature, request)
    arrays: dict[str, Array] = {}
    batch = -1
    for tensor in tensors:
        name = tensor.name
        if name in arrays:
            raise InvalidRequest(f"input '{name}' already exists in request")
        spec = specs.get(name)
        if spec is None:
            raise InvalidRequest(f"unexpected inference input '{name}' for model '{request.model_name}'")
        if tensor.datatype != spec.datatype:
            _reject_datatype(tensor, spec, request.model_name)
        if signature.max_batch_size:
            batch = _check_batch(tensor, batch, signature.max_batch_size, request.model_name)
        _check_shape(tensor, spec, signature.max_batch_size, request.model_name)
        arrays[name] = _bind(tensor, DATATYPES[spec.datatype], request.model_name)
    return arrays


def _reject_input_count(signature: Signature, request: InferenceRequest) -> None:
    names = [tensor.name for tensor in request.inputs]
    for at, name in enumerate(names):
        if name in names[:at]:
            raise InvalidRequest(f"input '{name}' already exists in request")
    missing = [name for name in signature.input_by_name if name not in names]
    got = f" Got input(s) {names}" if names else " Got no input"
    lacking = (
        f", but missing required input(s) {missing}. Please provide all required input(s)." if missing else "."
    )
    raise InvalidRequest(
        f"expected {len(signature.inputs)} inputs but got {len(names)} inputs for model "
        f"'{request.model_name}'.{got}{lacking}"
    )


def _reject_datatype(tensor: InputTensor, spec: TensorSpec, model: str) -> None:
    if tensor.datatype not in DATATYPES:
        raise InvalidRequest(
            f"inference input '{tensor.name}' data-type is '{tensor.datatype}', which is none of "
            f"{', '.join(DATATYPES)}; model '{model}' expects '{spec.datatype}'"
        )
    raise InvalidRequest(
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


def _check_shape(tensor: InputTensor, spec: TensorSpec, max_batch_size: int, model: str) -> None:
    shape = tensor.shape
    fits = len(shape) == len(spec.shape)
    if fits:
        for dim, wanted in zip(shape, spec.shape, strict=True):
            if dim < 0 or wanted not in (-1, dim):
                fits = False
                break
    if not fits:
        note = f"NOTE: max_batch_size is {max_batch_size}: the first dim is the batch." if max_batch_size else ""
        raise InvalidRequest(
            f"unexpected shape for input '{tensor.name}' for model '{model}'. "
            f"Expected {_shape_text(spec.shape)}, got {_shape_text(shape)}. {note}"
        )


def _shape_text(shape: Sequence[int]) -> str:
    return f"[{','.join(str(dim) for dim in shape)}]"


def _bind(tensor: InputTensor, datatype: DataType, model: str) -> Array:
    count = element_count(tensor.shape)
    if count > MAX_ELEMENTS:
        raise InvalidRequest(
            f"input '{tensor.name}' for model '{model}' has too many elements: shape {_shape_text(tensor.shape)}"
        )
    data = tensor.data
    if isinstance(data, np.ndarray):
        return _bind_elements(tensor, data, datatype, count, model)
    if not datatype.itemsize:
        try:
            return object_array(unpack_bytes(data, count), tensor.shape)
        except BytesFramingError as error:
            raise InvalidRequest(
                f"{error.message} for inference input '{tensor.name}' for model '{model}'"
            ) from None
    if len(data) != count * datatype.itemsize:
        raise _byte_size_error(tensor, count * datatype.itemsize, len(data), model)
    array = array_over(data, datatype, tensor.shape)
    if datatype.name == "BOOL" and count and array.view(np.uint8).max() > 1:
        raise InvalidRequest(f"input '{tensor.name}' for model '{model}' is BOOL: its bytes must be 0 or 1")
    return array


def _bind_elements(tensor: InputTensor, elements: Array, datatype: DataType, count: int, model: str) -> Array:
    if elements.size != count:
        if not datatype.itemsize:
            raise InvalidRequest(
                f"unexpected number of string elements {elements.size} for inference input '{tensor.name}' "
                f"for model '{model}', expecting {count}"
            )
        raise _byte_size_error(tensor, count * datatype.itemsize, elements.nbytes, model)
    array = elements.reshape(tensor.shape)
    array.flags.writeable = False
    return array


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
        if name not in signature.output_by_name:
            raise InvalidRequest(f"unexpected inference output '{name}' for model '{request.model_name}'")
        seen.add(name)


def bind_outputs(signature: Signature, answer: object, requested: Sequence[str], model: str) -> list[OutputTensor]:
    """The requested outputs (all when none is named), checked against the signature.

    Raises `Internal` with a text for the model's author when an output is missing or has another datatype or
    shape than declared.
    """
    if not isinstance(answer, Mapping):
        raise Internal(f"model '{model}' returned {type(answer).__name__}, expected a dict of outputs by name")
    outputs: list[OutputTensor] = []
    for spec in signature.outputs:
        if requested and spec.name not in requested:
            continue
        if spec.name not in answer:
            raise Internal(f"model '{model}' returned no output '{spec.name}', only {sorted(map(str, answer))}")
        outputs.append(_bind_output(spec, answer[spec.name], model))
    return outputs


def _bind_output(spec: TensorSpec, value: object, model: str) -> OutputTensor:
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    try:
        datatype = datatype_of(array)
    except TypeError as error:
        raise Internal(f"model '{model}' returned output '{spec.name}': {error}") from None
    if datatype != spec.datatype:
        raise Internal(
            f"model '{model}' returned output '{spec.name}' as {datatype}, its signature says {spec.datatype}"
        )
    shape = array.shape
    if len(shape) != len(spec.shape) or any(
        wanted not in (-1, dim) for dim, wanted in zip(shape, spec.shape, strict=True)
    ):
        raise Internal(
            f"model '{model}' returned output '{spec.name}' with shape {_shape_text(shape)}, its signature says "
            f"{_shape_text(spec.shape)}"
        )
    if datatype == "BYTES" and array.dtype.kind != "O":
        array = object_array(bytes_elements(array), shape)
    return OutputTensor(spec.name, datatype, array)
