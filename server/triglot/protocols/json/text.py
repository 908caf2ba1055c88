"""JSON bodies: text ⇄ values and arrays, exactly and fast.

Strategy: unless a body is small, its lists of numbers are cut out, and never become Python lists (`json.arrays`).
What cannot be read in this way is parsed by `fast_json`, and what that rejects by the standard parser, whose error
is sent to the client. A text whose values take long is parsed in pieces (`json.pieces`).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from triglot.core.errors import InvalidArgument
from triglot.core.fast_json import check_depth, dumps, dumps_array, loads
from triglot.core.tensor import Array, Buffer, bytes_elements, native
from triglot.protocols.json.arrays import count, parse_large
from triglot.protocols.json.limits import CONTAINER_COST, DEFAULT_LIMITS, VALUE_COST, JsonLimits
from triglot.protocols.json.pieces import HUGE_INTEGER, NOT_JSON, parse_in_pieces

T = TypeVar("T")

LARGE_FROM_BYTES = 2 * 1024
"""Below this, plain lists cost less than cutting out others."""
CHUNK = 32 * 1024
"""Elements printed at once: the longest that the GIL is held, about a millisecond."""
SMALL_BYTES = 64 * 1024
QUICK_BYTES = 4 * 1024 * 1024
QUICK_COST = 40_000 * VALUE_COST
"""A text of more bytes, or with values that cost more, is parsed in pieces."""


def read_body(
    body: bytes, large_key: str | None, read: Callable[[dict[str, Any]], T], limits: JsonLimits = DEFAULT_LIMITS
) -> T:
    """Returns what `read` makes of the body's JSON object.

    `read` gets plain Python values, except that lists of numbers under `large_key` (None: any key) may be a
    `LargeArray`. If that raises `TypeError` or `ValueError`, because it is not a list of numbers after all, `read`
    is called again with plain values.

    Raises `InvalidArgument` for text that is not a JSON object, `PayloadTooLarge` beyond `limits`, and as `read`.
    """
    limits.check_size(len(body))
    if len(body) >= LARGE_FROM_BYTES:
        try:
            values, lists = parse_large(body, limits, large_key)
            result = read(_object(values))
            for numbers in lists:
                numbers.check()
            return result
        except (ValueError, TypeError, RuntimeError):
            pass  # RuntimeError is simdjson's, for numbers beyond 64 bits and for depth.
    if not is_quick(body, limits):
        return read(_object(parse_in_pieces(body, limits)))
    try:
        return _read_plain(body, read)
    except RecursionError:
        raise InvalidArgument(f"{NOT_JSON}: nested too deep") from None


def is_quick(body: bytes, limits: JsonLimits) -> bool:
    """Whether the body's values are parsed within some 5 ms, and are certainly within the limits."""
    if len(body) <= SMALL_BYTES and len(body) * CONTAINER_COST <= limits.values:
        return True
    if len(body) > QUICK_BYTES:
        return False
    values, containers = count(b",", body) + count(b":", body), count(b"[", body) + count(b"{", body)
    cost = values * VALUE_COST + containers * CONTAINER_COST
    return cost <= min(QUICK_COST, limits.values)


def parse_plain(body: bytes, limits: JsonLimits) -> Any:
    """Returns the body's values, without arrays. Raises `ValueError`; for a long text as `parse_in_pieces`."""
    return loads(body) if is_quick(body, limits) else parse_in_pieces(body, limits)


def _read_plain(body: bytes, read: Callable[[dict[str, Any]], T]) -> T:
    try:
        return read(_object(loads(body)))
    except ValueError:
        pass
    except InvalidArgument:
        # A float may stand for an integer beyond 64 bits; parsed exactly, it gets an error of its own.
        if not HUGE_INTEGER.search(body):
            raise
    return read(_object(_parse_exactly(body)))


def _parse_exactly(body: bytes) -> Any:
    check_depth(body)
    try:
        return json.loads(body)
    except ValueError as error:
        raise InvalidArgument(f"{NOT_JSON}: {error}") from None


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidArgument(f"failed to parse the request JSON: expected an object, got {type_name(value)}")
    return value


def without_nulls(members: Mapping[str, T]) -> dict[str, T]:
    """Returns an object's members that are not null: a null field is an absent one (V2 spec 3.2)."""
    return {name: value for name, value in members.items() if value is not None}


def type_name(value: object) -> str:
    """Returns JSON's name for the type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an object" if isinstance(value, dict) else "an array"


def flatten(values: list[Any]) -> list[Any]:
    """Returns the elements of arbitrarily nested lists, in order."""
    while (types := set(map(type, values))) == {list}:
        values = list(chain.from_iterable(values))
    if list not in types:
        return values
    flat: list[Any] = []
    stack = [iter(values)]
    while stack:
        for value in stack[-1]:
            if isinstance(value, list):
                stack.append(iter(value))
                break
            flat.append(value)
        else:
            stack.pop()
    return flat


def float32_array(values: list[Any]) -> Array:
    """Returns a flat FP32 array of ints and floats; a number beyond FP32's range becomes infinite.

    Raises `OverflowError` for an int beyond FP64's range.
    """
    # Unlike numpy's, this conversion raises no warning; suppressing numpy's takes longer than converting.
    return np.frombuffer(array("f", values), np.float32) if values else np.empty(0, np.float32)


def print_array(array: Array) -> list[Buffer]:
    """Returns a JSON array of the elements in row-major order, in pieces; NaN and Infinity are bare tokens.

    BYTES elements become strings. Raises `UnicodeDecodeError` for one that is not UTF-8.
    """
    flat = native(array).reshape(-1)
    if flat.size <= CHUNK:
        return [_print_chunk(flat)]
    return _joined_lists(_print_chunk(flat[at : at + CHUNK]) for at in range(0, flat.size, CHUNK))


def print_nested(array: Array) -> list[Buffer]:
    """Returns a numeric array of at least one dim as nested JSON arrays, in pieces, with bare NaN and Infinity."""
    if array.ndim == 1:
        return print_array(array)
    items = max(1, CHUNK // max(1, array[:1].size))
    if items >= len(array):
        return [_print_chunk(native(array))]
    if items > 1:
        return _joined_lists(_print_chunk(native(array[at : at + items])) for at in range(0, len(array), items))
    pieces: list[Buffer] = []
    for at in range(len(array)):
        pieces.append(b"," if at else b"[")
        pieces += print_nested(array[at])
    return [*pieces, b"]"]


def _joined_lists(texts: Iterable[bytes]) -> list[Buffer]:
    """Returns one list of the items of several non-empty ones, without copies."""
    pieces: list[Buffer] = []
    for text in texts:
        pieces += b"," if pieces else b"[", memoryview(text)[1:-1]
    return [*pieces, b"]"]


def _print_chunk(chunk: Array) -> bytes:
    kind = chunk.dtype.kind
    if kind in "OSUT":
        return dumps([element.decode() for element in bytes_elements(chunk)])
    text = dumps_array(chunk)
    if kind == "f" and b"n" in text:  # Part of null, which stands for NaN and Infinity.
        first, *parts = text.split(b"null")
        values = chunk[~np.isfinite(chunk)].tolist()
        return first + b"".join(json.dumps(one).encode() + part for one, part in zip(values, parts, strict=True))
    return text
