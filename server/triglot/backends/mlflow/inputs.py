"""The inputs of a signature: requests in any form, as the columns or tensors that it declares, without a loss.

Columns come by name in any order, as one matrix, or as `instances`, the JSON of each row. As in MLflow, what the
signature does not name is dropped. Numbers of other types are converted if none of them changes, reals to the
precision of their column.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from triglot.backends.columns import Inputs, exact, json_array, listed, parsed, shown
from triglot.backends.mlflow.description import TENSOR, Field
from triglot.core.errors import InvalidArgument
from triglot.core.tensor import DATATYPES, Array, datatype_of
from triglot.model.signature import INSTANCES, shape_text


def columns_of(fields: Sequence[Field], inputs: Inputs) -> dict[str, Array]:
    """Return a request's columns, in the order of the signature; those that are not required may be missing.

    Numbers have the type of their column. Text comes as bytes, or as values of JSON. Raise `InvalidArgument`.
    """
    names = {field.name for field in fields}
    if INSTANCES in inputs and INSTANCES not in names:
        found = _columns_of_rows(fields, parsed(inputs[INSTANCES]))
    elif len(inputs) == 1 and not (names & inputs.keys() and _is_column(next(iter(inputs.values())))):
        found = _columns_of_matrix(fields, next(iter(inputs.values())))
    else:
        found = {name: _flat(name, array) for name, array in inputs.items() if name in names}
    if missing := [field.name for field in fields if field.required and field.name not in found]:
        given = f", got {listed(inputs)}" if INSTANCES not in inputs else ""
        raise InvalidArgument(f"missing input {listed(missing)}{given}")
    if len({len(array) for array in found.values()}) > 1:
        lengths = ", ".join(f"{len(array)} in '{name}'" for name, array in found.items())
        raise InvalidArgument(f"expected columns of equal length, got {lengths}")
    return {field.name: _typed(field, found[field.name]) for field in fields if field.name in found}


def _is_column(array: Array) -> bool:
    return array.ndim == 1 or array.shape[1:] == (1,)


def _flat(name: str, array: Array) -> Array:
    if not _is_column(array):
        raise InvalidArgument(f"column '{name}': expected shape [-1], got {shape_text(array.shape)}")
    return array.reshape(-1)


def _columns_of_rows(fields: Sequence[Field], rows: list[Any]) -> dict[str, Array]:
    if len(fields) == 1 and not fields[0].named:
        return {fields[0].name: json_array(rows)}
    if all(isinstance(row, list) and len(row) == len(fields) for row in rows):
        return {field.name: json_array([row[at] for row in rows]) for at, field in enumerate(fields)}
    if not all(isinstance(row, dict) for row in rows):
        if len(fields) > 1:
            raise InvalidArgument(f"expected objects, or lists of {len(fields)} values, got others")
        return {fields[0].name: json_array(rows)}
    known = {key for row in rows for key in row}
    return {
        field.name: json_array([row.get(field.name) for row in rows]) for field in fields if field.name in known
    }


def _columns_of_matrix(fields: Sequence[Field], array: Array) -> dict[str, Array]:
    """Return the columns of a matrix of any name, or of the only column."""
    if len(fields) == 1 and _is_column(array):
        return {fields[0].name: array.reshape(-1)}
    if array.ndim != 2 or array.shape[1] != len(fields):
        raise InvalidArgument(
            f"expected the columns {listed(field.name for field in fields)}, or a matrix "
            f"{shape_text((-1, len(fields)))}, got {shape_text(array.shape)}"
        )
    return {field.name: array[:, at] for at, field in enumerate(fields)}


def tensors_of(fields: Sequence[Field], inputs: Inputs) -> dict[str, Array]:
    """Return a request's tensors by name; a single one may have any name. Raise `InvalidArgument`."""
    names = {field.name for field in fields}
    if INSTANCES in inputs and INSTANCES not in names:
        found = _tensors_of_rows(fields, parsed(inputs[INSTANCES]))
    elif len(fields) == 1 and len(inputs) == 1:
        found = {fields[0].name: next(iter(inputs.values()))}
    elif len(fields) == 1 and not names & inputs.keys():
        found = {fields[0].name: _stacked(inputs)}
    else:
        found = {name: array for name, array in inputs.items() if name in names}
    if missing := [field.name for field in fields if field.name not in found]:
        raise InvalidArgument(f"missing input {listed(missing)}, got {listed(inputs)}")
    return {field.name: _shaped(field, _typed(field, found[field.name])) for field in fields}


