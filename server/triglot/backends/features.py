"""Derives the input tensors of a fitted estimator, and converts requests to its table.

Strategy: an estimator knows how many features it takes, and often their names, but not which kind of values they
have. The encoders inside it know the values that they were fitted on, and a transformer that knows none is asked
to transform some. From these an example row is built, and the estimator is asked to predict it. How estimators are
nested does not matter: all objects that an estimator refers to are looked at.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, product
from pathlib import Path
from typing import Any

import numpy as np

from triglot.backends import missing_dependency
from triglot.backends.columns import INPUT, Inputs, exact, json_array, parsed, records
from triglot.core.tensor import DATATYPES, Array, object_array
from triglot.core.types import TensorSpec
from triglot.model.signature import INSTANCES

TEXT = "text"
_NUMBERS: tuple[Any, ...] = (0.0, 1.0)
"""Either may be invalid for a feature, such as 0 for a logarithm."""
_TEXTS: tuple[Any, ...] = (TEXT, "0")
_DATES: tuple[Any, ...] = (np.datetime64("2000-01-01", "s"),)
_METHODS = ("fit", "predict", "predict_proba", "transform")
MOST_MIXED = 512
"""Most rows that are tried with texts and dates among the numbers."""
_CATEGORICAL = re.compile(r"^\[categorical_feature: (.*)\]$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Categories:
    """What is known of a feature that has to be a pandas Categorical: its categories."""

    values: Sequence[Any]


class Unused:
    """What is known of a feature that no transformer uses."""


UNUSED = Unused()


class Layout:
    """Input tensors, an example of one row, and the conversion of inputs to what the estimator takes.

    `row` has an example value of each feature, and `names` their names. `frame` makes a DataFrame; None: the table
    is an array. `number` is the datatype of numbers, `missing` what stands for a null.

    Features of one kind without names are one tensor `x`, others have one tensor each. Whichever is declared, a
    call may send the matrix `x`, the columns by name, or `instances`: the JSON of each row, a list of values or an
    object. If all are numbers, those of other types become `number`, see `exact`. `columns` are the ones that it
    uses, if their names are known, and `unnamed` is the matrix, if all are of one kind.
    """

    def __init__(
        self,
        row: Sequence[Any],
        number: str,
        names: Sequence[str] | None = None,
        frame: Any = None,
        missing: Any = np.nan,
    ) -> None:
        self._names = [f"{INPUT}{at}" for at in range(len(row))] if names is None else list(names)
        self._frame = frame
        self._missing = missing
        self._row = dict(zip(self._names, row, strict=True))
        self._used = {name: value for name, value in self._row.items() if value is not UNUSED}
        datatypes = {name: _datatype(value, number) for name, value in self._used.items()}
        by_name = [TensorSpec(name, datatype, [-1]) for name, datatype in datatypes.items()]
        self.columns = by_name if names is not None else []
        self._dtype: np.dtype[Any] | None = None
        plain = not any(map(_is_special, self._used.values()))
        kinds = set(datatypes.values())
        if kinds == {number} and plain and missing is not None:
            self._dtype = DATATYPES[number].dtype
        self.unnamed: TensorSpec | None = None
        if plain and len(kinds) == 1 and (len(self._used) == len(row) or kinds == {number}):
            self.unnamed = TensorSpec(INPUT, next(iter(kinds)), [-1, len(row)])
        if names is None and self.unnamed is not None:
            datatype = self.unnamed.datatype
            self.specs = [self.unnamed]
            values = [0.0 if value is UNUSED else value for value in row]
            self.example = {INPUT: _tensor(values, datatype)[np.newaxis]}
        else:
            self.specs = by_name
            self.example = {name: _tensor([value], datatypes[name]) for name, value in self._used.items()}

    def table(self, inputs: Inputs) -> Any:
        """Return the table of a call's inputs. Raise `ValueError` and `InvalidArgument`."""
        if INSTANCES in inputs and INSTANCES not in self._row:
            return self._of_instances(records(parsed(inputs[INSTANCES])))
        is_only = len(inputs) == 1
        arrays = {name: self._taken(name, array, is_only) for name, array in inputs.items()}
        if len(arrays) == 1:
            ((name, array),) = arrays.items()
            if name not in self._row or (array.ndim > 1 and array.shape[1:] != (1,)):
                return array if self._frame is None else self._frame(array, columns=self._names)
        return self._of_columns({name: _column(array) for name, array in arrays.items()})

    def _taken(self, name: str, array: Array, is_only: bool) -> Array:
        """Return an input as the estimator takes it, in memory of its own. Raise `ValueError`."""
        if self._dtype is None or array.dtype == self._dtype:
            return _own(array)
        # Columns that the estimator does not use may hold anything.
        is_used = name in self._used or (is_only and name not in self._row)
        return exact(array, self._dtype) if is_used else _own(array)

    def _of_instances(self, rows: list[Any]) -> Any:
        if all(isinstance(row, dict) for row in rows):
            keys = dict.fromkeys(key for row in rows for key in row)
            return self._of_columns({key: self._values(key, [row.get(key) for row in rows]) for key in keys})
        if all(isinstance(row, list) and len(row) == len(self._names) for row in rows):
            columns = zip(self._names, zip(*rows, strict=True), strict=True)
            return self._of_columns({name: self._values(name, column) for name, column in columns})
        try:
            return np.array(rows)  # The estimator says what is wrong.
        except ValueError:
            raise ValueError(f"expected objects, or lists of {len(self._names)} values, got others") from None

    def _values(self, name: str, values: Sequence[Any]) -> Array:
        if self._dtype is not None and name in self._used:
            return exact(json_array(values), self._dtype)
        return json_array([self._missing if value is None else value for value in values], may_mix=True)

    def _of_columns(self, columns: Inputs) -> Any:
        if absent := self._used.keys() - columns.keys():
            names = ", ".join(f"'{name}'" for name in self._used if name in absent)
            raise ValueError(f"missing input {names}")
        ordered = [name for name in self._names if name in columns]
        further = [name for name in columns if name not in self._row]
        if self._frame is not None:
            # The estimator decides on columns that it was not fitted on.
            return self._frame({name: self._converted(name, columns[name]) for name in ordered + further})
        if further:
            raise ValueError(f"unexpected input '{further[0]}', expected {INPUT}, or {', '.join(self._names)}")
        unused = np.full(len(columns[ordered[0]]), np.nan)
        arrays = [columns.get(name, unused) for name in self._names]
        if any(array.dtype.hasobject for array in arrays):
            arrays = [array.astype(object) for array in arrays]
        return np.column_stack(arrays)

    def _converted(self, name: str, array: Array) -> Any:
        value = self._row.get(name)
        if isinstance(value, Categories):
            return _pandas().Categorical(array, categories=value.values)
        return _pandas().to_datetime(array) if isinstance(value, np.datetime64) else array


