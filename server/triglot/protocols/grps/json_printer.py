"""`Message` → JSON in the form of grps' servers (grps 2.1, 2.4). Pure functions.

Strategy: small messages have the layout of grps' Python server, one item per line. The numbers of a large array
are printed without blanks, from its memory.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

from triglot.core.errors import Internal
from triglot.core.fast_json import dumps_array
from triglot.core.tensor import Array, element_count, native
from triglot.model.grps_types import LISTS
from triglot.pb.grps import grps_pb2 as pb
from triglot.protocols.grps.generic_tensor import MAX_DIMS
from triglot.protocols.grps.json_numbers import FLOAT32, FLOAT64, INT64, float_name, float_values
from triglot.protocols.grps.message import Data, GrpsMap, GrpsTensor, Message, Status
from triglot.protocols.json.text import CHUNK, print_array, print_nested

COMPACT_FROM = 1024
"""An array with more elements is printed without blanks."""
MAX_EMPTY_LISTS = 64 * 1024
"""Most lists without numbers in an `ndarray`: a few bytes of shape could ask for billions."""
ELEMENT_TEXT = 16
"""Estimate of the text of an element, in bytes."""
_NO_NDARRAY = "No float32 tensors in output. Cannot convert to ndarray."
_TOKENS = (b"-Infinity", b"Infinity", b"NaN")


def print_message(message: Message) -> bytes:
    """Return the JSON document of a message, without a newline at its end.

    Names are protobuf's; defaults are omitted, except data members and entries of maps.
    """
    return _document(_head(message) | _data(message.data))


def print_ndarray(message: Message) -> bytes:
    """Return JSON with the message's status, and its first tensor as `ndarray`: nested lists, or a number.

    NaN and infinities are null. Raise `Internal` if there is no DT_FLOAT32 tensor, or its number of elements does
    not match its shape.
    """
    tensors = message.data
    if not isinstance(tensors, list) or not tensors or tensors[0].dtype != pb.DT_FLOAT32:
        raise Internal(_NO_NDARRAY)
    status = Message(status=message.status)
    return _document(_head(status) | {"ndarray": _nested(tensors[0])})


def answer_size(message: Message) -> int:
    """Estimate how much text printing produces, in bytes."""
    data = message.data
    if isinstance(data, list):
        return sum([tensor.elements.size for tensor in data]) * ELEMENT_TEXT
    if isinstance(data, GrpsMap):
        texts = sum(map(len, data.s_s.values())) + sum(map(len, data.s_b.values()))
        return texts + sum(map(len, _maps(data).values())) * ELEMENT_TEXT
    return len(data) if isinstance(data, str | bytes) else 0


def _head(message: Message) -> dict[str, Any]:
    head: dict[str, Any] = {}
    if message.status is not None:
        head["status"] = _status(message.status)
    if message.model:
        head["model"] = message.model
    return head


def _status(status: Status) -> dict[str, Any]:
    return _set(
        {"code": status.code, "msg": status.msg, "status": _enum_value(pb.Status.StatusFlag, status.status)}
    )


def _set(members: dict[str, Any]) -> dict[str, Any]:
    """Return the members that are not defaults."""
    return {key: value for key, value in members.items() if value}


def _enum_value(enum: Any, number: int) -> str | int:
    """Return an enum value's name, or the number of an unknown one; 0 for 0, the default."""
    return enum.Name(number) if number and number in enum.values() else number


def _data(data: Data) -> dict[str, Any]:
    if data is None:
        return {}
    if isinstance(data, str):
        return {"str_data": data}
    if isinstance(data, bytes):
        return {"bin_data": _base64(data)}
    if isinstance(data, list):
        return {"gtensors": _set({"tensors": [_tensor(tensor) for tensor in data]})}
    return {"gmap": _set(_map_values(data))} if isinstance(data, GrpsMap) else {"ndarray": {}}


def _tensor(tensor: GrpsTensor) -> dict[str, Any]:
    members: dict[str, Any] = {
        "name": tensor.name,
        "dtype": _enum_value(pb.DataType, tensor.dtype),
        "shape": list(tensor.shape),
    }
    row = LISTS.get(tensor.dtype)
    if row is not None:
        members[row.field] = _list_values(tensor.elements.astype(row.wire, copy=False).reshape(-1))
    return _set(members)


def _list_values(elements: Array) -> list[Any] | bytes:
    """Return the elements for JSON; the printed text if there are many."""
    if elements.size > COMPACT_FROM:
        return _compact(elements)
    if elements.dtype.kind == "f":
        return float_values(elements)
    values: list[Any] = elements.tolist()
    return list(map(str, values)) if elements.dtype == INT64 else values


