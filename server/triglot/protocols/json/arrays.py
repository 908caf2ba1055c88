"""Lists of numbers in JSON texts: cut out of the text, and read as arrays without ever being Python lists.

Strategy: after a member's name, a list without strings and objects ends with the last bracket before the next
brace or quote. Such lists are cut out. The rest is small, and the standard parser reads it, with a marker in place
of each list. A list itself is parsed by simdjson where it is installed, in pieces if it is long, which flattens
its numbers: it makes no Python number of a number, and takes half the time. These parsers decide what is valid
JSON; what does not match the expectation, or what one of the two would read in another way, is left for the caller
to read otherwise.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from array import array
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from triglot.core.fast_json import check_depth, loads
from triglot.core.tensor import Array
from triglot.protocols.json.dialect import NUMBER_COST, JsonLimits

MAX_AT_ONCE = 512 * 1024
PIECE = 128 * 1024
"""Longest list that is parsed at once, some 3 ms, and the pieces of a longer one, which fit the cache; in bytes.

The standard parser, which is used if there are NaN or Infinity, takes 5 ms for a piece.
"""
MAX_STRINGS = 512
MAX_REST = 64 * 1024
"""Most strings in a text, and its longest rest without lists of numbers in bytes; beyond, nothing is cut out."""
COUNT_BYTES = 256 * 1024
MAX_RANK = 64
"""Most levels of lists; as many bytes are read at the ends of a list to see whether it only wraps one list."""
_STRING = re.compile(rb'"([^"\\]*(?:\\.[^"\\]*)*)"', re.DOTALL)
_MEMBER_LIST = re.compile(rb"[ \t\r\n]{0,64}:[ \t\r\n]{0,64}\[")
_MARKER = f"list-{secrets.token_hex(8)}-"


try:
    import simdjson
except ImportError:
    HAS_SIMDJSON = False  # Its wheels end with Python 3.13: it is an extra.
else:
    HAS_SIMDJSON = True

_DTYPES = {"d": "f8", "i": "i8", "u": "u8"}
_TYPE_CODES = {"d": "d", "i": "q", "u": "Q"}
_LONG_INTEGER = re.compile(rb"(?<=[\[,\s])-?[0-9]{19,}(?=[\],\s])")


def parse_lists(text: bytes) -> Any:
    """Return the lists of a text that begins with "[", and has neither strings nor objects.

    Raise `ValueError` or `RuntimeError` for a text that has to be read otherwise.
    """
    return simdjson.Parser().parse(text) if HAS_SIMDJSON else loads(text)


def numbers_of(lists: Any, kind: str, text: bytes) -> Array:
    """Return all numbers of lists, flattened: "d" as float64, "i" as int64, "u" as uint64; `text` is the source.

    Raise `ValueError` or `TypeError` for items that have to be read otherwise.
    """
    if not isinstance(lists, list):
        return np.frombuffer(lists.as_buffer(of_type=kind), _DTYPES[kind])
    if b"u" in text or b"l" in text:
        raise TypeError("true and false are no numbers")
    try:
        numbers = np.frombuffer(_flat(lists, _TYPE_CODES[kind]), _DTYPES[kind])
    except OverflowError as error:
        raise ValueError(str(error)) from None
    # Integers beyond 64 bits became floats.
    if kind == "d" and numbers.size and np.abs(numbers).max() >= 2.0**63:
        for digits in _LONG_INTEGER.findall(text):
            if not -(2**63) <= int(digits) < 2**64:
                raise ValueError("an integer beyond 64 bits")
    return numbers


def _flat(items: list[Any], type_code: str) -> array[Any]:
    """Return the numbers in lists, and beside lists, in order. Raise as `array`."""
    while True:
        try:
            return array(type_code, items)
        except TypeError:
            types = set(map(type, items))
            if list not in types:
                raise
        if len(types) > 1:
            items = [item if isinstance(item, list) else [item] for item in items]
        items = list(chain.from_iterable(items))


class LargeArray:
    """A list of numbers, nested or not: a text's bytes from `start` to `stop`, parsed when its numbers are read.

    All methods raise `ValueError`, `TypeError` or `RuntimeError` for a list that has to be read otherwise.
    """

    __slots__ = ("_is_json", "_place", "_size")

    def __init__(self, text: bytes, start: int, stop: int) -> None:
        self._place = text, start, stop
        self._is_json = False
        self._size: int | None = None
        """Number of elements, once it is known."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The dims, if all lists of a level are equally long; those of a list without numbers are not known.

        Strategy: what is left of the text without all bytes but brackets and commas, its *skeleton*, has to be
        that of a regular list whose dims are those of the first list of each level.
        """
        rank = self._single()
        text, start, stop = self._place
        if rank is not None:
            size = self.commas() + 1 if self._size is None else self._size
            if size == 1 and not text[start:stop].strip(b"[] \t\r\n"):
                size = 0
            return (1,) * (rank - 1) + (size,)
        if text.startswith(b"[" * (MAX_RANK + 1), start):
            raise ValueError("nested too deep")  # Checked first, to save reading the whole text.
        skeleton = _skeleton(*self._place)
        shape = _shape_of(skeleton)
        if skeleton != _skeleton_of(shape):
            raise ValueError("lists of unequal lengths")
        return shape

    def _single(self) -> int | None:
        """Return how many lists there are if each contains only the next one, else None."""
        text, start, stop = self._place
        beginning = text[start : start + MAX_RANK]
        brackets = len(beginning) - len(beginning.lstrip(b"[ \t\r\n"))
        rank = beginning.count(b"[", 0, brackets)
        ending = text[max(start, stop - MAX_RANK) : stop]
        closed = ending.count(b"]", len(ending.rstrip(b"] \t\r\n")))
        return rank if closed == rank and text.find(b"[", start + brackets, stop) < 0 else None

    def dense(self, kind: str) -> tuple[tuple[int, ...], Array]:
        """Return the shape, and the `numbers`. Raise `ValueError` for a list without numbers, too."""
        numbers, shape = self.numbers(kind), self.shape
        if not numbers.size or numbers.size != math.prod(shape):
            raise ValueError("empty lists, or numbers beside lists")
        return shape, numbers

    def numbers(self, kind: str) -> Array:
        """Return all elements flattened: "d" as float64, "i" as int64, "u" as uint64."""
        text, start, stop = self._place
        if stop - start <= MAX_AT_ONCE:
            numbers = _numbers(kind, text[start:stop])
        else:
            numbers = np.concatenate(
                [_numbers(kind, piece)[first:last] for piece, first, last in _pieces(*self._place, self._single())]
            )
        self._is_json = True
        self._size = numbers.size
        return numbers

    def __repr__(self) -> str:
        """Return the list's text for an error; only its beginning if it is long."""
        text, start, stop = self._place
        return (
            repr(json.loads(text[start:stop]))
            if stop - start <= MAX_AT_ONCE
            else repr(text[start : start + COUNT_BYTES])
        )

    def check(self) -> None:
        """Make sure that the text is valid JSON, unless all numbers were read."""
        if not self._is_json:
            for piece, _, _ in _pieces(*self._place, self._single()):
                _parse(piece)
            self._is_json = True

    def commas(self) -> int:
        """Return the number of commas."""
        return count(b",", *self._place)


