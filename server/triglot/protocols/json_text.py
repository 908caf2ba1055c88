"""JSON bodies with large arrays: text ⇄ arrays, exact and quick.

Strategy: a small body goes through orjson. A large one goes through simdjson, which keeps big arrays in its own
memory until they are copied out as numbers; they never become Python lists. Both refuse what the standard
parser accepts beyond RFC 8259 (the tokens NaN and Infinity, huge integers, lone surrogates), so whatever they
refuse is parsed again: a large body with NaN and Infinity put into numbers, and at last by the standard parser,
whose word is final and whose error is the client's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import orjson
import simdjson

from triglot.core.errors import InvalidArgument
from triglot.core.tensor import Array, bytes_elements

T = TypeVar("T")

SIMD_FROM_BYTES = 2 * 1024
"""Below this, orjson's lists cost less than simdjson's set-up."""
CHUNK = 32 * 1024
"""Elements that are printed at a time: the longest that the interpreter is held up, about a millisecond."""
_BUFFER_TYPES = {"d": "f8", "i": "i8", "u": "u8"}


class _StandIns:
    """NaN and Infinity as numbers that no honest body holds, and back; both ways are counted, and must agree."""

    _TOKENS = (
        (b"-Infinity", b"-1.7976931348623153e308", -np.inf),
        (b"Infinity", b"1.7976931348623153e308", np.inf),
        (b"NaN", b"-1.7976931348623151e308", np.nan),
    )

    def __init__(self) -> None:
        self.put_in = 0
        self.taken_out = 0

    def put(self, body: bytes) -> bytes | None:
        """The body with numbers for tokens; None when there is no token, or escapes hide where strings end."""
        if b"\\" in body:
            return None
        parts = body.split(b'"')
        for at in range(0, len(parts), 2):  # The parts outside of strings.
            for token, stand_in, _ in self._TOKENS:
                if count := parts[at].count(token):
                    self.put_in += count
                    parts[at] = parts[at].replace(token, stand_in)
        return b'"'.join(parts) if self.put_in else None

    def take(self, numbers: Array) -> Array:
        """The numbers with NaN and Infinity back in their places."""
        restored = numbers.copy()
        for _, stand_in, value in self._TOKENS:
            places = numbers == float(stand_in)
            self.taken_out += int(np.count_nonzero(places))
            restored[places] = value
        return restored


class LargeArray:
    """An array of a large body, still in the parser's own memory."""

    def __init__(self, array: Any, stand_ins: _StandIns | None) -> None:
        self._array = array
        self._stand_ins = stand_ins

    def numbers(self, kind: str) -> Array:
        """All elements, nesting flattened: "d" as float64, "i" as int64, "u" as uint64.

        Raises `TypeError` or `ValueError` when an element is something else.
        """
        numbers: Array = np.frombuffer(self._array.as_buffer(of_type=kind), _BUFFER_TYPES[kind])
        return numbers if self._stand_ins is None or kind != "d" else self._stand_ins.take(numbers)

    def plain(self) -> list[Any]:
        """The array as nested lists."""
        values: list[Any] = self._array.as_list()
        return values


def read_body(body: bytes, large_key: str, read: Callable[[dict[str, Any]], T]) -> T:
    """What `read` makes of the body's JSON object.

    `read` is given plain Python values, except that arrays under `large_key` may be a `LargeArray`. It is
    called again on plain values when it raises anything on those, so an error always comes from the exact
    parser.

    Raises `InvalidArgument` for text that is no JSON object, and what `read` raises.
    """
    if len(body) < SIMD_FROM_BYTES:
        try:
            return read(_object(orjson.loads(body)))
        except (ValueError, InvalidArgument):
            return read(_object(_parse_exactly(body)))
    for stand_ins in (None, _StandIns()):
        text = body if stand_ins is None else stand_ins.put(body)
        if text is None:
            continue
        try:
            document = simdjson.Parser().parse(text)
            result = read(_object(_plain_but(document, large_key, stand_ins)))
        except (ValueError, TypeError, InvalidArgument):
            continue
        if stand_ins is None or stand_ins.put_in == stand_ins.taken_out:
            return result
    return read(_object(_parse_exactly(body)))


def _plain_but(value: Any, large_key: str, stand_ins: _StandIns | None) -> Any:
    if isinstance(value, simdjson.Object):
        return {
            key: LargeArray(item, stand_ins)
            if key == large_key and isinstance(item, simdjson.Array)
            else _plain_but(item, large_key, stand_ins)
            for key, item in value.items()
        }
    if isinstance(value, simdjson.Array):
        return [_plain_but(item, large_key, stand_ins) for item in value]
    return value


def _parse_exactly(body: bytes) -> Any:
    try:
        return json.loads(body)
    except RecursionError:
        raise InvalidArgument("failed to parse the request JSON: nested too deep") from None
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
    if not any(isinstance(value, list) for value in values):
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


def print_array(array: Array) -> list[bytes]:
    """A JSON array of the elements in row-major order, in pieces; NaN and Infinity are bare tokens.

    BYTES elements become strings. Raises `UnicodeDecodeError` for one that is not UTF-8.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    pieces: list[bytes] = [b"["]
    for at in range(0, flat.size, CHUNK):
        chunk = flat[at : at + CHUNK]
        if at:
            pieces.append(b",")
        pieces.append(_print_chunk(chunk)[1:-1])
    pieces.append(b"]")
    return pieces


def _print_chunk(chunk: Array) -> bytes:
    if chunk.dtype.kind == "O":
        return orjson.dumps([element.decode() for element in bytes_elements(chunk)])
    if chunk.dtype.kind == "f" and not np.isfinite(chunk).all():
        return json.dumps(chunk.tolist(), separators=(",", ":")).encode()
    return orjson.dumps(chunk, option=orjson.OPT_SERIALIZE_NUMPY)
