"""Models of LightGBM: trained here, saved, and compared with what the library answers itself."""

# ruff: noqa: E402 — without the libraries there is nothing to import.

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import triglot
from tests.backends.direct_calls import described, infer, send
from triglot import backends
from triglot.core.errors import InvalidArgument, ModelLoadError
from triglot.model.config import ModelConfig

lightgbm = pytest.importorskip("lightgbm", reason="the ml environment has it")

import joblib
import pandas as pd

RANDOM = np.random.default_rng(1)
X = RANDOM.random((120, 3))
X[RANDOM.random(X.shape) < 0.1] = np.nan
TWO, THREE = RANDOM.integers(0, 2, 120), RANDOM.integers(0, 3, 120)
REAL = X[:, 0] + RANDOM.random(120)
REAL[np.isnan(REAL)] = 0.5
PLAIN = {"verbose": -1, "num_threads": 1, "min_data_in_leaf": 3}
FOREST = {"boosting": "rf", "bagging_freq": 1, "bagging_fraction": 0.5}
OBJECTIVES: dict[str, tuple[dict[str, Any], Any]] = {
    **{
        name: ({"objective": name}, REAL)
        for name in ("l2", "l1", "huber", "fair", "quantile", "mape", "poisson", "gamma", "tweedie")
    },
    "binary": ({"objective": "binary"}, TWO),
    "cross_entropy": ({"objective": "cross_entropy"}, TWO),
    "cross_entropy_lambda": ({"objective": "cross_entropy_lambda"}, TWO),
    "multiclass": ({"objective": "multiclass", "num_class": 3}, THREE),
    "multiclassova": ({"objective": "multiclassova", "num_class": 3}, THREE),
    "lambdarank": ({"objective": "lambdarank"}, THREE),
    "rank_xendcg": ({"objective": "rank_xendcg"}, THREE),
    "sqrt": ({"objective": "regression", "reg_sqrt": True}, REAL),
    "dart": ({"objective": "regression", "boosting": "dart"}, REAL),
    "forest": ({"objective": "regression", **FOREST}, REAL),
    "forest of classes": ({"objective": "multiclass", "num_class": 3, **FOREST}, THREE),
    "linear": ({"objective": "regression", "linear_tree": True}, REAL),
    "zeros": ({"objective": "regression", "zero_as_missing": True}, REAL),
    "the author's own": (
        {"objective": lambda scores, data: (scores - data.get_label(), np.ones(len(scores)))},
        REAL,
    ),
}


def trained(name: str = "l2", data: Any = X, **options: Any) -> Any:
    parameters, target = OBJECTIVES[name]
    group = [60, 60] if "rank" in name else None
    return lightgbm.train(PLAIN | parameters, lightgbm.Dataset(data, target, group=group, **options), 5)


def load(folder: Path, booster: Any, **parameters: str) -> triglot.Model:
    booster.save_model(folder / "model.txt")
    return backends.load("lightgbm", folder / "model.txt", ModelConfig(parameters=parameters))


def load_pickled(folder: Path, found: object) -> triglot.Model:
    joblib.dump(found, folder / "model.joblib")
    return backends.load("sklearn", folder / "model.joblib")


