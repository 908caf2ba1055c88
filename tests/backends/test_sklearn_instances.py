"""Rows as clients of AI Platform, KServe V1 and KServe V2 send them: the estimator gets their own values."""

# ruff: noqa: E402 — without the libraries there is nothing to import.

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.process import FREE_PORTS, SECONDS, Triglot
from tests.protocol_clients.channel import grpc_channel, rpc
from tests.protocol_clients.rest import Rest
from triglot.core.tensor import pack_bytes
from triglot.pb.kserve import inference_pb2 as pb

pytest.importorskip("sklearn", reason="the ml environment has it")
xgboost = pytest.importorskip("xgboost", reason="the ml environment has it")

import joblib
import pandas as pd
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.feature_extraction import DictVectorizer
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.feature_selection import SelectKBest
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline
from sklearn.preprocessing import LabelBinarizer, OneHotEncoder, StandardScaler

ROWS = [[20.0, "a", "x"], [30.0, "b", "y"], [25.0, "a", "x"], [40.0, "c", "z"]] * 10
LABELS = np.array([0, 1, 0, 1] * 10)
FRAME = pd.DataFrame(ROWS, columns=["age", "job", "city"])
FLAGS = pd.DataFrame({"ok": [True, False] * 20, "v": [1.0, 2.0, 3.0, 4.0] * 10, "job": ["a", "b", "a", "c"] * 10})
NUMBERS = np.array([[row[0], at % 3, at] for at, row in enumerate(ROWS)])


def mixed(number: list[Any], texts: list[Any], missing: Any = np.nan) -> Any:
    impute = SimpleImputer(strategy="most_frequent", missing_values=missing)
    columns = ColumnTransformer(
        [
            ("numbers", make_pipeline(SimpleImputer(), StandardScaler()), number),
            ("texts", make_pipeline(impute, OneHotEncoder(handle_unknown="ignore")), texts),
        ]
    )
    return make_pipeline(columns, LogisticRegression())


def census() -> Any:
    """A union of pickers that were never fitted: it counts no features, as in AI Platform's tutorial.

    See GoogleCloudPlatform/cloudml-samples, OnlinePredictionWithScikitLearnInCMLE.ipynb.
    """
    parts: list[Any] = []
    for at in range(3):
        pick = SelectKBest(k=1)
        pick.scores_ = np.eye(3)[at]
        steps: list[Any] = [("pick", pick)]
        if at:
            steps.append(("binary", LabelBinarizer().fit(pick.transform(ROWS))))
        parts.append((str(at), Pipeline(steps)))
    union = FeatureUnion(parts)
    forest = RandomForestClassifier(5, random_state=0).fit(union.transform(ROWS), LABELS)
    return Pipeline([("union", union), ("forest", forest)])


OBJECTS = [{"age": row[0], "job": row[1]} for row in ROWS]
flags = ColumnTransformer([("job", OneHotEncoder(), ["job"])], remainder="passthrough")
encoded_flags = ColumnTransformer([("ok", OneHotEncoder(), ["ok"]), ("job", OneHotEncoder(), ["job"])])
TRAINED: dict[str, Any] = {
    "positions": mixed([0], [1, 2]).fit(np.array(ROWS, object), LABELS),
    "nones": mixed([0], [1, 2], None).fit(np.array(ROWS, object), LABELS),
    "two-positions": mixed([0], [1]).fit(np.array(ROWS, object), LABELS),
    "names": mixed(["age"], ["job", "city"]).fit(FRAME, LABELS),
    "two-names": mixed(["age"], ["job"]).fit(FRAME, LABELS),
    "flags": make_pipeline(flags, LogisticRegression()).fit(FLAGS, LABELS),
    "encoded-flags": make_pipeline(encoded_flags, LogisticRegression()).fit(FLAGS, LABELS),
    "census": census(),
    "objects": make_pipeline(DictVectorizer(), LogisticRegression()).fit(OBJECTS, LABELS),
    "texts": make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(["good", "bad"] * 20, LABELS),
    "numbers": HistGradientBoostingClassifier(max_iter=3).fit(NUMBERS, LABELS),
    "named-numbers": LogisticRegression().fit(pd.DataFrame(NUMBERS, columns=["a b", "c", "d"]), LABELS),
    "dropping-numbers": make_pipeline(
        ColumnTransformer([("numbers", StandardScaler(), ["a b", "c"])]), LogisticRegression()
    ).fit(pd.DataFrame(NUMBERS, columns=["a b", "c", "d"]), LABELS),
    "pickled": xgboost.XGBClassifier(n_estimators=3, n_jobs=1).fit(NUMBERS, LABELS),
    "booster": xgboost.train({"nthread": 1}, xgboost.DMatrix(NUMBERS, LABELS), 3),
}


