"""MLServer's runtimes and its documentation's examples on `triglot mlserver`, called by MLServer's own code."""

# ruff: noqa: E402 — without the libraries there is nothing to import.

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.process import SECONDS, Triglot
from tests.protocol_clients.rest import Rest

mlserver = pytest.importorskip("mlserver", reason="the mlserver environment has it")

import catboost
import joblib
import lightgbm
import pandas as pd
import xgboost
from mlserver.codecs import Base64Codec, DatetimeCodec, NumpyCodec, NumpyRequestCodec, PandasCodec, StringCodec
from mlserver.grpc import dataplane_pb2_grpc
from mlserver.grpc.converters import ModelInferRequestConverter, ModelInferResponseConverter
from mlserver.types import InferenceRequest, InferenceResponse, Parameters, RequestInput, RequestOutput
from sklearn.compose import ColumnTransformer
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

# Of MLServer's own converters.
pytestmark = pytest.mark.filterwarnings("ignore:The `construct` method is deprecated")
HERE = {
    "MLSERVER_HOST": "127.0.0.1",
    "MLSERVER_HTTP_PORT": "0",
    "MLSERVER_GRPC_PORT": "0",
    "MLSERVER_METRICS_PORT": "0",
}
RANDOM = np.random.default_rng(1)
X = RANDOM.random((60, 4))
CLASSES = (X[:, 0] * 3).astype(int)
VALUES = X @ [2.0, -1.0, 0.5, 3.0]
LABELS = np.array(["low", "mid", "größer"], object)[CLASSES]
FRAME = pd.DataFrame(X, columns=["d", "a", "c", "b"])
MIXED = pd.DataFrame({"age": X[:, 0], "city": np.array(["Bonn", "Köln"], object)[CLASSES % 2]})
SKLEARN, XGBOOST = "mlserver_sklearn.SKLearnModel", "mlserver_xgboost.XGBoostModel"
LIGHTGBM, CATBOOST = "mlserver_lightgbm.LightGBMModel", "mlserver_catboost.CatboostModel"
QUIET = {"verbose": False, "allow_writing_files": False, "iterations": 4}
CUSTOM = """
import json

from mlserver import MLModel
from mlserver.codecs import decode_args
from mlserver.types import InferenceRequest, InferenceResponse, Parameters, ResponseOutput


class JsonHelloWorldModel(MLModel):
    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        request = {one.name: json.loads("".join(self.decode(one))) for one in payload.inputs}
        answer = json.dumps({"server": "hello", "request": request}).encode("UTF-8")
        return InferenceResponse(
            id=payload.id,
            model_name=self.name,
            model_version=self.version,
            outputs=[
                ResponseOutput(
                    name="echo_response",
                    shape=[len(answer)],
                    datatype="BYTES",
                    data=[answer],
                    parameters=Parameters(content_type="str"),
                )
            ],
        )
"""
ECHO = """
from datetime import datetime
from typing import List, Union

import numpy as np
import pandas as pd
from mlserver import MLModel
from mlserver.codecs import decode_args


class Kinds(MLModel):
    @decode_args
    async def predict(
        self, x: np.ndarray, names: List[str], raw: List[bytes], days: List[Union[str, datetime]]
    ) -> pd.DataFrame:
        return pd.DataFrame(
            {
                "x": x[:, 0] * 2,
                "names": pd.Series([name.upper() for name in names], dtype=object),
                "sizes": [len(one) for one in raw],
                "years": [day.year for day in days],
            }
        )
"""

ROWS_OF_BATCH = """
import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class Rows(MLModel):
    async def predict(self, payload):
        x = self.decode(payload.inputs[0], default_codec=NumpyCodec)
        rows = NumpyCodec.encode_output("rows", np.full((len(x), 1), len(x)))
        return InferenceResponse(model_name=self.name, outputs=[rows, NumpyCodec.encode_output("y", x * 2)])
"""
BATCHED = {"max_batch_size": 4, "max_batch_time": 600}
"""So long that only a full batch ends the wait."""


