"""What a protocol reads as JSON: strict JSON, by orjson, and what its own parser takes besides.

`JsonLimits` are one budget for the JSON of a request, over all routes; checked before values are created.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from triglot.core.errors import InvalidArgument, PayloadTooLarge
from triglot.core.fast_json import check_depth, loads

HUGE_INTEGER: Final = re.compile(rb"[0-9]{19}")
_STRING: Final = re.compile(rb'"([^"\\]*+(?:\\.[^"\\]*+)*+)"(\s*+:)?', re.DOTALL)
"""A JSON string, and the colon that makes it a member's name."""


SIZE_OPTION: Final = "max_json_size"
VALUES_OPTION: Final = "max_json_values"
MAX_DEPTH: Final = 1000
"""Approximate limit on nested lists and objects: the parsers' own limits are 1,000 to 1,024."""
NUMBER_COST: Final = 1
VALUE_COST: Final = 16
CONTAINER_COST: Final = 64
"""Costs of values in the budget, by the memory that they take: a number in an array has 8 bytes.

No text costs more than `CONTAINER_COST` per byte.
"""


@dataclass(frozen=True, slots=True)
class JsonLimits:
    """Limits on one request's JSON: `size` in bytes, decompressed; `values` as `max_json_values` counts them."""

    size: int = 64 * 1024 * 1024
    values: int = 8 * 1024 * 1024

    def check_size(self, size: int) -> None:
        """Raise `PayloadTooLarge` for a text of this size."""
        if size > self.size:
            raise PayloadTooLarge(
                f"the JSON of the request has {size} bytes, the limit is {self.size} (option {SIZE_OPTION}); send "
                "large tensors as binary data"
            )

    def check_text(self, size: int) -> None:
        """Raise `PayloadTooLarge` for a string of this size, which is parsed at once."""
        if size > self.size // 4:
            raise PayloadTooLarge(
                f"a string in the JSON of the request has more than {self.size // 4} bytes, a quarter of option "
                f"{SIZE_OPTION}; send large tensors as binary data"
            )

    def check_cost(self, cost: int) -> None:
        """Raise `PayloadTooLarge` for values of this cost."""
        if cost > self.values:
            raise PayloadTooLarge(
                f"the JSON of the request has too many values, the limit is {self.values} (option "
                f"{VALUES_OPTION}: a number in a list of numbers counts {NUMBER_COST}, any other value or key "
                f"{VALUE_COST}, a list or an object {CONTAINER_COST}); send large tensors as binary data"
            )


DEFAULT_LIMITS: Final = JsonLimits()


def type_name(value: object) -> str:
    """Return JSON's name for the type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an object" if isinstance(value, dict) else "an array"


def _not_object(value: Any) -> str:
    return f"failed to parse the request JSON: expected an object, got {type_name(value)}"


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a protocol reads JSON text as Python values.

    `loads` reads nearly all texts. It raises `ValueError` for the others, which `parse` reads, or rejects with
    `ValueError` or `RecursionError`.
    """

    error: str = "failed to parse the request JSON"
    """How the text of an error begins."""
    loads: Callable[[bytes], Any] = loads
    parse: Callable[[bytes], Any] = json.loads
    not_object: Callable[[Any], str] = _not_object
    """Return the text of the error for a body that is not an object."""
    keeps_first: bool = False
    """Whether the first of equal keys counts, and not the last."""
    ignores_rest: bool = False
    """Whether text after the first value is ignored."""
    quotes_values: bool = False
    """Whether errors quote values, so that they need plain lists in place of arrays."""

    def read(self, text: bytes) -> Any:
        """Return the value of a text; an integer beyond 64 bits may be a float. Raise `InvalidArgument`."""
        try:
            return self.loads(text)
        except ValueError:
            return self.read_exactly(text)

    def read_exactly(self, text: bytes) -> Any:
        """Return the value of a text. Raise `InvalidArgument`."""
        try:
            check_depth(text)
            return self.parse(text)
        except RecursionError:
            raise self.too_deep() from None
        except ValueError as error:
            raise InvalidArgument(f"{self.error}: {error}") from None

    def object_of(self, value: Any) -> dict[str, Any]:
        """Return a body that is an object. Raise `InvalidArgument` for any other."""
        if not isinstance(value, dict):
            raise InvalidArgument(self.not_object(value))
        return value

    def too_deep(self) -> InvalidArgument:
        """Return the error for a text with too many levels of lists and objects."""
        return InvalidArgument(f"{self.error}: nested too deep")


STANDARD: Final = Dialect()
"""JSON as Python's own module reads it, with NaN and Infinity."""


def loads_unique(text: bytes) -> Any:
    """Return the value of a text of strict JSON. Raise `ValueError`, also for repeated keys."""
    value = loads(text)
    colons = text.count(b":")
    if isinstance(value, dict) and colons == len(value):
        return value
    members = _count_members(value)
    if colons != members and members != sum(1 for string in _STRING.finditer(text) if string[2]):
        raise ValueError("a repeated key")
    return value


def _count_members(value: Any) -> int:
    """Return the number of members of all objects in a value."""
    count, level = 0, [value]
    while not set(map(type, level)).isdisjoint((dict, list)):
        objects = [item for item in level if type(item) is dict]
        lists = [item for item in level if type(item) is list]
        count += sum(map(len, objects))
        level = [item for values in (*lists, *map(dict.values, objects)) for item in values]
    return count