@dataclass
class Served:
    """The server's REST and gRPC clients."""

    rest: Rest
    channel: grpc.Channel


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    for name, model in TRAINED.items():
        (folder / name).mkdir()
        if name == "booster":
            model.save_model(folder / name / "model.ubj")
        else:
            joblib.dump(model, folder / name / "model.joblib")
    with Triglot(folder, *FREE_PORTS, "--drain-delay", "0") as server:
        grpc_port, rest_port = server.ports()
        with grpc_channel(grpc_port) as channel:
            yield Served(Rest(rest_port), channel)
        server.stop()
        assert "Traceback" not in server.stderr.text()


NAN = float("nan")
# Model, instances, and the table that the estimator has to get.
INSTANCES: dict[str, tuple[str, list[Any], Any]] = {
    "lists": (
        "positions",
        [[25, "a", "x"], [31.5, "q", "z"]],
        np.array([[25, "a", "x"], [31.5, "q", "z"]], object),
    ),
    "objects": ("positions", [{"x0": 25, "x1": "b", "x2": "y"}], np.array([[25, "b", "y"]], object)),
    "null in lists": ("positions", [[None, "b", None]], np.array([[NAN, "b", NAN]], object)),
    "null that is imputed as None": ("nones", [[None, None, "y"]], np.array([[NAN, None, "y"]], object)),
    "anything in dropped positions": ("two-positions", [[25, "b", {"k": []}]], np.array([[25, "b", 0]], object)),
    "dropped positions left out": ("two-positions", [{"x1": "b", "x0": 25}], np.array([[25, "b", 0]], object)),
    "lists for names": ("names", [[25, "b", "y"], [40, "c", "q"]], [[25, "b", "y"], [40, "c", "q"]]),
    "null for a number": ("names", [{"age": None, "job": "b", "city": "y"}], [[NAN, "b", "y"]]),
    "null for a text": ("names", [{"age": 20, "job": None, "city": "y"}], [[20, NAN, "y"]]),
    "a key that some lack": (
        "names",
        [{"age": 20, "city": "y"}, {"age": 20, "job": "b", "city": "y"}],
        [[20, NAN, "y"], [20, "b", "y"]],
    ),
    "further keys": ("names", [{"id": "7", "age": 20, "job": "b", "city": "y"}], [[20, "b", "y"]]),
    "dropped names left out": ("two-names", [{"age": 20, "job": "b"}], [[20, "b", "x"]]),
    "anything in dropped names": ("two-names", [{"age": 20, "job": "b", "city": [1]}], [[20, "b", "x"]]),
    "true": ("flags", [{"ok": True, "v": 2, "job": "a"}], [[True, 2, "a"]]),
    "true in lists": ("flags", [[True, 2, "a"], [False, 3.5, "b"]], [[True, 2, "a"], [False, 3.5, "b"]]),
    "1 for true": ("flags", [{"ok": 1, "v": 2.0, "job": "a"}], [[True, 2, "a"]]),
    "true that is encoded": (
        "encoded-flags",
        [{"ok": True, "job": "a"}, {"ok": False, "job": "c"}],
        [[True, 0, "a"], [False, 0, "c"]],
    ),
    "1 for true that is encoded": ("encoded-flags", [{"ok": 1, "job": "a"}], [[True, 0, "a"]]),
    "uncounted": ("census", [[25, "a", "x"], [31.5, "b", "z"]], [[25, "a", "x"], [31.5, "b", "z"]]),
    "objects of any keys": (
        "objects",
        [{"age": 25.0, "job": "a"}, {"job": "c"}],
        [{"age": 25.0, "job": "a"}, {"job": "c"}],
    ),
    "texts": ("texts", ["good", "12", "{}"], ["good", "12", "{}"]),
    "null among numbers": ("numbers", [[None, 1, 2], [3, None, None]], [[NAN, 1, 2], [3, NAN, NAN]]),
    "true among numbers": ("numbers", [[True, 1, False]], [[1, 1, 0]]),
    "numbers by name": ("named-numbers", [{"d": 1, "a b": 30, "c": 2}], [[30, 2, 1]]),
    "texts in columns that are not used": (
        "dropping-numbers",
        [{"d": "7", "id": "8", "a b": 30, "c": 2}],
        [[30, 2, 1]],
    ),
    # KServe V1 takes each for a table.
    "columns of lists": ("named-numbers", [{"a b": [30, 20], "c": [2, 1], "d": [1, 1]}], [[30, 2, 1], [20, 1, 1]]),
    "columns by row": ("named-numbers", [{"a b": {"0": 30}, "c": {"0": 2}, "d": {"0": 1}}], [[30, 2, 1]]),
    "lists of objects": ("names", [[{"age": 20, "job": "b", "city": "y"}]], [[20, "b", "y"]]),
    "null for xgboost's classes": ("pickled", [[None, 1, 2], [30, True, None]], [[NAN, 1, 2], [30, 1, NAN]]),
    "null for a booster": ("booster", [[None, 1, 2], [30, True, None]], [[NAN, 1, 2], [30, 1, NAN]]),
}