def refusal(model: triglot.Model, parameters: Any = None, **inputs: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        send(model, inputs, parameters)
    return caught.value.message


@pytest.mark.parametrize("name", OBJECTIVES)
def test_answer_is_the_boosters_own(tmp_path: Path, name: str) -> None:
    booster = trained(name)
    model = load(tmp_path, booster)
    assert model.platform == "lightgbm"
    assert described(model.inputs) == [("x", "FP64", [-1, 3])]
    assert described(model.outputs) == [("predict", "FP64", [-1, *booster.predict(X).shape[1:]])]
    for rows in (X, X[:1]):
        np.testing.assert_array_equal(infer(model, x=rows), booster.predict(rows))
    assert infer(model, x=X[:0]).shape == (0, *booster.predict(X).shape[1:])
    assert ("predict_proba" in model.signatures) == (name in {"binary"} or "class" in name)


def test_probabilities_of_a_booster_of_two_classes(tmp_path: Path) -> None:
    booster = trained("binary")
    second = booster.predict(X)
    answer = infer(load(tmp_path, booster), "predict_proba", x=X)
    np.testing.assert_array_equal(answer, np.column_stack([1 - second, second]))


@pytest.mark.parametrize("name", ["binary", "multiclass", "poisson"])
def test_parameters_of_predict(tmp_path: Path, name: str) -> None:
    booster = trained(name)
    model = load(tmp_path, booster)
    for parameters in ({"raw_score": True}, {"num_iteration": 2}, {"pred_contrib": True}, {"pred_leaf": True}):
        answer = send(model, {"x": X}, parameters)
        np.testing.assert_array_equal(answer, booster.predict(X, **parameters))
    assert refusal(model, {"raw_score": 1}, x=X) == "parameter raw_score: expected bool, got 1"


def test_raw_scores_of_a_random_forest_are_averages(tmp_path: Path) -> None:
    """As its values are; LightGBM itself returns sums over the trees."""
    model = load(tmp_path, trained("forest"))
    each: list[dict[str, Any]] = [{}, {"num_iteration": 2}, {"start_iteration": 3}]
    for parameters in each:
        values = send(model, {"x": X}, parameters)
        raw = send(model, {"x": X}, {"raw_score": True, **parameters})
        np.testing.assert_allclose(raw, values, rtol=1e-12)
        parts = send(model, {"x": X}, {"pred_contrib": True, **parameters})
        np.testing.assert_allclose(parts.sum(axis=1), values, rtol=1e-12)


RECORDED = json.loads(Path(__file__).with_name("lightgbm_3_3_5.json").read_text())
"""Files that LightGBM 3.3.5 saved, and what it predicts for the rows; it needs older libraries than those here."""


@pytest.mark.parametrize("name", RECORDED["models"])
def test_a_file_of_an_older_release(tmp_path: Path, name: str) -> None:
    recorded = RECORDED["models"][name]
    (tmp_path / "model.txt").write_text(recorded["file"])
    model = backends.load("lightgbm", tmp_path / "model.txt")
    rows = np.array(RECORDED["rows"], float)
    inputs: dict[str, Any] = {"x": rows}
    if name == "categories":
        inputs = {"a": rows[:, 0], "b": rows[:, 1], "city": np.array(RECORDED["cities"], object)}
    np.testing.assert_array_equal(send(model, inputs), recorded["predictions"])


# --- columns ---


def test_columns_by_name_in_any_order(tmp_path: Path) -> None:
    frame = pd.DataFrame(X, columns=["a b", "größe", "c"])
    booster = trained(data=frame)
    model = load(tmp_path, booster)
    for second in (X[:, 1], X[:, 1:2]):
        answer = send(model, {"c": X[:, 2], "a b": X[:, 0], "größe": second})
        np.testing.assert_array_equal(answer, booster.predict(frame))
    row = {"c": 0.5, "größe": None, "a_b": 2}
    expected = booster.predict(np.array([[2, np.nan, 0.5]]))
    np.testing.assert_array_equal(send(model, {"instances": [json.dumps(row)]}), expected)
    assert refusal(model, c=X[:, 2]) == "missing input 'a_b', 'größe'"
    assert refusal(model, c=X[:, 2], d=X[:, 2]) == (
        "unexpected input 'd', expected one matrix, or 'a_b', 'größe', 'c'"
    )
    text = "two inputs are the column 'a_b'"
    assert refusal(model, **{"a b": X[:, 0], "a_b": X[:, 0]}) == text


@pytest.mark.parametrize("dtype", ["?", "i1", "u1", "i4", "i8", "u8", "f2", "f4", "f8"])
def test_matrix_of_any_name_and_number_type(tmp_path: Path, dtype: str) -> None:
    booster = trained()
    numbers = np.array([[1, 0, 1], [0, 0, 1]], dtype)
    answer = send(load(tmp_path, booster), {"input-0": numbers})
    np.testing.assert_array_equal(answer, booster.predict(numbers.astype("f8")))


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.array([[1, 2, 2**53 + 1]]), "expected numbers that FP64 can hold, got 9007199254740993"),
        (np.array([[1, 2, 2**63 - 1]]), "expected numbers that FP64 can hold, got 9223372036854775807"),
        (np.array([["1", "2", "3"]], object), "expected numbers, got '1'"),
        (np.zeros((1, 2)), "expected a matrix [-1,3], got [1,2]"),
        (np.zeros(3), "expected a matrix [-1,3], got [3]"),
    ],
)
def test_what_loses_something_is_refused(tmp_path: Path, array: Any, text: str) -> None:
    assert refusal(load(tmp_path, trained()), x=array) == text


