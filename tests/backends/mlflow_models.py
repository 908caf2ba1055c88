"""Models that MLflow saves, of every flavor that the environment has the library for, with the data to score."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
pytest.importorskip("mlflow", reason="the mlflow environment has it")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Of MLflow's own type hints, when it is imported.
    import mlflow.catboost
    import mlflow.lightgbm
    import mlflow.onnx
    import mlflow.pyfunc
    import mlflow.sklearn
    import mlflow.xgboost

import catboost
import cloudpickle
import lightgbm
import onnx
import pandas as pd
import xgboost
from mlflow.models import ModelSignature, infer_signature
from mlflow.pyfunc import scoring_server
from mlflow.types import ParamSchema, ParamSpec
from mlflow.types.llm import ChatCompletionResponse
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

# As classes of a notebook: the server does not have this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
RANDOM = np.random.default_rng(1)
FRAME = pd.DataFrame(
    {"age": RANDOM.random(60), "income": RANDOM.random(60) * 1000, "rooms": RANDOM.integers(1, 9, 60)}
)
MIXED = pd.DataFrame({"age": FRAME.age, "city": np.array(["Bonn", "Köln"], object)[RANDOM.integers(0, 2, 60)]})
MATRIX = FRAME.to_numpy(np.float64)
TWO = (FRAME.age > 0.5).astype(int).to_numpy()
WORDS = np.array(["low", "größer"], object)[TWO]
REAL = FRAME.income.to_numpy() / 7
QUIET = {"n_estimators": 3, "verbose": -1, "n_jobs": 1}


class Stretched(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """A frame in, a frame out; with parameters."""

    def predict(self, context: Any, model_input: Any, params: Any = None) -> Any:
        factor, offsets = params["factor"], params["offsets"]
        return pd.DataFrame(
            {
                "stretched": model_input["age"] * factor + sum(offsets),
                "city": model_input["city"].str.upper(),
            }
        )


class Kinds(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """Returns what it sees of each type of column."""

    def predict(self, context: Any, model_input: Any, params: Any = None) -> Any:
        when = model_input["when"]
        return pd.DataFrame(
            {
                "year": when.dt.year.astype("int64"),
                "later": when + pd.Timedelta(days=1),
                "size": model_input["raw"].map(len).astype("int64"),
                "is_small": model_input["flag"],
                "half": model_input["real"] / np.float32(2),
                "small": model_input["small"],
            }
        )


class Arrays(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """Tensors by name in, tensors by name out."""

    def predict(self, context: Any, model_input: Any, params: Any = None) -> Any:
        return {"sum": model_input["a"] + model_input["b"].sum(axis=1), "first": model_input["a"][:1]}


class Nested(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """Takes objects, and returns what no tensor can hold."""

    def predict(self, context: Any, model_input: Any, params: Any = None) -> Any:
        return [{"total": sum(row), "all": list(row)} for row in model_input["values"]]


class Echo(mlflow.pyfunc.ChatModel):  # type: ignore[misc]
    """A chat, with the signature that MLflow gives it."""

    def predict(self, context: Any, messages: Any, params: Any) -> Any:
        text = f"{messages[-1].content} {params.max_tokens} {params.custom_inputs}"
        message = {"role": "assistant", "content": text}
        return ChatCompletionResponse.from_dict({"choices": [{"index": 0, "message": message}], "created": 7})


class Whole(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """Without a signature: takes the body, and returns it."""

    def predict(self, context: Any, model_input: Any, params: Any = None) -> Any:
        return {"got": [model_input]}


KINDS = pd.DataFrame(
    {
        "when": pd.to_datetime(["2024-01-02T03:04:05", "1999-12-31T23:59:59"]),
        "raw": [b"\x00\xff", b"abc"],
        "flag": [True, False],
        "real": np.array([1.1, 2.5], np.float32),
        "small": np.array([1, -(2**31)], np.int32),
    }
)
TENSORS = {"a": np.array([1.5, 2.5], np.float32), "b": np.arange(6, dtype=np.float32).reshape(2, 3)}
NESTED = pd.DataFrame({"values": [[1, 2], [3, 4]]})
PARAMS = ParamSchema([ParamSpec("factor", "double", 2.0), ParamSpec("offsets", "long", [1, 2], (-1,))])


def _graph() -> Any:
    """The input twice and three times."""
    tensor = onnx.helper.make_tensor_value_info
    nodes = [
        onnx.helper.make_node("Add", ["x", "x"], ["twice"]),
        onnx.helper.make_node("Add", ["x", "twice"], ["thrice"]),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [tensor("x", onnx.TensorProto.FLOAT, ["n", 3])],
        [tensor(name, onnx.TensorProto.FLOAT, ["n", 3]) for name in ("twice", "thrice")],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)


def _mixed_pipeline() -> Any:
    encoded = ColumnTransformer([("age", StandardScaler(), ["age"]), ("city", OneHotEncoder(), ["city"])])
    return make_pipeline(encoded, LogisticRegression()).fit(MIXED, WORDS)


def _kept(example: Any) -> dict[str, Any]:
    """Options of `save_model`: an example, and no search for packages, which takes a process."""
    return {"input_example": example, "pip_requirements": []}


def _save(flavor: Any, found: Any, data: Any, **options: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        answer = getattr(found, options.get("pyfunc_predict_fn", "predict"))(data)
        flavor.save_model(found, path, signature=infer_signature(data, answer), **_kept(data[:2]), **options)

    return write


def _booster() -> Any:
    parameters = {"objective": "multi:softprob", "num_class": 2, "nthread": 1}
    return xgboost.train(parameters, xgboost.DMatrix(FRAME, TWO), 3)


def _python(model: Any, data: Any, answer: Any, params: Any = None) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        inferred = infer_signature(data, answer)
        signature = ModelSignature(inferred.inputs, inferred.outputs, params)
        mlflow.pyfunc.save_model(path, python_model=model, signature=signature, **_kept(data))

    return write


SAVED: Mapping[str, tuple[Callable[[Path], None], Any]] = {
    "sklearn": (
        _save(mlflow.sklearn, LogisticRegression().fit(FRAME, TWO), FRAME),
        FRAME[3:9],
    ),
    "sklearn_pickled": (
        _save(
            mlflow.sklearn,
            _mixed_pipeline(),
            MIXED,
            serialization_format="cloudpickle",
            pyfunc_predict_fn="predict_proba",
        ),
        MIXED[:5],
    ),
    "sklearn_words": (_save(mlflow.sklearn, _mixed_pipeline(), MIXED, serialization_format="pickle"), MIXED[:5]),
    "sklearn_matrix": (
        _save(mlflow.sklearn, LogisticRegression().fit(MATRIX, TWO), MATRIX.astype("f4")),
        MATRIX[:4].astype("f4"),
    ),
    "xgboost_classifier": (
        _save(mlflow.xgboost, xgboost.XGBClassifier(n_estimators=3, n_jobs=1).fit(FRAME, TWO), FRAME),
        FRAME[:5],
    ),
    "xgboost_booster": (
        lambda path: mlflow.xgboost.save_model(
            _booster(), path, signature=infer_signature(FRAME), **_kept(FRAME[:1])
        ),
        FRAME[:5],
    ),
    "lightgbm_classifier": (
        _save(mlflow.lightgbm, lightgbm.LGBMClassifier(**QUIET).fit(FRAME, WORDS), FRAME),
        FRAME[:5],
    ),
    "lightgbm_booster": (
        _save(mlflow.lightgbm, lightgbm.LGBMRegressor(**QUIET).fit(MATRIX, REAL).booster_, FRAME),
        FRAME[:5],
    ),
    "catboost_classifier": (
        _save(
            mlflow.catboost,
            catboost.CatBoostClassifier(iterations=3, verbose=0, allow_writing_files=False).fit(FRAME, WORDS),
            FRAME,
        ),
        FRAME[:5],
    ),
    "catboost_regressor": (
        _save(
            mlflow.catboost,
            catboost.CatBoostRegressor(
                iterations=3, verbose=0, allow_writing_files=False, cat_features=["city"]
            ).fit(MIXED, REAL),
            MIXED,
        ),
        MIXED[:5],
    ),
    "onnx": (
        lambda path: mlflow.onnx.save_model(
            _graph(), path, signature=infer_signature(MATRIX.astype("f4")), **_kept(MATRIX[:2].astype("f4"))
        ),
        MATRIX[:2].astype("f4"),
    ),
    "onnx_frame": (
        lambda path: mlflow.onnx.save_model(
            _graph(),
            path,
            signature=infer_signature(FRAME[["age", "income"]].assign(b=1.5)),
            **_kept(FRAME[["age", "income"]].assign(b=1.5)[:1]),
        ),
        FRAME[["age", "income"]].assign(b=1.5)[:1],
    ),
    "python_frame": (
        _python(Stretched(), MIXED, pd.DataFrame({"stretched": [1.0], "city": ["A"]}), PARAMS),
        MIXED[:3],
    ),
    "python_kinds": (_python(Kinds(), KINDS, None), KINDS),
    "python_tensors": (_python(Arrays(), TENSORS, None), TENSORS),
    "python_nested": (_python(Nested(), NESTED, None), NESTED),
}
"""How each is saved, and what it is asked for."""


def save(folder: Path) -> None:
    """Save every model into a repository."""
    for name, (write, _) in SAVED.items():
        write(folder / name)


def save_chats(folder: Path) -> None:
    """Save a chat model, and one without a signature."""
    mlflow.pyfunc.save_model(folder / "chat", python_model=Echo())
    mlflow.pyfunc.save_model(folder / "whole", python_model=Whole())


def predict(folder: Path, data: Any, params: Any = None) -> Any:
    """What MLflow answers for the model in a folder."""
    return mlflow.pyfunc.load_model(str(folder)).predict(data, params=params)


def invoke(folder: Path, body: str, content_type: str) -> Any:
    """What MLflow's scoring server answers for the model in a folder."""
    model = mlflow.pyfunc.load_model(str(folder))
    answer = scoring_server.invocations(body, content_type, model, model.metadata.get_input_schema())
    assert answer.status == 200
    return json.loads(answer.response)


def example(folder: Path) -> Any:
    """The input example of the model in a folder."""
    return mlflow.pyfunc.load_model(str(folder)).input_example
