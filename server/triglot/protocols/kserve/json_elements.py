"""Tensor elements ⇄ JSON (spec 2.1, 3.7)."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from triglot.core.errors import Internal, InvalidArgument
from triglot.core.fast_json import dumps
from triglot.core.tensor import (
    DATATYPES,
    TFSERVING_DATATYPES,
    Array,
    Buffer,
    DataType,
    element_count,
    object_array,
)
from triglot.core.types import OutputTensor
from triglot.protocols.json.arrays import LargeArray
from triglot.protocols.json.dialect import type_name
from triglot.protocols.json.text import flatten, float32_array, print_array

NO_JSON: Final = ("FP16", "BF16", *TFSERVING_DATATYPES)
"""Datatypes whose elements have no JSON form."""
MAX_EXACT: Final = 2**53 - 1
"""Up to here no two integers are the same float64."""


def elements_of_json(
    data: Any, datatype_name: str, shape: tuple[int, ...], what: str, key: str = "'data' of "
) -> Array:
    """Return the elements of a JSON `data` array as a flat array; nesting is not compared with the shape.

    `key` and `what` name the data's place in the request in error texts.

    Raise `InvalidArgument` for an element that the datatype does not allow (spec 2.1), or a wrong count.
    """
    datatype = DATATYPES.get(datatype_name)
    if datatype is None:
        raise InvalidArgument(f"{what}: datatype '{datatype_name}' is none of {', '.join(DATATYPES)}")
    if datatype_name in NO_JSON:
        raise InvalidArgument(f"{what}: {datatype_name} has no JSON form; send it as binary data")
    what = key + what
    if isinstance(data, LargeArray):
        array = _convert_large(data, datatype, what)
    elif isinstance(data, list):
        array = _convert(data, datatype, what)
    else:
        raise InvalidArgument(f"{what} must be an array, got {type_name(data)}")
    if array.size != element_count(shape):
        raise InvalidArgument(
            f"{what} has {array.size} elements, expected {element_count(shape)} for shape {list(shape)}"
        )
    return array


def _convert_large(data: LargeArray, datatype: DataType, what: str) -> Array:
    """Raise `TypeError` or `ValueError` for anything but numbers of 64 bits: `read_body` then parses in full."""
    kind = datatype.dtype.kind
    if kind == "f":
        return _narrowed_floats(data.numbers("d"), datatype)
    if kind in "iu":
        try:
            numbers = data.numbers("u" if datatype.name == "UINT64" else "i")
        except (TypeError, ValueError):
            numbers = _integral(data.numbers("d"))
        return _narrowed_integers(numbers, datatype, what)
    raise TypeError(f"{datatype.name} elements are not numbers")


def _convert(values: list[Any], datatype: DataType, what: str) -> Array:
    kind = datatype.dtype.kind
    types = set(map(type, values))
    if list in types:
        values = flatten(values)
        types = set(map(type, values))
    if kind == "O":
        if types - {str}:
            raise _element_error(values, (str,), datatype, "a string", what)
        try:
            return object_array([value.encode() for value in values], (len(values),))
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"{what} has a string that is not Unicode text: {error}") from None
    if kind == "b":
        if types - {bool}:
            raise _element_error(values, (bool,), datatype, "true or false", what)
        return np.array(values, dtype=datatype.dtype)
    if kind == "f":
        if types - {int, float, type(None)}:
            raise _element_error(values, (int, float, type(None)), datatype, "a number", what)
        try:
            if datatype.name == "FP32" and type(None) not in types:
                return float32_array(values)
            return _narrowed_floats(np.array(values, dtype=np.float64), datatype)
        except OverflowError:
            raise InvalidArgument(f"{what} has an integer too large for {datatype.name}") from None
    return _convert_integers(values, types, datatype, what)


def _convert_integers(values: list[Any], types: set[type], datatype: DataType, what: str) -> Array:
    if float in types:
        values = list(map(_integer, values))
        types = set(map(type, values))
    if types - {int}:
        raise _element_error(values, (int,), datatype, "an integer", what)
    bounds = np.iinfo(datatype.dtype)
    if values and (min(values) < bounds.min or max(values) > bounds.max):
        raise _range_error(datatype, what)
    return np.array(values, dtype=datatype.dtype)


def _narrowed_floats(numbers: Array, datatype: DataType) -> Array:
    # A number beyond FP32's range becomes infinite, as in Triton.
    with np.errstate(over="ignore"):
        return numbers.astype(datatype.dtype, copy=False)


def _narrowed_integers(numbers: Array, datatype: DataType, what: str) -> Array:
    bounds = np.iinfo(datatype.dtype)
    if numbers.size and (numbers.min() < bounds.min or numbers.max() > bounds.max):
        raise _range_error(datatype, what)
    return numbers.astype(datatype.dtype, copy=False)


def _integral(numbers: Array) -> Array:
    """Return float64 numbers as int64. Raise `ValueError` unless each is integral, and exact in both."""
    if not (np.abs(numbers) <= MAX_EXACT).all():
        raise ValueError("too large to be exact, or NaN")
    integers: Array = numbers.astype(np.int64)
    if not (integers == numbers).all():
        raise ValueError("not integral")
    return integers


def _integer(value: Any) -> Any:
    """Return an integral float as an int, and anything else unchanged.

    So is -2^63, to which the parser may have rounded an integer below INT64's range.
    """
    return int(value) if type(value) is float and value.is_integer() and value != -(2.0**63) else value


def _range_error(datatype: DataType, what: str) -> InvalidArgument:
    bounds = np.iinfo(datatype.dtype)
    return InvalidArgument(f"{what} has an element outside {datatype.name}'s range [{bounds.min}, {bounds.max}]")


def _element_error(
    values: list[Any], allowed: tuple[type, ...], datatype: DataType, expected: str, what: str
) -> InvalidArgument:
    at, wrong = next((at, value) for at, value in enumerate(values) if type(value) not in allowed)
    return InvalidArgument(
        f"{what}: element {at} must be {expected} for {datatype.name}, got {type_name(wrong)} {wrong!r:.60}"
    )


def json_of_elements(output: OutputTensor) -> list[Buffer]:
    """Return the pieces of an output's JSON `data`, a flat array.

    Raise `InvalidArgument` if it has no JSON form.
    """
    if output.datatype in NO_JSON:
        raise InvalidArgument(
            f"output '{output.name}': {output.datatype} has no JSON form; request it as binary data"
        )
    try:
        return print_array(output.array)
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"output '{output.name}' has a BYTES element that is not UTF-8; request it as binary data: {error}"
        ) from None


def print_json(value: object) -> bytes:
    """Return the JSON of a part of a response. Raise `Internal` if it has none."""
    try:
        return dumps(value)
    except (TypeError, ValueError) as error:
        raise Internal(f"the response parameters have no JSON form: {error}") from error
