"""Pickled estimators and pipelines of scikit-learn, and models of XGBoost: `model.joblib` and `model.pkl`.

Unpickling runs arbitrary code from the file, so files come from the configured repositories only.

The inputs and outputs of an estimator are determined by predicting one row during the load, so the declared ones
are known to work.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import joblib
import numpy as np
from sklearn.exceptions import NotFittedError

from triglot.backends import missing_dependency
from triglot.backends.error_text import error_text
from triglot.backends.features import Layout, layouts, numbers
from triglot.backends.parameters import warn_of_unknown
from triglot.core.call import Call
from triglot.core.errors import InvalidArgument, ModelLoadError
from triglot.core.tensor import DATATYPES, Array, datatype_of
from triglot.core.types import TensorSpec
from triglot.model.config import ModelConfig
from triglot.model.model import Model
from triglot.model.signature import DEFAULT_SIGNATURE, Signature

log = logging.getLogger(__name__)

METHODS = ("predict", "predict_proba", "transform")
"""Methods that can be called: values or labels, the labels' probabilities, and a pipeline's transformed features.
MLServer has the same three names."""


def load(file: Path, config: ModelConfig) -> Model:
    """Returns the model of the object in `file`; its type determines the library (tfs 7.4).

    Raises `ModelLoadError` for an unsupported object, and `MissingDependency` for a library that the object needs.
    """
    warn_of_unknown(file, config, "sklearn")
    found = _unpickle(file)
    family = type(found).__mro__
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in family}
    if "xgboost.core.Booster" in names:
        model: Model = importlib.import_module("triglot.backends.xgboost").BoosterModel(found)
        return model
    if "xgboost.sklearn.XGBModel" in names:
        # These classes need no feature names; only linear models require them.
        plain = numbers("FP32", found.n_features_in_)
        return XgboostEstimatorModel(file, found, chain([plain], layouts(file, found, "FP32")))
    if any("sklearn" in kind.__module__ for kind in family):
        return EstimatorModel(file, found, layouts(file, found, "FP64"))
    raise ModelLoadError(
        f"{file}: expected a scikit-learn estimator or an xgboost model, found "
        f"{type(found).__module__}.{type(found).__qualname__}"
    )


def _unpickle(file: Path) -> Any:
    with _warnings_logged(file):
        try:
            return joblib.load(file)
        except ModuleNotFoundError as error:
            if error.name == "xgboost":
                raise missing_dependency(file, "the pickled object", error) from error
            # Not `missing_dependency`: it may be a module of the author's, and another project's name on the
            # index.
            raise ModelLoadError(
                f"{file}: the pickled object needs the module {error.name}, which is not installed"
            ) from error


@contextmanager
def _warnings_logged(file: Path) -> Iterator[None]:
    """Logs the warnings of libraries, such as that an object was pickled by another release."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        log.warning("%s: %s", file, text)


class EstimatorModel(Model):
    """An estimator. Each of `METHODS` that it has is a signature; the first one is the default.

    - If all features are numbers, or all are text, there is one input `x` of shape [-1, n].
    - Mixed features have an input of shape [-1] each, named after the column of the DataFrame that the estimator
      was fitted on, or else x0, x1 and so on.
    - If the first step takes whole texts, there is an input `x` of shape [-1].

    The output is named after the method. Request parameters that are arguments of the method are passed on.

    `candidates` are possible layouts of the inputs; the first one that the estimator accepts is declared. Raises
    `ModelLoadError` if it accepts none, and `MissingDependency` if pandas is missing.
    """

    platform = "sklearn"
    inputs_in_place = True  # Each call copies the inputs.
    takes_parameters = True

    def __init__(self, file: Path, estimator: Any, candidates: Iterable[Layout]) -> None:
        methods = [name for name in METHODS if hasattr(estimator, name)]
        if not methods:
            raise ModelLoadError(f"{file}: {type(estimator).__name__} has none of {', '.join(METHODS)}")
        self._default = methods[0]
        layout, outputs = _probe(file, estimator, methods, candidates)
        self._table = layout.table
        self._methods = {name: getattr(estimator, name) for name in outputs}
        self._arguments = {name: _arguments(estimator, name) for name in outputs}
        self._dtypes = {name: DATATYPES[spec.datatype].dtype for name, spec in outputs.items()}
        self.inputs = layout.specs
        self.outputs = [outputs.pop(self._default)]
        self.signatures = {name: Signature(layout.specs, [spec]) for name, spec in outputs.items()}

    def infer(self, inputs: Mapping[str, Array], call: Call) -> dict[str, Array]:
        """Calls the signature's method.

        Raises `InvalidArgument` for values that the estimator rejects, with its text (tfs 7.3).
        """
        name = self._default if call.signature_name in ("", DEFAULT_SIGNATURE) else call.signature_name
        arguments = {key: value for key, value in call.parameters.items() if key in self._arguments[name]}
        try:
            table = self._table(inputs)
            array = _rows(name, self._methods[name](table, **arguments), len(table))
            return {name: _cast(name, array, self._dtypes[name])}
        except ValueError as error:
            raise InvalidArgument(f"Exception during {self.platform} prediction: {error_text(error)}") from error


