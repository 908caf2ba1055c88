"""Models of scikit-learn and XGBoost in a real server, as clients of each protocol see them."""

# ruff: noqa: E402 — without the libraries there is nothing to import.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest

from tests.process import FREE_PORTS, SECONDS, Triglot
from tests.protocol_clients.channel import grpc_channel, rpc
from tests.protocol_clients.rest import Rest
from triglot.core.tensor import pack_bytes, unpack_bytes
from triglot.pb.kserve import inference_pb2 as pb

pytest.importorskip("sklearn", reason="the ml environment has it")
xgboost = pytest.importorskip("xgboost", reason="the ml environment has it")

import joblib
import pandas as pd
from sklearn.compose import ColumnTransformer
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

RANDOM = np.random.default_rng(1)
X = RANDOM.random((40, 3))
LABELS = (X[:, 0] > 0.5).astype(int)
WORDS = np.array(["low", "größer"], object)[LABELS]
FRAME = pd.DataFrame({"age": X[:, 0], "city": np.array(["Bonn", "Köln"], object)[RANDOM.integers(0, 2, 40)]})


@dataclass
class Served:
    """The server's two ports, and the models as they were trained."""

    rest: Rest
    channel: grpc.Channel
    trained: dict[str, Any]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    scaled = ColumnTransformer([("age", StandardScaler(), ["age"]), ("city", OneHotEncoder(), ["city"])])
    trained = {
        "labels": make_pipeline(StandardScaler(), LogisticRegression()).fit(X, LABELS),
        "texts": make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(
            ["good", "bad"] * 20, ["ja", "naïve"] * 20
        ),
        "frame": make_pipeline(scaled, LogisticRegression()).fit(FRAME, WORDS),
        "pickled": xgboost.XGBClassifier(n_estimators=3, n_jobs=1).fit(X, LABELS),
        "booster": xgboost.train(
            {"objective": "multi:softprob", "num_class": 2, "nthread": 1}, xgboost.DMatrix(X, LABELS), 3
        ),
    }
    for name, model in trained.items():
        (folder / name / "7").mkdir(parents=True)
        if name == "booster":
            (folder / name / "7" / "model.bst").write_bytes(model.save_raw("ubj"))
        else:
            joblib.dump(model, folder / name / "7" / ("model.pkl" if name == "pickled" else "model.joblib"))
    with Triglot(folder, *FREE_PORTS, "--drain-delay", "0") as server:
        grpc_port, rest_port = server.ports()
        with grpc_channel(grpc_port) as channel:
            yield Served(Rest(rest_port), channel, trained)
        server.stop()
        assert "Traceback" not in server.stderr.text()
        assert "Warning" not in server.stderr.text()


