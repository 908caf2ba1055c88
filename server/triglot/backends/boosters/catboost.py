"""CatBoost's models of any class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import catboost
import numpy as np

from triglot.backends import error_text
from triglot.backends.columns import Columns, Values, shown
from triglot.core.call import Call
from triglot.core.errors import InvalidArgument, ModelLoadError
from triglot.core.tensor import Array, datatype_of
from triglot.core.types import TensorSpec
from triglot.model.model import Model
from triglot.model.signature import Signature
from triglot.platform.cpus import thread_limit

PREDICTION_TYPE = "prediction_type"
PREDICTION_TYPES = ("RawFormulaVal", "Probability", "LogProbability", "Exponent")
"""What a request's parameter `prediction_type` can ask for, as in CatBoost's `predict`."""
ONE_THREAD = 20_000
"""Rows times trees up to which one thread predicts: others take longer to start."""


def class_of(loss: str) -> Any:
    """Return CatBoost's class for models of a loss: others answer with something else, without an error."""
    if catboost.core.is_classification_objective(loss):
        return catboost.CatBoostClassifier
    return catboost.CatBoostRanker if catboost.core.is_ranking_metric(loss) else catboost.CatBoostRegressor


def loss_of(model: Any) -> str:
    """Return the loss that a model was trained with."""
    return str(model.get_all_params().get("loss_function", "RMSE"))


class CatboostModel(Model):
    """A model of CatBoost, whose class is the one for its loss.

    The output is `predict`: FP64 values, or labels. Classifiers have the signature `predict_proba`, too. Numbers
    are FP32, categories and texts BYTES.
    """

    platform = "catboost"
    any_inputs = True
    any_output_shapes = True
    takes_parameters = True
    inputs_in_place = True  # Each call copies the inputs.

    def __init__(self, file: Path, found: Any) -> None:
        if not found.is_fitted():
            raise ModelLoadError(f"{file}: {type(found).__name__} is not fitted")
        if found.get_embedding_feature_indices():
            raise ModelLoadError(f"{file}: embedding features are not supported")
        self._model = found
        self._categories, self._texts = found.get_cat_feature_indices(), found.get_text_feature_indices()
        names = found.feature_names_
        special: dict[int, Values] = {at: Categories() for at in self._categories}
        special |= {at: Texts() for at in self._texts}
        self._columns = Columns(names, "FP32", special, named=names != [str(at) for at in range(len(names))])
        self._trees = max(1, found.tree_count_)
        self._classes: Array | None = None
        if catboost.core.is_classification_objective(loss_of(found)):
            self._classes = np.asarray(found.classes_)
        self.inputs, self.columns, self.unnamed = (
            self._columns.specs,
            self._columns.columns,
            self._columns.unnamed,
        )
        row = np.zeros((1, len(names)), object if special else np.float32)
        if special:
            row[:, list(special)] = ""
        result = self._predict(row, "")
        self.outputs = [TensorSpec("predict", datatype_of(result), [-1, *result.shape[1:]])]
        if self._classes is not None:
            proba = self._predict(row, "Probability")
            outputs = [TensorSpec("predict_proba", "FP64", [-1, *proba.shape[1:]])]
            self.signatures = {"predict_proba": Signature(self.inputs, outputs)}
            self.labels = {"predict_proba": [str(label).encode() for label in self._classes.tolist()]}

    def infer(self, inputs: Mapping[str, Array], call: Call) -> dict[str, Array]:
        """Predict. Raise `InvalidArgument` for what the model does not take."""
        kind = call.parameters.get(PREDICTION_TYPE, "")
        if kind not in ("", *PREDICTION_TYPES):
            raise InvalidArgument(
                f"parameter {PREDICTION_TYPE}: expected one of {', '.join(PREDICTION_TYPES)}, got {kind!r:.60}"
            )
        name = "predict_proba" if call.signature_name == "predict_proba" else "predict"
        if kind and name == "predict" and self._classes is not None:
            raise InvalidArgument(
                f"{PREDICTION_TYPE} is a parameter of the signature 'predict_proba': predict returns labels"
            )
        usual = "Probability" if name == "predict_proba" else ""
        return {name: self._predict(self._columns.matrix(inputs), str(kind or usual))}

    def _predict(self, matrix: Array, kind: str) -> Array:
        """Return labels or values, or another `kind` of prediction."""
        rows = len(matrix)
        threads = 1 if rows * self._trees <= ONE_THREAD else thread_limit() or -1
        labels = not kind and self._classes is not None
        try:
            data = matrix
            if matrix.dtype.hasobject:
                data = catboost.Pool(matrix, cat_features=self._categories, text_features=self._texts)
            if kind or labels:  # The base class takes all kinds, and its own default is no label.
                result = catboost.CatBoost.predict(self._model, data, kind or "Class", thread_count=threads)
            else:
                result = self._model.predict(data, thread_count=threads)
        except (TypeError, ValueError, catboost.CatBoostError) as error:
            raise InvalidArgument(f"Exception during catboost prediction: {error_text(error)}") from error
        return self._labels(np.asarray(result), rows) if labels else np.asarray(result)

    def _labels(self, result: Array, rows: int) -> Array:
        assert self._classes is not None
        if self._classes.dtype.kind == "b" and result.dtype.kind != "b":
            result = result.astype(str) == "True"
        # Labels of more than two classes come as a column.
        return result.reshape(rows) if result.size == rows else result


class Categories(Values):
    """Texts, and whole numbers, which are the same as their texts."""

    datatype = "BYTES"
    dtype = np.dtype(object)

    def convert(self, array: Array) -> Array:
        """See `Values`."""
        return _objects([_category(value) for value in array.tolist()])


class Texts(Values):
    """Whole texts."""

    datatype = "BYTES"
    dtype = np.dtype(object)

    def convert(self, array: Array) -> Array:
        """See `Values`."""
        return _objects([_text(value) for value in array.tolist()])


def _category(value: Any) -> str | int:
    if isinstance(value, bytes | str):
        return _text(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not float(value).is_integer():
        raise ValueError(f"expected categories as text or whole numbers, got {shown(value)}")
    return int(value)


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise ValueError(f"expected text, got {shown(value)}")
    return value


def _objects(values: Sequence[Any]) -> Array:
    array = np.empty(len(values), object)
    array[:] = values
    return array
