"""Values and flat lists in protobuf's JSON mapping (grps 2.1, 2.2). Pure functions."""

from __future__ import annotations

import binascii
import math
import re
from typing import Any

import numpy as np

from triglot.core.errors import InvalidArgument
from triglot.core.fast_json import dumps_array, loads
from triglot.core.tensor import Array
from triglot.protocols.json.arrays import LargeArray
from triglot.protocols.json.dialect import type_name

INT32, UINT32, INT64 = np.dtype("i4"), np.dtype("u4"), np.dtype("i8")
FLOAT32, FLOAT64 = np.dtype("f4"), np.dtype("f8")

_FLOAT_NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_FLOAT_TEXT = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", re.ASCII)
_INTEGER_TEXT = re.compile(r"-?[0-9]{1,400}", re.ASCII)
_INTEGER_CHARACTERS = "-0123456789"
_URL_SAFE = str.maketrans("-_", "+/")


def read_text(value: Any, what: str) -> str:
    """Return a string. Raise `InvalidArgument`."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{what} must be a string, got {type_name(value)}")
    if not _is_unicode(value):
        raise InvalidArgument(f"{what} is not Unicode text: {value!a:.200}")
    return value


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_bytes(value: Any, what: str) -> bytes:
    """Return the bytes of base64 in either alphabet; padding is optional, white space ignored (grps 2.2).

    Raise `InvalidArgument`.
    """
    text = "".join(read_text(value, what).translate(_URL_SAFE).split()).rstrip("=")
    try:
        return binascii.a2b_base64(text + "=" * (-len(text) % 4), strict_mode=True)
    except ValueError as error:  # Also raised for text that is not ASCII.
        raise InvalidArgument(f"{what} is not base64: {error}") from None


def read_integer(value: Any, dtype: np.dtype[Any], what: str) -> int:
    """Return an integer of `dtype`, from a whole number or a string of digits. Raise `InvalidArgument`."""
    number = _integer(value, what)
    bounds = np.iinfo(dtype)
    if not bounds.min <= number <= bounds.max:
        raise _range_error(number, dtype, what)
    return number


def read_float(value: Any, dtype: np.dtype[Any], what: str) -> float:
    """Return a number rounded to `dtype`, from a JSON number, or a string with one, or "NaN" or "[-]Infinity".

    Raise `InvalidArgument`, also for a number beyond `dtype`'s range.
    """
    return float(_narrowed(np.array([_float(value, what)]), dtype, what)[0])


def read_list(values: Any, dtype: np.dtype[Any], what: str) -> Array:
    """Return a list as a flat array of `dtype` (objects are `str`), by the rules for single values.

    Raise `InvalidArgument`; for a `LargeArray` also `TypeError`, `ValueError` and `RuntimeError` if it has to be
    read as a plain list.
    """
    if not isinstance(values, list | LargeArray):
        raise InvalidArgument(f"{what} must be an array, got {type_name(values)}")
    element = f"an element of {what}"
    if dtype.kind == "O":
        return _texts(values, element)
    return _floats(values, dtype, element) if dtype.kind == "f" else _integers(values, dtype, element)


def _texts(values: list[Any] | LargeArray, what: str) -> Array:
    if isinstance(values, LargeArray):
        raise TypeError("strings are not numbers")
    if set(map(type, values)) - {str} or not _is_unicode("".join(values)):
        for value in values:
            read_text(value, what)
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _integers(values: list[Any] | LargeArray, dtype: np.dtype[Any], what: str) -> Array:
    if isinstance(values, LargeArray):
        array = _flat_numbers(values, "i")
        if array.size:
            _check_range(int(array.min()), int(array.max()), dtype, what)
        return array.astype(dtype, copy=False)
    numbers = values if set(map(type, values)) <= {int} else _unwrapped(values, what)
    if numbers:
        _check_range(min(numbers), max(numbers), dtype, what)
    return np.array(numbers, dtype)


def _flat_numbers(values: LargeArray, kind: str) -> Array:
    numbers = values.numbers(kind)
    if len(values.shape) > 1:
        raise ValueError("nested lists")
    return numbers


def _check_range(lowest: int, highest: int, dtype: np.dtype[Any], what: str) -> None:
    bounds = np.iinfo(dtype)
    if lowest < bounds.min:
        raise _range_error(lowest, dtype, what)
    if highest > bounds.max:
        raise _range_error(highest, dtype, what)


def _range_error(number: float, dtype: np.dtype[Any], what: str) -> InvalidArgument:
    return InvalidArgument(f"{what}: value out of range of {dtype.name}: {number!s:.60}")


def _unwrapped(values: list[Any], what: str) -> list[int]:
    if set(map(type, values)) == {str} and not "".join(values).strip(_INTEGER_CHARACTERS):
        try:
            return list(map(int, values))
        except ValueError:
            pass  # The next line finds out which one is wrong.
    return [_integer(value, what) for value in values]


def _integer(value: Any, what: str) -> int:
    if type(value) is int:
        return value
    is_integer = isinstance(value, float) and value.is_integer()
    if is_integer or (isinstance(value, str) and _INTEGER_TEXT.fullmatch(value)):
        return int(value)
    raise _type_error(value, "an integer", what)


def _floats(values: list[Any] | LargeArray, dtype: np.dtype[Any], what: str) -> Array:
    if isinstance(values, LargeArray):
        numbers = _flat_numbers(values, "d")
        if not np.isfinite(numbers).all():
            raise ValueError("bare NaN or Infinity")
        return _narrowed(numbers, dtype, what)
    if set(map(type, values)) == {float}:
        numbers = np.array(values)
        if np.isfinite(numbers).all():
            return _narrowed(numbers, dtype, what)
    # One by one: integers may exceed a float's range, and strings are parsed.
    return _narrowed(np.array([_float(value, what) for value in values], np.float64), dtype, what)


def _narrowed(numbers: Array, dtype: np.dtype[Any], what: str) -> Array:
    if numbers.dtype == dtype:
        return numbers
    with np.errstate(over="ignore"):
        narrow = numbers.astype(dtype)
    beyond = np.isinf(narrow) & np.isfinite(numbers)
    if beyond.any():
        raise _range_error(float(numbers[beyond][0]), dtype, what)
    return narrow


def _float(value: Any, what: str) -> float:
    """Return a number; booleans count as 1 and 0, as in protobuf."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        # The parser returns infinity for numbers beyond float64, too.
        name = float_name(value)
        raise InvalidArgument(f'{what}: {name} or a number out of range; write {name} as the string "{name}"')
    if isinstance(value, str):
        if value in _FLOAT_NAMES:
            return _FLOAT_NAMES[value]
        if not _FLOAT_TEXT.fullmatch(value):
            raise _type_error(value, "a number", what)
    elif not isinstance(value, int):
        raise _type_error(value, "a number", what)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise InvalidArgument(f"{what}: value out of range of float64")
    return number


def _type_error(value: Any, expected: str, what: str) -> InvalidArgument:
    quoted = f" {value!r:.60}" if isinstance(value, float | str) else ""
    return InvalidArgument(f"{what} must be {expected}, got {type_name(value)}{quoted}")


def float_values(array: Array) -> list[float | str]:
    """Return a flat float array's elements for JSON: FP32 as the shortest text that reads back to it."""
    if array.dtype == FLOAT32:
        # numpy and Python would print all digits of the double that it becomes.
        text = dumps_array(np.ascontiguousarray(array))
        values: list[Any] = loads(text)
    else:
        values = array.tolist()
    for at in np.flatnonzero(~np.isfinite(array)):
        values[at] = float_name(float(array[at]))
    return values


def float_name(value: float) -> str:
    """Return the name of a number that is not finite."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
