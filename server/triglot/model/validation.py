"""Checks requests and responses against signatures; every protocol's requests pass here before any allocation.

The error texts are those that KServe V2 clients match (spec 1.5).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from math import prod
from types import MappingProxyType
from typing import Any, Final, NoReturn

import numpy as np

from triglot.core.compiling import mypyc_attr
from triglot.core.errors import Internal, InvalidArgument
from triglot.core.tensor import (
    DATATYPES,
    LONG_BYTES,
    Array,
    BytesFramingError,
    array_over,
    datatype_of,
    is_addressable,
    object_array,
    unpack_bytes,
)
from triglot.core.types import Answer, InferenceRequest, InputTensor, OutputTensor, ParameterValue, TensorSpec
from triglot.model.signature import Signature, TensorRule, shape_text

log = logging.getLogger(__name__)
MAX_LISTED: Final = 20
"""Limit on the signatures that an error lists."""
NO_SIGNATURES: Final[Mapping[str, Signature]] = MappingProxyType({})


@mypyc_attr(native_class=False)
class InvalidRequest(InvalidArgument):
    """Raised when a request does not fit the model's signature."""


def bind_inputs(signature: Signature, request: InferenceRequest) -> dict[str, Array]:
    """Return the request's inputs by name, as arrays of their datatype's dtype; numeric ones share its memory.

    Raise `InvalidRequest` for the first mismatch.
    """
    rules = signature.input_rules
    tensors = request.inputs
    arrays: dict[str, Array] = {}
    batch = -1
    try:
        if len(tensors) != len(rules) and not (signature.may_lack and len(tensors) < len(rules)):
            return _bind_other_count(signature, request)
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
                size = _check_shape(tensor, rule, signature.max_batch_size, request)
                shape = tensor.shape
            if not rule.plain or isinstance(data, np.ndarray):
                arrays[name] = _bind(tensor, rule.dtype, request.model_name)
            elif len(data) == size:
                dtype = rule.dtype  # An array over bytes is read-only by itself.
                arrays[name] = (
                    np.ndarray(shape, dtype, data) if type(data) is bytes else array_over(data, dtype, shape)
                )
            else:
                raise _byte_size_error(tensor, size, len(data), request.model_name)
        if len(arrays) < len(rules):
            _complete(arrays, signature, request)
    except InvalidRequest:
        if signature.any_inputs:
            return _bind_undeclared(request, signature.max_batch_size)
        raise
    return arrays


def _bind_other_count(signature: Signature, request: InferenceRequest) -> dict[str, Array]:
    """Return more or fewer inputs than are declared, for a model that accepts any."""
    if not (signature.any_tensors or signature.any_inputs):
        _reject_input_count(signature, request)
    return _bind_undeclared(request, signature.max_batch_size)


def _bind_undeclared(request: InferenceRequest, max_batch_size: int) -> dict[str, Array]:
    """Return the inputs with the datatypes and shapes of the request, for a model that accepts any inputs."""
    arrays: dict[str, Array] = {}
    batch = -1
    for tensor in request.inputs:
        if tensor.name in arrays:
            raise _name_error(tensor.name, True, request.model_name)
        if max_batch_size:
            batch = _check_batch(tensor, batch, max_batch_size, request.model_name)
        arrays[tensor.name] = bind_undeclared(tensor, request.model_name)
    return arrays


def bind_undeclared(tensor: InputTensor, model: str) -> Array:
    """Return such an input as an array of its own datatype and shape. Raise `InvalidRequest`."""
    if any(dim < 0 for dim in tensor.shape):
        raise InvalidRequest(f"input '{tensor.name}' has a dim below 0: {shape_text(tensor.shape)}")
    datatype = DATATYPES.get(tensor.datatype)
    if datatype is None:
        raise InvalidRequest(
            f"inference input '{tensor.name}' data-type is '{tensor.datatype}', which is none of "
            f"{', '.join(DATATYPES)}"
        )
    _check_addressable(tensor, datatype.dtype, model)
    return _bind(tensor, datatype.dtype, model)


def _complete(arrays: dict[str, Array], signature: Signature, request: InferenceRequest) -> None:
    """Add the defaults of omitted inputs; optional inputs stay absent."""
    for name in signature.input_rules:
        if name not in arrays:
            if name not in signature.may_lack:
                _reject_input_count(signature, request)
            if name in signature.defaults:
                arrays[name] = signature.defaults[name]


def check_shapes(signature: Signature, request: InferenceRequest) -> None:
    """Raise `InvalidRequest` for the first input whose shape differs from the declared one."""
    for tensor in request.inputs:
        rule = signature.input_rules.get(tensor.name)
        if rule is not None and not rule.fits(tensor.shape):
            raise _shape_error(tensor, rule, signature.max_batch_size, request.model_name)


