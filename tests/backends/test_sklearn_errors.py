"""What estimators refuse, what is found out while they load, and files that hold no model."""

# ruff: noqa: E402 — without the libraries there is nothing to import.

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.direct_calls import described, infer
from triglot import backends
from triglot.core.call import Call
from triglot.core.errors import InvalidArgument, ModelLoadError
from triglot.core.tensor import object_array
from triglot.core.types import TensorSpec

sklearn = pytest.importorskip("sklearn", reason="the ml environment has it")

import pandas as pd
from sklearn.base import BaseEstimator
from sklearn.cluster import DBSCAN
from sklearn.decomposition import PCA
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler

from tests.backends.estimators import CATEGORIES, LABELS, WORDS, X, load, save


def load_error(file: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        backends.load("sklearn", file)
    assert str(caught.value).startswith(f"{file}: ")
    return str(caught.value).removeprefix(f"{file}: ")


# --- values that are refused ---


def test_values_that_the_estimator_refuses(tmp_path: Path) -> None:
    estimator = LogisticRegression().fit(X, LABELS)
    model = load(tmp_path, estimator)
    for rows, text in (
        ([[0.0, np.nan, 1.0]], "Input X contains NaN"),
        ([[0.0, np.inf, 1.0]], "Input X contains infinity"),
        (np.zeros((0, 3)), "Found array with 0 sample"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            infer(model, x=rows)
        assert caught.value.message.startswith(f"Exception during sklearn prediction: {text}")


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (np.zeros((1, 2)), "X has 2 features"),
        (np.zeros(3), "Expected 2D array"),
        (np.zeros((1, 1, 3)), "Found array"),
    ],
)
@pytest.mark.parametrize("names", [None, ["a", "b", "c"]])
def test_shapes_that_are_not_the_declared_one(tmp_path: Path, x: Any, text: str, names: list[str] | None) -> None:
    """A protocol may leave it to the model to look at the shapes."""
    table = X if names is None else pd.DataFrame(X, columns=names)
    model = load(tmp_path, LogisticRegression().fit(table, LABELS))
    with pytest.raises(InvalidArgument) as caught:
        model.infer({"x": x}, Call())
    assert names or text in caught.value.message


def test_texts_that_are_refused(tmp_path: Path) -> None:
    model = load(tmp_path, make_pipeline(OneHotEncoder(), LogisticRegression()).fit(CATEGORIES, LABELS))
    with pytest.raises(InvalidArgument, match=r"Found unknown categories \['Rom'\] in column 0"):
        infer(model, x=[["Rom", "neither"]])
    with pytest.raises(InvalidArgument, match="'utf-8' codec can't decode byte 0xff"):
        model.infer({"x": object_array([b"Ulm", b"\xff"], (1, 2))}, Call())


class Broken(LinearRegression):  # type: ignore[misc]  # It has no types.
    """Fails on what it was not tried with."""

    def predict(self, X: Any) -> Any:  # noqa: N803
        if np.any(X):
            raise KeyError("a secret")
        return super().predict(X)


def test_what_is_not_the_callers_fault(tmp_path: Path) -> None:
    model = load(tmp_path, Broken().fit(X, X[:, 0]))
    with pytest.raises(KeyError):
        infer(model, x=X)


def test_the_requests_own_array(tmp_path: Path) -> None:
    """It may be unaligned, and a transformer may write into the array that it is given."""
    estimator = make_pipeline(StandardScaler(copy=False), LogisticRegression()).fit(X.copy(), LABELS)
    model = load(tmp_path, estimator)
    expected = estimator.predict(X.copy())
    for offset in range(9):
        data = bytearray(bytes(offset) + X.tobytes())
        view = np.frombuffer(data, "f8", offset=offset).reshape(X.shape)
        np.testing.assert_array_equal(model.infer({"x": view}, Call())["predict"], expected)
        assert data == bytes(offset) + X.tobytes()


# --- what is found out while it loads ---


def test_zero_may_be_out_of_range(tmp_path: Path) -> None:
    estimator = make_pipeline(FunctionTransformer(np.log, validate=True), LinearRegression()).fit(X, X[:, 0])
    with np.errstate(divide="ignore"):
        model = load(tmp_path, estimator)
    assert described(model.inputs) == [("x", "FP64", [-1, 3])]
    np.testing.assert_array_equal(infer(model, x=X), estimator.predict(X))


@pytest.mark.parametrize(("target", "datatype"), [(WORDS, "BYTES"), (LABELS, "INT64"), (LABELS > 1, "BOOL")])
def test_a_classifier_that_does_not_count_its_features(tmp_path: Path, target: Any, datatype: str) -> None:
    estimator = LogisticRegression().fit(X, target)
    del estimator.n_features_in_
    model = load(tmp_path, estimator)
    assert described(model.inputs) == [("x", "FP64", [-1, -1])]
    assert model.outputs == [TensorSpec("predict", datatype, None)]
    np.testing.assert_array_equal(infer(model, x=X), estimator.predict(X))


class Single(BaseEstimator):  # type: ignore[misc]  # It has no types.
    """An estimator as users write them: it says nothing of itself, and answers with single precision."""

    def predict(self, X: Any) -> Any:  # noqa: N803
        return np.asarray(X, np.float32).sum(axis=1)


def test_a_regressor_that_does_not_count_its_features(tmp_path: Path) -> None:
    model = load(tmp_path, Single())
    assert model.outputs == [TensorSpec("predict", "FP64", None)]
    np.testing.assert_array_equal(infer(model, x=X), X.astype("f4").sum(axis=1))


class Choosy(Single):
    """Takes nothing but twos."""

    def fit(self, X: Any) -> Choosy:  # noqa: N803
        self.n_features_in_ = X.shape[1]
        return self

    def predict(self, X: Any) -> Any:  # noqa: N803
        raise RuntimeError(f"not {X[0].tolist()}")


def test_nothing_that_is_tried_is_taken(tmp_path: Path) -> None:
    assert load_error(save(tmp_path, Choosy().fit(X))) == (
        "Choosy accepts neither numbers nor the categories of its encoders: RuntimeError: not [0.0, 0.0, 0.0]"
    )


# --- what is no model ---


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"a": 1}, "expected a model of scikit-learn, XGBoost, LightGBM or CatBoost, found builtins.dict"),
        (np.ones(3), "expected a model of scikit-learn, XGBoost, LightGBM or CatBoost, found numpy.ndarray"),
        (
            LogisticRegression,
            "expected a model of scikit-learn, XGBoost, LightGBM or CatBoost, found builtins.type",
        ),
        (DBSCAN().fit(X), "DBSCAN has none of predict, predict_proba, transform"),
        (
            TfidfVectorizer().fit(["a text"]),
            "ValueError: transform returned csr_matrix, expected one array with a row for each instance",
        ),
    ],
    ids=str,
)
def test_objects_that_are_no_model(tmp_path: Path, found: object, text: str) -> None:
    assert load_error(save(tmp_path, found)).startswith(text)


