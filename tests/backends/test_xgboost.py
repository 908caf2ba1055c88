"""Models of XGBoost: trained here, saved, and compared with what they answer themselves."""

# ruff: noqa: E402 — without the libraries there is nothing to import.

from __future__ import annotations

import base64
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import triglot
from tests.backends.direct_calls import described, infer, send
from triglot import backends
from triglot.core.errors import InvalidArgument, ModelLoadError
from triglot.model.config import ModelConfig

xgboost = pytest.importorskip("xgboost", reason="the ml environment has it")

import joblib
import pandas as pd

RANDOM = np.random.default_rng(1)
X = RANDOM.random((80, 3)).astype("f4")
X[RANDOM.random(X.shape) < 0.1] = np.nan
X[RANDOM.random(X.shape) < 0.1] = 0
LABELS = RANDOM.integers(0, 3, 80)

OBJECTIVES: dict[str, tuple[dict[str, Any], Any, list[int]]] = {
    "regression": ({}, RANDOM.random(80), [-1]),
    "binary": ({"objective": "binary:logistic"}, LABELS > 1, [-1]),
    "margin": ({"objective": "binary:logitraw"}, LABELS > 1, [-1]),
    "probabilities": ({"objective": "multi:softprob", "num_class": 3}, LABELS, [-1, 3]),
    "classes": ({"objective": "multi:softmax", "num_class": 3}, LABELS, [-1]),
    "two-targets": ({}, RANDOM.random((80, 2)), [-1, 2]),
    "vector-leaves": ({"multi_strategy": "multi_output_tree"}, RANDOM.random((80, 2)), [-1, 2]),
    "linear": ({"booster": "gblinear"}, RANDOM.random(80), [-1]),
    "dart": ({"booster": "dart"}, RANDOM.random(80), [-1]),
    "ranking": ({"objective": "rank:pairwise"}, LABELS, [-1]),
}


def trained(name: str = "binary", **names: Any) -> Any:
    parameters, target, _ = OBJECTIVES[name]
    return xgboost.train({"nthread": 1, **parameters}, xgboost.DMatrix(X, target, **names), 4)


def saved(folder: Path, booster: Any, name: str = "model.ubj") -> Path:
    booster.save_model(folder / name)
    return folder / name


def load_pickled(folder: Path, found: object) -> triglot.Model:
    joblib.dump(found, folder / "model.joblib")
    return backends.load("sklearn", folder / "model.joblib")


