"""Estimators that take texts, categories and DataFrames: what is declared, and what they are given."""

# ruff: noqa: E402 — without the libraries there is nothing to import.

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.direct_calls import described, infer, send
from tests.process import SECONDS, clean_environment

sklearn = pytest.importorskip("sklearn", reason="the ml environment has it")

import pandas as pd
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import VotingClassifier
from sklearn.feature_extraction.text import HashingVectorizer, TfidfVectorizer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

from tests.backends.estimators import CATEGORIES, FRAME, LABELS, WORDS, X, load, save

# --- texts and DataFrames ---


def test_whole_texts(tmp_path: Path) -> None:
    notes = FRAME["note"].to_numpy()
    for estimator in (
        make_pipeline(TfidfVectorizer(), LogisticRegression()),
        make_pipeline(HashingVectorizer(n_features=16), LogisticRegression()),
        make_pipeline(FeatureUnion([("a", TfidfVectorizer()), ("b", TfidfVectorizer())]), LogisticRegression()),
        GridSearchCV(make_pipeline(TfidfVectorizer(), LogisticRegression()), {}, cv=2),
        VotingClassifier([("a", make_pipeline(TfidfVectorizer(), LogisticRegression()))]),
    ):
        estimator.fit(notes, WORDS)
        model = load(tmp_path, estimator)
        assert described(model.inputs) == [("x", "BYTES", [-1])]
        unseen = [*notes, "größer", ""]
        np.testing.assert_array_equal(infer(model, x=unseen), estimator.predict(unseen))


@pytest.mark.parametrize(
    "steps",
    [
        [OneHotEncoder()],
        [OneHotEncoder(handle_unknown="ignore")],
        [SimpleImputer(strategy="most_frequent"), OrdinalEncoder()],
        [ColumnTransformer([("both", OneHotEncoder(), slice(0, 2))])],
        [ColumnTransformer([("words", TfidfVectorizer(), 1), ("city", OneHotEncoder(), [True, False])])],
    ],
    ids=str,
)
def test_columns_of_texts(tmp_path: Path, steps: list[Any]) -> None:
    estimator = make_pipeline(*steps, LogisticRegression()).fit(CATEGORIES, LABELS)
    model = load(tmp_path, estimator)
    assert described(model.inputs) == [("x", "BYTES", [-1, 2])]
    np.testing.assert_array_equal(infer(model, x=CATEGORIES), estimator.predict(CATEGORIES))


def columns(estimator: Any, *names: Any) -> Any:
    """A pipeline over the three columns of FRAME, by their names or numbers."""
    numbers = make_pipeline(SimpleImputer(), StandardScaler())
    cities = make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder())
    age, city, note = names
    steps = [("age", numbers, [age]), ("city", cities, [city]), ("note", TfidfVectorizer(), note)]
    return make_pipeline(ColumnTransformer(steps), estimator)


def test_a_data_frame(tmp_path: Path) -> None:
    estimator = columns(LogisticRegression(), "age", "city", "note").fit(FRAME, WORDS)
    model = load(tmp_path, estimator)
    assert described(model.inputs) == [("age", "FP64", [-1]), ("city", "BYTES", [-1]), ("note", "BYTES", [-1])]
    inputs = {name: FRAME[name].to_numpy() for name in FRAME}
    np.testing.assert_array_equal(infer(model, **inputs), estimator.predict(FRAME))
    np.testing.assert_array_equal(infer(model, "predict_proba", **inputs), estimator.predict_proba(FRAME))


def test_numbers_and_texts_without_names(tmp_path: Path) -> None:
    table = FRAME.to_numpy()
    estimator = columns(LogisticRegression(), 0, 1, 2).fit(table, WORDS)
    model = load(tmp_path, estimator)
    assert described(model.inputs) == [("x0", "FP64", [-1]), ("x1", "BYTES", [-1]), ("x2", "BYTES", [-1])]
    inputs = {f"x{at}": FRAME[name].to_numpy() for at, name in enumerate(FRAME)}
    np.testing.assert_array_equal(infer(model, **inputs), estimator.predict(table))


@pytest.mark.parametrize("names", [["a", "b", "c"], ["größe", "", "1"]])
def test_columns_of_numbers_keep_their_names(tmp_path: Path, names: list[str]) -> None:
    """The estimator is given the names again: it would warn, and warnings are errors here."""
    frame = pd.DataFrame(X, columns=names)
    for estimator in (
        LogisticRegression(),
        make_pipeline(ColumnTransformer([("x", StandardScaler(), names[:2])]), LogisticRegression()),
    ):
        estimator.fit(frame, LABELS)
        model = load(tmp_path, estimator)
        used = names if isinstance(estimator, LogisticRegression) else names[:2]
        assert described(model.inputs) == [(name, "FP64", [-1]) for name in used]
        columns = {name: frame[name].to_numpy() for name in used}
        np.testing.assert_array_equal(infer(model, **columns), estimator.predict(frame))
        np.testing.assert_array_equal(send(model, {"x": X}), estimator.predict(frame))


def test_columns_of_text_keep_their_names(tmp_path: Path) -> None:
    frame = FRAME[["city", "note"]]
    estimator = make_pipeline(OneHotEncoder(), LogisticRegression()).fit(frame, LABELS)
    model = load(tmp_path, estimator)
    assert described(model.inputs) == [("city", "BYTES", [-1]), ("note", "BYTES", [-1])]
    np.testing.assert_array_equal(send(model, {"x": frame.to_numpy()}), estimator.predict(frame))


WITHOUT = """
import importlib.abc, pathlib, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from triglot import backends
from triglot.core.errors import MissingDependency
for file in map(pathlib.Path, sys.argv[2:]):
    try:
        backends.load("sklearn", file)
        print("loaded")
    except MissingDependency as error:
        print(str(error).removeprefix(f"{file}: "))
"""


def loaded_without(module: str, *files: Path) -> list[str]:
    """What loading each file comes to in a process in which a module is not installed: "loaded", or the error."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, module, *map(str, files)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=clean_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_pandas_is_missing(tmp_path: Path) -> None:
    (tmp_path / "framed").mkdir()
    framed = save(tmp_path / "framed", LogisticRegression().fit(pd.DataFrame(X, columns=list("abc")), LABELS))
    plain = save(tmp_path, LogisticRegression().fit(X, LABELS))
    assert loaded_without("pandas", framed, plain) == [
        "the estimator (LogisticRegression) was fitted on a DataFrame and needs pandas, which is not installed; "
        "run: pip install pandas",
        "loaded",
    ]


def test_xgboost_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "model.pkl"
    file.write_bytes(b"cxgboost.core\nBooster\n.")
    assert loaded_without("xgboost", file) == [
        "the pickled object needs xgboost, which is not installed; run: pip install xgboost-cpu"
    ]