def expected(name: str, table: Any) -> Any:
    model = TRAINED[name]
    if name == "booster":
        return model.predict(xgboost.DMatrix(np.array(table)))
    names = getattr(model, "feature_names_in_", None)
    return model.predict(table if names is None else pd.DataFrame(table, columns=names))


@pytest.mark.parametrize("path", ["/v1/models/{}:predict", "/v1/projects/p/models/{}:predict"])
@pytest.mark.parametrize("case", INSTANCES)
def test_the_estimator_gets_the_instances(served: Served, case: str, path: str) -> None:
    name, instances, table = INSTANCES[case]
    status, answer = served.rest.post(path.format(name), {"instances": instances})
    assert status == 200, answer
    np.testing.assert_allclose(answer["predictions"], expected(name, table), rtol=1e-6)


def test_another_signature(served: Served) -> None:
    body = {"signature_name": "predict_proba", "instances": [[None, "b", "y"]]}
    status, answer = served.rest.post("/v1/models/names:predict", body)
    table = pd.DataFrame([[NAN, "b", "y"]], columns=list(FRAME))
    np.testing.assert_allclose(answer["predictions"], TRAINED["names"].predict_proba(table))
    assert status == 200


ROW = [30.0, 2.0, 1.0]
BY_NAME = dict(zip(["a b", "c", "d"], ROW, strict=True))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models/named-numbers:predict", {"instances": [ROW]}),
        ("/v1/models/named-numbers:predict", {"instances": [BY_NAME]}),
        ("/v1/models/named-numbers:predict", {"inputs": [ROW]}),
        ("/v1/models/named-numbers:predict", {"inputs": {"x": [ROW]}}),
        ("/v1/models/named-numbers:predict", {"inputs": {name: [value] for name, value in BY_NAME.items()}}),
        ("/grps/v1/infer/predict", {"model": "named-numbers-1", "ndarray": [ROW]}),
        (
            "/grps/v1/infer/predict",
            {
                "model": "named-numbers-1",
                "gtensors": {"tensors": [{"dtype": "DT_FLOAT64", "shape": [1, 3], "flat_float64": ROW}]},
            },
        ),
        (
            "/grps/v1/infer/predict",
            {
                "model": "named-numbers-1",
                "gtensors": {
                    "tensors": [
                        {"name": name, "dtype": "DT_FLOAT64", "shape": [1], "flat_float64": [value]}
                        for name, value in BY_NAME.items()
                    ]
                },
            },
        ),
    ],
)
def test_named_columns_and_their_matrix_by_every_protocol(served: Served, path: str, body: Any) -> None:
    status, answer = served.rest.post(path, body, {"Content-Type": "application/json"})
    assert status == 200, answer
    (wanted,) = expected("named-numbers", [ROW]).tolist()
    values = answer.get("predictions") or answer.get("outputs")
    assert values == [wanted] if values else answer["gtensors"]["tensors"][0]["flat_int64"] == [str(wanted)]