@pytest.mark.parametrize("found", [LogisticRegression(), make_pipeline(StandardScaler(), PCA())], ids=str)
def test_an_estimator_that_is_not_fitted(tmp_path: Path, found: object) -> None:
    assert "instance is not fitted yet" in load_error(save(tmp_path, found))


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"half"])
def test_a_broken_file(tmp_path: Path, content: bytes) -> None:
    file = save(tmp_path, LogisticRegression().fit(X, LABELS))
    file.write_bytes(file.read_bytes()[:200] if content == b"half" else content)
    load_error(file)


def test_a_module_that_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "model.pkl"
    file.write_bytes(b"cno_such_module\nThing\n.")
    assert load_error(file) == "the pickled object needs the module no_such_module, which is not installed"


def test_another_releases_pickle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pickled = pickle.dumps(make_pipeline(StandardScaler(), LogisticRegression()).fit(X, LABELS))
    other = "0" * len(sklearn.__version__)
    file = tmp_path / "model.pkl"
    file.write_bytes(pickled.replace(sklearn.__version__.encode(), other.encode()))
    with caplog.at_level(logging.WARNING):
        assert infer(backends.load("sklearn", file), x=X).shape == (60,)
    assert len(caplog.messages) == 3
    for message in caplog.messages:
        assert message.startswith(f"{file}: ")
        assert f"from version {other} when using version {sklearn.__version__}" in message
