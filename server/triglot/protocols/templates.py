"""Small requests that differ only in their tensors' values and the like: parsed once.

Strategy: a client sends the same message again and again with other numbers in it. The bytes between the
numbers are kept as a template; a message of the same length with the same bytes in those places can only mean
the same request, so its values are sliced out and nothing is parsed. Everything else takes the whole way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

R = TypeVar("R")

MAX_TEMPLATES = 256
MAX_OF_LENGTH = 8
"""Templates of messages of one length: as many models or clients may take turns."""
RARELY = 64
"""Beyond these, one message in so many is made a template, in place of the oldest."""


@dataclass(frozen=True, slots=True)
class Variables(Generic[R]):
    """Where a message may differ from others of its kind, in the order of the bytes.

    `make` gives the request of such a message, or None when what it has in these places cannot stand there.
    `tensors`: the places of its inputs' values, in the order of the inputs; None where there is more that differs.
    """

    places: Sequence[slice]
    make: Callable[[bytes], R | None]
    tensors: Sequence[slice] | None = None


class Template(Generic[R]):
    """What is the same in messages of one kind. `pattern` is for whoever has more to remember of them."""

    __slots__ = ("literals", "make", "pattern", "tensors")

    def __init__(self, data: bytes, variables: Variables[R]) -> None:
        self.literals = _literals(data, variables.places)
        self.make = variables.make
        self.tensors = variables.tensors
        self.pattern: Any = None


class TemplateDecoder(Generic[R]):
    """`decode`, with a memory for messages below `small` bytes. Not for use by several threads.

    `find` says what is variable in a message that was decoded, or None when there is no template in it.
    """

    def __init__(
        self, decode: Callable[[bytes], R], find: Callable[[bytes, R], Variables[R] | None], small: int
    ) -> None:
        self._decode = decode
        self._find = find
        self._small = small
        self._by_length: dict[int, list[Template[R]]] = {}
        self._count = 0
        self._unlike = 0

    def find(self, data: bytes) -> Template[R] | None:
        """The one that the message is of, if there is one."""
        for template in self._by_length.get(len(data), ()):
            for place, literal in template.literals:
                if data[place] != literal:
                    break
            else:
                return template
        return None

    def __call__(self, data: bytes) -> R:
        """The request of `data`; raises as `decode`."""
        template = self.find(data)
        if template is not None and (known := template.make(data)) is not None:
            return known
        request = self._decode(data)
        if len(data) < self._small:
            self._learn(data, request)
        return request

    def _learn(self, data: bytes, request: R) -> None:
        known = self._by_length.get(len(data), [])
        if len(known) >= MAX_OF_LENGTH:
            # Messages that differ each time are not to pay for it each time.
            self._unlike += 1
            if self._unlike % RARELY:
                return
        if (variables := self._find(data, request)) is None:
            return
        if len(known) >= MAX_OF_LENGTH:
            del known[0]
            self._count -= 1
        elif self._count >= MAX_TEMPLATES:
            self._by_length, self._count, known = {}, 0, []
        known.append(Template(data, variables))
        self._by_length[len(data)] = known
        self._count += 1


def _literals(data: bytes, places: Sequence[slice]) -> tuple[tuple[slice, bytes], ...]:
    """What stands before, between and behind the places."""
    bounds = [0, *[bound for place in places for bound in (place.start, place.stop)], len(data)]
    between = [slice(start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True)]
    return tuple((place, data[place]) for place in between if place.start < place.stop)