class RowLayout:
    """The layout of an estimator that does not count its features: it gets the rows as they are sent.

    `example` is a row that it takes. Rows of text, or of numbers, are an input `x` of `datatype`; any others are
    `instances`, with the JSON of each. With `frame`, objects become a DataFrame, and so do lists if their `names`
    are known.
    """

    def __init__(
        self, example: Any, datatype: str = "", frame: Any = None, names: Sequence[str] | None = None
    ) -> None:
        self._frame = frame
        self._names = names
        self.columns: list[TensorSpec] = []
        self.unnamed: TensorSpec | None = None
        if not datatype:
            self.specs = [TensorSpec(INSTANCES, "BYTES", [-1])]
            self.example = {INSTANCES: object_array([json.dumps(example).encode()], (1,))}
        else:
            self.specs = [TensorSpec(INPUT, datatype, [-1] if datatype == "BYTES" else [-1, -1])]
            self.example = {INPUT: _tensor([example], datatype)}

    def table(self, inputs: Inputs) -> Any:
        """Return the rows of a call's inputs. Raise `ValueError` and `InvalidArgument`."""
        if INSTANCES in inputs:
            return self._rows(parsed(inputs[INSTANCES]))
        arrays = {name: _column(_own(array)) for name, array in inputs.items()}
        if len(arrays) == 1 and (self._frame is None or INPUT in arrays):
            return next(iter(arrays.values()))
        if self._frame is not None:
            return self._frame(arrays)
        columns = zip(*(array.tolist() for array in arrays.values()), strict=True)
        return [dict(zip(arrays, values, strict=True)) for values in columns]

    def _rows(self, rows: list[Any]) -> Any:
        if self._frame is None:
            return rows
        if all(isinstance(row, list) for row in rows) and self._names is not None:
            return self._frame([_without_null(row) for row in rows], columns=self._names)
        objects = records(rows)
        if all(isinstance(row, dict) for row in objects):
            return self._frame([dict(zip(row, _without_null(row.values()), strict=True)) for row in objects])
        return rows