# --- categories ---

CITIES = RANDOM.choice(["Köln", "Bonn", "Ulm"], 120)
SIZES = RANDOM.choice([50, 10, 30], 120)
KINDS = pd.DataFrame(
    {
        "city": pd.Categorical(CITIES),
        "v": X[:, 0],
        "one": pd.Categorical(["same"] * 120),
        "size": pd.Categorical(SIZES),
    }
)
OF_KINDS = (CITIES == "Ulm") * 2.0 + (SIZES == 10) + X[:, 1]
OF_KINDS[np.isnan(OF_KINDS)] = 0.5
COLUMNS: dict[str, Any] = {"size": SIZES.astype(float), "city": CITIES, "one": ["same"] * 120, "v": X[:, 0]}
PARAMETERS = PLAIN | {"min_data_per_group": 3, "cat_smooth": 1}


def of_kinds(frame: pd.DataFrame = KINDS, **options: Any) -> Any:
    return lightgbm.train(PARAMETERS, lightgbm.Dataset(frame, OF_KINDS, **options), 5)


def test_categories_are_values(tmp_path: Path) -> None:
    booster = of_kinds()
    model = load(tmp_path, booster)
    assert described(model.inputs) == [
        ("city", "BYTES", [-1]),
        ("v", "FP64", [-1]),
        ("one", "BYTES", [-1]),
        ("size", "FP64", [-1]),
    ]
    np.testing.assert_array_equal(infer(model, **COLUMNS), booster.predict(KINDS))
    rows = [json.dumps([city, v, "same", int(size)]) for city, v, size in zip(CITIES, X[:, 2], SIZES, strict=True)]
    frame = KINDS.assign(v=X[:, 2])
    answer = send(model, {"instances": [row.replace("NaN", "null") for row in rows]})
    np.testing.assert_array_equal(answer, booster.predict(frame))


def test_unknown_category_is_a_missing_value(tmp_path: Path) -> None:
    booster = of_kinds()
    frame = KINDS[:2].assign(
        city=pd.Categorical(["Rom", ""]),
        size=pd.Categorical([99, np.nan]),
    )
    inputs: dict[str, Any] = {"city": ["Rom", ""], "v": X[:2, 0], "one": ["same"] * 2, "size": [99.0, np.nan]}
    np.testing.assert_array_equal(infer(load(tmp_path, booster), **inputs), booster.predict(frame))


def test_value_of_another_kind_is_no_category(tmp_path: Path) -> None:
    model = load(tmp_path, of_kinds())
    assert refusal(model, **COLUMNS | {"city": SIZES.tolist()}) == (
        f"column 'city': expected one of its categories, such as 'Bonn', 'Köln', 'Ulm', got {SIZES[0]}"
    )
    assert refusal(model, **COLUMNS | {"size": CITIES.astype(object)}) == (
        f"column 'size': expected one of its categories, such as 10, 30, 50, got {str(CITIES[0])!r}"
    )
    assert refusal(model, x=np.zeros((1, 4))).startswith("column 'city': expected one of its categories")


def test_positions_of_categories_by_configuration(tmp_path: Path) -> None:
    booster = of_kinds()
    codes = KINDS.assign(**{name: KINDS[name].cat.codes for name in ("city", "one", "size")}).to_numpy("f8")
    model = load(tmp_path, booster, categories="positions")
    assert described(model.inputs) == [(name, "FP64", [-1]) for name in KINDS]
    np.testing.assert_array_equal(send(model, {"x": codes}), booster.predict(codes))
    assert refusal(model, x=np.full((1, 4), 0.9)) == (
        "column 'city': expected categories as whole numbers, got 0.9"
    )
    with pytest.raises(ModelLoadError, match="parameters: categories: expected values or positions, got 'codes'"):
        load(tmp_path, booster, categories="codes")


