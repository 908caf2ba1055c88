"""The columns that a model knows, and their values in each form that a request may send them in."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from triglot.core.errors import InvalidArgument
from triglot.core.tensor import DATATYPES, TFSERVING_DATATYPES, Array, datatype_of
from triglot.core.types import TensorSpec
from triglot.model.signature import INSTANCES, shape_text

INPUT = "x"
MAX_LISTED = 20
"""Limit on the columns that an error lists."""

Inputs = Mapping[str, Array]


class Values(ABC):
    """What one column takes in place of any numbers: its declared `datatype`, and the `dtype` of the result."""

    datatype: str
    dtype: np.dtype[Any]

    @abstractmethod
    def convert(self, array: Array) -> Array:
        """Return values as the library takes them; texts come as bytes. Raise `ValueError`."""


class Columns:
    """The columns of a model by name: what is declared for them, and the matrix of a request's inputs.

    A request sends one matrix of any name, the columns by their names in any order, or `instances`: the JSON of
    each row, a list of values or an object. Numbers of any type become `datatype`, see `exact`. `special` has the
    columns with other values, by position, and `spell` returns a name as the model spells it. `specs` are the
    inputs to declare: the `columns`, if the author `named` them or they are of several kinds, or else the matrix.
    `unnamed` is the matrix, if it has one datatype.
    """

    def __init__(
        self,
        names: Sequence[str],
        datatype: str,
        special: Mapping[int, Values] | None = None,
        spell: Callable[[str], str] = str,
        *,
        named: bool,
    ) -> None:
        self._names = list(names)
        self._places = {name: at for at, name in enumerate(names)}
        self._numbers = DATATYPES[datatype].dtype
        self._special = special or {}
        self._spell = spell
        self._dtype = np.result_type(self._numbers, *(values.dtype for values in self._special.values()))
        datatypes = [
            self._special[at].datatype if at in self._special else datatype for at in range(len(self._names))
        ]
        by_name = [TensorSpec(name, kind, [-1]) for name, kind in zip(names, datatypes, strict=True)]
        self.columns = by_name if named else []
        self.unnamed = None if len(set(datatypes)) > 1 else TensorSpec(INPUT, datatypes[0], [-1, len(names)])
        self.specs = by_name if named or self.unnamed is None else [self.unnamed]

    def matrix(self, inputs: Inputs) -> Array:
        """Return the matrix [rows, columns] of a call's inputs. Raise `InvalidArgument`."""
        if INSTANCES in inputs and INSTANCES not in self._places:
            return self._of_rows(records(parsed(inputs[INSTANCES])))
        if len(inputs) == 1:
            ((name, array),) = inputs.items()
            if self._spell(name) not in self._places or (array.ndim > 1 and array.shape[1:] != (1,)):
                return self._of_matrix(array)
        return self._of_columns(inputs)

    def _of_matrix(self, array: Array) -> Array:
        if array.ndim != 2 or array.shape[1] != len(self._names):
            raise InvalidArgument(
                f"expected a matrix {shape_text((-1, len(self._names)))}, got {shape_text(array.shape)}"
            )
        if not self._special:
            return self._exact("", array)
        if array.dtype.hasobject:
            return self._joined(list(array.T))
        matrix = self._exact("", array).astype(self._dtype)
        for at in self._special:
            matrix[:, at] = self._converted(at, array[:, at])
        return matrix

    def _of_columns(self, inputs: Inputs) -> Array:
        columns: list[Array | None] = [None] * len(self._names)
        for name, array in inputs.items():
            at = self._places.get(self._spell(name))
            if at is None:
                raise InvalidArgument(f"unexpected input '{name}', expected one matrix, or {listed(self._names)}")
            if columns[at] is not None:
                raise InvalidArgument(f"two inputs are the column '{self._names[at]}'")
            if array.ndim != 1 and array.shape[1:] != (1,):
                raise InvalidArgument(f"column '{name}': expected shape [-1], got {shape_text(array.shape)}")
            columns[at] = array.reshape(-1)
        if missing := [name for name, array in zip(self._names, columns, strict=True) if array is None]:
            raise InvalidArgument(f"missing input {listed(missing)}")
        arrays = [array for array in columns if array is not None]
        if len({len(array) for array in arrays}) > 1:
            lengths = ", ".join(
                f"{len(array)} in '{name}'" for name, array in zip(self._names, arrays, strict=True)
            )
            raise InvalidArgument(f"expected columns of equal length, got {lengths}")
        return self._joined(arrays)

    def _of_rows(self, rows: list[Any]) -> Array:
        if all(isinstance(row, dict) for row in rows):
            keys = dict.fromkeys(key for row in rows for key in row)
            return self._of_columns({key: json_array([row.get(key) for row in rows]) for key in keys})
        if all(isinstance(row, list) and len(row) == len(self._names) for row in rows):
            return self._joined([json_array(column) for column in zip(*rows, strict=True)])
        raise InvalidArgument(f"expected objects, or lists of {len(self._names)} values, got others")

    def _joined(self, columns: Sequence[Array]) -> Array:
        matrix = np.empty((len(columns[0]), len(columns)), self._dtype)
        for at, column in enumerate(columns):
            matrix[:, at] = self._converted(at, column)
        return matrix

    def _converted(self, at: int, array: Array) -> Array:
        name = self._names[at]
        if at not in self._special:
            return self._exact(f"column '{name}': ", array)
        try:
            return self._special[at].convert(array)
        except ValueError as error:
            raise InvalidArgument(f"column '{name}': {error}") from None

    def _exact(self, where: str, array: Array) -> Array:
        try:
            return exact(array, self._numbers)
        except ValueError as error:
            raise InvalidArgument(f"{where}{error}") from None


