"""JSON bodies: text ⇄ values and arrays, exactly and fast.

Strategy: unless a body is small, its lists of numbers are cut out, and never become Python lists (`json.arrays`).
What cannot be read in this way becomes plain Python values (`json.dialect`), in pieces if they take long
(`json.pieces`).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, Final, TypeVar

import numpy as np

from triglot.core.errors import InvalidArgument, ServingError
from triglot.core.fast_json import dumps, dumps_array
from triglot.core.tensor import Array, Buffer, bytes_elements, native
from triglot.protocols.json.arrays import LargeArray, count, parse_large
from triglot.protocols.json.dialect import (
    CONTAINER_COST,
    DEFAULT_LIMITS,
    HUGE_INTEGER,
    STANDARD,
    VALUE_COST,
    Dialect,
    JsonLimits,
)
from triglot.protocols.json.pieces import parse_in_pieces

T = TypeVar("T")

LARGE_FROM_BYTES: Final = 2 * 1024
"""Below this, plain lists cost less than cutting out others."""
CHUNK: Final = 32 * 1024
"""Elements printed at once: the longest that the GIL is held, about a millisecond."""
SMALL_BYTES: Final = 64 * 1024
QUICK_BYTES: Final = 4 * 1024 * 1024
QUICK_COST: Final = 40_000 * VALUE_COST
"""A text of more bytes, or with values that cost more, is parsed in pieces."""


def read_body(
    body: bytes,
    large_key: str | None,
    read: Callable[[dict[str, Any]], T],
    limits: JsonLimits = DEFAULT_LIMITS,
    dialect: Dialect = STANDARD,
) -> T:
    """Return what `read` makes of the body's JSON object.

    `read` gets plain Python values, except that lists of numbers under `large_key` (None: any key) may be a
    `LargeArray`. If that raises `TypeError` or `ValueError`, because it is not a list of numbers after all, `read`
    is called again with plain values.

    Raise `InvalidArgument` for text that is not a JSON object, `PayloadTooLarge` beyond `limits`, and as `read`.
    """
    limits.check_size(len(body))
    if len(body) >= LARGE_FROM_BYTES:
        try:
            return _read_large(body, large_key, read, limits, dialect)
        except (ValueError, TypeError, RuntimeError):
            pass  # RuntimeError is simdjson's, for numbers beyond 64 bits and for depth.
    try:
        return _read_plain(body, read, limits, dialect)
    except RecursionError:
        raise dialect.too_deep() from None


def _read_plain(body: bytes, read: Callable[[dict[str, Any]], T], limits: JsonLimits, dialect: Dialect) -> T:
    try:
        return read(read_object(body, limits, dialect))
    except InvalidArgument:
        # A float may stand for an integer beyond 64 bits; parsed exactly, it gets an error of its own.
        if not (is_quick(body, limits) and HUGE_INTEGER.search(body)):
            raise
    return read(dialect.object_of(dialect.read_exactly(body)))


def _read_large(
    body: bytes,
    key: str | None,
    read: Callable[[dict[str, Any]], T],
    limits: JsonLimits,
    dialect: Dialect,
) -> T:
    values, lists = parse_large(body, limits, key)
    try:
        result = read(dialect.object_of(values))
    except ServingError as error:
        for numbers in lists:  # Errors in the JSON come before others.
            numbers.check()
        if dialect.quotes_values and isinstance(error, InvalidArgument):
            raise ValueError("plain lists are needed") from None
        raise
    for numbers in lists:
        numbers.check()
    return result


def parse(body: bytes, limits: JsonLimits, dialect: Dialect = STANDARD) -> Any:
    """Return the value of a body, in plain Python values.

    Raise `InvalidArgument`, and `PayloadTooLarge` before too many values are created.
    """
    return dialect.read(body) if is_quick(body, limits) else parse_in_pieces(body, limits, dialect)


def is_quick(body: bytes, limits: JsonLimits) -> bool:
    """Whether the body's values are parsed within some 5 ms, and are certainly within the limits."""
    if len(body) <= SMALL_BYTES and len(body) * CONTAINER_COST <= limits.values:
        return True
    if len(body) > QUICK_BYTES:
        return False
    values, containers = count(b",", body) + count(b":", body), count(b"[", body) + count(b"{", body)
    cost = values * VALUE_COST + containers * CONTAINER_COST
    return cost <= min(QUICK_COST, limits.values)


def read_object(body: bytes, limits: JsonLimits, dialect: Dialect = STANDARD) -> dict[str, Any]:
    """Return the JSON object of a body, in plain Python values. Raise as `read_body`."""
    limits.check_size(len(body))
    return dialect.object_of(parse(body, limits, dialect))


def without_nulls(members: Mapping[str, T]) -> dict[str, T]:
    """Return an object's members that are not null: a null field is an absent one (V2 spec 3.2)."""
    return {name: value for name, value in members.items() if value is not None}


def flatten(values: list[Any]) -> list[Any]:
    """Return the elements of arbitrarily nested lists, in order."""
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


def dense(value: Any) -> tuple[tuple[int, ...], list[Any]]:
    """Return the shape of nested lists, and their elements, flattened; those of any other value are () and itself.

    Raise `ValueError` unless all lists of a level are equally long.
    """
    dims: list[int] = []
    elements, types = [value], {type(value)}
    while types == {list}:
        sizes = set(map(len, elements))
        if len(sizes) > 1:
            raise ValueError("lists of unequal lengths")
        dims += sizes
        elements = list(chain.from_iterable(elements))
        types = set(map(type, elements))
    if not types.isdisjoint((list, LargeArray)):
        raise ValueError("lists beside other values")
    return tuple(dims), elements


def float32_array(values: list[Any]) -> Array:
    """Return a flat FP32 array of ints and floats; a number beyond FP32's range becomes infinite.

    Raise `OverflowError` for an int beyond FP64's range.
    """
    # Unlike numpy's, this conversion raises no warning; suppressing numpy's takes longer than converting.
    return np.frombuffer(array("f", values), np.float32) if values else np.empty(0, np.float32)


def print_array(array: Array) -> list[Buffer]:
    """Return a JSON array of the elements in row-major order, in pieces; NaN and Infinity are bare tokens.

    BYTES elements become strings. Raise `UnicodeDecodeError` for one that is not UTF-8.
    `array`: any dtype and shape.
    """
    flat = native(array).reshape(-1)
    if flat.size <= CHUNK:
        return [_print_chunk(flat)]
    return _joined_lists(_print_chunk(flat[at : at + CHUNK]) for at in range(0, flat.size, CHUNK))


def print_nested(array: Array) -> list[Buffer]:
    """Return a numeric array of at least one dim as nested JSON arrays, in pieces, with bare NaN and Infinity."""
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
    """Return one list of the items of several non-empty ones, without copies."""
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
        return first + b"".join(
            json.dumps(value).encode() + part for value, part in zip(values, parts, strict=True)
        )
    return text