def layouts(file: Path, estimator: Any, number: str) -> Iterator[Layout | RowLayout]:
    """Yield possible layouts for an estimator, the most likely first; `number` is the datatype of numbers.

    Raise `MissingDependency` if the estimator was fitted on a DataFrame and pandas is missing: it selects its
    features by column names.
    """
    count = getattr(estimator, "n_features_in_", None)
    names = getattr(estimator, "feature_names_in_", None)
    if count is None:
        for text in (*_TEXTS, ""):
            yield RowLayout(text, "BYTES")
        yield from (RowLayout({}), RowLayout([TEXT]))
        # The first part that counts its features may be given what the estimator is given.
        inner = next((part for part in parts(estimator) if getattr(part, "n_features_in_", None)), None)
        if inner is None:
            return
        count = inner.n_features_in_
        names = getattr(inner, "feature_names_in_", None)
    frame = None if names is None else _data_frame(file, estimator)
    missing = None if any(getattr(part, "missing_values", 0) is None for part in parts(estimator)) else np.nan
    names = None if names is None else [str(name) for name in names]
    for row in _rows(estimator, names, count, frame):
        yield Layout(row, number, names, frame, missing)


def numbers(number: str, count: int, names: Sequence[str] | None = None) -> Layout:
    """Return the layout of rows of `count` numbers in an array."""
    return Layout([0.0] * count, number, names)


def untried(file: Path, estimator: Any) -> RowLayout | None:
    """Return the layout of an estimator that accepts no example row, None if that is no layout but a failure.

    One that does not count its features is given whatever is sent, and one that was fitted on a DataFrame a
    DataFrame of it: what a user's own transformer does with its columns cannot be guessed.
    """
    names = getattr(estimator, "feature_names_in_", None)
    if names is not None:
        return RowLayout({}, frame=_data_frame(file, estimator), names=list(names))
    if hasattr(estimator, "n_features_in_"):
        return None
    try:
        frame = _pandas().DataFrame
    except ModuleNotFoundError:
        frame = None
    if any(hasattr(part, "feature_names_in_") or _knows_texts(part) for part in parts(estimator)):
        return RowLayout({}, frame=frame)
    return RowLayout([], "FP64", frame)


def parts(estimator: Any) -> Iterator[Any]:
    """Yield an estimator and all objects inside it that can be fitted or called, outermost first."""
    found: deque[Any] = deque([estimator])
    seen: set[int] = set()
    while found:
        part = found.popleft()
        if isinstance(part, str | bytes | int | float | np.generic | None) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, list | tuple):
            found.extend(part)
        elif isinstance(part, dict):
            found.extend(part.values())
        elif isinstance(part, np.ndarray):
            found.extend(part.flat if part.dtype.hasobject else ())
        elif not isinstance(part, type) and any(hasattr(part, name) for name in _METHODS):
            yield part
            found.extend(getattr(part, "__dict__", {}).values())


