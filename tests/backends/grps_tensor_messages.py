"""GrpsMessages with tensors, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from triglot.backends.grps.gtensors import fill, to_array
from triglot.core.tensor import Array
from triglot.pb.grps import grps_pb2 as pb


def filled(array: Array, name: str = "x") -> pb.GenericTensor:
    tensor = pb.GenericTensor(name=name)
    fill(tensor, array)
    return pb.GenericTensor.FromString(tensor.SerializeToString())


def message(*tensors: pb.GenericTensor) -> pb.GrpsMessage:
    return pb.GrpsMessage(gtensors=pb.GenericTensorData(tensors=tensors))


def floats(name: str, shape: list[int], *values: float) -> pb.GenericTensor:
    return pb.GenericTensor(name=name, dtype=pb.DT_FLOAT32, shape=shape, flat_float32=values)


def named(reply: pb.GrpsMessage) -> dict[str, Array]:
    return {tensor.name: to_array(tensor) for tensor in reply.gtensors.tensors}


def values(arrays: Any) -> Any:
    """The arrays as lists, so that they can be compared."""
    if isinstance(arrays, dict):
        return {name: array.tolist() for name, array in arrays.items()}
    return [array.tolist() for array in arrays]


def same(first: Array, second: Array) -> None:
    assert (first.dtype, first.shape) == (second.dtype, second.shape)
    np.testing.assert_array_equal(first, second)