class XgboostEstimatorModel(EstimatorModel):
    """XGBClassifier, XGBRegressor and similar classes: labels come from their own `predict`."""

    platform = "xgboost"


def _arguments(estimator: Any, method: str) -> set[str]:
    """Returns the arguments of a method besides the data; a pipeline passes them to its last step."""
    while hasattr(estimator, "steps"):
        estimator = estimator.steps[-1][1]
    _, *further = inspect.signature(getattr(estimator, method)).parameters.values()
    return {parameter.name for parameter in further if parameter.kind is not parameter.VAR_KEYWORD}


def _probe(
    file: Path, estimator: Any, methods: Sequence[str], candidates: Iterable[Layout]
) -> tuple[Layout, dict[str, TensorSpec]]:
    """Returns the first layout that works, and the output of each method."""
    errors: list[Exception] = []
    for layout in candidates:
        try:
            table = layout.table(layout.example)
            result = getattr(estimator, methods[0])(table)
        except Exception as error:
            errors.append(error)
        else:
            outputs = {methods[0]: _output(methods[0], result)}
            return layout, outputs | _further_outputs(estimator, methods[1:], table)
    first_error = errors[0]
    if isinstance(first_error, NotFittedError):
        raise ModelLoadError(f"{file}: {first_error}") from first_error
    if not hasattr(estimator, "n_features_in_"):
        return numbers("FP64"), {methods[0]: _untried_output(estimator, methods[0])}
    raise ModelLoadError(
        f"{file}: {type(estimator).__name__} accepts neither numbers nor the categories of its encoders: "
        f"{type(first_error).__name__}: {error_text(first_error)}"
    ) from first_error


def _further_outputs(estimator: Any, methods: Sequence[str], table: Any) -> dict[str, TensorSpec]:
    outputs: dict[str, TensorSpec] = {}
    for name in methods:
        try:
            outputs[name] = _output(name, getattr(estimator, name)(table))
        except Exception as error:
            log.info("%s() is not served: %s", name, error)  # It returns several arrays, or a sparse one.
    return outputs


def _output(name: str, result: Any) -> TensorSpec:
    """Returns the output's spec for a `result` of one row. Raises `ValueError` and `TypeError` for non-tensors."""
    array = _rows(name, result, 1)
    return TensorSpec(name, datatype_of(array), [-1, *array.shape[1:]])


def _untried_output(estimator: Any, name: str) -> TensorSpec:
    """Returns the output's spec for an old estimator that does not know its number of features."""
    classes = getattr(estimator, "classes_", None) if name == "predict" else None
    return TensorSpec(name, "FP64" if classes is None else datatype_of(np.asarray(classes)), None)


def _rows(name: str, result: Any, count: int) -> Array:
    array: Array = np.asarray(result)
    if isinstance(result, tuple) or array.ndim == 0 or len(array) != count:
        raise ValueError(
            f"{name} returned {type(result).__name__}, expected one array with a row for each instance"
        )
    return array


def _cast(name: str, array: Array, dtype: np.dtype[Any]) -> Array:
    if array.dtype == dtype or (dtype.hasobject and array.dtype.kind in "OSUT"):
        return array
    # A request's parameters may change labels to scores.
    if dtype.hasobject or not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ValueError(f"{name} returned {array.dtype}, expected {dtype}")
    return array.astype(dtype)