REFUSED: dict[str, tuple[str, Any, str]] = {
    "a missing name": ("names", [{"age": 20, "job": "b"}], "missing input 'city'"),
    "a short list": ("names", [[20, "b"]], "2 features"),
    "lists of two lengths": (
        "names",
        [[20, "b", "y"], [20]],
        "expected objects, or lists of 3 values, got others",
    ),
    "lists and objects": ("names", [[20, "b", "y"], {"age": 20}], "expected objects, or lists of 3 values"),
    "text for a number": ("names", [["old", "b", "y"]], "could not convert string to float: 'old'"),
    "an object for a number": ("names", [[{"years": 3}, "b", "y"]], "must be a string or a real number"),
    "an unknown position": ("positions", [{"x0": 1, "x1": "a", "x2": "x", "x3": 2}], "unexpected input 'x3'"),
    "an unencoded text": ("encoded-flags", [{"ok": True, "job": "q"}], "Found unknown categories ['q']"),
    "text for a booster": ("booster", [["a", 1, 2]], "column 'x0': expected numbers, got 'a'"),
    "an object for one of all numbers": ("named-numbers", [[{"n": 1}, 1, 2]], "expected numbers, got {'n': 1}"),
    "null for a model that refuses it": ("named-numbers", [[None, 1, 2]], "Input X contains NaN"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_instances_say_why(served: Served, case: str) -> None:
    name, instances, text = REFUSED[case]
    for path in (f"/v1/models/{name}:predict", f"/v1/projects/p/models/{name}:predict"):
        status, answer = served.rest.post(path, {"instances": instances})
        assert status == 400, answer
        assert text in answer["error"]


@pytest.mark.parametrize(
    "body", [{}, {"instances": []}, {"instances": 3}, {"instances": [[1, 2, 3]], "inputs": [[1, 2, 3]]}]
)
def test_what_are_no_instances_is_refused_as_of_any_model(served: Served, body: Any) -> None:
    status, answer = served.rest.post("/v1/models/numbers:predict", body)
    assert status == 400, answer


# --- KServe V2 ---

# Model, inputs, and the table: what is declared is in metadata, what else is sent reaches the estimator, too.
COLUMNS: dict[str, tuple[str, list[tuple[str, str, list[int], list[Any]]], Any]] = {
    "json": ("names", [("instances", "BYTES", [1], [json.dumps([20, None, "y"])])], [[20, NAN, "y"]]),
    "dropped text": (
        "two-names",
        [("age", "FP64", [1], [20.0]), ("job", "BYTES", [1], ["b"]), ("city", "BYTES", [1], ["q"])],
        [[20, "b", "x"]],
    ),
    "columns of two dims": (
        "names",
        [("age", "FP64", [1, 1], [20.0]), ("job", "BYTES", [1, 1], ["b"]), ("city", "BYTES", [1, 1], ["y"])],
        [[20, "b", "y"]],
    ),
    "integers": (
        "names",
        [("age", "INT64", [1], [20]), ("job", "BYTES", [1], ["b"]), ("city", "BYTES", [1], ["y"])],
        [[20, "b", "y"]],
    ),
    "numbers by name": (
        "named-numbers",
        [("a b", "FP64", [1], [30.0]), ("c", "FP64", [1], [2.0]), ("d", "FP64", [1], [1.0])],
        [[30, 2, 1]],
    ),
    "another name and precision": ("numbers", [("input-0", "FP32", [1, 3], [30.0, 2.0, 1.0])], [[30, 2, 1]]),
    "whole texts of two dims": ("texts", [("x", "BYTES", [2, 1], ["good", "bad"])], ["good", "bad"]),
    "objects": (
        "objects",
        [("age", "FP64", [1], [25.0]), ("job", "BYTES", [1], ["a"])],
        [{"age": 25.0, "job": "a"}],
    ),
    "booleans for a booster": ("booster", [("x", "INT32", [1, 3], [30, 2, 1])], [[30, 2, 1]]),
}
DTYPES = {"FP32": "f4", "FP64": "f8", "INT32": "i4", "INT64": "i8"}


@pytest.mark.parametrize("case", COLUMNS)
def test_v2_over_rest(served: Served, case: str) -> None:
    name, inputs, table = COLUMNS[case]
    keys = ("name", "datatype", "shape", "data")
    body = {"inputs": [dict(zip(keys, values, strict=True)) for values in inputs]}
    status, answer = served.rest.post(f"/v2/models/{name}/infer", body)
    assert status == 200, answer
    np.testing.assert_allclose(answer["outputs"][0]["data"], expected(name, table), rtol=1e-6)


@pytest.mark.parametrize("case", COLUMNS)
def test_v2_over_grpc(served: Served, case: str) -> None:
    name, inputs, table = COLUMNS[case]
    request = pb.ModelInferRequest(model_name=name)
    for tensor, datatype, shape, data in inputs:
        request.inputs.add(name=tensor, datatype=datatype, shape=shape)
        request.raw_input_contents.append(
            pack_bytes([text.encode() for text in data])
            if datatype == "BYTES"
            else np.array(data, DTYPES[datatype]).tobytes()
        )
    reply = rpc(served.channel, "ModelInfer", pb.ModelInferResponse)(request, timeout=SECONDS)
    (output,), (content,) = reply.outputs, reply.raw_output_contents
    np.testing.assert_allclose(np.frombuffer(content, DTYPES[output.datatype]), expected(name, table), rtol=1e-6)


def test_v2_refuses_what_the_estimator_refuses(served: Served) -> None:
    for inputs, text in (
        ([{"name": "age", "datatype": "FP64", "shape": [1], "data": [20]}], "missing input 'job', 'city'"),
        ([{"name": "instances", "datatype": "BYTES", "shape": [1], "data": ["{"]}], "instances: expected JSON"),
        ([{"name": "x", "datatype": "FP64", "shape": [1, 2], "data": [1, 2]}], "2 columns passed, passed data"),
    ):
        status, answer = served.rest.post("/v2/models/names/infer", {"inputs": inputs})
        assert (status, text in answer["error"] or "Shape of passed values" in answer["error"]) == (400, True), (
            answer
        )


def test_batches_of_instances(tmp_path: Path) -> None:
    """Whatever the inputs are, requests share batches, of which the configuration has the limit."""
    for name in ("names", "objects"):
        (tmp_path / name).mkdir()
        joblib.dump(TRAINED[name], tmp_path / name / "model.joblib")
        (tmp_path / name / "config.pbtxt").write_text("max_batch_size: 4\ndynamic_batching {}")
    with Triglot(tmp_path, *FREE_PORTS, "--drain-delay", "0") as server:
        rest = Rest(server.ports()[1])
        table = pd.DataFrame([[20, NAN, "y"], [40, "b", "q"]], columns=list(FRAME))
        body = {"instances": [[20, None, "y"], [40, "b", "q"]]}
        _, answer = rest.post("/v1/models/names:predict", body)
        assert answer == {"predictions": TRAINED["names"].predict(table).tolist()}
        _, answer = rest.post("/v1/models/objects:predict", {"instances": OBJECTS[:4]})
        assert answer == {"predictions": TRAINED["objects"].predict(OBJECTS[:4]).tolist()}
        rows = {"name": "instances", "datatype": "BYTES", "shape": [5], "data": ['[20, null, "y"]'] * 5}
        status, answer = rest.post("/v2/models/names/infer", {"inputs": [rows]})
        assert status == 400
        assert answer["error"].endswith("inference request batch-size must be <= 4 for 'names'")
        server.stop()