@dataclass
class Served:
    """The server's clients, and its models as they were trained."""

    rest: Rest
    channel: grpc.Channel
    metrics_port: int
    trained: dict[str, Any]

    def infer(self, model: str, request: InferenceRequest) -> InferenceResponse:
        """By REST, as MLServer's documentation does."""
        status, answer = self.rest.post(f"/v2/models/{model}/infer", json.loads(request.model_dump_json()))
        assert status == 200, answer
        return InferenceResponse.model_validate(answer)

    def infer_by_grpc(self, model: str, request: InferenceRequest) -> InferenceResponse:
        """By its generated stub and its converters."""
        stub = dataplane_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        message = ModelInferRequestConverter.from_types(request, model_name=model, model_version=None)
        return ModelInferResponseConverter.to_types(stub.ModelInfer(message, timeout=SECONDS))


def write(folder: Path, implementation: str, uri: str, **settings: Any) -> Path:
    """A model's settings, named after its folder."""
    folder.mkdir(parents=True)
    parameters = {"uri": uri, "version": "v0.1.0", **settings.pop("parameters", {})}
    values = {"name": folder.name, "implementation": implementation, "parameters": parameters, **settings}
    (folder / "model-settings.json").write_text(json.dumps(values))
    return folder / uri


def write_models(folder: Path) -> dict[str, Any]:
    logistic = LogisticRegression()
    columns = ColumnTransformer([("age", StandardScaler(), ["age"]), ("city", OneHotEncoder(), ["city"])])
    pickled = {
        "mnist-svm": logistic.fit(X, CLASSES),
        "labels": LogisticRegression().fit(FRAME, LABELS),
        "mixed": make_pipeline(columns, LogisticRegression()).fit(MIXED, CLASSES),
        "scaler": make_pipeline(StandardScaler()).fit(X),
        "words": make_pipeline(CountVectorizer(), LogisticRegression()).fit(["good", "bad"] * 5, [1, 0] * 5),
    }
    pd_type = {"parameters": {"content_type": "pd"}}
    for name, settings in {
        "mnist-svm": {},
        "labels": pd_type,
        "mixed": pd_type,
        "scaler": {},
        "words": {},
    }.items():
        joblib.dump(pickled[name], write(folder / "pickled" / "deep" / name, SKLEARN, "./m.joblib", **settings))
    proba = {"parameters": {"extra": {"predict_fn": "predict_proba"}}}
    joblib.dump(logistic, write(folder / "probabilities", SKLEARN, "model.pkl", **proba))
    joblib.dump(logistic, write(folder / "batched", SKLEARN, "model.pkl", **BATCHED))
    boosters = {
        "classes": xgboost.XGBClassifier(n_estimators=4, n_jobs=1).fit(X, CLASSES),
        "values": xgboost.XGBRegressor(n_estimators=4, n_jobs=1).fit(X, VALUES),
        "softprob": xgboost.train(
            {"objective": "multi:softprob", "num_class": 3, "nthread": 1}, xgboost.DMatrix(X, CLASSES), 4
        ),
    }
    for name, model in boosters.items():
        model.save_model(write(folder / name, XGBOOST, "model.json"))
    data = lightgbm.Dataset(X, CLASSES)
    trained = lightgbm.train({"objective": "multiclass", "num_class": 3, "verbose": -1, "num_threads": 1}, data, 4)
    trained.save_model(str(write(folder / "iris-lgb", LIGHTGBM, "./iris-lightgbm.bst")))
    cats = {"cats": LABELS, "yes": CLASSES > 1}
    for name, target in cats.items():
        boosters[name] = catboost.CatBoostClassifier(**QUIET).fit(X, target)
        boosters[name].save_model(str(write(folder / name, CATBOOST, "./model.cbm")))
    for name, source, kind, batching in (
        ("hello", CUSTOM, "jsonmodels.JsonHelloWorldModel", {}),
        ("kinds", ECHO, "kinds.Kinds", {}),
        ("rows", ROWS_OF_BATCH, "rows.Rows", BATCHED),
    ):
        write(folder / name, kind, ".", **batching)
        (folder / name / f"{kind.partition('.')[0]}.py").write_text(source)
    return {**pickled, **boosters, "iris-lgb": trained}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    trained = write_models(folder)
    (folder / "settings.json").write_text('{"debug": false, "parallel_workers": 1}')
    with Triglot(folder, command="mlserver", environment=HERE) as triglot:
        metrics_port = int(triglot.stderr.wait_for(r"metrics on 127\.0\.0\.1:(\d+)").group(1))
        grpc_port, rest_port = triglot.ports()
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            yield Served(Rest(rest_port), channel, metrics_port, trained)