METADATA = {
    "labels": ("sklearn", [("x", "FP64", [-1, 3])], ("predict", "INT64", [-1])),
    "texts": ("sklearn", [("x", "BYTES", [-1])], ("predict", "BYTES", [-1])),
    "frame": ("sklearn", [("age", "FP64", [-1]), ("city", "BYTES", [-1])], ("predict", "BYTES", [-1])),
    "pickled": ("xgboost", [("x", "FP32", [-1, 3])], ("predict", "INT64", [-1])),
    "booster": ("xgboost", [("x", "FP32", [-1, 3])], ("predict", "FP32", [-1, 2])),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata(served: Served, name: str) -> None:
    platform, inputs, output = METADATA[name]
    status, text = served.rest.get(f"/v2/models/{name}")
    assert (status, text["platform"], text["versions"]) == (200, platform, ["7"])
    assert [(tensor["name"], tensor["datatype"], tensor["shape"]) for tensor in text["inputs"]] == inputs
    assert [(tensor["name"], tensor["datatype"], tensor["shape"]) for tensor in text["outputs"]] == [output]
    reply = rpc(served.channel, "ModelMetadata", pb.ModelMetadataResponse)(
        pb.ModelMetadataRequest(name=name), timeout=SECONDS
    )
    assert reply.platform == platform
    assert [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in reply.inputs] == inputs
    assert [(output.name, output.datatype, list(output.shape)) for output in reply.outputs] == [output]


ROWS = X[:5].astype("f4").astype(float)
"""Rows that are the same in either precision."""
REQUESTS: dict[str, tuple[dict[str, Any], Any]] = {
    "labels": ({"x": ROWS}, ROWS),
    "texts": ({"x": ["good", "bad"]}, ["good", "bad"]),
    "frame": ({"age": FRAME["age"][:5], "city": FRAME["city"][:5]}, FRAME[:5]),
    "pickled": ({"x": ROWS}, ROWS),
    "booster": ({"x": ROWS}, xgboost.DMatrix(ROWS)),
}


def expected(served: Served, name: str) -> Any:
    return served.trained[name].predict(REQUESTS[name][1])


@pytest.mark.parametrize("name", REQUESTS)
def test_v2_over_rest(served: Served, name: str) -> None:
    inputs = [
        {
            "name": tensor,
            "datatype": datatype,
            "shape": np.shape(REQUESTS[name][0][tensor]),
            "data": np.ravel(REQUESTS[name][0][tensor]).tolist(),
        }
        for tensor, datatype, _ in METADATA[name][1]
    ]
    status, answer = served.rest.post(f"/v2/models/{name}/infer", {"inputs": inputs})
    (output,) = answer["outputs"]
    assert (status, output["name"], output["datatype"]) == (200, "predict", METADATA[name][2][1])
    wanted = expected(served, name)
    np.testing.assert_array_equal(np.array(output["data"], wanted.dtype).reshape(output["shape"]), wanted)


@pytest.mark.parametrize("name", REQUESTS)
def test_v2_over_grpc(served: Served, name: str) -> None:
    request = pb.ModelInferRequest(model_name=name)
    for tensor, datatype, _ in METADATA[name][1]:
        values = np.asarray(REQUESTS[name][0][tensor])
        request.inputs.add(name=tensor, datatype=datatype, shape=values.shape)
        request.raw_input_contents.append(
            pack_bytes([text.encode() for text in values.tolist()])
            if datatype == "BYTES"
            else values.astype("f4" if datatype == "FP32" else "f8").tobytes()
        )
    reply = rpc(served.channel, "ModelInfer", pb.ModelInferResponse)(request, timeout=SECONDS)
    (output,), (content,) = reply.outputs, reply.raw_output_contents
    wanted = expected(served, name)
    if output.datatype == "BYTES":
        assert [text.decode() for text in unpack_bytes(content, len(wanted))] == list(wanted)
    else:
        values = np.frombuffer(content, {"INT64": "i8", "FP32": "f4"}[output.datatype])
        np.testing.assert_array_equal(values.reshape(output.shape), wanted)


def test_a_signature_by_its_name(served: Served) -> None:
    body = {
        "inputs": [{"name": "x", "datatype": "FP64", "shape": [5, 3], "data": ROWS.ravel().tolist()}],
        "parameters": {"signature_name": "predict_proba"},
    }
    status, answer = served.rest.post("/v2/models/labels/infer", body)
    (output,) = answer["outputs"]
    assert (status, output["name"], output["shape"]) == (200, "predict_proba", [5, 2])
    np.testing.assert_array_equal(np.reshape(output["data"], (5, 2)), served.trained["labels"].predict_proba(ROWS))


def test_a_signature_by_its_output(served: Served) -> None:
    tensor = {"name": "x", "datatype": "FP64", "shape": [5, 3], "data": ROWS.ravel().tolist()}
    wanted = served.trained["labels"].predict_proba(ROWS)
    path = "/v2/models/labels/infer"
    status, answer = served.rest.post(path, {"inputs": [tensor], "outputs": [{"name": "predict_proba"}]})
    (output,) = answer["outputs"]
    assert (status, output["name"], output["shape"]) == (200, "predict_proba", [5, 2])
    np.testing.assert_array_equal(np.reshape(output["data"], (5, 2)), wanted)
    request = pb.ModelInferRequest(model_name="labels", raw_input_contents=[ROWS.tobytes()])
    request.inputs.add(name="x", datatype="FP64", shape=ROWS.shape)
    request.outputs.add(name="predict_proba")
    reply = rpc(served.channel, "ModelInfer", pb.ModelInferResponse)(request, timeout=SECONDS)
    np.testing.assert_array_equal(np.frombuffer(reply.raw_output_contents[0]).reshape(5, 2), wanted)
    for names in (["score"], ["predict", "predict_proba"]):
        outputs = [{"name": name} for name in names]
        status, answer = served.rest.post(path, {"inputs": [tensor], "outputs": outputs})
        assert status == 400
        text = f"unexpected inference output '{names[-1]}' for model 'labels'; the outputs of its signatures: "
        assert f"{text}serving_default: predict; predict_proba: predict_proba" in answer["error"]


def test_values_that_are_refused(served: Served) -> None:
    status, answer = served.rest.post(
        "/v2/models/labels/infer",
        {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1, 3], "data": [0, float("nan"), 1]}]},
    )
    assert status == 400
    assert answer["error"].startswith("Exception during sklearn prediction: Input X contains NaN.")


# --- instances, as AI Platform's and TensorFlow Serving's clients send them ---

INSTANCES: dict[str, Any] = {
    "labels": ROWS.tolist(),
    "texts": ["good", "bad"],
    "frame": FRAME[:5].to_dict("records"),
    "pickled": ROWS.tolist(),
    "booster": ROWS.tolist(),
}


@pytest.mark.parametrize("path", ["/v1/models/{}:predict", "/v1/projects/p/models/{}:predict"])
@pytest.mark.parametrize("name", INSTANCES)
def test_instances(served: Served, name: str, path: str) -> None:
    status, answer = served.rest.post(path.format(name), {"instances": INSTANCES[name]})
    assert (status, answer.keys()) == (200, {"predictions"})
    wanted = expected(served, name)
    np.testing.assert_array_equal(np.array(answer["predictions"], wanted.dtype), wanted)


def test_missing_values_in_instances(served: Served) -> None:
    rows = [[0.1, float("nan"), 0.0]]
    _, answer = served.rest.post("/v1/projects/p/models/booster:predict", {"instances": rows})
    wanted = served.trained["booster"].predict(xgboost.DMatrix(np.array(rows, "f4")))
    np.testing.assert_array_equal(np.array(answer["predictions"], "f4"), wanted)


def test_a_failed_prediction(served: Served) -> None:
    status, answer = served.rest.post("/v1/projects/p/models/labels:predict", {"instances": [[1.0, 2.0]]})
    assert status == 400
    assert answer.keys() == {"error"}
    assert "Exception during sklearn prediction: X has 2 features" in answer["error"]