def test_ordered_categories_are_not_guessed(tmp_path: Path) -> None:
    ordered = of_kinds(KINDS.assign(size=KINDS["size"].cat.as_ordered()))
    with pytest.raises(ModelLoadError, match="it has 3 lists of categories for 2 categorical columns"):
        load(tmp_path, ordered)


def test_categories_that_are_the_numbers_themselves(tmp_path: Path) -> None:
    data = np.column_stack([SIZES, X[:, 0]])
    booster = lightgbm.train(PARAMETERS, lightgbm.Dataset(data, OF_KINDS, categorical_feature=[0]), 5)
    model = load(tmp_path, booster)
    assert described(model.inputs) == [("x", "FP64", [-1, 2])]
    np.testing.assert_array_equal(infer(model, x=data), booster.predict(data))
    assert refusal(model, x=data + 0.5).startswith("column 'Column_0': expected categories as whole numbers")


# --- pickles, which the sklearn backend opens ---


@pytest.mark.parametrize(
    "labels", [TWO, THREE, np.array(["ja", "nö", "x"], object)[THREE]], ids=["2", "3", "text"]
)
@pytest.mark.parametrize("names", [None, ["a", "b", "c"]])
def test_classifier_answers_with_labels(tmp_path: Path, labels: Any, names: Any) -> None:
    data = X if names is None else pd.DataFrame(X, columns=names)
    classifier = lightgbm.LGBMClassifier(n_estimators=5, n_jobs=1, verbose=-1).fit(data, labels)
    model = load_pickled(tmp_path, classifier)
    assert model.platform == "lightgbm"
    inputs = {"x": X} if names is None else dict(zip(names, X.T, strict=True))
    np.testing.assert_array_equal(infer(model, **inputs), classifier.predict(data))
    np.testing.assert_array_equal(infer(model, "predict_proba", **inputs), classifier.predict_proba(data))
    assert model.labels["predict_proba"] == [str(label).encode() for label in classifier.classes_]
    raw = send(model, {"x": X}, {"raw_score": True}, "predict_proba")
    np.testing.assert_array_equal(raw, classifier.predict_proba(data, raw_score=True))
    assert "parameters of the signature 'predict_proba'" in refusal(model, {"raw_score": True}, x=X)


def test_estimator_with_categories(tmp_path: Path) -> None:
    regressor = lightgbm.LGBMRegressor(n_estimators=5, n_jobs=1, verbose=-1, min_data_per_group=3)
    regressor.fit(KINDS, OF_KINDS)
    model = load_pickled(tmp_path, regressor)
    np.testing.assert_array_equal(infer(model, **COLUMNS), regressor.predict(KINDS))


def test_pickled_booster_that_was_stopped_early(tmp_path: Path) -> None:
    data = lightgbm.Dataset(X, REAL)
    booster = lightgbm.train(
        PLAIN,
        data,
        50,
        valid_sets=[data.create_valid(X, REAL[::-1])],
        callbacks=[lightgbm.early_stopping(2, verbose=False)],
    )
    np.testing.assert_array_equal(infer(load_pickled(tmp_path, booster), x=X), booster.predict(X))


# --- files ---


def test_name_that_xgboost_has_too(tmp_path: Path) -> None:
    """KServe and MLServer look for a `model.bst`."""
    booster = trained()
    booster.save_model(tmp_path / "model.bst")
    model = backends.load("xgboost", tmp_path / "model.bst")
    assert model.platform == "lightgbm"
    np.testing.assert_array_equal(infer(model, x=X), booster.predict(X))


@pytest.mark.parametrize("content", ["", "tree\n", "not a model", "half", "cut", "short", "\r\n"])
def test_broken_file(tmp_path: Path, content: str) -> None:
    """LightGBM ends the process for some of them."""
    text = trained().model_to_string()
    cut = {"half": text[:600], "cut": text[: len(text) // 2], "short": text[: text.index("end of trees")]}
    file = tmp_path / "model.txt"
    file.write_bytes((text.replace("\n", "\r\n") if content == "\r\n" else cut.get(content, content)).encode())
    with pytest.raises(ModelLoadError) as caught:
        backends.load("lightgbm", file)
    assert str(caught.value) == f"{file}: expected a whole file of LightGBM, which begins with 'tree'"