def _numbers(kind: str, text: bytes) -> Array:
    return numbers_of(_parse(text, kind), kind, text)


def _parse(text: bytes, kind: str = "d") -> Any:
    try:
        return parse_lists(text)
    except ValueError:
        if not _has_token(text):
            raise
        if kind != "d":
            raise TypeError("NaN and Infinity are no integers") from None
    return json.loads(text)


def _has_token(text: bytes) -> bool:
    """Whether it may contain NaN or Infinity, which `parse_lists` rejects."""
    return b"N" in text or b"I" in text


def _pieces(text: bytes, at: int, end: int, rank: int | None) -> Iterator[tuple[bytes, int | None, int | None]]:
    """Yield JSON lists that together have the elements from `at` to `end`, each with the slice that counts.

    `rank`: how many lists there are if each contains only the next one.

    Lists that are open where the text is split are opened and closed around a piece. A number added beside the
    split proves that there is an element on its other side.
    """
    depth = 0
    while at < end:
        stop = end if end - at <= PIECE else text.rfind(b",", at, at + PIECE)
        if stop < 0:
            raise ValueError("a number that is too long")
        opened, is_last = depth, stop == end
        if rank is None:
            depth += count(b"[", text, at, stop) - count(b"]", text, at, stop)
        else:
            depth = 0 if is_last else rank  # A surplus bracket elsewhere makes a piece invalid JSON.
        if depth < 0 or (depth == 0) != is_last:
            raise ValueError("brackets that do not match")
        before = b"[" * opened + b"0," if opened else b""
        behind = b"" if is_last else b",0" + b"]" * depth
        piece = b"".join([before, memoryview(text)[at:stop], behind])
        yield piece, 1 if opened else None, None if is_last else -1
        at = stop + 1


