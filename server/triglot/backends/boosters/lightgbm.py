"""LightGBM's boosters and estimators as models."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np

from triglot.backends import error_text
from triglot.backends.columns import Columns, Values, exact, shown
from triglot.backends.features import categorical_positions, category_columns
from triglot.core.call import Call
from triglot.core.errors import InvalidArgument, ModelLoadError
from triglot.core.tensor import Array, datatype_of
from triglot.core.types import ParameterValue, TensorSpec
from triglot.model.config import ModelConfig
from triglot.model.model import Model
from triglot.model.signature import Signature
from triglot.platform.cpus import thread_limit

CATEGORIES = "categories"
PARAMETERS = (CATEGORIES,)
"""Parameters of a configuration: whether clients send the `values` of categories or their `positions`."""
ARGUMENTS = {
    "raw_score": bool,
    "pred_leaf": bool,
    "pred_contrib": bool,
    "start_iteration": int,
    "num_iteration": int,
}
"""Parameters of requests: arguments of LightGBM's `predict`, with their types."""
ONE_THREAD = 20_000
"""Rows times trees up to which one thread predicts: others take longer to start."""
_FLOAT64 = np.dtype(np.float64)

# What it says by itself goes to stdout otherwise.
lightgbm.register_logger(logging.getLogger("lightgbm"))


class LightgbmModel(Model):
    """A booster, or an estimator's booster with what the estimator knows beside it.

    The output is `predict`, FP64: values, or the probabilities of a booster, whose labels no file has; labels of a
    classifier. Classifiers and boosters of classes have the signature `predict_proba`, too. Columns of categories
    take their values (see `category_columns`), all others numbers.
    """

    platform = "lightgbm"
    any_inputs = True
    any_output_shapes = True
    takes_parameters = True
    inputs_in_place = True  # Each call copies the inputs.

    def __init__(self, file: Path, found: Any, config: ModelConfig) -> None:
        is_estimator = isinstance(found, lightgbm.LGBMModel)
        self._booster = booster = found.booster_ if is_estimator else found
        header = booster.model_to_string(num_iteration=1).partition("\n\n")[0].splitlines()
        objective = next((line.split("=")[1].split()[0] for line in header if line.startswith("objective=")), "")
        self._averages = "average_output" in header
        self._options = {
            name: value
            for name, value in (found.get_params() if is_estimator else {}).items()
            if name.startswith("pred_early_stop")
        }
        self._columns = _columns(file, booster, config)
        self.inputs, self.columns, self.unnamed = (
            self._columns.specs,
            self._columns.columns,
            self._columns.unnamed,
        )
        row = np.full((1, booster.num_feature()), np.nan)
        shape = self._predict(row, {}).shape[1:]
        of_classes = objective in ("binary", "multiclass", "multiclassova")
        self._classes: Array | None = None
        if isinstance(found, lightgbm.LGBMClassifier) and objective:
            self._classes = np.asarray(found.classes_)
            of_classes = True
        count = shape[0] if shape else 2
        datatype = "FP64" if self._classes is None else datatype_of(self._classes)
        self.outputs = [TensorSpec("predict", datatype, [-1] if self._classes is not None else [-1, *shape])]
        if of_classes:
            outputs = [TensorSpec("predict_proba", "FP64", [-1, count])]
            self.signatures = {"predict_proba": Signature(self.inputs, outputs)}
        if self._classes is not None:
            self.labels = {"predict_proba": [str(label).encode() for label in self._classes.tolist()]}

    def infer(self, inputs: Mapping[str, Array], call: Call) -> dict[str, Array]:
        """Predict. Raise `InvalidArgument` for what the model does not take."""
        arguments = {name: _argument(name, call.parameters[name]) for name in ARGUMENTS if name in call.parameters}
        result = self._predict(self._columns.matrix(inputs), arguments)
        special = any(arguments.get(name) for name in ("raw_score", "pred_leaf", "pred_contrib"))
        if call.signature_name == "predict_proba":
            return {"predict_proba": result if special else _probabilities(result)}
        if self._classes is None:
            return {"predict": result}
        if special:
            raise InvalidArgument(
                "raw_score, pred_leaf and pred_contrib are parameters of the signature 'predict_proba': predict "
                "returns labels"
            )
        return {"predict": self._classes[np.argmax(_probabilities(result), axis=1)]}

    def _predict(self, matrix: Array, arguments: Mapping[str, Any]) -> Array:
        rows = len(matrix)
        threads = 1 if rows * self._booster.num_trees() <= ONE_THREAD else thread_limit()
        # Of no rows, LightGBM returns a shape without the classes.
        sent = matrix if rows else np.zeros((1, matrix.shape[1]))
        try:
            result = self._booster.predict(sent, num_threads=threads, **self._options, **arguments)
        except (ValueError, lightgbm.basic.LightGBMError) as error:
            raise InvalidArgument(f"Exception during lightgbm prediction: {error_text(error)}") from error
        if self._averages and (arguments.get("raw_score") or arguments.get("pred_contrib")):
            result = result / self._iterations(arguments)
        return np.asarray(result[:rows], np.float64)

    def _iterations(self, arguments: Mapping[str, Any]) -> int:
        """Return how many iterations a prediction sums: LightGBM averages a random forest's values only."""
        start = max(0, arguments.get("start_iteration", 0))
        wanted: int = arguments.get("num_iteration", 0 if start else self._booster.best_iteration)
        rest: int = self._booster.current_iteration() - start
        return max(1, min(wanted, rest) if wanted > 0 else rest)