def _knows_texts(part: Any) -> bool:
    """Whether a transformer was fitted on text: a vectorizer, an encoder of features or of labels."""
    if not hasattr(part, "transform"):
        return False
    known = [*getattr(part, "categories_", ()), getattr(part, "classes_", ())]
    return hasattr(part, "build_analyzer") or any(np.asarray(values).dtype.kind in "OU" for values in known)


def _data_frame(file: Path, estimator: Any) -> Any:
    try:
        return _pandas().DataFrame
    except ModuleNotFoundError as error:
        what = f"the estimator ({type(estimator).__name__}) was fitted on a DataFrame and"
        raise missing_dependency(file, what, error) from error


def _pandas() -> Any:
    return importlib.import_module("pandas")


# --- example rows ---


def _rows(estimator: Any, names: list[str] | None, count: int, frame: Any) -> Iterator[list[Any]]:
    """Yield rows of example values that the estimator may accept."""
    candidates = _known_rows(estimator, names, count)
    if any(UNUSED in row for row in candidates):  # Used by another part after all, as by a stacking's last step.
        candidates += [[None if value is UNUSED else value for value in row] for row in candidates]
    others = _TEXTS if frame is None else (*_TEXTS, *_DATES)
    for row in [*candidates, [None] * count]:
        for unknown in _NUMBERS:
            yield [unknown if value is None else value for value in row]
        yield from islice(_mixed(row, (TEXT,) if frame is None else (TEXT, *_DATES)), MOST_MIXED)
        for unknown in others:
            yield [unknown if value is None else value for value in row]


def _mixed(row: list[Any], others: tuple[Any, ...]) -> Iterator[list[Any]]:
    """Yield the row with numbers for what is not known but one feature, then two, and so on."""
    places = [at for at, value in enumerate(row) if value is None]
    numbers_only = [_NUMBERS[0] if value is None else value for value in row]
    for count in range(1, len(places)):
        for chosen in combinations(places, count):
            for values in product(others, repeat=count):
                mixed = numbers_only.copy()
                for place, value in zip(chosen, values, strict=True):
                    mixed[place] = value
                yield mixed


def _known_rows(estimator: Any, names: list[str] | None, count: int) -> list[list[Any]]:
    """Return rows of the values that parts of an estimator know, None for every other feature.

    The first one joins what parts know of features by their names; each of the others is what one part knows of as
    many features.
    """
    joined: list[Any] = [None] * count
    places = {name: at for at, name in enumerate(names or ())}
    single = []
    for part in parts(estimator):
        known = _known_values(part)
        if known is None:
            continue
        own = getattr(part, "feature_names_in_", None)
        if places and own is not None and len(own) == len(known):
            for name, value in zip(own, known, strict=True):
                at = places.get(name, -1)
                if at >= 0 and joined[at] in (None, UNUSED):
                    joined[at] = value
        elif len(known) == count and known not in single:
            single.append(known)
    return [joined, *single] if joined.count(None) < count else single


def _known_values(part: Any) -> list[Any] | None:
    """Return a value of each feature of a part: one that it knows, `UNUSED` or None; None if it knows none."""
    if hasattr(part, "transformers_"):
        return _column_values(part)
    if hasattr(part, "categories_"):
        return [_first(categories) for categories in part.categories_]
    if hasattr(part, "build_analyzer"):
        return [TEXT]
    if getattr(part, "pandas_categorical", None):
        categories = category_columns(part)
        return (
            None
            if categories is None
            else [Categories(categories[at]) if at in categories else None for at in range(part.num_feature())]
        )
    return None