def _shape_of(skeleton: bytes) -> tuple[int, ...]:
    """Return a list's shape if it is regular; else some shape, whose skeleton differs, and is not longer."""
    beginning = skeleton[: MAX_RANK + 1]
    rank = len(beginning) - len(beginning.lstrip(b"["))
    if rank > MAX_RANK:
        raise ValueError("nested too deep")
    dims: list[int] = []
    length = 0
    """Length of the skeleton of one list of the level below."""
    for level in range(rank):
        end = skeleton.find(b"]" * (level + 1), rank)
        if end < 0:
            raise ValueError("brackets that do not match")
        level_bytes = end + level + 1 - (rank - 1 - level)
        dims.append((level_bytes - 1) // (length + 1))
        length = level_bytes
    return tuple(reversed(dims))


def _skeleton_of(shape: tuple[int, ...]) -> bytes:
    """Return the brackets and commas of nested lists of this shape, in which no dim is 0."""
    text = b""
    for size in reversed(shape):
        text = b"[" + (text + b",") * (size - 1) + text + b"]"
    return text


def _skeleton(text: bytes, start: int, stop: int) -> bytes:
    """Return the brackets and commas of a text."""
    places = range(start, stop, COUNT_BYTES)
    return b"".join([text[at : min(at + COUNT_BYTES, stop)].translate(None, _NO_STRUCTURE) for at in places])


_NO_STRUCTURE = bytes(set(range(256)) - set(b"[],"))


def count(char: bytes, text: bytes, start: int = 0, stop: int | None = None) -> int:
    """Return what `bytes.count` does, five times as fast for frequent bytes."""
    codes = np.frombuffer(text, np.uint8)[start:stop]
    return sum(
        [
            int(np.count_nonzero(codes[at : at + COUNT_BYTES] == ord(char)))
            for at in range(0, len(codes), COUNT_BYTES)
        ]
    )


def _cut_lists(text: bytes, key: str | None) -> tuple[bytes, dict[str, LargeArray]]:
    """Return the text with markers in place of its lists of numbers, and these lists by marker.

    `key`: only lists that are members of this name. Raise as `LargeArray`.
    """
    name = None if key is None else key.encode()
    parts: list[bytes] = []
    lists: dict[str, LargeArray] = {}
    at = copied = rest = strings = 0
    while (quote := text.find(b'"', at)) >= 0:
        strings += 1
        string = _STRING.match(text, quote, quote + MAX_REST)
        if string is None or strings > MAX_STRINGS:
            raise ValueError("long strings, or many")
        at = string.end()
        member = _MEMBER_LIST.match(text, at)
        if member is None or name not in (None, string[1]):
            continue
        start = member.end() - 1
        next_quote = text.find(b'"', start)
        limit = len(text) if next_quote < 0 else next_quote
        brace = text.find(b"}", start, limit)
        stop = text.rfind(b"]", start, limit if brace < 0 else brace) + 1
        if not stop or text.find(b"{", start, stop) >= 0:
            continue
        marker = f"{_MARKER}{len(lists)}"
        lists[marker] = LargeArray(text, start, stop)
        parts += text[copied:start], b'"%b"' % marker.encode()
        rest += start - copied
        if rest > MAX_REST:
            break
        at = copied = stop
    if rest + len(text) - copied > MAX_REST:
        raise ValueError("too much besides lists of numbers")
    parts.append(text[copied:])
    return b"".join(parts), lists


def parse_large(text: bytes, limits: JsonLimits, key: str | None = None) -> tuple[Any, list[LargeArray]]:
    """Return the values of a text, and its lists of numbers, which are members named `key`, or of any name.

    Callers must `check` the lists whose numbers they do not read.

    Raise as `LargeArray` for a text that has to be read otherwise, which includes repeated keys;
    `PayloadTooLarge` for too many numbers.
    """
    rest, lists = _cut_lists(text, key)
    if len(text) // 2 > limits.values:
        limits.check_cost(sum(array.commas() for array in lists.values()) * NUMBER_COST)

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = {name: lists.get(value, value) if type(value) is str else value for name, value in pairs}
        if len(values) < len(pairs):
            raise ValueError("a duplicate key")
        return values

    check_depth(rest)
    return json.loads(rest, object_pairs_hook=members), list(lists.values())
