"""Pickled models of scikit-learn, XGBoost, LightGBM and CatBoost: `model.joblib` and `model.pkl`.

Unpickling runs arbitrary code from the file, so files come from the configured repositories only.

The inputs and outputs of an estimator are determined by predicting one row during the load, so the declared ones
are known to work.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import sklearn
from sklearn.exceptions import NotFittedError

from triglot.backends import described, error_text, missing_dependency, warn_of_unknown
from triglot.backends.features import Layout, RowLayout, layouts, numbers, parts, untried
from triglot.backends.pickles import content_of
from triglot.core.call import Call
from triglot.core.errors import InvalidArgument, MissingDependency, ModelLoadError
from triglot.core.tensor import DATATYPES, Array, datatype_of
from triglot.core.types import TensorSpec
from triglot.model.config import ModelConfig
from triglot.model.model import Model, signature_of
from triglot.model.signature import DEFAULT_SIGNATURE, Signature

log = logging.getLogger(__name__)

_RELEASE = re.compile(rb"_sklearn_version.{1,12}?(\d+\.\d+[.\w]*)", re.DOTALL)
METHODS = ("predict", "predict_proba", "transform")
"""Methods that can be called: values or labels, the labels' probabilities, and a pipeline's transformed features.
MLServer has the same three names."""


def load(file: Path, config: ModelConfig) -> Model:
    """Return the model of the object in `file`; its type determines the library (tfs 7.4).

    Raise `ModelLoadError` for an unsupported object, and `MissingDependency` for a library that the object needs.
    """
    warn_of_unknown(file, config, "sklearn")
    try:
        with _warnings_logged(file):
            found = _unpickle(file)
        return model_of(file, found, config)
    except MissingDependency:
        raise
    except Exception as error:
        if (release := other_release(file)) is None:
            raise
        text = str(error) if isinstance(error, ModelLoadError) else described(file, error)
        raise ModelLoadError(
            f"{text}; the file was pickled with scikit-learn {release}, and {sklearn.__version__} is installed; "
            f"run: pip install scikit-learn=={release}"
        ) from error


def model_of(file: Path, found: Any, config: ModelConfig) -> Model:
    """Return the model of an object that was read from `file`. Raise `ModelLoadError`."""
    family = type(found).__mro__
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in family}
    if "xgboost" in sys.modules:
        from triglot.backends.boosters import xgboost  # noqa: PLC0415 - it imports xgboost.

        xgboost.check_pickle(file)
        if "xgboost.core.Booster" in names:
            return xgboost.BoosterModel(found)
    if names & {"lightgbm.basic.Booster", "lightgbm.sklearn.LGBMModel"}:
        from triglot.backends.boosters import lightgbm  # noqa: PLC0415 - it imports lightgbm.

        return lightgbm.LightgbmModel(file, found, config)
    if "catboost.core.CatBoost" in names:
        from triglot.backends.boosters import catboost  # noqa: PLC0415 - it imports catboost.

        return catboost.CatboostModel(file, found)
    if "xgboost.sklearn.XGBModel" in names:
        return xgboost_model(file, found)
    if any("sklearn" in kind.__module__ for kind in family):
        return EstimatorModel(file, found, layouts(file, found, "FP64"))
    raise ModelLoadError(
        f"{file}: expected a model of scikit-learn, XGBoost, LightGBM or CatBoost, found "
        f"{type(found).__module__}.{type(found).__qualname__}"
    )


def xgboost_model(file: Path, found: Any) -> XgboostEstimatorModel:
    """Return the model of an estimator of `xgboost.sklearn`. Raise `ModelLoadError`."""
    # These classes need no feature names; only linear models require them.
    plain = numbers("FP32", found.n_features_in_, getattr(found, "feature_names_in_", None))
    return XgboostEstimatorModel(file, found, chain([plain], layouts(file, found, "FP32")))


def _unpickle(file: Path) -> Any:
    try:
        return joblib.load(file)
    except ModuleNotFoundError as error:
        if error.name in ("catboost", "lightgbm", "xgboost"):
            raise missing_dependency(file, "the pickled object", error) from error
        # Not `missing_dependency`: it may be a module of the author's, and another project's name on the index.
        raise ModelLoadError(
            f"{file}: the pickled object needs the module {error.name}, which is not installed"
        ) from error


@contextmanager
def _warnings_logged(file: Path) -> Iterator[None]:
    """Log the warnings of libraries, such as that an object was pickled by another release."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        finally:
            for text in dict.fromkeys(str(warning.message) for warning in caught):
                log.warning("%s: %s", file, text)