def _tensors_of_rows(fields: Sequence[Field], rows: list[Any]) -> dict[str, Array]:
    if all(isinstance(row, dict) for row in rows) and rows:
        return {
            field.name: _of_json(field, [row[field.name] for row in rows])
            for field in fields
            if all(field.name in row for row in rows)
        }
    if len(fields) > 1:
        raise InvalidArgument(f"expected objects with {listed(field.name for field in fields)}, got others")
    return {fields[0].name: _of_json(fields[0], rows)}


def _of_json(field: Field, rows: list[Any]) -> Array:
    try:
        array: Array = np.array(rows)
    except ValueError:
        raise InvalidArgument(f"input '{field.name}': expected lists of equal lengths") from None
    if array.dtype.kind not in "bif":
        array = np.array(rows, object)
    return array


def _stacked(columns: Inputs) -> Array:
    """Return the columns of a table as a matrix."""
    arrays = [_flat(name, array) for name, array in columns.items()]
    if len({len(array) for array in arrays}) > 1:
        raise InvalidArgument(f"expected columns of equal length, or one tensor, got {listed(columns)}")
    return np.stack(arrays, axis=1)


def _shaped(field: Field, array: Array) -> Array:
    wanted = field.spec.shape or ()
    if len(array.shape) != len(wanted) or any(
        dim not in (-1, size) for dim, size in zip(wanted, array.shape, strict=True)
    ):
        raise InvalidArgument(
            f"input '{field.name}': expected shape {shape_text(wanted)}, got {shape_text(array.shape)}"
        )
    return array


# --- values ---


def _typed(field: Field, array: Array) -> Array:
    datatype = field.spec.datatype
    what = "input" if field.kind == TENSOR else "column"
    try:
        if datatype == "BYTES":
            return array
        dtype = DATATYPES[datatype].dtype
        if array.dtype == dtype:
            return np.require(array, requirements="A")
        if dtype.kind not in _CONVERSIONS:
            raise ValueError(f"expected {datatype}, got {datatype_of(array)}")
        return _CONVERSIONS[dtype.kind](array, dtype)
    except ValueError as error:
        raise InvalidArgument(f"{what} '{field.name}': {error}") from None


def integers(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return whole numbers as an array of another, integer `dtype`.

    Raise `ValueError` for those beyond its range, reals with a fraction, and what is no number.
    """
    datatype = datatype_of(np.empty(0, dtype))
    if array.dtype.hasobject:
        for value in array.ravel().tolist():
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"expected whole numbers for {datatype}, got {shown(value)}")
    elif array.dtype.kind not in "iuf":
        raise ValueError(f"expected whole numbers for {datatype}, got {datatype_of(array)}")
    if array.size:
        bounds, low, high = np.iinfo(dtype), array.min(), array.max()
        wrong = [value for value in (low, high) if not bounds.min <= value <= bounds.max]
        if not wrong and array.dtype.kind == "f":
            wrong = array[np.trunc(array) != array].tolist()
        if wrong:
            raise ValueError(f"expected whole numbers that {datatype} can hold, got {wrong[0]}")
    return array.astype(dtype)


def _truths(array: Array, _: np.dtype[Any]) -> Array:
    if array.dtype.hasobject and all(isinstance(value, bool) for value in array.ravel().tolist()):
        return array.astype(bool)
    found = "others" if array.dtype.hasobject else datatype_of(array)
    raise ValueError(f"expected BOOL values, got {found}")


_CONVERSIONS: Mapping[str, Callable[[Array, np.dtype[Any]], Array]] = {
    "b": _truths,
    "f": exact,
    "i": integers,
    "u": integers,
}


def is_missing(value: Any) -> bool:
    """Whether a value in a column of text is null, which pandas writes as NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def from_base64(value: Any) -> bytes:
    """Return a binary value: bytes of a tensor, base64 of JSON, where MLflow breaks lines. Raise `ValueError`."""
    if isinstance(value, bytes):
        return value
    try:
        return base64.b64decode(value.replace("\n", ""), validate=True)
    except (AttributeError, TypeError, binascii.Error):
        raise ValueError(f"expected base64, got {shown(value)}") from None
