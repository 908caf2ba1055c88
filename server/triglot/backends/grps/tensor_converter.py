"""The rules that the built-in converters share (grps 6.6): `gtensors` to a library's tensors, and back.

Named tensors form a dict, unnamed ones a list in their order. A result's tensors are named by its keys, or else
`output`, or `output_0`, `output_1`, …. In a batch the first dim is each request's own batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np

from triglot.backends.grps.converter import Converter
from triglot.backends.grps.gtensors import dtype_name, fill, to_array
from triglot.core.errors import Internal, InvalidArgument
from triglot.core.tensor import Array
from triglot.pb.grps import grps_pb2 as pb

Arrays = dict[str, Array] | list[Array]
BATCH_SIZE = "batch_size"
"""The key of a request's first dim in its context's user data, as in grps."""


class TensorConverter(Converter):
    """A converter for one library's tensors; stateless, so requests may share it."""

    _dtypes: ClassVar[Collection[int]]
    """DataTypes that an input may have."""
    _tensor_class: ClassVar[Any]
    """Class of a result's tensors."""

    def init(self, path: Any = None, args: Any = None) -> None:
        """Receives `converter_path` and `converter_args`, which are not used."""
        super().init(path, args)

    @abstractmethod
    def _to_tensor(self, array: Array) -> Any:
        """Return the library's tensor for an array that has memory of its own."""

    @abstractmethod
    def _to_array(self, tensor: Any) -> Array:
        """Return the values of a result's tensor, on whichever device it is."""

    def preprocess(self, inp: Any, context: Any) -> Any:
        """Return the tensors of a GrpsMessage. Raise `InvalidArgument`."""
        return _each(self._to_tensor, _decode(inp, self._dtypes))

    def postprocess(self, inp: Any, context: Any) -> Any:
        """Convert a tensor, or a list, tuple or dict of tensors, to a GrpsMessage. Raise `Internal`."""
        return _encode(self._named(inp))

    def batch_preprocess(self, inps: list[Any], contexts: list[Any]) -> Any:
        """Return the tensors of several GrpsMessages, concatenated along the first dim.

        Raise `InvalidArgument` if one of them has no batch dim, or if names, dtypes or other dims differ.
        """
        if len(inps) != len(contexts):
            raise Internal(f"expected a context for each of {len(inps)} messages, got {len(contexts)}")
        requests = []
        for at, (message, context) in enumerate(zip(inps, contexts, strict=True)):
            try:
                arrays = _decode(message, self._dtypes)
                context.put_user_data(BATCH_SIZE, _batch_size(arrays))
            except InvalidArgument as error:
                raise InvalidArgument(f"request {at + 1} of a batch of {len(inps)}: {error.message}") from None
            requests.append(arrays)
        return _each(self._to_tensor, _joined(requests))

    def batch_postprocess(self, inp: Any, contexts: list[Any]) -> list[Any]:
        """Split a result as for `postprocess` and return a GrpsMessage per context.

        Raise `Internal` if a tensor's first dim is not the sum of the requests'.
        """
        sizes = [context.get_user_data(BATCH_SIZE) for context in contexts]
        if None in sizes:
            raise Internal(f"a context has no user data {BATCH_SIZE!r}, which batch_preprocess sets")
        ends = list(accumulate(sizes))
        named = self._named(inp)
        for name, array in named.items():
            if array.ndim == 0 or len(array) != ends[-1]:
                raise Internal(
                    f"output {name!r} has the shape {list(array.shape)}; its first dim must be {ends[-1]}, "
                    f"the rows of all {len(contexts)} requests of the batch"
                )
        return [
            _encode({name: array[end - size : end] for name, array in named.items()})
            for size, end in zip(sizes, ends, strict=True)
        ]

    def _named(self, result: Any) -> dict[str, Array]:
        """Return the arrays of a result by name. Raise `Internal`."""
        named = named_parts(result, self._tensor_class)
        for name, tensor in named.items():
            if not isinstance(name, str):
                raise Internal(f"output {name!r}: expected a string as its name, got {type(name).__name__}")
            if not isinstance(tensor, self._tensor_class):
                raise Internal(f"output {name!r}: expected a tensor, got {type(tensor).__name__}")
        return {name: self._to_array(tensor) for name, tensor in named.items()}


def named_parts(result: Any, kind: Any) -> dict[Any, Any]:
    """Return the tensors of class `kind` in a result by name. Raise `Internal` for any other result."""
    if isinstance(result, kind):
        return {"output": result}
    if isinstance(result, list | tuple):
        return {f"output_{at}": tensor for at, tensor in enumerate(result)}
    if isinstance(result, dict):
        return result
    raise Internal(f"expected a tensor, or a list, tuple or dict of tensors, got {type(result).__name__}")