ROWS = X[:3].astype("f4")


@pytest.mark.parametrize("method", ["infer", "infer_by_grpc"])
@pytest.mark.parametrize(
    "name", ["mnist-svm", "labels", "classes", "values", "softprob", "iris-lgb", "cats", "yes"]
)
def test_predict(served: Served, name: str, method: str) -> None:
    model = served.trained[name]
    rows: Any = ROWS if name != "labels" else pd.DataFrame(ROWS, columns=list(FRAME))
    expected = np.asarray(model.predict(xgboost.DMatrix(rows) if name == "softprob" else rows))
    response = getattr(served, method)(name, NumpyRequestCodec.encode_request(ROWS))
    (output,) = response.outputs
    assert (output.name, output.parameters.content_type) == ("predict", "np")
    assert output.shape == ([3, 1] if expected.ndim == 1 else list(expected.shape))
    if expected.dtype.kind in "OU":
        assert StringCodec.decode_output(output) == expected.ravel().tolist()
    else:
        found = NumpyCodec.decode_output(output)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found.ravel(), expected.ravel())


def test_the_example_of_the_documentation(served: Served) -> None:
    x_0 = X[:1].astype("f4")
    request = {"inputs": [{"name": "predict", "shape": list(x_0.shape), "datatype": "FP32", "data": x_0.tolist()}]}
    status, answer = served.rest.post("/v2/models/mnist-svm/versions/v0.1.0/infer", request)
    assert (status, answer["model_name"]) == (200, "mnist-svm")
    assert answer["outputs"] == [
        {
            "name": "predict",
            "datatype": "INT64",
            "shape": [1, 1],
            "parameters": {"content_type": "np"},
            "data": served.trained["mnist-svm"].predict(x_0).tolist(),
        }
    ]


def test_outputs_by_name(served: Served) -> None:
    model = served.trained["mnist-svm"]
    request = NumpyRequestCodec.encode_request(X[:2])
    request.outputs = [RequestOutput(name="predict_proba"), RequestOutput(name="predict")]
    outputs = served.infer("mnist-svm", request).outputs
    assert [output.name for output in outputs] == ["predict", "predict_proba"]
    np.testing.assert_array_equal(NumpyCodec.decode_output(outputs[1]), model.predict_proba(X[:2]))
    (output,) = served.infer("probabilities", NumpyRequestCodec.encode_request(X[:2])).outputs
    np.testing.assert_array_equal(NumpyCodec.decode_output(output), model.predict_proba(X[:2]))
    (output,) = served.infer("scaler", NumpyRequestCodec.encode_request(X[:2])).outputs
    assert output.name == "transform"
    request.outputs = [RequestOutput(name="guess")]
    status, answer = served.rest.post("/v2/models/mnist-svm/infer", json.loads(request.model_dump_json()))
    assert (status, set(answer)) == (400, {"error"})
    assert "'guess'" in answer["error"]


