"""Cache of parsed small requests by layout: everything in a message but its tensors' values.

Strategy: names, dtypes and shapes repeat from request to request, values do not. `split` separates a message's
layout from its values; a known layout builds the request from the values without parsing. A message that cannot be
split, or whose layout is new, is decoded as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Generic, TypeVar

from triglot.core.tensor import MessageBytes
from triglot.protocols.wire import LENGTH, VARINT

R = TypeVar("R")

MAX_LAYOUT_BYTES: Final = 2048
"""Longest layout that is cached, in bytes."""
MAX_LAYOUTS_BYTES: Final = 80 * 1024
"""Limit on the bytes of all layouts of one cache. What is parsed of them takes up to 25 times as many."""
LAYOUT_BYTES: Final = 64
"""Bytes that each layout counts for besides its own."""
Values = Sequence[bytes]
Make = Callable[[Values], R]
"""Builds a request from the values, in the order in which they are in the message."""
Rules = Mapping[int, "Rules | None"]
"""Fields to cut, by their one-byte tags: None for the whole value, or the rules of the submessage in it."""


def length_tag(number: int) -> int:
    """Return the tag of a length-delimited field, which is one byte for numbers below 16."""
    return number << 3 | LENGTH


class Layouts(Generic[R]):
    """Cache of layouts, first in, first out. On the event loop."""

    def __init__(self) -> None:
        self.known: dict[bytes, R] = {}
        """What is cached, by layout."""
        self._bytes = 0

    def put(self, key: bytes, layout: R) -> None:
        """Cache it, unless its key is too long."""
        if len(key) > MAX_LAYOUT_BYTES:
            return
        self.known[key] = layout
        self._bytes += LAYOUT_BYTES + len(key)
        while self._bytes > MAX_LAYOUTS_BYTES:
            oldest = next(iter(self.known))
            del self.known[oldest]
            self._bytes -= LAYOUT_BYTES + len(oldest)


class LayoutDecoder(Generic[R]):
    """A `decode` function that parses the layout of messages below `small` bytes once. On the event loop.

    `learn` returns the function that builds requests of a decoded message's layout from other values, or None if
    values determine more than themselves.
    """

    def __init__(
        self,
        decode: Callable[[MessageBytes], R],
        rules: Rules,
        learn: Callable[[bytes, R], Make[R] | None],
        small: int,
    ) -> None:
        self._decode = decode
        self._rules = rules
        self._learn = learn
        self._small = small
        self._layouts: Layouts[Make[R]] = Layouts()

    def __call__(self, data: MessageBytes) -> R:
        """Return the request of `data`; raises as `decode`."""
        if not isinstance(data, bytes) or len(data) >= self._small or (parts := split(data, self._rules)) is None:
            return self._decode(data)
        key, values = parts
        make = self._layouts.known.get(key)
        if make is not None:
            return make(values)
        request = self._decode(data)
        if (make := self._learn(data, request)) is not None:
            self._layouts.put(key, make)
        return request


def split(data: bytes, rules: Rules) -> tuple[bytes, list[bytes]] | None:
    """Return a message without the values that `rules` cut, and these values; None if it is unusual or damaged.

    Two messages with equal layouts differ in these values only.
    """
    kept: list[bytes] = []
    values: list[bytes] = []
    try:
        since = _split(data, 0, len(data), rules, kept, values, 0)
    except (IndexError, ValueError):
        return None
    kept.append(data[since:])
    return b"".join(kept), values


def _split(
    data: bytes, at: int, end: int, rules: Rules, kept: list[bytes], values: list[bytes], since: int
) -> int:
    """Append the parts of the message between `at` and `end`; returns the offset up to which all were appended."""
    while at < end:
        tag = data[at]
        kind = tag & 0x87
        if kind == LENGTH:
            size, start = data[at + 1], at + 2
            if size > 0x7F:
                size, start = long_length(data, at + 1)
            at = start + size
            if at > end:
                raise ValueError("a field extends beyond the end")
            if tag in rules:
                nested = rules[tag]
                if nested is None:
                    kept.append(data[since:start])
                    values.append(data[start:at])
                    since = at
                else:
                    since = _split(data, start, at, nested, kept, values, since)
        elif kind == VARINT:
            at += 1
            while data[at] > 0x7F:
                at += 1
            at += 1
        else:
            raise ValueError("a field of another kind")
    if at != end:
        raise ValueError("a field extends beyond the end")
    return since


def long_length(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Read a length of two to four bytes, and the offset after it. Raise `ValueError` for a longer one."""
    size = shift = 0
    for place in range(at, at + 4):
        byte = data[place]
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            return size, place + 1
        shift += 7
    raise ValueError("a long length")