def _first(categories: Any) -> Any:
    """Return the first category that is no missing value, as a Python object; dates stay numpy's."""
    values = np.asarray(categories)
    if values.dtype.kind == "M":
        return values[0]
    return next((value for value in values.tolist() if value is not None and not _is_nan(value)), None)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def category_columns(booster: Any) -> dict[int, Sequence[Any]] | None:
    """Return the categories of the columns of a LightGBM booster that were pandas Categoricals, by position.

    The trees hold positions in these lists, and the file does not say which columns they belong to. None: it
    cannot be known, as there were ordered Categoricals, whose columns are not among the categorical ones.
    """
    lists = booster.pandas_categorical or []
    positions = categorical_positions(booster)
    return dict(zip(positions, lists, strict=True)) if len(positions) == len(lists) else None


def categorical_positions(booster: Any) -> list[int]:
    """Return the positions of the categorical columns of a LightGBM booster."""
    found = _CATEGORICAL.search(booster.model_to_string(num_iteration=1))
    listed = found[1].removeprefix("name:").split(",") if found and found[1] else []
    names = booster.feature_name()
    by_name = found is not None and found[1].startswith("name:")
    return sorted(names.index(column) if by_name else int(column) for column in listed)


def _column_values(transformer: Any) -> list[Any]:
    """Return what the parts of a ColumnTransformer know of its features."""
    row: list[Any] = [UNUSED] * transformer.n_features_in_
    names = getattr(transformer, "feature_names_in_", None)
    places = transformer._transformer_to_input_indices
    for name, part, columns in transformer.transformers_:
        if isinstance(part, str) and part == "drop":
            continue
        at = list(places.get(name, ()))
        known = None
        if not isinstance(part, str):
            inside = (values for part in parts(part) if (values := _known_values(part)) is not None)
            known = next((values for values in inside if len(values) == len(at)), None)
            if known is None:
                own_names = None if names is None else [names[index] for index in at]
                known = _transformed(part, own_names, len(at), one_column=np.ndim(columns) == 0)
        for place, value in zip(at, known or [None] * len(at), strict=True):
            if row[place] in (None, UNUSED):
                row[place] = value
    return row


def _transformed(part: Any, names: list[str] | None, count: int, *, one_column: bool) -> list[Any] | None:
    """Return a row for a transformer that knows none; None if it takes numbers, or nothing that is tried.

    `one_column`: it gets a column, not a table.
    """
    frame = None if names is None else _pandas().DataFrame
    for value in (*_NUMBERS, *_TEXTS, *(_DATES if names else ())):
        layout = Layout([value] * count, "FP64", names, frame)
        table = layout.table(layout.example)
        if one_column:
            table = table[:, 0] if frame is None else table.iloc[:, 0]
        try:
            part.transform(table)
        except Exception:
            continue
        return [value] * count if not isinstance(value, float) else None
    return None


# --- values ---


def _is_special(value: Any) -> bool:
    return isinstance(value, Categories | np.datetime64)


def _datatype(value: Any, number: str) -> str:
    if isinstance(value, Categories):
        value = value.values[0]
    if isinstance(value, bool):
        return "BOOL"
    return "BYTES" if isinstance(value, str | np.datetime64) else number


def _tensor(values: Iterable[Any], datatype: str) -> Array:
    """Return the values as a request would contain them."""
    plain = [value.values[0] if isinstance(value, Categories) else value for value in values]
    elements = [str(value).encode() for value in plain] if datatype == "BYTES" else plain
    return np.array(elements, DATATYPES[datatype].dtype)


def _own(array: Array) -> Array:
    """Return texts as `str` and numbers unchanged. Raise `UnicodeDecodeError`.

    Always a copy: the request's own array may be unaligned, and transformers with copy=False write to their input.
    """
    if not array.dtype.hasobject:
        return np.array(array)
    text = np.empty(array.size, object)
    text[:] = [element.decode() for element in array.ravel().tolist()]
    return text.reshape(array.shape)


def _column(array: Array) -> Array:
    """Return a column without a second dim of 1, which MLServer's and KServe's codecs add."""
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def _without_null(values: Iterable[Any]) -> list[Any]:
    return [np.nan if value is None else value for value in values]
