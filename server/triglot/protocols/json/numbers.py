"""Lists of numbers in JSON: text ⇄ arrays, by simdjson where it is installed, by orjson else, with equal results.

Strategy: simdjson makes no Python number of a number, and takes half the time. What one of the two would read in
another way, both leave to the caller.
"""

from __future__ import annotations

import re
from array import array
from itertools import chain
from typing import Any

import numpy as np

from triglot.core.fast_json import loads
from triglot.core.tensor import Array

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
    """Return all numbers of lists, flattened: "d" as float64, "i" as int64, "u" as uint64; `text` is theirs.

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
    """Return the numbers in lists, and beside lists, in order. Raises as `array`."""
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
