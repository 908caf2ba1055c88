"""Converts a model's call to another model: its arrays to request tensors, and the response to arrays."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from triglot.core.call import Call, ModelCall
from triglot.core.errors import InvalidArgument
from triglot.core.tensor import Array, bytes_elements, datatype_of, native, object_array
from triglot.core.types import Answer, InferenceRequest, InferenceResponse, InputTensor

LONG_TEXTS = 4096
"""BYTES tensors with at least this many elements are converted on a thread."""


async def request_of(parent: Call, wanted: ModelCall) -> InferenceRequest:
    """Returns the request of a model's call. Raises `InvalidArgument` for values that cannot be inputs."""
    if not isinstance(wanted.inputs, Mapping):
        raise InvalidArgument(f"inputs: expected a dict of arrays by name, got {type(wanted.inputs).__name__}")
    # Inputs must not change while the other model reads them, or while its response cache digests them.
    copied = any(one.borrows for one in parent.members)
    arrays = {name: _array(name, value, copied=copied) for name, value in wanted.inputs.items()}
    texts = sum([array.size for array in arrays.values() if array.dtype.kind in "OSUT"])

    def tensors() -> list[InputTensor]:
        return [_tensor(name, array) for name, array in arrays.items()]

    return InferenceRequest(
        wanted.model,
        str(wanted.version or ""),
        wanted.request_id or parent.request_id,
        await asyncio.to_thread(tensors) if texts >= LONG_TEXTS else tensors(),
        tuple(wanted.outputs),
        dict(parent.parameters if wanted.parameters is None else wanted.parameters),
        wanted.signature_name,
    )


def _array(name: object, value: Any, *, copied: bool) -> Array:
    if not isinstance(name, str):
        raise InvalidArgument(f"inputs: expected names, got {name!r}")
    try:
        return np.array(value) if copied else np.asarray(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"input '{name}': expected an array: {error}") from None


def _tensor(name: str, array: Array) -> InputTensor:
    """Returns the array as a flat tensor: a view, unless its memory layout is not that of a client's tensor."""
    try:
        datatype = datatype_of(array)
    except TypeError as error:
        raise InvalidArgument(f"input '{name}': {error}") from None
    array = _texts(array) if datatype == "BYTES" else native(array)
    return InputTensor(name, datatype, array.shape, array.reshape(-1))


def _texts(array: Array) -> Array:
    """Returns the BYTES elements as `bytes` objects: the array itself if it holds only these."""
    if array.dtype.hasobject and all(type(item) is bytes for item in array.flat):
        return array
    return object_array(bytes_elements(array), array.shape)


def arrays_of(response: InferenceResponse) -> dict[str, Array]:
    outputs = {output.name: output.array for output in response.outputs}
    return Answer(outputs, response.parameters) if response.parameters else outputs
