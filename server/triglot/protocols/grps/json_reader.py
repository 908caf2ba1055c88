"""HTTP bodies of grps as JSON → `Message` (grps 2.2 to 2.4). Pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
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
from triglot.protocols.json.arrays import LargeArray
from triglot.protocols.json.dialect import DEFAULT_LIMITS, JsonLimits, type_name
from triglot.protocols.json.text import dense, read_body
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


def read_message(body: bytes, limits: JsonLimits = DEFAULT_LIMITS) -> Message:
    """Return the message of a predict body. A `status` in it is ignored; `ndarray` becomes one tensor.

    Raise `InvalidArgument`, also for more or fewer than one data member; `PayloadTooLarge` beyond `limits`.
    """
    return read_body(body, None, _message, limits)


def read_model_name(body: bytes) -> str | None:
    """Return the `str_data` of a metadata/model body, the model's name, if any. Raise `InvalidArgument`."""

    def read(values: dict[str, Any]) -> str | None:
        name = _member(values, "str_data")
        return None if name is None else read_text(name, "'str_data'")

    return read_body(body, None, read)


def _message(values: dict[str, Any]) -> Message:
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
    return Message(name, _data(key, values), from_ndarray=key == "ndarray")


def _data(key: str, values: dict[str, Any]) -> Data:
    value = _member(values, key)
    if key == "str_data":
        return read_text(value, "'str_data'")
    if key == "ndarray":
        return [_ndarray(value)]
    owner = _object(value, f"'{key}'")
    if key == "gmap":
        return GrpsMap(**{name: _map(owner, name) for name in _MAPS})
    return [_tensor(tensor, at) for at, tensor in enumerate(_tensors(owner))]


def _member(owner: dict[str, Any], name: str) -> Any:
    """Return the value under any spelling of a field's name; null counts as no value.

    Raise `InvalidArgument` if two spellings have a value.
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
    """Return a tensor with the list of its dtype; other lists are ignored."""
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
    """Return a DataType's number, from its name, a number or digits; an undefined number is kept."""
    if value is None:
        return pb.DT_INVALID
    if isinstance(value, str) and not _DIGITS.fullmatch(value):
        names = pb.DataType.keys()
        if value not in names:
            raise InvalidArgument(f"{what} is {value!r:.60}, expected a number or one of {', '.join(names)}")
        return pb.DataType.Value(value)
    return read_integer(value, INT32, what)


def _ndarray(value: Any) -> GrpsTensor:
    """Return the tensor of nested lists of numbers, with bare NaN and Infinity, and booleans as 1 and 0."""
    if isinstance(value, LargeArray):
        return _float_tensor(*value.dense("d"))
    try:
        dims, items = dense(value)
    except ValueError:
        raise InvalidArgument("'ndarray' is ragged: its lists must be of equal lengths at each level") from None
    if dims == (0,):
        raise InvalidArgument("'ndarray' is empty, expected a number or nested lists of numbers")
    wrong = [item for item in items if not isinstance(item, int | float)]
    if wrong:
        raise InvalidArgument(f"'ndarray' must be nested lists of numbers, got {type_name(wrong[0])} in it")
    try:
        return _float_tensor(dims, np.array(items, np.float64))
    except OverflowError:
        raise InvalidArgument("'ndarray' has an integer out of range of float64") from None


def _float_tensor(shape: tuple[int, ...], numbers: Array) -> GrpsTensor:
    if len(shape) > MAX_DIMS.count:
        raise limit_error(MAX_DIMS)
    # As in numpy, a number beyond float32's range becomes infinite.
    with np.errstate(over="ignore"):
        return GrpsTensor("", pb.DT_FLOAT32, shape, numbers.astype(FLOAT32))
