"""Builds the inputs of warm-up requests, from a model's configuration and its examples (spec 5.6)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from triglot.core.errors import InvalidArgument
from triglot.core.tensor import (
    DATATYPES,
    Array,
    Buffer,
    BytesFramingError,
    DataType,
    datatype_of,
    element_count,
    is_addressable,
    object_array,
    unpack_bytes,
)
from triglot.core.types import InferenceRequest, InputTensor
from triglot.model.config import WarmUpInput, WarmUpRequest
from triglot.model.signature import Signature, shape_text
from triglot.model.validation import check_shapes

RANDOM_BELOW = 128
"""Random integers are below this: they often are an index into something."""
RANDOM_TEXT_LENGTH = 8


# --- of a configured request ---


def configured_inputs(
    request: WarmUpRequest, model: str, signature: Signature, max_batch_size: int
) -> list[InputTensor]:
    """Return the tensors of a configured request, with the batch dim if the model has one.

    A file holds the elements of one row, which are repeated, or those of the whole batch.
    Raise `InvalidArgument`, before any allocation, for a shape that does not fit the declared one.
    """
    batch, limit = max(1, request.batch_size), max(1, max_batch_size)
    if batch > limit:
        raise InvalidArgument(
            f"batch_size: expected at most {limit}, got {batch}: the model's max_batch_size is {max_batch_size}"
        )
    rows = (batch,) if max_batch_size else ()
    tensors = []
    for name, wanted in request.inputs.items():
        shape = (*rows, *wanted.dims)
        if wanted.datatype not in DATATYPES:
            raise InvalidArgument(
                f"input '{name}': datatype '{wanted.datatype}' is none of {', '.join(DATATYPES)}"
            )
        if any(dim < 0 for dim in shape):
            raise InvalidArgument(
                f"input '{name}': expected dims of at least 0, got {shape_text(wanted.dims)}: warm-up inputs need "
                "fixed dims"
            )
        if not is_addressable(shape, DATATYPES[wanted.datatype].dtype):
            raise InvalidArgument(f"input '{name}' has too many elements: shape {shape_text(shape)}")
        tensors.append(InputTensor(name, wanted.datatype, shape, b""))
    check_shapes(signature, InferenceRequest(model, inputs=tensors))
    random = np.random.default_rng(0)  # A fixed seed: a version that loads once loads every time.
    for tensor in tensors:
        tensor.data = _data(tensor, request.inputs[tensor.name], batch, random)
    return tensors


def _data(tensor: InputTensor, wanted: WarmUpInput, batch: int, random: np.random.Generator) -> Buffer | Array:
    datatype = DATATYPES[tensor.datatype]
    count = element_count(tensor.shape)
    if wanted.file is not None:
        try:
            return _from_file(wanted.file, datatype, element_count(wanted.dims), batch)
        except OSError as error:
            raise InvalidArgument(f"input '{tensor.name}': {wanted.file}: {error.strerror}") from error
        except InvalidArgument as error:
            raise InvalidArgument(f"input '{tensor.name}': {wanted.file}: {error.message}") from error
    if wanted.random:
        return _random(random, datatype.dtype, count)
    return object_array([b""] * count, (count,)) if datatype.dtype.hasobject else np.zeros(count, datatype.dtype)


def _random(random: np.random.Generator, dtype: np.dtype[Any], count: int) -> Array:
    """Return `count` values: floats from 0 to 1, integers below `RANDOM_BELOW`, or printable ASCII texts."""
    if dtype.hasobject:
        text = random.integers(ord("!"), ord("~") + 1, (count, RANDOM_TEXT_LENGTH), np.uint8).tobytes()
        ends = range(RANDOM_TEXT_LENGTH, len(text) + 1, RANDOM_TEXT_LENGTH)
        return object_array([text[end - RANDOM_TEXT_LENGTH : end] for end in ends], (count,))
    if dtype.kind in "bui" or dtype.names:
        return random.integers(0, 2 if dtype.kind == "b" else RANDOM_BELOW, count, np.uint8).astype(dtype)
    values = random.random(count, np.float64 if dtype.itemsize >= 8 else np.float32)
    return values.astype(dtype)


def _from_file(file: Path, datatype: DataType, count: int, batch: int) -> Buffer | Array:
    """Return `count` elements, `batch` times.

    Raise `InvalidArgument` when the file has more or fewer, and `OSError`.
    """
    with file.open("rb") as stream:
        if datatype.dtype.hasobject:
            elements = _elements(stream.read(), count, batch)
            return object_array(elements, (len(elements),))
        size, wanted = os.fstat(stream.fileno()).st_size, count * datatype.itemsize
        if size not in (wanted, wanted * batch):
            for_batch = f", or {wanted * batch} for the batch of {batch}" if batch > 1 else ""
            raise InvalidArgument(f"expected {wanted} bytes{for_batch}, found {size}")
        data = stream.read()
        return data if size == wanted * batch else data * batch


def _elements(data: bytes, count: int, batch: int) -> list[bytes]:
    try:
        return unpack_bytes(data, count) * batch
    except BytesFramingError:
        if batch == 1:
            raise
    return unpack_bytes(data, count * batch)


# --- of an example ---


def example_inputs(example: Mapping[str, Any], signature: Signature) -> list[InputTensor]:
    """Convert arrays, nested lists, numbers and texts to tensors of the declared datatypes, or else of their own.

    Floats may be rounded. Raise `InvalidArgument` where a conversion would lose anything else.
    """
    rules = signature.input_rules
    tensors = []
    for name, value in example.items():
        rule = rules.get(name)
        try:
            array = _array(value, "" if rule is None else rule.spec.datatype)
        except InvalidArgument as error:
            raise InvalidArgument(f"input '{name}': {error.message}") from error
        except Exception as error:  # The elements are arbitrary objects.
            raise InvalidArgument(f"input '{name}': cannot be converted to an array: {error}") from error
        tensors.append(InputTensor(name, datatype_of(array), array.shape, array))
    return tensors


def _array(value: Any, datatype: str) -> Array:
    """Return the value as an array of `datatype`, or of its own datatype if none is declared."""
    # No text arrays of numpy's own types: those drop trailing zero bytes.
    array = value if isinstance(value, np.ndarray) else np.asarray(value, object if datatype == "BYTES" else None)
    found = datatype_of(array)
    if found == "BYTES" and datatype in ("", "BYTES"):
        return _text(array if isinstance(value, np.ndarray) else np.asarray(value, object))
    if not datatype or found == datatype:
        return array.astype(DATATYPES[found].dtype, copy=False)
    if "BYTES" in (found, datatype):
        raise InvalidArgument(f"expected {datatype} values, got {array.dtype}")
    return _converted(array, datatype)


def _text(array: Array) -> Array:
    elements = []
    for element in array.ravel().tolist():
        if not isinstance(element, str | bytes):
            raise InvalidArgument(f"expected str or bytes, got {type(element).__name__}: {element!r}")
        elements.append(element.encode() if isinstance(element, str) else bytes(element))
    return object_array(elements, array.shape)


def _converted(array: Array, datatype: str) -> Array:
    """Convert the numbers to `datatype`; floats may be rounded, and nothing else may be lost."""
    dtype = DATATYPES[datatype].dtype
    if dtype.names:
        return _converted(array, datatype.removeprefix("Q")).view(dtype)
    if array.dtype.kind != "c" or dtype.kind == "c":
        with np.errstate(all="ignore"):
            converted = array.astype(dtype)
        is_integer = dtype.kind in "bui"
        if _are_integers(array, dtype) if is_integer else (np.isfinite(converted) == np.isfinite(array)).all():
            return converted
    span = f" from {array.min()} to {array.max()}" if array.size else ""
    raise InvalidArgument(f"expected {datatype} values, got {array.dtype}{span}")


def _are_integers(array: Array, dtype: np.dtype[Any]) -> bool:
    """Whether all numbers are integers in the range of `dtype`."""
    if not array.size:
        return True
    if array.dtype.kind not in "bui":
        array = array.astype(np.float64)
        if not (array == np.trunc(array)).all():
            return False
    lowest, highest = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    # Python compares its own numbers exactly, regardless of their types.
    return bool(lowest <= array.min().item() and array.max().item() <= highest)
