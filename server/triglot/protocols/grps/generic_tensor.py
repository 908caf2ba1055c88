"""GenericTensor bytes ⇄ `GrpsTensor` (grps 1). Pure functions.

Strategy: packed floats are the array's own bytes, so they are cut from the message and viewed as an array, and
joined from the array's memory when encoding. Integers and strings go through protobuf's own lists.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from triglot.core.errors import InvalidArgument
from triglot.core.tensor import Array, array_over, native
from triglot.model.grps_types import LISTS, PACKED_FLOATS, FlatList
from triglot.pb.grps import grps_pb2 as pb
from triglot.protocols.grps.message import GrpsTensor
from triglot.protocols.grps.tensors import utf8
from triglot.protocols.wire import (
    Limit,
    MessageRules,
    TooManyFields,
    length_prefix,
    limit_error,
    parse,
    scan,
    serialize,
)

FEW_FIELDS = 64
"""A tensor with more fields than this has its elements one by one, and nothing to cut."""
ELEMENT_WORK = 8
"""Cost of encoding an integer or a string, in bytes of text."""
MAX_CACHED = 256
"""Longest tensor name whose head is cached, in characters: clients may send any."""
MAX_DIMS = Limit("dims in a shape", 32)
"""numpy's own limit (before version 2)."""
_NAME, _SHAPE = 1, 3
_RULES = MessageRules(cut=frozenset(PACKED_FLOATS), varints={_SHAPE: MAX_DIMS})
_EMPTY = np.empty(0, np.float32)


def read_tensor(data: memoryview) -> GrpsTensor:
    """Return the tensor of a serialized GenericTensor; its packed floats are a view of `data`.

    Raise `InvalidArgument`.
    """
    try:
        rest, cuts = scan(data, _RULES, FEW_FIELDS)
    except TooManyFields:
        return tensor_of_message(parse(pb.GenericTensor, bytes(data)))
    lists: dict[int, list[Array]] = {}
    for number, payload in cuts:
        lists.setdefault(number, []).append(_floats(payload, PACKED_FLOATS[number].wire))
    message = parse(pb.GenericTensor, rest)
    row = LISTS.get(message.dtype)
    packed = lists.get(row.number) if row else None
    if row is None or packed is None:
        return tensor_of_message(message)
    if getattr(message, row.field):
        # Packed and unpacked values are mixed: only protobuf merges them in their order.
        return tensor_of_message(parse(pb.GenericTensor, bytes(data)))
    return _with_elements(message, packed[0] if len(packed) == 1 else np.concatenate(packed))


def _floats(payload: memoryview, dtype: np.dtype[Any]) -> Array:
    if len(payload) % dtype.itemsize:
        raise InvalidArgument(
            "the request is not a valid grps.protos.v1.GenericTensor: packed numbers of "
            f"{dtype.itemsize} bytes in {len(payload)} bytes"
        )
    return array_over(payload, dtype, (len(payload) // dtype.itemsize,))


def tensor_of_message(message: pb.GenericTensor, *, limited: bool = True) -> GrpsTensor:
    """Return the tensor of a parsed GenericTensor, with the list of its dtype.

    Raise `InvalidArgument` for more dims than `MAX_DIMS`, if `limited`.
    """
    if limited and len(message.shape) > MAX_DIMS.count:
        raise limit_error(MAX_DIMS)
    row = LISTS.get(message.dtype)
    if row is None:
        return _with_elements(message, _EMPTY)
    values: Any = getattr(message, row.field)
    if not row.wire.hasobject:
        return _with_elements(message, np.array(values, row.wire))
    texts = np.empty(len(values), object)
    texts[:] = list(values)
    return _with_elements(message, texts)


def _with_elements(message: pb.GenericTensor, elements: Array) -> GrpsTensor:
    return GrpsTensor(message.name, message.dtype, tuple(message.shape), elements)


def reading_size(data: memoryview) -> int:
    """Return how many bytes `read_tensor` parses besides packed floats. Raise `InvalidArgument`."""
    try:
        return len(scan(data, _RULES, FEW_FIELDS)[0])
    except TooManyFields:
        return len(data)


def tensor_pieces(tensor: GrpsTensor) -> tuple[Any, ...]:
    """Return a serialized GenericTensor as two pieces to join; the second is the memory of floats.

    Raise `InvalidArgument` for a string that UTF-8 cannot encode.
    """
    row = LISTS.get(tensor.dtype)
    if row is None or not tensor.elements.size:
        return _head(tensor.name, tensor.dtype, tensor.shape, 0), b""
    if row.number not in PACKED_FLOATS:
        return _head(tensor.name, tensor.dtype, tensor.shape, 0), _elements(tensor.elements, row)
    floats = native(tensor.elements if tensor.elements.dtype is row.wire else tensor.elements.astype(row.wire))
    return _head(tensor.name, tensor.dtype, tensor.shape, floats.nbytes), floats


def _elements(elements: Array, row: FlatList) -> bytes:
    lists: dict[str, Any] = {row.field: elements.tolist()}
    try:
        return serialize(pb.GenericTensor(**lists))
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{row.field} has a string that is not Unicode text: {error}") from None


def _head(name: str, dtype: int, shape: tuple[int, ...], float_bytes: int) -> bytes:
    """Return what `tensor_head` does, cached unless the name is very long."""
    return (_cached_head if len(name) <= MAX_CACHED else tensor_head)(name, dtype, shape, float_bytes)


def tensor_head(name: str, dtype: int, shape: tuple[int, ...], float_bytes: int) -> bytes:
    """Return all of a tensor but its elements, with the prefix of packed floats."""
    encoded_name = utf8(name, "a tensor's name")
    pieces = [length_prefix(_NAME, len(encoded_name)), encoded_name] if encoded_name else []
    pieces.append(serialize(pb.GenericTensor(dtype=dtype, shape=shape)))  # type: ignore[arg-type]  # Any number.
    if float_bytes:
        pieces.append(length_prefix(LISTS[dtype].number, float_bytes))
    return b"".join(pieces)


_cached_head = lru_cache(maxsize=1024)(tensor_head)


def writing_size(tensor: GrpsTensor) -> int:
    """Estimates what `tensor_pieces` encodes element by element, in bytes of text."""
    row = LISTS.get(tensor.dtype)
    return 0 if row is None or row.number in PACKED_FLOATS else tensor.elements.size * ELEMENT_WORK