def _name_error(name: str, known: bool, model: str) -> InvalidRequest:
    if known:
        return InvalidRequest(f"input '{name}' already exists in request")
    return InvalidRequest(f"unexpected inference input '{name}' for model '{model}'")


def _reject_input_count(signature: Signature, request: InferenceRequest) -> NoReturn:
    names = [tensor.name for tensor in request.inputs]
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidRequest(f"input '{name}' already exists in request")
        seen.add(name)
    missing = [name for name in signature.input_rules if name not in seen and name not in signature.may_lack]
    most = len(signature.inputs)
    least = most - len(signature.may_lack)
    expected = f"{most} inputs" if least == most else f"number of inputs between {least} and {most}"
    lacking = (
        f", but missing required input(s) {_listed(missing)}. Please provide all required input(s)."
        if missing
        else "."
    )
    raise InvalidRequest(
        f"expected {expected} but got {len(names)} inputs for model '{request.model_name}'. "
        f"Got input(s) {_listed(names)}{lacking}"
    )


def _listed(names: Sequence[str]) -> str:
    """List names as Triton does."""
    return "[" + ",".join(f"'{name}'" for name in names) + "]"


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


def _check_shape(tensor: InputTensor, rule: TensorRule, max_batch_size: int, request: InferenceRequest) -> int:
    """Return the number of bytes that the tensor must have."""
    shape = tensor.shape
    if shape == (1,) and rule.spec.shape == () and not request.lenient_shapes:
        shape = tensor.shape = ()  # Triton has no rank 0: there such an input has the dims [1].
    fits = rule.fits(shape)
    if not fits and (not request.lenient_shapes or any(dim < 0 for dim in shape)):
        raise _shape_error(tensor, rule, max_batch_size, request.model_name)
    _check_addressable(tensor, rule.dtype, request.model_name)
    return rule.remember(shape) if fits else rule.byte_size(shape)


def _check_addressable(tensor: InputTensor, dtype: np.dtype[Any], model: str) -> None:
    if not is_addressable(tensor.shape, dtype):
        raise InvalidRequest(
            f"input '{tensor.name}' for model '{model}' has too many elements: shape {shape_text(tensor.shape)}"
        )


def _shape_error(tensor: InputTensor, rule: TensorRule, max_batch_size: int, model: str) -> InvalidRequest:
    note = f"NOTE: max_batch_size is {max_batch_size}: the first dim is the batch." if max_batch_size else ""
    return InvalidRequest(
        f"unexpected shape for input '{tensor.name}' for model '{model}'. "
        f"Expected {shape_text(rule.spec.shape)}, got {shape_text(tensor.shape)}. {note}"
    )


def _bind(tensor: InputTensor, dtype: np.dtype[Any], model: str) -> Array:
    """Return the array of a tensor whose bytes, or elements, have to be checked."""
    count = prod(tensor.shape)
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
            what, _, counts = error.message.partition(", ")
            raise InvalidRequest(
                f"{what} for inference input '{tensor.name}' for model '{model}', {counts}"
            ) from None
    if len(data) != count * dtype.itemsize:
        raise _byte_size_error(tensor, count * dtype.itemsize, len(data), model)
    array = array_over(data, dtype, tensor.shape)
    if dtype.kind == "b" and count and array.view(np.uint8).max() > 1:
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


def check_requested_outputs(
    signature: Signature, request: InferenceRequest, signatures: Mapping[str, Signature] = NO_SIGNATURES
) -> None:
    """Raise `InvalidRequest` when an output is requested twice, unknown, or cannot be returned.

    No names ask for all outputs that can be, of which there must be one if there are others. `signatures` are all
    that the model has; the error says which has which outputs.
    """
    if signature.any_tensors:
        return
    seen: set[str] = set()
    requested = request.outputs or (() if signature.outputs else list(signature.unservable_outputs))
    for name in requested:
        if name in seen:
            raise InvalidRequest(f"output '{name}' already exists in request")
        if name not in signature.output_rules:
            reason = signature.unservable_outputs.get(name)
            why = _where_outputs_are(signatures) if reason is None else f", which cannot return it: {reason}"
            raise InvalidRequest(f"unexpected inference output '{name}' for model '{request.model_name}'{why}")
        seen.add(name)


def _where_outputs_are(signatures: Mapping[str, Signature]) -> str:
    if len(signatures) < 2:
        return ""
    outputs = (f"{name}: {', '.join(each.output_rules)}" for name, each in islice(signatures.items(), MAX_LISTED))
    return f"; the outputs of its signatures: {'; '.join(outputs)}"