def other_release(file: Path) -> str | None:
    """Return the release of scikit-learn that pickled a file; None if it is the installed one, or not known.

    It is read from the file, as scikit-learn warns only of objects that could be restored.
    """
    found = _RELEASE.search(content_of(file))
    release = None if found is None else found[1].decode()
    return None if release == sklearn.__version__ else release


class EstimatorModel(Model):
    """An estimator. Each of `METHODS` that it has is a signature; the first one is the default.

    - If it was fitted on a DataFrame, its columns are the inputs, of shape [-1] each.
    - Otherwise, if all features are numbers, or all are text, there is one input `x` of shape [-1, n], and mixed
      features are the inputs x0, x1 and so on.
    - If the first step takes whole texts, there is an input `x` of shape [-1].

    The output is named after the method. Request parameters that are arguments of the method are passed on.

    `candidates` are possible layouts of the inputs; the first one that the estimator accepts is declared. Raises
    `ModelLoadError` if it accepts none, and `MissingDependency` if pandas is missing.
    """

    platform = "sklearn"
    inputs_in_place = True  # Each call copies the inputs.
    takes_parameters = True
    any_inputs = True

    def __init__(self, file: Path, estimator: Any, candidates: Iterable[Layout | RowLayout]) -> None:
        methods = [name for name in METHODS if hasattr(estimator, name)]
        if not methods:
            raise ModelLoadError(f"{file}: {type(estimator).__name__} has none of {', '.join(METHODS)}")
        self._default = methods[0]
        layout, outputs = _probe(file, estimator, methods, candidates)
        self._table = layout.table
        self._methods = {name: getattr(estimator, name) for name in outputs}
        self._arguments = {name: _arguments(estimator, name) for name in outputs}
        self._dtypes = {spec.name: DATATYPES[spec.datatype].dtype for specs in outputs.values() for spec in specs}
        self.inputs = layout.specs
        self.columns = layout.columns
        self.unnamed = layout.unnamed
        self.outputs = outputs.pop(self._default)
        self.signatures = {name: Signature(layout.specs, specs) for name, specs in outputs.items()}
        if any(map(_has_counts, parts(estimator))):
            self.warnings = [_counts_text(other_release(file))]

    def infer(self, inputs: Mapping[str, Array], call: Call) -> dict[str, Array]:
        """Call the signature's method.

        Raise `InvalidArgument` for values that the estimator rejects, with its text (tfs 7.3).
        """
        name = self._default if call.signature_name in ("", DEFAULT_SIGNATURE) else call.signature_name
        arguments = {key: value for key, value in call.parameters.items() if key in self._arguments[name]}
        try:
            table = self._table(inputs)
            arrays = _arrays(name, self._methods[name](table, **arguments), len(table))
            return {output: _cast(output, array, self._dtypes[output]) for output, array in arrays.items()}
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"Exception during {self.platform} prediction: {error_text(error)}") from error


class XgboostEstimatorModel(EstimatorModel):
    """XGBClassifier, XGBRegressor and similar classes: labels come from their own `predict`."""

    platform = "xgboost"


def _has_counts(part: Any) -> bool:
    """Whether a tree counts the rows in its leaves, as before scikit-learn 1.4, where they are fractions now."""
    tree = getattr(part, "tree_", None) if hasattr(part, "predict_proba") else None
    return tree is not None and tree.value[0].sum(axis=-1).max() > 1 + 1e-6