def load_error(file: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        backends.load("xgboost", file)
    prefix = f"{file}: xgboost {xgboost.__version__} cannot read it: "
    assert str(caught.value).startswith(prefix)
    return str(caught.value).removeprefix(prefix)


# --- boosters ---


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_answer_is_the_boosters_own(tmp_path: Path, name: str) -> None:
    booster = trained(name)
    model = backends.load("xgboost", saved(tmp_path, booster))
    assert model.platform == "xgboost"
    assert described(model.inputs) == [("x", "FP32", [-1, 3])]
    assert described(model.outputs) == [("predict", "FP32", OBJECTIVES[name][2])]
    for rows in (X, X[:1]):
        np.testing.assert_array_equal(infer(model, x=rows), booster.predict(xgboost.DMatrix(rows)))


@pytest.mark.parametrize("name", ["model.bst", "model.json", "model.ubj"])
@pytest.mark.parametrize("written_as", ["model.json", "model.ubj"])
def test_the_content_is_what_counts(tmp_path: Path, name: str, written_as: str) -> None:
    booster = trained()
    saved(tmp_path, booster, written_as).rename(tmp_path / name)
    model = backends.load("xgboost", tmp_path / name)
    np.testing.assert_array_equal(infer(model, x=X), booster.predict(xgboost.DMatrix(X)))


def test_nan_is_missing_and_zero_is_a_number(tmp_path: Path) -> None:
    column = np.repeat(np.array([[np.nan], [0], [1]], "f4"), 20, axis=0)
    target = np.repeat([5.0, 1.0, 3.0], 20)
    data = xgboost.DMatrix(column, target)
    booster = xgboost.train({"eta": 1, "lambda": 0, "min_child_weight": 0, "nthread": 1}, data, 2)
    model = backends.load("xgboost", saved(tmp_path, booster))
    np.testing.assert_allclose(infer(model, x=column[::20]), [5, 1, 3])


@pytest.mark.parametrize("types", [None, ["float", "float", "q"]])
def test_a_booster_that_knows_the_names_of_its_features(tmp_path: Path, types: Any) -> None:
    names = ["a", "größe", "c"]
    booster = trained(feature_names=names, feature_types=types)
    model = backends.load("xgboost", saved(tmp_path, booster))
    expected = booster.predict(xgboost.DMatrix(X, feature_names=names, feature_types=types))
    assert described(model.inputs) == [(name, "FP32", [-1]) for name in names]
    np.testing.assert_array_equal(infer(model, **dict(zip(names, X.T, strict=True))), expected)
    np.testing.assert_array_equal(model.infer({"x": X})["predict"], expected)


def test_a_booster_that_was_stopped_early(tmp_path: Path) -> None:
    """As xgboost's own booster: its user says which trees are meant."""
    data, noise = xgboost.DMatrix(X, LABELS > 1), xgboost.DMatrix(X, LABELS < 1)
    booster = xgboost.train(
        {"nthread": 1}, data, 20, evals=[(noise, "noise")], early_stopping_rounds=3, verbose_eval=False
    )
    assert booster.best_iteration + 1 < booster.num_boosted_rounds()
    model = backends.load("xgboost", saved(tmp_path, booster))
    np.testing.assert_array_equal(infer(model, x=X), booster.predict(data))


def test_the_requests_own_array(tmp_path: Path) -> None:
    booster = trained()
    model = backends.load("xgboost", saved(tmp_path, booster))
    expected = booster.predict(xgboost.DMatrix(X))
    for offset in range(5):
        view = np.frombuffer(bytes(offset) + X.tobytes(), "f4", offset=offset).reshape(X.shape)
        np.testing.assert_array_equal(model.infer({"x": view})["predict"], expected)


def test_values_that_xgboost_refuses(tmp_path: Path) -> None:
    model = backends.load("xgboost", saved(tmp_path, trained()))
    with pytest.raises(InvalidArgument) as caught:
        infer(model, x=np.array([[0, np.inf, 1]], "f4"))
    assert caught.value.message.startswith("Could not initialize DMatrix from inputs: ")
    assert "Input data contains `inf`" in caught.value.message
    assert "Stack trace" not in caught.value.message
    assert ".cc:" not in caught.value.message


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((1, 2), "Could not initialize DMatrix from inputs: expected a matrix [-1,3], got [1,2]"),
        ((1, 4), "Could not initialize DMatrix from inputs: expected a matrix [-1,3], got [1,4]"),
        ((1, 1, 3), "Could not initialize DMatrix from inputs: "),
        ((3,), "Could not initialize DMatrix from inputs: "),
        ((), "Could not initialize DMatrix from inputs: "),
    ],
)
def test_shapes_that_are_not_the_declared_one(tmp_path: Path, shape: tuple[int, ...], text: str) -> None:
    """A protocol may leave it to the model to look at the shapes."""
    model = backends.load("xgboost", saved(tmp_path, trained()))
    with pytest.raises(InvalidArgument) as caught:
        model.infer({"x": np.zeros(shape, "f4")})
    assert caught.value.message.startswith(text)


# --- what cannot be read ---

# One tree in the format that releases before 3.1 wrote into .bst files.
OLD_FORMAT = zlib.decompress(
    base64.b64decode(
        "eNpLysxLC1HXtGdigABGKM0EZTMiidEa8EPppMy8xKJKq5z89MziksxkNqhwelJJUWoqPR1EDkB3H9MgcO9/JADid66cYg2ildXX"
        "2FseLbdhQIt8Tiidn5SVmlySWZbqAhWoVspLzE1VslJCiyIlHaWi1PT4nPzi4viCxKLEXCWraqXi5MSc1PiC/OL48tTM9IwSoDZD"
        "pdpaACdBOJw="
    )
)


