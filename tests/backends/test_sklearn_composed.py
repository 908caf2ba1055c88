"""Estimators inside others: what each declares, and that it answers as itself, whatever it is made of."""

# ruff: noqa: E402 — without the libraries there is nothing to import.

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import triglot
from tests.backends.direct_calls import described, infer

sklearn = pytest.importorskip("sklearn", reason="the ml environment has it")

import pandas as pd
from sklearn.base import BaseEstimator, ClassifierMixin, TransformerMixin, clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.cluster import KMeans
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.ensemble import (
    BaggingClassifier,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    IsolationForest,
    RandomForestClassifier,
    StackingClassifier,
    VotingClassifier,
)
from sklearn.feature_extraction import DictVectorizer, FeatureHasher
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.feature_selection import RFE
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV, RandomizedSearchCV
from sklearn.multiclass import OneVsRestClassifier
from sklearn.multioutput import MultiOutputClassifier
from sklearn.neighbors import KNeighborsClassifier, LocalOutlierFactor
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler, TargetEncoder
from sklearn.tree import DecisionTreeClassifier

from tests.backends.estimators import load

RANDOM = np.random.default_rng(1)
COUNT = 60
FRAME = pd.DataFrame(
    {
        "age": RANDOM.integers(1, 90, COUNT).astype(float),
        "sex": RANDOM.choice(["male", "female"], COUNT),
        "port": RANDOM.choice(["S", "C", "Q"], COUNT),
        "alone": RANDOM.choice([True, False], COUNT),
        "name": [f"Mr. Person {at}" for at in range(COUNT)],
        "sailed": pd.date_range("2020-01-01", periods=COUNT),
    }
)
LABELS = (FRAME["sex"] == "male").to_numpy().astype(int)
TWO_LABELS = np.column_stack([LABELS, FRAME["age"] > 40])
USED = [("age", "FP64", [-1]), ("sex", "BYTES", [-1]), ("port", "BYTES", [-1]), ("alone", "BOOL", [-1])]
"""The columns that `passengers` uses; it drops the name and the date."""


def passengers(last: Any = None) -> Any:
    texts = make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder(handle_unknown="ignore"))
    columns = [
        ("numbers", make_pipeline(SimpleImputer(), StandardScaler()), ["age"]),
        ("texts", texts, ["sex", "port"]),
        ("bools", OneHotEncoder(), ["alone"]),
    ]
    return make_pipeline(ColumnTransformer(columns), LogisticRegression() if last is None else last)