def _compact(elements: Array) -> bytes:
    chunks = [elements[at : at + CHUNK] for at in range(0, elements.size, CHUNK)]
    return b"[" + b",".join(map(_chunk_text, chunks)) + b"]"


def _chunk_text(chunk: Array) -> bytes:
    """Return the elements' text, separated by commas."""
    if chunk.dtype.kind == "O":
        return json.dumps(chunk.tolist(), separators=(",", ":"))[1:-1].encode()
    non_finite = np.flatnonzero(~np.isfinite(chunk))
    if non_finite.size:
        texts = dumps_array(native(chunk))[1:-1].split(b",")
        for at in non_finite:
            texts[at] = b'"%b"' % float_name(float(chunk[at])).encode()
        return b",".join(texts)
    text = b"".join(print_array(chunk))[1:-1]
    return b'"' + text.replace(b",", b'","') + b'"' if chunk.dtype == INT64 else text


def _maps(data: GrpsMap) -> dict[str, dict[str, Any]]:
    return {name: getattr(data, name) for name in ("s_s", "s_b", "s_i32", "s_i64", "s_f", "s_d")}


def _map_values(data: GrpsMap) -> dict[str, dict[str, Any]]:
    return _maps(data) | {
        "s_b": {key: _base64(value) for key, value in data.s_b.items()},
        "s_i64": {key: str(value) for key, value in data.s_i64.items()},
        "s_f": _float_map(data.s_f, FLOAT32),
        "s_d": _float_map(data.s_d, FLOAT64),
    }


def _float_map(entries: dict[str, float], dtype: np.dtype[Any]) -> dict[str, float | str]:
    with np.errstate(over="ignore"):
        numbers = np.array(list(entries.values()), np.float64).astype(dtype)
    return dict(zip(entries, float_values(numbers), strict=True))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _nested(tensor: GrpsTensor) -> list[Any] | float | bytes | None:
    """Return the elements nested as the shape says; the printed text if there are many."""
    shape = tensor.shape
    if len(shape) > MAX_DIMS.count:
        raise Internal(f"the output's shape has {len(shape)} dims, the limit for an ndarray is {MAX_DIMS.count}")
    count = element_count(shape)
    if tensor.elements.size != count:
        raise Internal(
            f"the output has {tensor.elements.size} elements, expected {count} for shape {list(shape)}: cannot "
            "convert to ndarray"
        )
    if 0 in shape:
        # The dims after the first 0 are not visible in nested lists.
        shape = shape[: shape.index(0) + 1]
        if element_count(shape[:-1]) > MAX_EMPTY_LISTS:
            raise Internal(
                f"the output's shape {list(tensor.shape)} requires more than {MAX_EMPTY_LISTS} empty lists"
            )
    array = tensor.elements.astype(FLOAT32, copy=False).astype(FLOAT64).reshape(shape)
    if array.size <= COMPACT_FROM:
        items = array.astype(object)
        items[~np.isfinite(array)] = None
        values: list[Any] | float | None = items.tolist()
        return values
    text = b"".join(print_nested(array))
    if not np.isfinite(array).all():
        for token in _TOKENS:
            text = text.replace(token, b"null")
    return text


def _document(members: dict[str, Any]) -> bytes:
    pieces: list[str | bytes] = []
    _print(members, "\n ", pieces)
    return b"".join([piece if isinstance(piece, bytes) else piece.encode() for piece in pieces])


def _print(value: Any, line: str, pieces: list[str | bytes]) -> None:
    """Append the text of a value; bytes are printed already. `line` precedes each of its items."""
    if isinstance(value, bytes):
        pieces.append(value)
        return
    if not value or not isinstance(value, dict | list):
        pieces.append(json.dumps(value))
        return
    items = list(value.values()) if isinstance(value, dict) else value
    if not any(isinstance(item, dict | list | bytes) for item in items):
        text = json.dumps(value, separators=("," + line, ": "))
        pieces.append(text[0] + line + text[1:-1] + line[:-1] + text[-1])
        return
    heads = [json.dumps(key) + ": " for key in value] if isinstance(value, dict) else [""] * len(items)
    start, end = "{}" if isinstance(value, dict) else "[]"
    for head, item in zip(heads, items, strict=True):
        pieces.append(start + line + head)
        _print(item, line + " ", pieces)
        start = ","
    pieces.append(line[:-1] + end)
