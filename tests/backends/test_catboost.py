"""Models of CatBoost: trained here, saved, and compared with what the library answers itself."""

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

catboost = pytest.importorskip("catboost", reason="the ml environment has it")

import joblib
import pandas as pd

RANDOM = np.random.default_rng(1)
X = RANDOM.random((120, 3)).astype("f4")
TWO, THREE = RANDOM.integers(0, 2, 120), RANDOM.integers(0, 3, 120)
REAL = X[:, 0] + RANDOM.random(120)
OPTIONS = {"iterations": 5, "verbose": False, "thread_count": 1, "allow_writing_files": False}
RANKERS = [
    *("YetiRank", "YetiRankPairwise", "LambdaMart", "PairLogit", "PairLogitPairwise", "QueryRMSE", "QuerySoftMax"),
    *("StochasticFilter", "StochasticRank:metric=DCG"),
]
VALUES: dict[str, Any] = {
    **dict.fromkeys(
        ("RMSE", "MAE", "Quantile", "LogCosh", "Huber:delta=1", "MAPE", "RMSPE", "Poisson", "Cox"), REAL
    ),
    **dict.fromkeys(("LogLinQuantile", "Lq:q=1.5", "Expectile:alpha=0.3", "MultiQuantile:alpha=0.2,0.8"), REAL),
    "Tweedie:variance_power=1.5": REAL,
    "MultiRMSE": np.column_stack([REAL, -REAL]),
    "MultiRMSEWithMissingValues": np.column_stack([REAL, np.where(TWO, np.nan, REAL)]),
    "SurvivalAft": np.column_stack([REAL, np.where(TWO, -1, REAL + 1)]),
    "RMSEWithUncertainty": REAL,
    "GroupQuantile": REAL,
    **dict.fromkeys(RANKERS, THREE),
}
CLASSES: dict[str, Any] = {
    "Logloss": TWO,
    "CrossEntropy": TWO,
    "Focal:focal_alpha=0.3;focal_gamma=2": TWO,
    "MultiClass": THREE,
    "MultiClassOneVsAll": THREE,
    "MultiLogloss": np.column_stack([TWO, THREE > 1]).astype(int),
    "MultiCrossEntropy": np.column_stack([TWO, THREE > 1]).astype(int),
}
"""Every loss that CatBoost 1.2 trains with on a CPU, and a target for it."""


def trained(loss: str, target: Any, data: Any = X, **columns: Any) -> Any:
    """A model of the class that its loss is for."""
    if loss in RANKERS or loss == "GroupQuantile":
        columns["group_id"] = np.repeat([0, 1], 60)
    if loss in RANKERS:
        kind = catboost.CatBoostRanker
    elif loss == "GroupQuantile":
        kind = catboost.CatBoost  # It has no class of its own.
    else:
        kind = catboost.CatBoostClassifier if loss in CLASSES else catboost.CatBoostRegressor
    if kind is catboost.CatBoost:
        return kind(OPTIONS | {"loss_function": loss}).fit(catboost.Pool(data, target, **columns))
    return kind(loss_function=loss, **OPTIONS).fit(catboost.Pool(data, target, **columns))


def load(folder: Path, model: Any) -> triglot.Model:
    model.save_model(folder / "model.cbm")
    return backends.load("catboost", folder / "model.cbm")


