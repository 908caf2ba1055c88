"""Whether a model serves a request, without a server's ports."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import numpy as np

from triglot.config.options import Config
from triglot.core.call import Call
from triglot.core.tensor import DATATYPES, Array, datatype_of, raw_buffer
from triglot.core.types import InferenceRequest, InputTensor
from triglot.inline import Served, roots_of
from triglot.model.signature import ModelMetadata
from triglot.server import Server

Tensors = Mapping[str, Any]
"""Tensors by name: arrays, or lists, which get the declared datatypes."""


def assert_serves(
    model: Served | Mapping[str, Served], inputs: Tensors, *outputs: Tensors, name: str = "", rtol: float = 1e-5
) -> list[dict[str, Array]]:
    """Load a model as a server does, call it once, and return its responses; close it.

    `outputs`: what the responses must have, one each, several of a decoupled model; floats may differ by
    `rtol`, relatively. Without any, the call must only succeed. `name`: which model, of several in a folder.

    Raise `AssertionError` for other responses, `ModelLoadError` if it does not load, and the `ServingError` that a
    client would get. To be called without an event loop that runs.
    """
    responses = asyncio.run(_responses(model, inputs, name))
    if outputs:
        assert len(responses) == len(outputs), f"expected {len(outputs)} responses, got {len(responses)}"
    for response, expected in zip(responses, outputs, strict=False):
        for output, values in expected.items():
            assert output in response, f"expected output {output!r}, got {', '.join(response)}"
            array = response[output]
            wanted = np.asarray(values, array.dtype) if array.dtype.kind != "O" else _as_bytes(values)
            if array.dtype.kind in "fc":
                np.testing.assert_allclose(array, wanted, rtol, err_msg=output)
            else:
                np.testing.assert_array_equal(array, wanted, err_msg=output)
    return responses


async def _responses(model: Served | Mapping[str, Served], inputs: Tensors, name: str) -> list[dict[str, Array]]:
    server = Server(list(roots_of([model])), Config(debug=True))
    try:
        if errors := await server.load():
            raise errors[0]
        metadata = _chosen({served.name: served for served in server.metadata()}, name)
        tensors = [_tensor(metadata, *pair) for pair in inputs.items()]
        request = InferenceRequest(metadata.name, inputs=tensors)
        async with aclosing(server.dataplane.infer_stream(request, Call())) as responses:
            return [{output.name: _own(output.array) for output in answer.outputs} async for answer in responses]
    finally:
        await server.stop()


def _chosen(served: Mapping[str, ModelMetadata], name: str) -> ModelMetadata:
    if not name and len(served) == 1:
        return next(iter(served.values()))
    if name not in served:
        raise ValueError(f"name: expected one of {', '.join(sorted(served))}, got {name!r}")
    return served[name]


def _tensor(metadata: ModelMetadata, name: str, values: Any) -> InputTensor:
    declared = {spec.name: spec.datatype for spec in metadata.signature.inputs}
    array = np.asarray(values) if isinstance(values, np.ndarray) or name not in declared else None
    if array is None:
        array = np.asarray(values, DATATYPES[declared[name]].dtype)
    return InputTensor(name, datatype_of(array), array.shape, bytes(raw_buffer(array)))


def _own(array: Array) -> Array:
    """Return the elements without the model's memory; BYTES as an object array of `bytes`."""
    return _as_bytes(array) if array.dtype.kind in "OSUT" else array.copy()


def _as_bytes(values: Any) -> Array:
    """Return texts as an object array of `bytes`."""
    array = np.asarray(values, object)
    flat = [item if isinstance(item, bytes) else str(item).encode() for item in array.ravel().tolist()]
    made = np.empty(len(flat), object)
    made[:] = flat
    return made.reshape(array.shape)
