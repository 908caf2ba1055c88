"""JSON bodies with large arrays: text ⇄ arrays, exact and quick.

Strategy: a small body goes through orjson. A large one goes through simdjson, which keeps big arrays in its own
memory until they are copied out as numbers; they never become Python lists. What simdjson refuses because of
NaN and Infinity, it is given again with numbers in their place. Whatever else it refuses, or cannot give as
numbers, goes through orjson, and what that refuses through the standard parser, whose error is the client's.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np
import orjson
import simdjson

from triglot.core.errors import InvalidArgument
from triglot.core.tensor import Array, Buffer, bytes_elements, native

T = TypeVar("T")

SIMD_FROM_BYTES = 2 * 1024
"""Below this, orjson's lists cost less than simdjson's set-up."""
CHUNK = 32 * 1024
"""Elements that are printed at a time: the longest that the interpreter is held up, about a millisecond."""
MAX_WALKED = 512
"""Elements or keys that are looked at one by one; the parser searches from the start for each."""
HUGE_INTEGER = re.compile(rb"[0-9]{19}")
_BUFFER_TYPES = {"d": "f8", "i": "i8", "u": "u8"}
_TOKENS = (b"-Infinity", b"Infinity", b"NaN")
_TOKEN_VALUES = (-np.inf, np.inf, np.nan)
_STAND_INS = (
    (b"-1.7976931348623153e308", b"1.7976931348623153e308", b"-1.7976931348623151e308"),
    (b"-1.7976931348623145e308", b"1.7976931348623145e308", b"-1.7976931348623143e308"),
)
"""Two sets of numbers for the tokens. A body is parsed once with each: where the two differ, a token stood."""


def _with_stand_ins(body: bytes) -> list[bytes]:
    """The body with each set of numbers in place of its tokens; none when escapes hide where strings end."""
    if b"\\" in body:
        return []
    parts = body.split(b'"')
    return [b'"'.join(_replace_outside_strings(parts, numbers)) for numbers in _STAND_INS]


def _replace_outside_strings(parts: list[bytes], numbers: tuple[bytes, ...]) -> list[bytes]:
    replaced = list(parts)
    for at in range(0, len(parts), 2):
        for token, number in zip(_TOKENS, numbers, strict=True):
            replaced[at] = replaced[at].replace(token, number)
    return replaced


class LargeArray:
    """An array of a large body, still in the parser's own memory.

    `twin` is the same array with the other set of stand-ins, when the body has tokens.
    """

    def __init__(self, array: Any, twin: Any | None) -> None:
        self._array = array
        self._twin = twin

    @property
    def shape(self) -> tuple[int, ...]:
        """The dims by the first element of each level; whether all lists of a level are as long is not known."""
        dims: list[int] = []
        item = self._array
        while isinstance(item, simdjson.Array):
            dims.append(len(item))
            item = item[0] if dims[-1] else None
        return tuple(dims)

    def lists(self, most: int) -> int | None:
        """How many lists there are, itself among them, when those of each level are as long as its first one.

        None: they are not, or there are more than `most`. What is in the innermost ones is not looked at.
        """
        shape = self.shape
        if sum(map(math.prod, (shape[:level] for level in range(len(shape))))) > most:
            return None
        count, level = 1, [self._array]
        for size in shape[1:]:
            level = [item for one in level for item in one]
            if any(not isinstance(item, simdjson.Array) or len(item) != size for item in level):
                return None
            count += len(level)
        return count

    def numbers(self, kind: str) -> Array:
        """All elements, nesting flattened: "d" as float64, "i" as int64, "u" as uint64.

        Raises `TypeError` or `ValueError` when an element is something else.
        """
        numbers = _buffer(self._array, kind)
        if self._twin is None or kind != "d":
            return numbers  # No token stands among integers.
        places = numbers != _buffer(self._twin, kind)
        restored = numbers.copy()
        for number, value in zip(_STAND_INS[0], _TOKEN_VALUES, strict=True):
            restored[places & (numbers == float(number))] = value
        return restored


def _buffer(array: Any, kind: str) -> Array:
    return np.frombuffer(array.as_buffer(of_type=kind), _BUFFER_TYPES[kind])


def read_body(body: bytes, large_key: str | None, read: Callable[[dict[str, Any]], T]) -> T:
    """What `read` makes of the body's JSON object.

    `read` is given plain Python values, except that arrays under `large_key` may be a `LargeArray`. When that
    raises `TypeError` or `ValueError`, because it is no array of numbers after all, `read` is called again on
    plain values.

    Raises `InvalidArgument` for text that is no JSON object, and what `read` raises.
    """
    if len(body) >= SIMD_FROM_BYTES:
        try:
            return read(_object(parse_large(body, large_key)))
        except (ValueError, TypeError, RuntimeError):
            pass  # RuntimeError is simdjson's, for numbers beyond 64 bits and for depth.
    try:
        return _read_plain(body, read)
    except RecursionError:
        raise InvalidArgument("failed to parse the request JSON: nested too deep") from None


def _read_plain(body: bytes, read: Callable[[dict[str, Any]], T]) -> T:
    try:
        return read(_object(orjson.loads(body)))
    except ValueError:
        pass
    except InvalidArgument:
        # A float may stand for an integer beyond 64 bits; what was refused because of that gets its own text.
        if not HUGE_INTEGER.search(body):
            raise
    return read(_object(_parse_exactly(body)))


def parse_large(body: bytes, large_key: str | None = None) -> Any:
    """The body's values by simdjson; arrays under `large_key` are a `LargeArray`.

    Without such a key all are, except those that begin with an object. Raises `ValueError` or `RuntimeError`
    for what cannot be taken exactly.
    """
    try:
        return _plain_but(large_key, simdjson.Parser().parse(body), None)
    except ValueError:
        twins = [simdjson.Parser().parse(text) for text in _with_stand_ins(body)]
        if not twins:
            raise
        return _plain_but(large_key, *twins)


def _plain_but(large_key: str | None, value: Any, twin: Any) -> Any:
    """Python values, with a `LargeArray` for each array under `large_key`; `twin` is walked in step.

    Raises `ValueError` for what would have to be walked too long, or cannot be walked exactly. (The parser's own
    conversions are of no use: beyond 2**24 elements they write out of bounds.)
    """
    if isinstance(value, simdjson.Object):
        keys = list(islice(value.keys(), MAX_WALKED + 1))
        # An object of the parser's finds the first of equal keys, and reads a key up to its NUL.
        if len(keys) > MAX_WALKED or len(set(keys)) < len(keys) or any("\0" in key for key in keys):
            raise ValueError("keys that need the exact parser")
        return {key: _member(large_key, key, value, twin) for key in keys}
    if isinstance(value, simdjson.Array):
        if len(value) > MAX_WALKED:
            raise ValueError("a long array where none is expected")
        return [_plain_but(large_key, value[at], None if twin is None else twin[at]) for at in range(len(value))]
    if twin is not None and value != twin:
        raise ValueError("a token outside of the large arrays")
    return value


def _member(large_key: str | None, key: str, value: Any, twin: Any) -> Any:
    item, other = value[key], None if twin is None else twin[key]
    if isinstance(item, simdjson.Array) and (key == large_key or (large_key is None and not _has_objects(item))):
        return LargeArray(item, other)
    return _plain_but(large_key, item, other)


def _has_objects(array: Any) -> bool:
    return len(array) > 0 and isinstance(array[0], simdjson.Object)


def _parse_exactly(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError as error:
        raise InvalidArgument(f"failed to parse the request JSON: {error}") from None


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidArgument(f"failed to parse the request JSON: expected an object, got {type_name(value)}")
    return value


def type_name(value: object) -> str:
    """What JSON calls the type of a value."""
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
    """The elements of arbitrarily nested lists, in their order."""
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
    """A flat FP32 array of ints and floats; one beyond FP32 becomes infinite.

    Raises `OverflowError` for an int that is beyond FP64, too.
    """
    # Unlike numpy's, this conversion knows no warning that would have to be kept away, which takes longer than it.
    return np.frombuffer(array("f", values), np.float32) if values else np.empty(0, np.float32)


def print_array(array: Array) -> list[Buffer]:
    """A JSON array of the elements in row-major order, in pieces; NaN and Infinity are bare tokens.

    BYTES elements become strings. Raises `UnicodeDecodeError` for one that is not UTF-8.
    """
    flat = native(array).reshape(-1)
    if flat.size <= CHUNK:
        return [_print_chunk(flat)]
    return _joined_lists(_print_chunk(flat[at : at + CHUNK]) for at in range(0, flat.size, CHUNK))


def print_nested(array: Array) -> list[Buffer]:
    """A numeric array of at least one dim as nested JSON arrays, in pieces; NaN and Infinity are bare tokens."""
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
    """One list of the items of several, of which none is empty. Nothing is copied."""
    pieces: list[Buffer] = []
    for text in texts:
        pieces += b"," if pieces else b"[", memoryview(text)[1:-1]
    return [*pieces, b"]"]


def _print_chunk(chunk: Array) -> bytes:
    kind = chunk.dtype.kind
    if kind in "OSUT":
        return orjson.dumps([element.decode() for element in bytes_elements(chunk)])
    text = orjson.dumps(chunk, option=orjson.OPT_SERIALIZE_NUMPY)
    if kind == "f" and b"n" in text:  # Of null, which stands for NaN and Infinity.
        return json.dumps(chunk.tolist(), separators=(",", ":")).encode()
    return text