def refusal(model: triglot.Model, parameters: Any = None, **inputs: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        send(model, inputs, parameters)
    return caught.value.message


@pytest.mark.parametrize("loss", VALUES)
def test_values_are_the_librarys_own(tmp_path: Path, loss: str) -> None:
    own = trained(loss, VALUES[loss])
    model = load(tmp_path, own)
    assert model.platform == "catboost"
    assert described(model.inputs) == [("x", "FP32", [-1, 3])]
    expected = own.predict(X)
    assert described(model.outputs) == [("predict", "FP64", [-1, *expected.shape[1:]])]
    assert not model.signatures
    for count in (120, 1, 0):
        np.testing.assert_array_equal(infer(model, x=X[:count]), expected[:count])
    raw = send(model, {"x": X}, {"prediction_type": "RawFormulaVal"})
    np.testing.assert_array_equal(raw, catboost.CatBoost.predict(own, X, "RawFormulaVal"))


@pytest.mark.parametrize("loss", CLASSES)
def test_classifier_answers_with_labels(tmp_path: Path, loss: str) -> None:
    own = trained(loss, CLASSES[loss])
    model = load(tmp_path, own)
    for count in (120, 1):
        labels = own.predict(X[:count])
        answer = infer(model, x=X[:count])
        np.testing.assert_array_equal(answer, labels if CLASSES[loss].ndim > 1 else labels.reshape(-1))
        probabilities = own.predict_proba(X[:count])
        np.testing.assert_array_equal(infer(model, "predict_proba", x=X[:count]), probabilities)
    for kind in ("RawFormulaVal", "LogProbability"):
        answer = send(model, {"x": X}, {"prediction_type": kind}, "predict_proba")
        np.testing.assert_array_equal(answer, own.predict(X, kind))
    assert "a parameter of the signature 'predict_proba'" in refusal(
        model, {"prediction_type": "Probability"}, x=X
    )
    assert refusal(model, {"prediction_type": "Class"}, x=X) == (
        "parameter prediction_type: expected one of RawFormulaVal, Probability, LogProbability, Exponent, "
        "got 'Class'"
    )


@pytest.mark.parametrize(
    ("labels", "datatype"),
    [([7, -3], "INT64"), ([0.5, 2.5], "FP64"), ([True, False], "BOOL"), (["ja", "nö"], "BYTES")],
)
def test_labels_have_their_type(tmp_path: Path, labels: list[Any], datatype: str) -> None:
    target = np.array(labels)[TWO]
    own = trained("Logloss", target)
    model = load(tmp_path, own)
    assert described(model.outputs) == [("predict", datatype, [-1])]
    np.testing.assert_array_equal(infer(model, x=X), np.array(own.predict(X).tolist(), target.dtype))
    assert model.labels["predict_proba"] == [str(label).encode() for label in own.classes_]


def test_threshold_of_probabilities(tmp_path: Path) -> None:
    own = trained("Logloss", TWO)
    own.set_probability_threshold(0.9)
    np.testing.assert_array_equal(infer(load(tmp_path, own), x=X), own.predict(X))


def test_json(tmp_path: Path) -> None:
    own = trained("MultiClass", THREE)
    own.save_model(tmp_path / "model.json", format="json")
    model = backends.load("catboost", tmp_path / "model.json")
    np.testing.assert_array_equal(infer(model, x=X), own.predict(X).reshape(-1))
    np.testing.assert_allclose(infer(model, "predict_proba", x=X), own.predict_proba(X), rtol=1e-12)


@pytest.mark.parametrize("base", [True, False])
def test_pickle(tmp_path: Path, base: bool) -> None:
    """The base class answers with log-odds by itself, whatever its loss is."""
    own = trained("Logloss", TWO)
    found = catboost.CatBoost(OPTIONS | {"loss_function": "Logloss"}).fit(X, TWO) if base else own
    joblib.dump(found, tmp_path / "model.joblib")
    model = backends.load("sklearn", tmp_path / "model.joblib")
    assert model.platform == "catboost"
    np.testing.assert_array_equal(infer(model, x=X), own.predict(X))


# --- columns ---

FRAME = pd.DataFrame(
    {
        "v": X[:, 0],
        "city": RANDOM.choice(["Köln", "Bonn"], 120),
        "note": RANDOM.choice(["a good one", "a bad one", "neither"], 120),
        "size": RANDOM.integers(0, 4, 120),
        "w": X[:, 1],
    }
)
KINDS = (FRAME["city"] == "Köln").to_numpy() & (FRAME["size"] > 1).to_numpy()
COLUMNS = {name: FRAME[name].to_numpy() for name in ("w", "size", "note", "city", "v")}


def of_kinds() -> Any:
    return trained("Logloss", KINDS.astype(int), FRAME, cat_features=["city", "size"], text_features=["note"])


def test_categories_and_texts_by_column(tmp_path: Path) -> None:
    own = of_kinds()
    model = load(tmp_path, own)
    declared = [("v", "FP32"), ("city", "BYTES"), ("note", "BYTES"), ("size", "BYTES"), ("w", "FP32")]
    assert described(model.inputs) == [(name, datatype, [-1]) for name, datatype in declared]
    expected = own.predict_proba(FRAME)
    for size in (COLUMNS["size"], COLUMNS["size"].astype(str), COLUMNS["size"].astype("f8")):
        answer = send(model, COLUMNS | {"size": size}, None, "predict_proba")
        np.testing.assert_array_equal(answer, expected)
    rows = [json.dumps(row) for row in FRAME.to_dict("records")]
    np.testing.assert_array_equal(send(model, {"instances": rows}, None, "predict_proba"), expected)


@pytest.mark.parametrize(
    ("column", "values", "text"),
    [
        ("size", np.full(120, 0.5), "column 'size': expected categories as text or whole numbers, got 0.5"),
        ("city", np.ones(120, bool), "column 'city': expected categories as text or whole numbers, got True"),
        ("note", np.ones(120), "column 'note': expected text, got 1.0"),
        ("v", ["1"] * 120, "column 'v': expected numbers, got '1'"),
        ("v", np.full(120, 16777217), "column 'v': expected numbers that FP32 can hold, got 16777217"),
        ("v", np.full(120, 1e300), "column 'v': expected numbers that FP32 can hold, got 1e+300"),
    ],
)
def test_what_is_no_value_of_a_column(tmp_path: Path, column: str, values: Any, text: str) -> None:
    assert refusal(load(tmp_path, of_kinds()), **COLUMNS | {column: values}) == text


def test_columns_of_numbers(tmp_path: Path) -> None:
    frame = pd.DataFrame(X, columns=["a", "größe", "c"])
    own = trained("RMSE", REAL, frame)
    model = load(tmp_path, own)
    answer = send(model, {"c": X[:, 2:], "größe": X[:, 1].astype("f8"), "a": X[:, 0]})
    np.testing.assert_array_equal(answer, own.predict(frame))
    np.testing.assert_array_equal(send(model, {"input-0": X.astype("f8")}), own.predict(frame))
    assert refusal(model, x=X[:, [0, 1, 2, 2]]) == "expected a matrix [-1,3], got [120,4]"
    assert refusal(model, a=X[:, 0]) == "missing input 'größe', 'c'"


@pytest.mark.parametrize("content", [b"", b"junk", b"{}", b"CBM1" + bytes(100)])
def test_broken_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.cbm"
    file.write_bytes(content)
    with pytest.raises(ModelLoadError) as caught:
        backends.load("catboost", file)
    assert str(caught.value).startswith(f"{file}: catboost {catboost.__version__} cannot read it: ")