def bind_outputs(
    signature: Signature, answer: object, requested: Sequence[str], model: str, *, lenient_shapes: bool = False
) -> list[OutputTensor]:
    """Return the requested outputs (all if none is named), checked against the signature.

    Raise `Internal` with a text for the model's author when an output is missing or has another datatype or
    shape than declared.
    """
    # `isinstance` with an abstract class is slow, so the common type is checked first.
    if type(answer) is not dict and not isinstance(answer, Mapping):
        raise Internal(f"model '{model}' returned {type(answer).__name__}, expected a dict of outputs by name")
    if signature.any_tensors:
        return _bind_undeclared_outputs(answer, requested, model)
    outputs: list[OutputTensor] = []
    for name, rule in signature.output_rules.items():
        if requested and name not in requested:
            continue
        if name not in answer:
            if isinstance(answer, Answer) and answer.partial:
                continue
            raise Internal(f"model '{model}' returned no output '{name}', only {sorted(map(str, answer))}")
        array = answer[name]
        # The fast path of `_bind_output`: most shapes are known.
        if type(array) is np.ndarray and array.dtype is rule.dtype and array.shape in rule.known_shapes:
            outputs.append(OutputTensor(name, rule.spec.datatype, array))
        else:
            outputs.append(_bind_output(rule, array, model, lenient_shapes))
    return outputs


def repeated_output(names: Sequence[str]) -> Internal:
    """Return, and log, the error for a model's response with several tensors of one name."""
    name = next(name for name in names if names.count(name) > 1)
    error = Internal(f"output '{name}': expected one tensor in the model's response, got {names.count(name)}")
    log.error("%s", error.message)
    return error


def check_parameters(values: Mapping[Any, Any], model: str) -> dict[str, ParameterValue]:
    """Return the parameters of a model's response. Raise `Internal` for a value that no protocol can carry."""
    for name, value in values.items():
        if not isinstance(name, str) or not name:
            raise Internal(f"model '{model}' returned a parameter named {name!r}, expected a string")
        fits = isinstance(value, bool | int | float | str)
        if not fits or (isinstance(value, int) and not -(1 << 63) <= value < 1 << 63):
            raise Internal(
                f"model '{model}' returned parameter '{name}' as {value!r:.60}, expected a bool, a float, a str "
                "or an int of 64 bits"
            )
    return dict(values)


def _bind_undeclared_outputs(
    answer: Mapping[str, Any], requested: Sequence[str], model: str
) -> list[OutputTensor]:
    for name in requested:
        if name not in answer:
            raise InvalidRequest(
                f"unexpected inference output '{name}' for model '{model}', which returned "
                f"{sorted(map(str, answer))}"
            )
    outputs = []
    for name in requested or answer:
        array = np.asarray(answer[name])
        try:
            outputs.append(OutputTensor(name, datatype_of(array), array))
        except TypeError as error:
            raise Internal(f"model '{model}' returned output '{name}': {error}") from None
    return outputs


def _bind_output(rule: TensorRule, value: object, model: str, lenient_shapes: bool) -> OutputTensor:
    spec = rule.spec
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    if array.dtype is not rule.dtype:
        _check_datatype(spec, array, model)
    shape = array.shape
    if shape not in rule.known_shapes:
        if rule.fits(shape):
            rule.remember(shape)
        else:
            text = (
                f"model '{model}' returned output '{spec.name}' with shape {shape_text(shape)}, its signature "
                f"says {shape_text(spec.shape)}"
            )
            if not lenient_shapes:
                raise Internal(text)
            if not rule.contradicted:
                rule.contradicted = True
                log.warning("%s; the result's shape counts", text)
    return OutputTensor(spec.name, spec.datatype, array)


def _check_datatype(spec: TensorSpec, array: Array, model: str) -> None:
    try:
        datatype = datatype_of(array)
    except TypeError as error:
        raise Internal(f"model '{model}' returned output '{spec.name}': {error}") from None
    if datatype != spec.datatype:
        wanted = DATATYPES[spec.datatype].dtype
        cast = (
            f": return it as .astype(np.{wanted.name})"
            if wanted.kind == array.dtype.kind and wanted.kind in "iuf"
            else ""
        )
        returned = f"model '{model}' returned output '{spec.name}' as {datatype}"
        raise Internal(f"{returned}, its signature says {spec.datatype}{cast}")


def takes_long(request: InferenceRequest) -> bool:
    """Return whether the inputs have too many bytes to bind BYTES elements, one by one, on the event loop."""
    return sum([len(tensor.data) for tensor in request.inputs]) > LONG_BYTES