def _counts_text(release: str | None) -> str:
    pickled, pin = f"scikit-learn {release}" if release else "a release before 1.4", release or "1.3.2"
    return (
        f"predict_proba returns counts, not probabilities, and labels may be wrong: the trees were pickled with "
        f"{pickled}, and scikit-learn {sklearn.__version__} expects fractions in them; train the model again, or "
        f"run: pip install scikit-learn=={pin}"
    )


def _arguments(estimator: Any, method: str) -> set[str]:
    """Return the arguments of a method besides the data; a pipeline passes them to its last step."""
    while hasattr(estimator, "steps"):
        estimator = estimator.steps[-1][1]
    _, *further = signature_of(getattr(estimator, method)).parameters.values()
    return {parameter.name for parameter in further if parameter.kind is not parameter.VAR_KEYWORD}


def _probe(
    file: Path, estimator: Any, methods: Sequence[str], candidates: Iterable[Layout | RowLayout]
) -> tuple[Layout | RowLayout, dict[str, list[TensorSpec]]]:
    """Return the first layout that works, and the outputs of each method."""
    errors: list[Exception] = []
    for layout in candidates:
        try:
            table = layout.table(layout.example)
            result = getattr(estimator, methods[0])(table)
        except Exception as error:
            errors.append(error)
        else:
            outputs = {methods[0]: _outputs(methods[0], result)}
            return layout, outputs | _further_outputs(estimator, methods[1:], table)
    first_error = errors[0]
    if isinstance(first_error, NotFittedError):
        raise ModelLoadError(f"{file}: {first_error}") from first_error
    unknown = untried(file, estimator)
    if unknown is not None and not (hasattr(estimator, "n_features_in_") and other_release(file)):
        text = f"{type(first_error).__name__}: {error_text(first_error)}"
        log.warning("%s: its inputs are not known, as it rejects every row that was tried: %s", file, text)
        return unknown, {name: [_untried_output(estimator, name)] for name in methods}
    raise ModelLoadError(
        f"{file}: {type(estimator).__name__} accepts neither numbers nor the categories of its encoders: "
        f"{type(first_error).__name__}: {error_text(first_error)}"
    ) from first_error


def _further_outputs(estimator: Any, methods: Sequence[str], table: Any) -> dict[str, list[TensorSpec]]:
    outputs: dict[str, list[TensorSpec]] = {}
    for name in methods:
        try:
            outputs[name] = _outputs(name, getattr(estimator, name)(table))
        except Exception as error:
            log.info("%s() is not served: %s", name, error)  # It returns a sparse array, or needs more rows.
    return outputs


def _outputs(name: str, result: Any) -> list[TensorSpec]:
    """Return the outputs' specs for a `result` of one row.

    Raise `ValueError` and `TypeError` for anything but tensors.
    """
    return [
        TensorSpec(output, datatype_of(array), [-1, *array.shape[1:]])
        for output, array in _arrays(name, result, 1).items()
    ]


def _untried_output(estimator: Any, name: str) -> TensorSpec:
    """Return the output's spec for an estimator that could not be tried."""
    classes = getattr(estimator, "classes_", None) if name == "predict" else None
    return TensorSpec(name, "FP64" if classes is None else datatype_of(np.asarray(classes)), None)


def _arrays(name: str, result: Any, count: int) -> dict[str, Array]:
    """Return the arrays that a method returned, by the names of their outputs, with a row for each of `count`.

    A list of tables, as `predict_proba` returns for several targets, is an output for each, numbered from 0.
    """
    if (
        isinstance(result, list)
        and result
        and all(isinstance(array, np.ndarray) and array.ndim == 2 for array in result)
    ):
        return {f"{name}_{at}": _rows(name, array, count) for at, array in enumerate(result)}
    return {name: _rows(name, result, count)}


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
