"""HTTP bodies of grps as JSON → `Message` (grps 2.2 to 2.4). Pure functions.

Strategy: `read_body` keeps the arrays of a large body in the parser's memory, which returns their numbers
flattened. So their nesting is proved from the text: with flat lists there are as many opening brackets as lists,
and the brackets and commas of an `ndarray` must be those of its shape. What cannot be proved is read again as
plain lists.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from typing import Any

import numpy as np

from triglot.core.errors import InvalidArgument
from triglot.core.tensor import Array
from triglot.model.grps_types import LISTS
from triglot.pb.grps import grps_pb2 as pb
from triglot.protocols.grps.codec import MAX_ENTRIES, MAX_TENSORS
from triglot.protocols.grps.generic_tensor import MAX_DIMS
from triglot.protocols.grps.json_numbers import (
    FLOAT32,
    FLOAT64,
    INT32,
    INT64,
    UINT32,
    read_bytes,
    read_float,
    read_integer,
    read_list,
    read_text,
)
from triglot.protocols.grps.message import Data, GrpsMap, GrpsTensor, Message
from triglot.protocols.json.arrays import LargeArray, all_but, count, skeleton_of
from triglot.protocols.json.dialect import type_name
from triglot.protocols.json.limits import DEFAULT_LIMITS, JsonLimits
from triglot.protocols.json.text import read_body
from triglot.protocols.wire import limit_error

_DATA = ("str_data", "gtensors", "gmap", "ndarray", "bin_data")
_ALIASES = {"flat_float16": "flat_half", "flat_float32": "flat_float", "flat_float64": "flat_double"}
"""Names of lists that only grps' documentation has (grps 2.3)."""
_MAPS: dict[str, Callable[[Any, str], Any]] = {
    "s_s": read_text,
    "s_b": read_bytes,
    "s_i32": lambda value, what: read_integer(value, INT32, what),
    "s_i64": lambda value, what: read_integer(value, INT64, what),
    "s_f": lambda value, what: read_float(value, FLOAT32, what),
    "s_d": lambda value, what: read_float(value, FLOAT64, what),
}
_DIGITS = re.compile(r"-?[0-9]+", re.ASCII)
_STRUCTURE = b"[],"
_NOT_STRUCTURE = all_but(_STRUCTURE)


def read_message(body: bytes, limits: JsonLimits = DEFAULT_LIMITS) -> Message:
    """Returns the message of a predict body. A `status` in it is ignored; `ndarray` becomes one tensor.

    Raises `InvalidArgument`, also for more or fewer than one data member; `PayloadTooLarge` beyond `limits`.
    """
    return read_body(body, None, lambda values: _message(values, body), limits)


def read_model_name(body: bytes) -> str | None:
    """Returns the `str_data` of a metadata/model body, the model's name, if any. Raises `InvalidArgument`."""

    def read(values: dict[str, Any]) -> str | None:
        name = _member(values, "str_data")
        return None if name is None else read_text(name, "'str_data'")

    return read_body(body, None, read)


def _message(values: dict[str, Any], body: bytes) -> Message:
    given = [key for key in _DATA if _member(values, key) is not None]
    if not given:
        raise InvalidArgument("No legal field in json. Expected one of str_data, gtensors, gmap and ndarray.")
    if len(given) > 1:
        raise InvalidArgument(f"only one of {', '.join(_DATA)} may be set, got {' and '.join(given)}")
    key = given[0]
    if key == "bin_data":
        raise InvalidArgument("bin_data should use application/octet-stream format.")
    model = values.get("model")
    name = "" if model is None else read_text(model, "'model'")
    return Message(name, _data(key, values, body), from_ndarray=key == "ndarray")


def _data(key: str, values: dict[str, Any], body: bytes) -> Data:
    value = _member(values, key)
    if key == "str_data":
        return read_text(value, "'str_data'")
    if key == "ndarray":
        return [_large_ndarray(value, values, body) if isinstance(value, LargeArray) else _ndarray(value)]
    owner = _object(value, f"'{key}'")
    if key == "gmap":
        return GrpsMap(**{name: _map(owner, name) for name in _MAPS})
    tensors = _tensors(owner)
    if any(isinstance(value, LargeArray) for tensor in tensors for value in tensor.values()):
        _check_flat(values, body)
    return [_tensor(tensor, at) for at, tensor in enumerate(tensors)]


def _member(owner: dict[str, Any], name: str) -> Any:
    """Returns the value under any spelling of a field's name; null counts as no value.

    Raises `InvalidArgument` if two spellings have a value.
    """
    given = [key for key in _spellings(name) if owner.get(key) is not None]
    if len(given) > 1:
        raise InvalidArgument(f"'{given[0]}' and '{given[1]}' are the same field; set only one of them")
    return owner[given[0]] if given else None


@cache
def _spellings(name: str) -> list[str]:
    names = [name, _ALIASES[name]] if name in _ALIASES else [name]
    return list(dict.fromkeys([*names, *map(_camel, names)]))


def _camel(name: str) -> str:
    head, *words = name.split("_")
    return head + "".join(map(str.capitalize, words))


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidArgument(f"{what} must be an object, got {type_name(value)}")
    return value


def _map(owner: dict[str, Any], name: str) -> dict[str, Any]:
    value = _member(owner, name)
    if value is None:
        return {}
    entries = _object(value, f"'{name}'")
    if len(entries) > MAX_ENTRIES.count:
        raise limit_error(MAX_ENTRIES)
    read = _MAPS[name]
    return {
        read_text(key, f"a key of '{name}'"): read(item, f"'{name}' of {key!r:.60}")
        for key, item in entries.items()
    }


