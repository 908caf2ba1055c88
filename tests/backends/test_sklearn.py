"""Estimators of scikit-learn: fitted here, pickled, and compared with what they answer themselves."""

# ruff: noqa: E402 — without the libraries there is nothing to import.

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.direct_calls import described, infer
from triglot import backends
from triglot.core.errors import InvalidArgument
from triglot.core.types import ParameterValue

sklearn = pytest.importorskip("sklearn", reason="the ml environment has it")

import joblib
from sklearn.cluster import KMeans
from sklearn.compose import TransformedTargetRegressor
from sklearn.decomposition import PCA
from sklearn.ensemble import IsolationForest, RandomForestClassifier, RandomForestRegressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC

from tests.backends.estimators import LABELS, WORDS, X, load

# --- what they answer ---

ESTIMATORS: dict[str, tuple[Any, Any, str, list[int]]] = {
    "integers": (LogisticRegression(), LABELS, "INT64", [-1]),
    "words": (LogisticRegression(), WORDS, "BYTES", [-1]),
    "fixed-words": (LogisticRegression(), WORDS.astype(str), "BYTES", [-1]),
    "booleans": (RandomForestClassifier(5, random_state=1), LABELS > 1, "BOOL", [-1]),
    "floats": (LinearRegression(), X[:, 2], "FP64", [-1]),
    "forest": (RandomForestRegressor(5, random_state=1), X[:, 2], "FP64", [-1]),
    "one-column": (LinearRegression(), X[:, 2:], "FP64", [-1, 1]),
    "two-targets": (LinearRegression(), X[:, 1:], "FP64", [-1, 2]),
    "two-labels": (RandomForestClassifier(5, random_state=1), np.column_stack([WORDS, WORDS]), "BYTES", [-1, 2]),
    "clusters": (KMeans(2, n_init=1, random_state=1), None, "INT32", [-1]),
    "outliers": (IsolationForest(n_estimators=5, random_state=1), None, "INT64", [-1]),
    "margin": (LinearSVC(), LABELS, "INT64", [-1]),
    "pipeline": (make_pipeline(StandardScaler(), PCA(2), LogisticRegression()), WORDS, "BYTES", [-1]),
    "search": (GridSearchCV(LogisticRegression(), {"C": [0.1, 1]}, cv=2), LABELS, "INT64", [-1]),
    "target": (
        TransformedTargetRegressor(LinearRegression(), func=np.log1p, inverse_func=np.expm1),
        X[:, 0],
        "FP64",
        [-1],
    ),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_answer_is_the_estimators_own(tmp_path: Path, name: str) -> None:
    estimator, target, datatype, shape = ESTIMATORS[name]
    estimator.fit(X, target)
    model = load(tmp_path, estimator)
    assert model.platform == "sklearn"
    assert described(model.inputs) == [("x", "FP64", [-1, 3])]
    assert described(model.outputs) == [("predict", datatype, shape)]
    for rows in (X, X[:1]):
        np.testing.assert_array_equal(infer(model, x=rows), estimator.predict(rows))


# Probabilities of several labels are several outputs: see test_sklearn_composed.py.
@pytest.mark.parametrize("name", sorted(ESTIMATORS.keys() - {"two-labels"}))
def test_further_signatures(tmp_path: Path, name: str) -> None:
    estimator, target, _, _ = ESTIMATORS[name]
    estimator.fit(X, target)
    model = load(tmp_path, estimator)
    has = {method for method in ("predict_proba", "transform") if hasattr(estimator, method)}
    assert model.signatures.keys() == has
    for method in model.signatures:
        expected = getattr(estimator, method)(X)
        np.testing.assert_array_equal(infer(model, method, x=X), expected)
        assert described(model.signatures[method].outputs) == [(method, "FP64", [-1, expected.shape[1]])]


def test_a_transformer_alone(tmp_path: Path) -> None:
    scaler = StandardScaler().fit(X)
    model = load(tmp_path, scaler)
    assert described(model.outputs) == [("transform", "FP64", [-1, 3])]
    assert model.signatures == {}
    np.testing.assert_array_equal(infer(model, x=X), scaler.transform(X))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_pickles(tmp_path: Path, protocol: int) -> None:
    estimator = LogisticRegression().fit(X, LABELS)
    file = tmp_path / "model.pkl"
    file.write_bytes(pickle.dumps(estimator, protocol))
    np.testing.assert_array_equal(infer(backends.load("sklearn", file), x=X), estimator.predict(X))


def test_compressed_files(tmp_path: Path) -> None:
    estimator = LogisticRegression().fit(X, LABELS)
    joblib.dump(estimator, tmp_path / "model.joblib", compress=3)
    model = backends.load("sklearn", tmp_path / "model.joblib")
    np.testing.assert_array_equal(infer(model, x=X), estimator.predict(X))


# --- parameters ---


class Shifted(LinearRegression):  # type: ignore[misc]  # It has no types.
    """An estimator whose predict() takes an argument."""

    def predict(self, X: Any, shift: float = 0.0) -> Any:  # noqa: N803
        return super().predict(X) + shift


@pytest.mark.parametrize("estimator", [Shifted(), make_pipeline(StandardScaler(), Shifted())], ids=str)
def test_parameters_that_predict_knows(tmp_path: Path, estimator: Any) -> None:
    estimator.fit(X, X[:, 0])
    model = load(tmp_path, estimator)
    assert model.takes_parameters
    parameters: dict[str, ParameterValue] = {"shift": 100.0, "priority": 1, "X": 3}
    np.testing.assert_array_equal(infer(model, parameters=parameters, x=X), estimator.predict(X, shift=100.0))
    np.testing.assert_array_equal(infer(model, x=X), estimator.predict(X))


def test_parameters_that_change_the_answer(tmp_path: Path) -> None:
    model = load(tmp_path, GaussianProcessRegressor().fit(X, X[:, 0]))
    with pytest.raises(InvalidArgument) as caught:
        infer(model, parameters={"return_std": True}, x=X)
    assert caught.value.message == (
        "Exception during sklearn prediction: predict returned tuple, expected one array with a row for "
        "each instance"
    )


class Labels(LogisticRegression):  # type: ignore[misc]  # It has no types.
    """A classifier that can be asked for something else than labels."""

    def predict(self, X: Any, scores: bool = False) -> Any:  # noqa: N803
        return self.decision_function(X) if scores else super().predict(X)


@pytest.mark.parametrize("labels", [LABELS > 1, LABELS, WORDS])
def test_parameters_that_make_labels_something_else(tmp_path: Path, labels: Any) -> None:
    model = load(tmp_path, Labels().fit(X, labels))
    with pytest.raises(
        InvalidArgument, match="Exception during sklearn prediction: predict returned float64, expected"
    ):
        infer(model, parameters={"scores": True}, x=X[:1])
