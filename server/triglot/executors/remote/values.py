"""Values as JSON, with tags for types that JSON lacks: a process's settings, and the attributes of its model."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from triglot.core import types
from triglot.core.tensor import (
    DATATYPES,
    array_over,
    datatype_of,
    element_count,
    object_array,
    raw_buffer,
    unpack_bytes,
)
from triglot.model import config as model_config
from triglot.model import ray_options, scheduling, signature

_TAG = "!"
_CLASSES: Mapping[str, type] = {
    name: value
    for module in (types, scheduling, model_config, signature, ray_options)
    for name, value in vars(module).items()
    if isinstance(value, type) and is_dataclass(value)
}


def dumps(value: object) -> bytes:
    """Return the value as JSON. Raise `TypeError`, which names the type, for a value of an unknown type."""
    return _encode(_plain(value)).encode()


def loads(data: bytes) -> Any:
    """Return the value; tuples have become lists. Raise `ValueError` for JSON that `dumps` does not write."""
    return (_decode if b'"!":' in data else json.loads)(data.decode())


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    for kinds, plain in _PLAIN:
        if isinstance(value, kinds):
            return plain(value)
    known = next((kind for kind in type(value).__mro__ if _CLASSES.get(kind.__name__) is kind), None)
    if known is None:
        raise TypeError(f"a value of {type(value).__name__} cannot be passed between processes")
    named = (field.name for field in fields(known) if field.init)
    return {_TAG: known.__name__, "of": {name: _plain(getattr(value, name)) for name in named}}


def _plain_mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    if all(type(key) is str for key in value) and _TAG not in value:
        return {key: _plain(item) for key, item in value.items()}
    return {_TAG: "map", "of": [[_plain(key), _plain(item)] for key, item in value.items()]}


def _plain_array(value: Any) -> dict[str, Any]:
    array = np.asarray(value)
    data = raw_buffer(array)
    raw = base64.b64encode(data.tobytes() if isinstance(data, np.ndarray) else data).decode()
    return {_TAG: "array", "datatype": datatype_of(array), "shape": array.shape, "of": raw}


_PLAIN: Sequence[tuple[tuple[type, ...], Callable[[Any], Any]]] = (
    ((Mapping,), _plain_mapping),
    ((bytes, bytearray, memoryview), lambda value: {_TAG: "bytes", "of": base64.b64encode(value).decode()}),
    ((np.ndarray, np.generic), _plain_array),
    ((Path,), lambda value: {_TAG: "path", "of": str(value)}),
    ((Set,), lambda value: {_TAG: "set", "of": [_plain(item) for item in value]}),
    ((Sequence,), lambda value: [_plain(item) for item in value]),
)


def _array(parts: dict[str, Any]) -> np.ndarray[Any, Any]:
    raw, shape = base64.b64decode(parts["of"]), parts["shape"]
    if parts["datatype"] == "BYTES":
        return object_array(unpack_bytes(raw, element_count(shape)), shape)
    return array_over(raw, DATATYPES[parts["datatype"]].dtype, shape)


_MAKERS: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "map": lambda parts: dict(parts["of"]),
    "bytes": lambda parts: base64.b64decode(parts["of"]),
    "array": _array,
    "path": lambda parts: Path(parts["of"]),
    "set": lambda parts: frozenset(parts["of"]),
}


def _made(parts: dict[str, Any]) -> Any:
    kind = parts.get(_TAG)
    if kind is None:
        return parts
    if maker := _MAKERS.get(kind):
        return maker(parts)
    if kind not in _CLASSES:
        raise ValueError(f"expected a value of a known kind, got {kind!r}")
    return _CLASSES[kind](**parts["of"])


_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder(object_hook=_made).decode