def _argument(name: str, value: ParameterValue) -> Any:
    kind = ARGUMENTS[name]
    if type(value) is not kind:
        raise InvalidArgument(f"parameter {name}: expected {kind.__name__}, got {value!r:.60}")
    return value


def _probabilities(result: Array) -> Array:
    """Return a column for each class: of two, LightGBM has the second one's."""
    return result if result.ndim == 2 else np.vstack((1.0 - result, result)).T


# --- columns ---


def _columns(file: Path, booster: Any, config: ModelConfig) -> Columns:
    meant = config.parameters.get(CATEGORIES, "values")
    if meant not in ("values", "positions"):
        raise ModelLoadError(
            f"{config.source or file}: parameters: {CATEGORIES}: expected values or positions, got {meant!r}"
        )
    special: dict[int, Values] = {at: Positions() for at in categorical_positions(booster)}
    if booster.pandas_categorical and meant == "values":
        categories = category_columns(booster)
        if categories is None:
            raise ModelLoadError(
                f"{file}: it has {len(booster.pandas_categorical)} lists of categories for {len(special)} "
                "categorical columns, as ordered Categoricals of pandas are numbers to LightGBM: which columns "
                f"they belong to is not known; with the parameter {CATEGORIES}: positions, clients send the "
                "positions in the lists"
            )
        special |= {at: Categories(values) for at, values in categories.items()}
    names = booster.feature_name()
    named = names != [f"Column_{at}" for at in range(len(names))]
    return Columns(names, "FP64", special, lambda name: name.replace(" ", "_"), named=named)


class Positions(Values):
    """Whole numbers: LightGBM takes 0.9 for 0."""

    datatype = "FP64"
    dtype = _FLOAT64

    def convert(self, array: Array) -> Array:
        """See `Values`."""
        numbers = exact(array, _FLOAT64)
        wrong = np.isfinite(numbers) & (np.trunc(numbers) != numbers)
        if wrong.any():
            raise ValueError(f"expected categories as whole numbers, got {numbers[wrong][0]}")
        return numbers


class Categories(Values):
    """Values of a list; one that is not in it is a missing value, as in a DataFrame."""

    dtype = _FLOAT64

    def __init__(self, values: Sequence[Any]) -> None:
        self._positions = {value: float(at) for at, value in enumerate(values)}
        kinds = {type(value) if isinstance(value, str | bool) else float for value in values}
        self._kind = kinds.pop() if len(kinds) == 1 else None
        self.datatype = "BOOL" if self._kind is bool else "FP64" if self._kind is float else "BYTES"

    def convert(self, array: Array) -> Array:
        """See `Values`."""
        values = [value.decode() if isinstance(value, bytes) else value for value in array.tolist()]
        for value in values if self._kind is not None else ():
            if _is_missing(value):
                continue
            if isinstance(value, str) != (self._kind is str):
                known = ", ".join(map(shown, list(self._positions)[:3]))
                raise ValueError(f"expected one of its categories, such as {known}, got {shown(value)}")
        return np.array([self._positions.get(value, np.nan) for value in values])


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
