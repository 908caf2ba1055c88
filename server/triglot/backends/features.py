"""Derives the input tensors of a fitted estimator, and converts requests to its table.

An estimator knows how many features it takes, and often their names, but not which of them are text. The encoders
inside it do: each keeps the values that it was fitted on. From these an example row is built to probe the
estimator.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from triglot.backends import missing_dependency
from triglot.core.tensor import DATATYPES, Array
from triglot.core.types import TensorSpec

INPUT = "x"

Inputs = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Layout:
    """Input tensors, an example of one row, and the function that converts inputs for the estimator."""

    specs: list[TensorSpec]
    example: dict[str, Array]
    table: Callable[[Inputs], Any]


def layouts(file: Path, estimator: Any, number: str) -> Iterator[Layout]:
    """Yields possible layouts for an estimator, the most likely first; `number` is the datatype of numbers.

    Raises `MissingDependency` if the estimator was fitted on a DataFrame and pandas is missing: it selects its
    features by column names.
    """
    count = getattr(estimator, "n_features_in_", None)
    if count is None:
        yield _texts()
        return
    names = getattr(estimator, "feature_names_in_", None)
    frame = None if names is None else _data_frame(file, estimator)
    row = _known_values(estimator)
    if row is None or len(row) != count:
        row = [None] * count
    for unknown in (0.0, 1.0):  # Either may be invalid for a feature, such as 0 for a logarithm.
        yield _layout([unknown if value is None else value for value in row], number, names, frame)


def numbers(number: str, count: int = -1) -> Layout:
    """Returns the layout of rows of `count` unnamed numbers, -1 for any count."""
    example = np.zeros((1, max(count, 0)), DATATYPES[number].dtype)
    return Layout([TensorSpec(INPUT, number, [-1, count])], {INPUT: example}, lambda inputs: _own(inputs[INPUT]))


def _data_frame(file: Path, estimator: Any) -> Callable[..., Any]:
    try:
        frame: Callable[..., Any] = importlib.import_module("pandas").DataFrame
    except ModuleNotFoundError as error:
        what = f"the estimator ({type(estimator).__name__}) was fitted on a DataFrame and"
        raise missing_dependency(file, what, error) from error
    return frame


def _known_values(estimator: Any) -> list[Any] | None:
    """Returns one value per feature that an encoder knows, None for every other feature.

    None if the estimator has no encoder that sees its features.
    """
    if hasattr(estimator, "categories_"):
        return [categories[0] for categories in estimator.categories_]
    if hasattr(estimator, "build_analyzer"):
        return [""]  # A vectorizer: one column of texts.
    if hasattr(estimator, "transformers_"):
        row: list[Any] = [None] * estimator.n_features_in_
        places = getattr(estimator, "_transformer_to_input_indices", {})
        for name, part, _ in estimator.transformers_:
            for at, value in zip(places.get(name, ()), _known_values(part) or (), strict=False):
                row[at] = value
        return row
    return next((row for row in map(_known_values, _parts(estimator)) if row is not None), None)


def _parts(estimator: Any) -> Iterator[Any]:
    """Yields the estimators inside a pipeline, a union, a search or a transformed target."""
    for name in ("steps", "transformer_list"):
        yield from (part for _, part in getattr(estimator, name, ()))
    for name in ("best_estimator_", "regressor_"):
        if hasattr(estimator, name):
            yield getattr(estimator, name)


def _layout(row: list[Any], number: str, names: Array | None, frame: Callable[..., Any] | None) -> Layout:
    """Returns a layout with one tensor if all features have one type, otherwise with one per feature."""
    datatypes = ["BYTES" if isinstance(value, str) else number for value in row]
    if len(set(datatypes)) == 1:
        spec = TensorSpec(INPUT, datatypes[0], [-1, len(row)])

        def table(inputs: Inputs) -> Any:
            array = _own(inputs[INPUT])
            return array if frame is None else frame(array, columns=names)

        return Layout([spec], {INPUT: _tensor(row, spec.datatype)[np.newaxis]}, table)

    columns = [f"x{at}" for at in range(len(row))] if names is None else names.tolist()
    specs = [TensorSpec(name, datatype, [-1]) for name, datatype in zip(columns, datatypes, strict=True)]

    def joined(inputs: Inputs) -> Any:
        values = {name: _own(inputs[name]) for name in columns}
        return np.column_stack([*map(_objects, values.values())]) if frame is None else frame(values)

    example = {spec.name: _tensor([value], spec.datatype) for spec, value in zip(specs, row, strict=True)}
    return Layout(specs, example, joined)


def _texts() -> Layout:
    """Returns the layout of whole texts, for a vectorizer."""
    return Layout(
        [TensorSpec(INPUT, "BYTES", [-1])], {INPUT: _tensor([""], "BYTES")}, lambda inputs: _own(inputs[INPUT])
    )


def _tensor(values: list[Any], datatype: str) -> Array:
    """Returns the values as a request would contain them."""
    elements = [value.encode() for value in values] if datatype == "BYTES" else values
    return np.array(elements, DATATYPES[datatype].dtype)


def _own(array: Array) -> Array:
    """Returns texts as `str` and numbers unchanged. Raises `UnicodeDecodeError`.

    Always a copy: the request's own array may be unaligned, and transformers with copy=False write to their input.
    """
    if not array.dtype.hasobject:
        return np.array(array)
    text = np.empty(array.size, object)
    text[:] = [element.decode() for element in array.ravel().tolist()]
    return text.reshape(array.shape)


def _objects(array: Array) -> Array:
    return array.astype(object)