def _each(function: Callable[[Array], Any], arrays: Arrays) -> Any:
    if isinstance(arrays, dict):
        return {name: function(array) for name, array in arrays.items()}
    return [function(array) for array in arrays]


def _decode(message: Any, dtypes: Collection[int]) -> Arrays:
    kind = message.WhichOneof("data_oneof")
    if kind != "gtensors":
        raise InvalidArgument(f"expected gtensors, got {kind or 'no data'}")
    tensors = message.gtensors.tensors
    if not tensors:
        raise InvalidArgument("gtensors: expected at least one tensor, got none")
    names = [tensor.name for tensor in tensors]
    if not any(names):
        return [_input(f"tensor {at}", tensor, dtypes) for at, tensor in enumerate(tensors)]
    if not all(names):
        raise InvalidArgument("gtensors: expected names for all of the tensors or for none, got both")
    arrays: dict[str, Array] = {}
    for name, tensor in zip(names, tensors, strict=True):
        if name in arrays:
            raise InvalidArgument(f"gtensors: two tensors have the name {name!r}")
        arrays[name] = _input(f"tensor {name!r}", tensor, dtypes)
    return arrays


def _input(label: str, tensor: Any, dtypes: Collection[int]) -> Array:
    if tensor.dtype not in dtypes:
        expected = ", ".join(map(dtype_name, sorted(dtypes)))
        raise InvalidArgument(f"{label}: expected dtype {expected}, got {dtype_name(tensor.dtype)}")
    try:
        array = to_array(tensor)
    except ValueError as error:
        raise InvalidArgument(f"{label}: {error}") from None
    if not array.size:
        raise InvalidArgument(f"{label}: expected elements, got none (shape {list(array.shape)})")
    return array


def _encode(arrays: dict[str, Array]) -> pb.GrpsMessage:
    message = pb.GrpsMessage(gtensors=pb.GenericTensorData())
    for name, array in arrays.items():
        try:
            fill(message.gtensors.tensors.add(name=name), array)
        except ValueError as error:
            raise Internal(f"output {name!r}: {error}") from None
    return message


def _labelled(arrays: Arrays) -> dict[str, Array]:
    """Return the arrays by their names in errors."""
    pairs = arrays.items() if isinstance(arrays, dict) else enumerate(arrays)
    return {f"tensor {key!r}": array for key, array in pairs}


def _batch_size(arrays: Arrays) -> int:
    """Return the common first dim of a request's tensors. Raise `InvalidArgument`."""
    labelled = _labelled(arrays)
    for label, array in labelled.items():
        if array.ndim < 2:
            raise InvalidArgument(f"{label}: expected a batch dim and others, got the shape {list(array.shape)}")
    sizes = {label: len(array) for label, array in labelled.items()}
    if len(set(sizes.values())) > 1:
        raise InvalidArgument(f"expected the same first dim for all tensors, got {sizes}")
    return next(iter(sizes.values()))


def _joined(requests: Sequence[Arrays]) -> Arrays:
    """Return the requests' arrays, concatenated along the first dim."""
    first = requests[0]
    expected = _layout(first)
    for at, request in enumerate(requests):
        if _layout(request) != expected:
            raise InvalidArgument(
                f"request {at + 1} of a batch of {len(requests)} has different tensors than the first request: "
                f"{_described(request)}, not {_described(first)}"
            )
    keys: Any = first if isinstance(first, dict) else range(len(first))
    joined = {key: np.concatenate([request[key] for request in requests]) for key in keys}
    return joined if isinstance(first, dict) else list(joined.values())


def _layout(arrays: Arrays) -> tuple[bool, dict[str, tuple[Any, ...]]]:
    """Return the properties that must be equal in all requests of a batch."""
    labelled = _labelled(arrays)
    return isinstance(arrays, dict), {label: (array.dtype, array.shape[1:]) for label, array in labelled.items()}


def _described(arrays: Arrays) -> str:
    return ", ".join(
        f"{label} {array.dtype} [?{''.join(f',{dim}' for dim in array.shape[1:])}]"
        for label, array in _labelled(arrays).items()
    )


class TrtTensorConverter(TensorConverter):
    """Converts DT_UINT8, DT_INT8, DT_INT32 and DT_FLOAT32 to numpy arrays; results may have any dtype of grps."""

    _dtypes = frozenset({pb.DT_UINT8, pb.DT_INT8, pb.DT_INT32, pb.DT_FLOAT32})
    _tensor_class = np.ndarray

    def _to_tensor(self, array: Array) -> Array:
        """Return the array itself."""
        return array

    def _to_array(self, tensor: Array) -> Array:
        """Return the array itself."""
        return tensor