def test_frames(served: Served) -> None:
    """Columns go by name in any order; a model that knows no names takes them in the order of the request."""
    (output,) = served.infer("labels", PandasCodec.encode_request(FRAME[["a", "b", "c", "d"]][:4])).outputs
    assert StringCodec.decode_output(output) == served.trained["labels"].predict(FRAME[:4]).tolist()
    request = PandasCodec.encode_request(FRAME[:4])
    (output,) = served.infer("mnist-svm", request).outputs
    assert NumpyCodec.decode_output(output).ravel().tolist() == served.trained["mnist-svm"].predict(X[:4]).tolist()
    mixed = InferenceRequest(
        inputs=[
            NumpyCodec.encode_input("age", MIXED["age"].to_numpy()[:4]),
            StringCodec.encode_input("city", MIXED["city"].tolist()[:4]),
        ]
    )
    for method in (served.infer, served.infer_by_grpc):
        (output,) = method("mixed", mixed).outputs
        expected = served.trained["mixed"].predict(MIXED[:4])
        assert NumpyCodec.decode_output(output).ravel().tolist() == expected.tolist()


def test_content_types_of_inputs_and_outputs(served: Served) -> None:
    request = InferenceRequest(inputs=[Base64Codec.encode_input("text", [b"good", b"bad"], use_bytes=False)])
    (output,) = served.infer("words", request).outputs
    assert NumpyCodec.decode_output(output).ravel().tolist() == [1, 0]
    request = NumpyRequestCodec.encode_request(X[:2])
    expected = served.trained["labels"].predict(FRAME[:2]).tolist()
    for content_type, codec in (("str", StringCodec), ("base64", Base64Codec)):
        request.outputs = [RequestOutput(name="predict", parameters=Parameters(content_type=content_type))]
        for method in (served.infer, served.infer_by_grpc):
            (output,) = method("labels", request).outputs
            assert output.parameters.content_type == content_type
            found = [text.decode() if isinstance(text, bytes) else text for text in codec.decode_output(output)]
            assert found == expected
    status, answer = served.rest.post("/v2/models/mnist-svm/infer", json.loads(request.model_dump_json()))
    assert (status, answer) == (
        400,
        {"error": "output 'predict': expected texts for the content type base64, got int64"},
    )
    of_pipelines = {"name": "x", "datatype": "BYTES", "shape": [1], "data": ['{"a": 1}']}
    body = {"inputs": [of_pipelines | {"parameters": {"content_type": "hg_json"}}]}
    status, answer = served.rest.post("/v2/models/words/infer", body)
    text = "input 'x': the content type hg_json is for pipelines of Hugging Face only"
    assert (status, answer) == (400, {"error": text})


def test_custom_classes(served: Served) -> None:
    """As in the documentation, the shapes of both texts are their lengths."""
    text = json.dumps({"name": "Foo Bar", "message": "Hello from Client (REST)!"})
    string = Parameters(content_type="str")
    for method, data in ((served.infer, text), (served.infer_by_grpc, text.encode())):
        sent = RequestInput(
            name="echo_request", shape=[len(text)], datatype="BYTES", data=[data], parameters=string
        )
        (output,) = method("hello", InferenceRequest(inputs=[sent])).outputs
        assert output.parameters.content_type == "str"
        assert json.loads(StringCodec.decode_output(output)[0])["request"]["echo_request"]["name"] == "Foo Bar"


def test_every_codec_for_a_custom_class(served: Served) -> None:
    days = pd.to_datetime(["2024-02-29", "2025-01-01"]).to_pydatetime().tolist()
    request = InferenceRequest(
        inputs=[
            NumpyCodec.encode_input("x", np.array([[1.0], [2.0]])),
            StringCodec.encode_input("names", ["a", "é"], use_bytes=False),
            Base64Codec.encode_input("raw", [b"\0\xff", b"abc"], use_bytes=False),
            DatetimeCodec.encode_input("days", days, use_bytes=False),
        ]
    )
    response = served.infer("kinds", request)
    frame = PandasCodec.decode_response(response)
    assert frame["x"].tolist() == [2, 4]
    assert frame["names"].tolist() == ["A", "É"]
    assert frame["sizes"].tolist() == [2, 3]
    assert frame["years"].tolist() == [2024, 2025]