class Wrapped(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # It has no types.
    """A meta-estimator as users write them: it says nothing of its features, and has its estimator in a dict."""

    def __init__(self, inner: Any = None) -> None:
        self.inner = inner

    def fit(self, X: Any, y: Any) -> Wrapped:  # noqa: N803
        self.fitted_ = {"only": [clone(self.inner).fit(X, y)]}
        self.classes_ = np.unique(y)
        return self

    def predict(self, X: Any) -> Any:  # noqa: N803
        return self.fitted_["only"][0].predict(X)


META: dict[str, Callable[[], Any]] = {
    "pipeline": passengers,
    "calibrated": lambda: CalibratedClassifierCV(passengers(), cv=2),
    "voting": lambda: VotingClassifier([("a", passengers()), ("b", passengers(DecisionTreeClassifier()))]),
    "stacking": lambda: StackingClassifier([("a", passengers())], cv=2),
    "one-vs-rest": lambda: OneVsRestClassifier(passengers()),
    "grid-search": lambda: GridSearchCV(passengers(), {}, cv=2),
    "random-search": lambda: RandomizedSearchCV(passengers(), {"logisticregression__C": [1]}, n_iter=1, cv=2),
    "target": lambda: TransformedTargetRegressor(passengers(Ridge()), func=np.log1p, inverse_func=np.expm1),
    "rfe": lambda: passengers(RFE(LogisticRegression(), n_features_to_select=2)),
    "outliers": lambda: passengers(IsolationForest(n_estimators=5, random_state=1)),
    "novelties": lambda: passengers(LocalOutlierFactor(novelty=True)),
    "clusters": lambda: passengers(KMeans(2, n_init=1, random_state=1)),
    "multi-output": lambda: MultiOutputClassifier(passengers()),
    "the-user's-own": lambda: Wrapped(passengers()),
    "of-several-kinds": lambda: Wrapped(CalibratedClassifierCV(GridSearchCV(passengers(), {}, cv=2), cv=2)),
}


def columns_of(frame: Any) -> dict[str, Any]:
    """What a client sends for the columns; dates as text."""
    return {
        name: frame[name].astype(str) if frame[name].dtype.kind == "M" else frame[name].to_numpy()
        for name in frame
    }


@pytest.mark.parametrize("name", META)
def test_meta_estimators_take_the_columns_of_what_they_contain(tmp_path: Path, name: str) -> None:
    estimator = META[name]().fit(FRAME, TWO_LABELS if name == "multi-output" else LABELS)
    model = load(tmp_path, estimator)
    assert described(model.inputs) == USED
    inputs = columns_of(FRAME[[column for column, _, _ in USED]])
    np.testing.assert_array_equal(infer(model, **inputs), estimator.predict(FRAME))


def test_threshold_and_frozen_classifiers(tmp_path: Path) -> None:
    selection = pytest.importorskip("sklearn.model_selection", reason="since 1.5")
    frozen = pytest.importorskip("sklearn.frozen", reason="since 1.6")
    for estimator in (
        selection.TunedThresholdClassifierCV(passengers(), cv=2),
        selection.FixedThresholdClassifier(passengers(), threshold=0.4),
        frozen.FrozenEstimator(passengers().fit(FRAME, LABELS)),
    ):
        model = load(tmp_path, estimator.fit(FRAME, LABELS))
        assert described(model.inputs) == USED
        inputs = columns_of(FRAME[[column for column, _, _ in USED]])
        np.testing.assert_array_equal(infer(model, **inputs), estimator.predict(FRAME))


def test_meta_estimators_of_arrays(tmp_path: Path) -> None:
    """Some pass their estimators arrays: columns are known by their positions."""
    table = FRAME[["age", "sex", "port"]].to_numpy(object)
    columns = ColumnTransformer([("numbers", StandardScaler(), [0]), ("texts", OneHotEncoder(), [1])])
    inner = make_pipeline(columns, LogisticRegression())
    for estimator in (inner, BaggingClassifier(inner, 2), OneVsRestClassifier(inner), Wrapped(inner)):
        model = load(tmp_path, estimator.fit(table, LABELS))
        assert described(model.inputs) == [("x0", "FP64", [-1]), ("x1", "BYTES", [-1])]
        answer = infer(model, x0=FRAME["age"], x1=FRAME["sex"])
        np.testing.assert_array_equal(answer, estimator.predict(table))


# --- transformers that know no categories are asked ---


class Length(TransformerMixin, BaseEstimator):  # type: ignore[misc]  # It has no types.
    """How long texts are."""

    def fit(self, X: Any, y: Any = None) -> Length:  # noqa: N803
        return self

    def transform(self, X: Any) -> Any:  # noqa: N803
        return X.apply(lambda column: column.str.len())


def day_of_week(frame: Any) -> Any:
    return frame.apply(lambda column: column.dt.day_of_week)


def with_month(frame: Any) -> Any:
    return frame[["age"]].assign(month=frame["sailed"].dt.month)


ASKED: dict[str, tuple[Any, list[tuple[str, str, list[int]]]]] = {
    "lengths": (
        ColumnTransformer([("length", Length(), ["name"]), ("age", "passthrough", ["age"])]),
        [("age", "FP64", [-1]), ("name", "BYTES", [-1])],
    ),
    "dates": (
        ColumnTransformer([("day", FunctionTransformer(day_of_week), ["sailed"]), ("a", "passthrough", ["age"])]),
        [("age", "FP64", [-1]), ("sailed", "BYTES", [-1])],
    ),
    "encoded-dates": (
        ColumnTransformer([("day", OneHotEncoder(handle_unknown="ignore"), ["sailed"])]),
        [("sailed", "BYTES", [-1])],
    ),
    "vectorized-column": (
        ColumnTransformer([("words", make_pipeline(FunctionTransformer(), TfidfVectorizer()), "name")]),
        [("name", "BYTES", [-1])],
    ),
    "targets": (ColumnTransformer([("t", TargetEncoder(), ["port"])]), [("port", "BYTES", [-1])]),
    "passthrough": (
        ColumnTransformer(
            [("sex", OneHotEncoder(), ["sex"]), ("-", "drop", ["name", "sailed", "port"])], remainder="passthrough"
        ),
        [("age", "FP64", [-1]), ("sex", "BYTES", [-1]), ("alone", "FP64", [-1])],
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_columns_of_transformers_without_categories(tmp_path: Path, name: str) -> None:
    transformer, inputs = ASKED[name]
    estimator = make_pipeline(transformer, DecisionTreeClassifier(random_state=1)).fit(FRAME, LABELS)
    model = load(tmp_path, estimator)
    assert described(model.inputs) == inputs
    columns = columns_of(FRAME[[column for column, _, _ in inputs]])
    columns |= {column: columns[column].astype(float) for column, datatype, _ in inputs if datatype == "FP64"}
    np.testing.assert_array_equal(infer(model, **columns), estimator.predict(FRAME))


def with_lengths(frame: Any) -> Any:
    return frame[["age"]].assign(length=frame["name"].str.len(), sex=frame["sex"].str.len())


def with_both(frame: Any) -> Any:
    return with_month(frame).assign(length=frame["name"].str.len())


@pytest.mark.parametrize(
    ("function", "kinds"),
    [
        (with_month, {"age": "FP64", "sailed": "BYTES"}),
        (with_lengths, {"age": "FP64", "sex": "BYTES", "name": "BYTES"}),
        (with_both, {"age": "FP64", "name": "BYTES", "sailed": "BYTES"}),
    ],
)
def test_a_first_step_of_the_users_own(tmp_path: Path, function: Any, kinds: dict[str, str]) -> None:
    frame = FRAME[list(kinds)]
    estimator = make_pipeline(FunctionTransformer(function), DecisionTreeClassifier(random_state=1))
    model = load(tmp_path, estimator.fit(frame, LABELS))
    assert described(model.inputs) == [(name, datatype, [-1]) for name, datatype in kinds.items()]
    np.testing.assert_array_equal(infer(model, **columns_of(frame)), estimator.predict(frame))


# --- categories ---

CATEGORIES = FRAME[["sex", "port", "age"]].astype({"sex": "category", "port": "category"})
TEXTS = [("sex", "BYTES", [-1]), ("port", "BYTES", [-1]), ("age", "FP64", [-1])]


def with_categories(named: bool) -> dict[str, Any]:
    """Options for columns with categories; since 1.6 those of that dtype are found without them."""
    return {"categorical_features": ["sex", "port"]} if named else {"categorical_features": "from_dtype"}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", [HistGradientBoostingClassifier, HistGradientBoostingRegressor])
def test_histogram_gradient_boosting(tmp_path: Path, kind: Any, named: bool) -> None:
    estimator = kind(min_samples_leaf=2, max_iter=5, **with_categories(named)).fit(CATEGORIES, LABELS)
    model = load(tmp_path, estimator)
    assert described(model.inputs) == TEXTS
    np.testing.assert_array_equal(
        infer(model, **columns_of(FRAME[list(CATEGORIES)])), estimator.predict(CATEGORIES)
    )


@pytest.mark.parametrize("wrap", [lambda inner: inner, lambda inner: CalibratedClassifierCV(inner, cv=2)])
def test_lightgbm(tmp_path: Path, wrap: Any) -> None:
    lightgbm = pytest.importorskip("lightgbm", reason="the ml environment has it")
    inner = lightgbm.LGBMClassifier(min_child_samples=2, n_estimators=5, n_jobs=1, verbose=-1)
    estimator = wrap(inner).fit(CATEGORIES, LABELS)
    model = load(tmp_path, estimator)
    assert described(model.inputs) == TEXTS
    np.testing.assert_array_equal(
        infer(model, **columns_of(FRAME[list(CATEGORIES)])), estimator.predict(CATEGORIES)
    )


# --- estimators that do not count their features ---


def shapes(texts: Any) -> Any:
    return np.array([[len(text), text.count(" ")] for text in texts])


def first_words(texts: Any) -> list[str]:
    return [text.split()[0] for text in texts]


class Pick(TransformerMixin, BaseEstimator):  # type: ignore[misc]  # It has no types.
    """The columns of one branch, as users write it."""

    def __init__(self, names: Any = None) -> None:
        self.names = names

    def fit(self, X: Any, y: Any = None) -> Pick:  # noqa: N803
        return self

    def transform(self, X: Any) -> Any:  # noqa: N803
        return X[self.names]


WORDS = make_pipeline(FunctionTransformer(first_words), CountVectorizer())
TEXT_COLUMNS: dict[str, Any] = {
    "union": FeatureUnion([("t", TfidfVectorizer()), ("s", FunctionTransformer(shapes))]),
    "union-of-steps": FeatureUnion([("s", FunctionTransformer(shapes)), ("w", WORDS)]),
    "union-of-unions": FeatureUnion(
        [("u", FeatureUnion([("a", CountVectorizer())])), ("c", CountVectorizer(analyzer="char"))]
    ),
    "steps": WORDS,
}


@pytest.mark.parametrize("name", TEXT_COLUMNS)
def test_unions_of_text(tmp_path: Path, name: str) -> None:
    texts = FRAME["name"].tolist()
    estimator = make_pipeline(TEXT_COLUMNS[name], DecisionTreeClassifier(random_state=1)).fit(texts, LABELS)
    model = load(tmp_path, estimator)
    assert described(model.inputs) == [("x", "BYTES", [-1])]
    np.testing.assert_array_equal(infer(model, x=texts), estimator.predict(texts))


OBJECTS = [{"city": "Ulm", "rooms": 3}, {"city": "Bonn"}, {"rooms": 1.5}] * 5


@pytest.mark.parametrize(
    "first",
    [DictVectorizer(), DictVectorizer(sparse=False), FeatureHasher(8)],
    ids=["sparse", "dense", "hashed"],
)
def test_objects_are_declared_as_json(tmp_path: Path, first: Any) -> None:
    estimator = make_pipeline(first, DecisionTreeClassifier(random_state=1)).fit(OBJECTS, [0, 1, 1] * 5)
    model = load(tmp_path, estimator)
    assert described(model.inputs) == [("instances", "BYTES", [-1])]
    answer = infer(model, instances=['{"city": "Ulm", "rooms": 3}', "{}"])
    np.testing.assert_array_equal(answer, estimator.predict([OBJECTS[0], {}]))


def test_columns_that_cannot_be_guessed_are_json(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words, ages = make_pipeline(Pick("name"), CountVectorizer()), make_pipeline(Pick(["age"]), StandardScaler())
    union = FeatureUnion([("words", words), ("ages", ages)])
    estimator = make_pipeline(union, DecisionTreeClassifier(random_state=1)).fit(FRAME, LABELS)
    model = load(tmp_path, estimator)
    assert described(model.inputs) == [("instances", "BYTES", [-1])]
    assert "its inputs are not known" in caplog.text
    row = '{"name": "Mr. Person 3", "age": 30}'
    table = pd.DataFrame([{"name": "Mr. Person 3", "age": 30}])
    answer = model.infer({"instances": np.array([row.encode()], object)}, triglot.Call())
    np.testing.assert_array_equal(answer["predict"], estimator.predict(table))
    columns = {"name": np.array([b"Mr. Person 3"], object), "age": np.array([30])}
    np.testing.assert_array_equal(model.infer(columns, triglot.Call())["predict"], estimator.predict(table))


# --- probabilities of several targets ---


@pytest.mark.parametrize(
    "estimator",
    [
        RandomForestClassifier(3, random_state=1),
        DecisionTreeClassifier(random_state=1),
        KNeighborsClassifier(),
        MultiOutputClassifier(LogisticRegression()),
    ],
    ids=lambda estimator: type(estimator).__name__,
)
def test_probabilities_of_several_targets_are_an_output_each(tmp_path: Path, estimator: Any) -> None:
    x, targets = RANDOM.random((COUNT, 3)), np.column_stack([np.arange(COUNT) % 3, LABELS])
    model = load(tmp_path, estimator.fit(x, targets))
    names = [("predict_proba_0", "FP64", [-1, 3]), ("predict_proba_1", "FP64", [-1, 2])]
    assert described(model.signatures["predict_proba"].outputs) == names
    call = triglot.Call()
    call.signature_name = "predict_proba"
    answer = model.infer({"x": x}, call)
    for (name, _, _), expected in zip(names, estimator.predict_proba(x), strict=True):
        np.testing.assert_array_equal(answer[name], expected)
