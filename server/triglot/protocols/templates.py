"""Small requests that differ only in their tensors' values and the like: parsed once.

Strategy: a client sends the same message again and again with other numbers in it. The bytes between the
numbers are kept as a template; a message of the same length with the same bytes in those places can only mean
the same request, so its values are sliced out and nothing is parsed. Everything else takes the whole way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

R = TypeVar("R")

MAX_TEMPLATES = 256


@dataclass(frozen=True, slots=True)
class Variables(Generic[R]):
    """Where a message may differ from others of its kind, in the order of the bytes.

    `make` gives the request that has these bytes in the places, or None when they cannot stand there.
    """

    places: Sequence[slice]
    make: Callable[[list[bytes]], R | None]


@dataclass(frozen=True, slots=True)
class _Template(Generic[R]):
    literals: tuple[tuple[slice, bytes], ...]
    variables: Variables[R]


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
        self._by_length: dict[int, _Template[R]] = {}

    def __call__(self, data: bytes) -> R:
        """The request of `data`; raises as `decode`."""
        template = self._by_length.get(len(data))
        if template is not None and (request := _fill(template, data)) is not None:
            return request
        request = self._decode(data)
        if len(data) < self._small and (variables := self._find(data, request)) is not None:
            if len(self._by_length) >= MAX_TEMPLATES:
                self._by_length.clear()
            self._by_length[len(data)] = _Template(_literals(data, variables.places), variables)
        return request


def _fill(template: _Template[R], data: bytes) -> R | None:
    for place, literal in template.literals:
        if data[place] != literal:
            return None
    variables = template.variables
    return variables.make([data[place] for place in variables.places])


def _literals(data: bytes, places: Sequence[slice]) -> tuple[tuple[slice, bytes], ...]:
    """What stands before, between and behind the places."""
    bounds = [0, *[bound for place in places for bound in (place.start, place.stop)], len(data)]
    between = [slice(start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True)]
    return tuple((place, data[place]) for place in between if place.start < place.stop)
