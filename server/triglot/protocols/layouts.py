"""Small requests are parsed once for each layout: what they are besides their tensors' values.

Strategy: names, dtypes and shapes repeat from request to request, values do not. `split` cuts a message into its
layout and its values; a layout that is known makes a request of the values, and nothing is parsed. What cannot be
split, or is not known yet, is decoded as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from triglot.protocols.wire import LENGTH, VARINT

R = TypeVar("R")

MAX_LAYOUTS = 1024
MAX_LAYOUT_BYTES = 2048
"""A longer layout is not kept."""
Values = Sequence[bytes]
Make = Callable[[Values], R]
"""The request of these values, in the order of the bytes."""
Rules = Mapping[int, "Rules | None"]
"""Which fields are cut, by their tags of one byte: None for the whole value, or the rules of the message in it."""


class Layouts(Generic[R]):
    """Layouts that are known: the oldest goes when there are too many. On the loop."""

    def __init__(self) -> None:
        self._known: dict[bytes, R] = {}

    def get(self, key: bytes) -> R | None:
        """What is kept for this layout."""
        return self._known.get(key)

    def put(self, key: bytes, layout: R) -> None:
        """Keep it."""
        if len(key) > MAX_LAYOUT_BYTES:
            return
        if len(self._known) >= MAX_LAYOUTS:
            del self._known[next(iter(self._known))]
        self._known[key] = layout


class LayoutDecoder(Generic[R]):
    """`decode` for messages below `small` bytes, by their layouts. On the loop.

    `learn` gives what makes the request of other values, of a message that was decoded; None where values decide
    about more than themselves.
    """

    def __init__(
        self, decode: Callable[[bytes], R], rules: Rules, learn: Callable[[bytes, R], Make[R] | None], small: int
    ) -> None:
        self._decode = decode
        self._rules = rules
        self._learn = learn
        self._small = small
        self._layouts: Layouts[Make[R]] = Layouts()

    def __call__(self, data: bytes) -> R:
        """The request of `data`; raises as `decode`."""
        if len(data) >= self._small or (parts := split(data, self._rules)) is None:
            return self._decode(data)
        key, values = parts
        make = self._layouts.get(key)
        if make is not None:
            return make(values)
        request = self._decode(data)
        if (make := self._learn(data, request)) is not None:
            self._layouts.put(key, make)
        return request


def split(data: bytes, rules: Rules) -> tuple[bytes, list[bytes]] | None:
    """A message without the values that `rules` cut, and these values; None for one that is unusual or damaged.

    Two messages without their values are equal only if they mean the same but for the values.
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
    """Appends what the message from `at` to `end` is made of; up to which place all has been appended."""
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
    """A length of two to four bytes, and the place after it. Raises `ValueError` for a longer one."""
    size = shift = 0
    for place in range(at, at + 4):
        byte = data[place]
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            return size, place + 1
        shift += 7
    raise ValueError("a long length")