def _tensors(owner: dict[str, Any]) -> list[dict[str, Any]]:
    tensors = _member(owner, "tensors")
    if tensors is None:
        return []
    if isinstance(tensors, LargeArray):
        # It begins with no object: an error, for which the plain list gives a better text, unless it is empty.
        if tensors.shape != (0,):
            raise TypeError("not an array of objects")
        return []
    if not isinstance(tensors, list):
        raise InvalidArgument(f"'tensors' must be an array of objects, got {type_name(tensors)}")
    if len(tensors) > MAX_TENSORS.count:
        raise limit_error(MAX_TENSORS)
    return [_object(tensor, f"tensor {at}") for at, tensor in enumerate(tensors)]


def _tensor(tensor: dict[str, Any], at: int) -> GrpsTensor:
    """Returns a tensor with the list of its dtype; other lists are ignored."""
    name = _member(tensor, "name")
    name = "" if name is None else read_text(name, f"'name' of tensor {at}")
    dtype = _dtype(_member(tensor, "dtype"), f"'dtype' of tensor {at}")
    dims = _list(tensor, "shape", UINT32, at)
    if dims.size > MAX_DIMS.count:
        raise limit_error(MAX_DIMS)
    row = LISTS.get(dtype)
    elements = np.empty(0, np.float32) if row is None else _list(tensor, row.field, row.wire, at)
    return GrpsTensor(name, dtype, tuple(dims.tolist()), elements)


def _list(tensor: dict[str, Any], name: str, dtype: np.dtype[Any], at: int) -> Array:
    values = _member(tensor, name)
    return read_list([] if values is None else values, dtype, f"'{name}' of tensor {at}")


def _dtype(value: Any, what: str) -> int:
    """Returns a DataType's number, from its name, a number or digits; an undefined number is kept."""
    if value is None:
        return pb.DT_INVALID
    if isinstance(value, str) and not _DIGITS.fullmatch(value):
        names = pb.DataType.keys()
        if value not in names:
            raise InvalidArgument(f"{what} is {value!r:.60}, expected a number or one of {', '.join(names)}")
        return pb.DataType.Value(value)
    return read_integer(value, INT32, what)


def _check_flat(values: dict[str, Any], body: bytes) -> None:
    """Raises `ValueError` if an array in the parser's memory may contain others."""
    if count(b"[", body) != sum(1 for _ in _arrays(values)):
        raise ValueError("nested lists, or brackets in strings")


def _arrays(value: Any) -> Iterator[Any]:
    """Yields all arrays in a value, except those in a `LargeArray`."""
    if isinstance(value, LargeArray):
        yield value
    elif isinstance(value, list):
        yield value
        for item in value:
            yield from _arrays(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _arrays(item)


def _large_ndarray(array: LargeArray, values: dict[str, Any], body: bytes) -> GrpsTensor:
    """Returns the tensor.

    Raises `TypeError` or `ValueError` unless all lists of a level are proved equally long.
    """
    numbers, shape = array.numbers("d"), array.shape
    if not numbers.size or numbers.size != math.prod(shape) or len(shape) > MAX_DIMS.count:
        raise ValueError("not as many numbers as the first lists promise")
    found = skeleton_of(_NOT_STRUCTURE, body)
    at = next(at for at, value in enumerate(values.values()) if value is array)
    before, behind = b"," * at, b"," * (len(values) - 1 - at)
    if not _is_plain(values, array) or len(found) != len(before) + _structure_length(shape) + len(behind):
        raise ValueError("other members have structure, or lists are not as long as the first ones")
    if found != before + _structure(shape) + behind:
        raise ValueError("lists are not as long as the first ones")
    return _float_tensor(shape, numbers)


def _is_plain(values: dict[str, Any], array: LargeArray) -> bool:
    """Whether the text of the members besides `array` has no brackets and commas."""
    for key, value in values.items():
        texts = key + value if isinstance(value, str) else key
        if value is not array and isinstance(value, dict | list | LargeArray):
            return False
        if any(chr(char) in texts for char in _STRUCTURE):
            return False
    return True


def _structure_length(shape: tuple[int, ...]) -> int:
    length = 0
    for size in reversed(shape):
        length = 2 + size * length + size - 1
    return length


def _structure(shape: tuple[int, ...]) -> bytes:
    """Returns the brackets and commas of nested lists; no dim is 0."""
    text = b""
    for size in reversed(shape):
        text = b"[" + (text + b",") * (size - 1) + text + b"]"
    return text


def _ndarray(value: Any) -> GrpsTensor:
    """Returns the tensor of nested lists of numbers, with bare NaN and Infinity, and booleans as 1 and 0."""
    items, dims = [value], []
    while any(isinstance(item, list) for item in items):
        if not all(isinstance(item, list) for item in items) or len(set(map(len, items))) > 1:
            raise InvalidArgument("'ndarray' is ragged: its lists must be of equal lengths at each level")
        dims.append(len(items[0]))
        if len(dims) > MAX_DIMS.count:
            raise limit_error(MAX_DIMS)
        items = list(chain.from_iterable(items))
    if dims == [0]:
        raise InvalidArgument("'ndarray' is empty, expected a number or nested lists of numbers")
    wrong = [item for item in items if not isinstance(item, int | float)]
    if wrong:
        raise InvalidArgument(f"'ndarray' must be nested lists of numbers, got {type_name(wrong[0])} in it")
    try:
        return _float_tensor(tuple(dims), np.array(items, np.float64))
    except OverflowError:
        raise InvalidArgument("'ndarray' has an integer out of range of float64") from None


def _float_tensor(shape: tuple[int, ...], numbers: Array) -> GrpsTensor:
    # As in numpy, a number beyond float32's range becomes infinite.
    with np.errstate(over="ignore"):
        return GrpsTensor("", pb.DT_FLOAT32, shape, numbers.astype(FLOAT32))