@pytest.mark.skipif(
    tuple(map(int, xgboost.__version__.split(".")[:2])) < (3, 1), reason="this release still reads it"
)
@pytest.mark.parametrize("name", ["model.bst", "model.json"])
def test_the_binary_format_of_old_releases(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(OLD_FORMAT)
    text = load_error(tmp_path / name)
    assert "The binary format has been deprecated in 1.6 and removed in 3.1" in text
    assert "Stack trace" not in text


@pytest.mark.parametrize("content", [b"", b"{", b"not a model", bytes(100), b'{"learner": 1}', b"half"])
@pytest.mark.parametrize("name", ["model.bst", "model.json", "model.ubj"])
def test_a_broken_file(tmp_path: Path, name: str, content: bytes) -> None:
    file = tmp_path / name
    file.write_bytes(saved(tmp_path, trained()).read_bytes()[:500] if content == b"half" else content)
    text = load_error(file)
    assert text
    assert "Stack trace" not in text


# --- pickles, which the sklearn backend opens ---


def test_a_pickled_booster(tmp_path: Path) -> None:
    booster = trained("probabilities")
    model = load_pickled(tmp_path, booster)
    assert model.platform == "xgboost"
    assert described(model.outputs) == [("predict", "FP32", [-1, 3])]
    np.testing.assert_array_equal(infer(model, x=X), booster.predict(xgboost.DMatrix(X)))


def test_a_classifier_answers_with_labels(tmp_path: Path) -> None:
    classifier = xgboost.XGBClassifier(n_estimators=4, n_jobs=1).fit(X, LABELS)
    model = load_pickled(tmp_path, classifier)
    assert model.platform == "xgboost"
    assert described(model.inputs) == [("x", "FP32", [-1, 3])]
    assert described(model.outputs) == [("predict", "INT64", [-1])]
    assert described(model.signatures["predict_proba"].outputs) == [("predict_proba", "FP32", [-1, 3])]
    np.testing.assert_array_equal(infer(model, x=X), classifier.predict(X))
    np.testing.assert_array_equal(infer(model, "predict_proba", x=X), classifier.predict_proba(X))


@pytest.mark.parametrize("name", ["model.bst", "model.json", "model.ubj"])
def test_a_file_that_a_classifier_saved_answers_as_the_classifier(tmp_path: Path, name: str) -> None:
    classifier = xgboost.XGBClassifier(n_estimators=4, n_jobs=1).fit(X, LABELS)
    classifier.save_model(tmp_path / f"saved{Path(name).suffix.replace('bst', 'json')}")
    (file,) = tmp_path.iterdir()
    model = backends.load("xgboost", file.rename(tmp_path / name))
    assert model.platform == "xgboost"
    assert described(model.inputs) == [("x", "FP32", [-1, 3])]
    np.testing.assert_array_equal(infer(model, x=X), classifier.predict(X))
    np.testing.assert_array_equal(infer(model, "predict_proba", x=X), classifier.predict_proba(X))


def test_a_classifiers_booster_on_request(tmp_path: Path) -> None:
    classifier = xgboost.XGBClassifier(n_estimators=4, n_jobs=1).fit(X, LABELS)
    file = saved(tmp_path, classifier)
    model = backends.load("xgboost", file, ModelConfig(parameters={"as_booster": "true"}))
    np.testing.assert_array_equal(infer(model, x=X), classifier.predict_proba(X))
    with pytest.raises(ModelLoadError, match="parameters: as_booster: expected true or false, got 'yes'"):
        backends.load("xgboost", file, ModelConfig(parameters={"as_booster": "yes"}))


def test_a_file_that_a_regressor_saved_uses_its_best_trees(tmp_path: Path) -> None:
    regressor = xgboost.XGBRegressor(n_estimators=20, n_jobs=1, early_stopping_rounds=3)
    regressor.fit(X, LABELS, eval_set=[(X, -LABELS)], verbose=False)
    model = backends.load("xgboost", saved(tmp_path, regressor))
    np.testing.assert_array_equal(infer(model, x=X), regressor.predict(X))


def test_a_regressor_that_was_stopped_early(tmp_path: Path) -> None:
    regressor = xgboost.XGBRegressor(n_estimators=20, n_jobs=1, early_stopping_rounds=3)
    regressor.fit(X, LABELS, eval_set=[(X, -LABELS)], verbose=False)
    assert regressor.best_iteration + 1 < regressor.get_booster().num_boosted_rounds()
    model = load_pickled(tmp_path, regressor)
    assert described(model.outputs) == [("predict", "FP32", [-1])]
    np.testing.assert_array_equal(infer(model, x=X), regressor.predict(X))


@pytest.mark.parametrize("booster", ["gbtree", "gblinear"])
def test_an_estimator_that_was_fitted_on_a_data_frame(tmp_path: Path, booster: str) -> None:
    frame = pd.DataFrame(X, columns=["a", "größe", "c"])
    regressor = xgboost.XGBRegressor(n_estimators=4, n_jobs=1, booster=booster).fit(frame, LABELS)
    model = load_pickled(tmp_path, regressor)
    assert described(model.inputs) == [(name, "FP32", [-1]) for name in frame]
    columns = {name: frame[name].to_numpy() for name in frame}
    np.testing.assert_array_equal(infer(model, **columns), regressor.predict(frame))
    np.testing.assert_array_equal(send(model, {"x": X}), regressor.predict(frame))


def test_categories_are_given_as_their_numbers(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": pd.Categorical(["u", "v", "w"] * 20), "b": np.arange(60.0)})
    codes = np.column_stack([frame["a"].cat.codes, frame["b"]]).astype("f4")
    classifier = xgboost.XGBClassifier(n_estimators=4, n_jobs=1, enable_categorical=True)
    classifier.fit(frame, frame["a"].cat.codes)
    answer = send(load_pickled(tmp_path, classifier), {"x": codes})
    np.testing.assert_array_equal(answer, classifier.predict(frame))
    booster = classifier.get_booster()
    answer = send(backends.load("xgboost", saved(tmp_path, booster)), {"x": codes})
    np.testing.assert_array_equal(answer, classifier.predict_proba(frame))


def test_parameters_that_change_the_answer(tmp_path: Path) -> None:
    regressor = xgboost.XGBRegressor(n_estimators=4, n_jobs=1, objective="reg:logistic").fit(X, LABELS > 1)
    model = load_pickled(tmp_path, regressor)
    margin = infer(model, parameters={"output_margin": True}, x=X)
    np.testing.assert_array_equal(margin, regressor.predict(X, output_margin=True))
    classifier = xgboost.XGBClassifier(n_estimators=4, n_jobs=1).fit(X, LABELS > 1)
    model = load_pickled(tmp_path, classifier)
    with pytest.raises(InvalidArgument) as caught:
        infer(model, parameters={"output_margin": True}, x=X)
    assert caught.value.message == "Exception during xgboost prediction: predict returned float32, expected int64"


def test_an_estimators_errors_name_no_files(tmp_path: Path) -> None:
    model = load_pickled(tmp_path, xgboost.XGBClassifier(n_estimators=4, n_jobs=1).fit(X, LABELS))
    with pytest.raises(InvalidArgument) as caught:
        model.infer({"x": np.zeros(3, "f4")}, triglot.Call())
    assert caught.value.message.startswith("Exception during xgboost prediction: Check failed: ")
    assert "Stack trace" not in caught.value.message
    assert "/" not in caught.value.message


def test_an_estimator_that_is_not_fitted(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="need to call fit or load_model beforehand"):
        load_pickled(tmp_path, xgboost.XGBClassifier())