def exact(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return numbers as an aligned array of another, floating-point `dtype`; null becomes NaN.

    Reals are rounded to its precision. Raise `ValueError` for integers that it cannot hold, reals that are beyond
    its range, and what is no number.
    """
    if array.dtype == dtype:
        return np.require(array, requirements="A")
    if array.dtype.hasobject:
        return _exact_of_objects(array, dtype)
    if datatype_of(array) in TFSERVING_DATATYPES:
        raise ValueError(f"expected numbers, got {datatype_of(array)}")
    with np.errstate(all="ignore"):
        converted = array.astype(dtype)
        wrong = False
        if array.dtype.kind in "iu" and 8 * array.dtype.itemsize > np.finfo(dtype).nmant + 1:
            # The largest integers round to a number that no integer of their type is.
            wrong = (converted.astype(array.dtype) != array) | (converted >= float(np.iinfo(array.dtype).max))
        elif array.dtype.kind == "f" and array.dtype.itemsize > dtype.itemsize:
            wrong = np.isinf(converted) & np.isfinite(array)
    if np.any(wrong):
        raise _inexact(array[wrong].tolist()[0], dtype)
    return converted


def _exact_of_objects(array: Array, dtype: np.dtype[Any]) -> Array:
    values = array.ravel().tolist()
    for value in values:
        if not isinstance(value, bool | int | float | None):
            raise ValueError(f"expected numbers, got {shown(value)}")
    converted = np.array([np.nan if value is None else _number(value, dtype) for value in values], dtype)
    return converted.reshape(array.shape)


def _number(value: float, dtype: np.dtype[Any]) -> float:
    try:
        with np.errstate(over="ignore"):
            converted = float(dtype.type(value))
    except OverflowError:
        raise _inexact(value, dtype) from None
    if converted != value and (isinstance(value, int) or (np.isinf(converted) and np.isfinite(value))):
        raise _inexact(value, dtype)
    return converted


def _inexact(value: float, dtype: np.dtype[Any]) -> ValueError:
    return ValueError(f"expected numbers that {datatype_of(np.empty(0, dtype))} can hold, got {value}")


def shown(value: Any) -> str:
    """Return a value of a tensor or of JSON for an error."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    return f"{value!r:.80}"


def listed(names: Iterable[str]) -> str:
    """List names of columns for an error: the first ones, and how many more there are."""
    quoted = [f"'{name}'" for name in names]
    more = len(quoted) - MAX_LISTED
    return ", ".join(quoted[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


# --- JSON ---


def parsed(texts: Array) -> list[Any]:
    """Return the values of an input `instances`. Raise `InvalidArgument`."""
    try:
        return [json.loads(text) for text in texts.ravel().tolist()]
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{INSTANCES}: expected JSON: {error}") from None


def records(instances: list[Any]) -> list[Any]:
    """Return rows; KServe V1 takes an instance for a table: an object of columns, or a list of objects.

    See `get_predict_input` in KServe 0.21's kserve/utils/utils.py. A column is a list, or an object by row.
    """
    rows: list[Any] = []
    for instance in instances:
        if isinstance(instance, dict) and instance and all(isinstance(v, list | dict) for v in instance.values()):
            columns = [v if isinstance(v, list) else list(v.values()) for v in instance.values()]
            rows += [dict(zip(instance, values, strict=True)) for values in zip(*columns, strict=True)]
        elif isinstance(instance, list) and instance and all(isinstance(row, dict) for row in instance):
            rows += instance
        else:
            rows.append(instance)
    return rows


def json_array(values: Sequence[Any], *, may_mix: bool = False) -> Array:
    """Return JSON values as a flat array: of numbers or booleans if all are of one type, else of objects.

    With `may_mix`, numbers of several types are reals, too, which no longer tells whether one was an integer.
    """
    types = {type(value) for value in values}
    if types <= {bool, int, float} and (may_mix or len(types) == 1):
        array = np.array(values)
        if array.dtype.kind in "bif":
            return array
    array = np.empty(len(values), object)
    array[:] = values
    return array