@pytest.mark.parametrize("name", ["batched", "rows"])
def test_adaptive_batching(served: Served, name: str) -> None:
    """Requests up to the size share a batch; a larger one runs alone."""
    requests = [NumpyRequestCodec.encode_request(X[at : at + 1]) for at in range(4)]
    with ThreadPoolExecutor(4) as threads:
        responses = list(threads.map(partial(served.infer, name), requests))
    larger = served.infer(name, NumpyRequestCodec.encode_request(X[:6]))
    found = [
        [NumpyCodec.decode_output(output).tolist() for output in response.outputs]
        for response in [*responses, larger]
    ]
    if name == "rows":
        assert found == [[[[4]], [(X[at] * 2).tolist()]] for at in range(4)] + [[[[6]] * 6, (X[:6] * 2).tolist()]]
    else:
        labels = served.trained["mnist-svm"].predict(X[:6]).tolist()
        assert found == [[[[label]]] for label in labels[:4]] + [[[[label] for label in labels]]]
    status, answer = served.rest.get(f"/v2/models/{name}/stats")
    assert status == 200
    sizes = {
        batch["batch_size"]: batch["compute_infer"]["count"] for batch in answer["model_stats"][0]["batch_stats"]
    }
    assert sizes == {4: 1, 6: 1}


def test_models_in_the_repository(served: Served) -> None:
    status, models = served.rest.post("/v2/repository/index", {})
    assert (status, {model["state"] for model in models}) == (200, {"READY"})
    assert {"mnist-svm", "hello", "iris-lgb"} <= {model["name"] for model in models}
    assert served.rest.post("/v2/repository/models/values/unload", {})[0] == 200
    assert served.rest.get("/v2/models/values/ready")[0] == 503
    assert served.rest.post("/v2/repository/models/values/load", {})[0] == 200
    assert served.rest.get("/v2/models/values/ready")[0] == 200
    status, metadata = served.rest.get("/v2/models/mnist-svm/versions/v0.1.0")
    assert (status, metadata["platform"], metadata["versions"]) == (200, "sklearn", ["1", "v0.1.0"])


def test_errors_metrics_and_pages(served: Served) -> None:
    request = NumpyRequestCodec.encode_request(X[:2])
    served.infer_by_grpc("cats", request)
    served.infer("cats", request)
    wrong = json.loads(NumpyRequestCodec.encode_request(X[:2, :3]).model_dump_json())
    assert served.rest.post("/v2/models/cats/infer", wrong)[0] == 400
    status, answer = served.rest.post("/v2/models/nothing/infer", wrong)
    assert (status, set(answer)) == (404, {"error"})
    with urllib.request.urlopen(f"http://127.0.0.1:{served.metrics_port}/metrics") as response:
        text = response.read().decode()
    for line in (
        'model_infer_request_failure_total{model="cats",version="1"} 1.0',
        'rest_server_requests_total{app_name="mlserver",method="POST",'
        'path="/v2/models/{model_name}/infer",status_code="404"} 1.0',
        'rest_server_requests_in_progress{app_name="mlserver",method="POST"} 0.0',
        'grpc_server_handled_total{grpc_code="OK",grpc_method="ModelInfer",'
        'grpc_service="inference.GRPCInferenceService",grpc_type="UNARY"}',
    ):
        assert line in text
    for path in ("/v2/docs", "/v2/models/cats/docs"):
        with urllib.request.urlopen(f"http://127.0.0.1:{served.rest.port}{path}") as response:
            assert "<html" in response.read().decode()
    status, document = served.rest.get("/v2/docs/dataplane.json")
    assert (status, document["info"]["title"]) == (200, "mlserver")
