"""Checks of the fields that a model's author writes: each raises a `ValueError` that names the field."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def expected(field: str, what: str, value: object) -> ValueError:
    """Return the error for a field: what was expected, and the value given."""
    return ValueError(f"{field}: expected {what}, got {value!r}")


@contextmanager
def within(field: str) -> Iterator[None]:
    """Prefix the field names in the block's errors with `field`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{field}.{error}") from None


def count(field: str, value: object, least: int = 0, most: float = math.inf) -> None:
    """Require an integer within the bounds."""
    if type(value) is not int:
        raise expected(field, "an integer", value)
    if not least <= value <= most:
        raise expected(field, f"at least {least}" if value < least else f"at most {most:g}", value)


def number(field: str, value: object, least: float, most: float, unit: str = "") -> None:
    """Require a number within the bounds."""
    if type(value) is not int and type(value) is not float:
        raise expected(field, unit or "a number", value)
    if not least <= value <= most:
        raise ValueError(f"{field}: expected {least:g} to {most:g}{unit and f' {unit}'}, got {value:g}")


def flag(field: str, value: object) -> None:
    """Require True or False."""
    if type(value) is not bool:
        raise expected(field, "True or False", value)


def name(field: str, value: object) -> None:
    """Require a non-empty string."""
    if not isinstance(value, str) or not value:
        raise expected(field, "a name", value)


def choice(field: str, value: object, choices: Collection[str]) -> None:
    """Require one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise expected(field, f"one of {', '.join(choices)}", value)


def kind(field: str, value: object, *classes: type) -> None:
    """Require an instance of one of the classes."""
    if not isinstance(value, classes):
        raise expected(field, " or ".join(allowed_class.__name__ for allowed_class in classes), value)


def items(field: str, value: Any, what: str) -> tuple[Any, ...]:
    """Return the elements of a list (any iterable but strings, bytes and mappings) as a tuple."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise expected(field, f"a list of {what}", value)
    return tuple(value)


def sizes(field: str, value: Any) -> tuple[int, ...]:
    """Return the integers of a list, each at least 1, sorted and without duplicates."""
    found = items(field, value, "integers")
    for at, size in enumerate(found):
        count(f"{field}[{at}]", size, 1)
    return tuple(sorted(set(found)))


def dims(field: str, value: Any, *, any_size: bool) -> tuple[int, ...]:
    """Return the dims of a list, each at least 1, or -1 with `any_size`."""
    found = items(field, value, "dims")
    for at, dim in enumerate(found):
        if not any_size or type(dim) is not int or dim != -1:
            count(f"{field}[{at}]", dim, 1)
    return found


def different(field: str, names: Iterable[str]) -> None:
    """Require unique names."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{field}: expected different names, got {name!r} twice")
        seen.add(name)
