"""Vertex AI's custom prediction routines in a real server: predictors, and handlers where FastAPI is installed."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from email.message import Message
from pathlib import Path

import pytest

from tests import environments
from tests.process import FREE_PORTS, SECONDS, Triglot
from tests.protocol_clients.rest import Rest

# As Google's guides have them: files are copied to the working directory, and read from there.
PREDICTOR = """
import json
import shutil


class ScaledPredictor:
    def __init__(self):
        return

    def load(self, artifacts_uri, **kwargs):
        shutil.copytree(artifacts_uri, ".", dirs_exist_ok=True)
        with open("factor.json") as file:
            self._factor = json.load(file)

    def preprocess(self, prediction_input):
        self._more = prediction_input.get("parameters", {})
        return prediction_input["instances"]

    def predict(self, instances):
        if self._more.get("fail"):
            raise ZeroDivisionError("Divide by zero")
        return [instance * self._factor for instance in instances]

    def postprocess(self, prediction_results):
        if self._more.get("bare"):
            return prediction_results
        return {"predictions": prediction_results}
"""
BARE = """
import numpy as np


class OnlyWhatIsNeeded:
    def load(self, artifacts_uri):
        self.artifacts = artifacts_uri

    def predict(self, prediction_input):
        return {"predictions": np.array(prediction_input["instances"]) + 1, "from": self.artifacts}
"""
HANDLER = """
from fastapi import HTTPException, Request, Response
from starlette.responses import JSONResponse, StreamingResponse


class CsvHandler:
    def __init__(self, artifacts_uri, predictor=None):
        self._predictor = predictor()
        self._predictor.load(artifacts_uri)

    async def handle(self, request: Request) -> Response:
        body = (await request.body()).decode()
        kind = request.headers.get("content-type", "").partition(";")[0]
        if kind == "application/json":
            body = ",".join(map(str, (await request.json())["instances"]))
        elif kind != "text/csv":
            raise HTTPException(status_code=415, detail=f"expected text/csv, got {kind}")
        if body == "raise":
            raise ValueError("no numbers", 3)
        if body == "busy":
            raise HTTPException(status_code=503, detail={"queue": 7}, headers={"Retry-After": "9"})
        predictions = self._predictor.predict([float(text) for text in body.split(",")])
        if kind == "application/json":
            return JSONResponse({"predictions": predictions})
        if body.endswith("0"):
            return StreamingResponse((f"{value}\\n" for value in predictions), media_type="text/plain")
        text = ",".join(map(str, predictions))
        return Response(text, 201, {"X-Model": "csv"}, media_type="text/csv")


class Plain:
    def __init__(self, artifacts_uri, predictor=None):
        assert predictor is None

    def handle(self, request):
        return {"predictions": [request.headers["x-who"]]}
"""
ENDPOINT = "/v1/projects/p/locations/l/endpoints"


CSV = {"predictor.py": PREDICTOR + "\n    _more = {}\n", "handler.py": HANDLER, "factor.json": "2"}
CSV_CLASSES = 'prediction_class = "predictor.ScaledPredictor"\nhandler_class = "handler.CsvHandler"\n'


def write(folder: Path, code: Mapping[str, str], toml: str) -> None:
    folder.mkdir(parents=True)
    for name, text in code.items():
        (folder / name).write_text(text)
    (folder / "predictor.toml").write_text(toml)


def post(port: int, path: str, body: bytes, **headers: str) -> tuple[int, bytes, Message]:
    """The status, body and headers of the response; underscores in names stand for hyphens."""
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, fields)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=SECONDS) as response:
            return response.status, response.read(), response.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers


# --- predictors ---


@pytest.fixture(scope="module")
def predictors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    """Two of one class with files of their own, and one with what is needed only; by a relative path."""
    folder = tmp_path_factory.mktemp("predictors")
    for name, factor in (("double", 2), ("triple", 3)):
        code = {"predictor.py": PREDICTOR, "factor.json": str(factor)}
        write(folder / name / "1", code, 'prediction_class = "predictor.ScaledPredictor"\n')
    write(folder / "plus_one", {"own.py": BARE}, 'prediction_class = "own.OnlyWhatIsNeeded"\n')
    with Triglot(".", *FREE_PORTS, "--drain-delay", "0", folder=folder) as process:
        yield Rest(process.ports()[1])
        process.stop()
    assert {path.name for path in folder.iterdir()} == {"double", "triple", "plus_one"}


@pytest.mark.parametrize(
    "path", ["/v1/models/{}:predict", "/v1/projects/p/models/{}:predict", ENDPOINT + "/{}:rawPredict"]
)
@pytest.mark.parametrize(
    ("model", "expected"), [("double", [4, 3.0]), ("triple", [6, 4.5]), ("plus_one", [3.0, 2.5])]
)
def test_instances(predictors: Rest, path: str, model: str, expected: list[float]) -> None:
    status, answer = predictors.post(path.format(model), {"instances": [2, 1.5]})
    assert (status, answer["predictions"]) == (200, expected)


def test_an_endpoints_answer_is_the_routines_with_what_vertex_adds(predictors: Rest) -> None:
    _, raw = predictors.post(f"{ENDPOINT}/plus_one:rawPredict", {"instances": [1]})
    status, answer = predictors.post(f"{ENDPOINT}/plus_one:predict", {"instances": [1]})
    assert raw == {"predictions": [2], "from": raw["from"]}
    added = {"deployedModelId", "model", "modelDisplayName", "modelVersionId"}
    assert (status, answer.keys()) == (200, raw.keys() | added)


def test_v2(predictors: Rest) -> None:
    tensor = {"name": "instances", "datatype": "BYTES", "shape": [2], "data": ["1", "2.5"]}
    status, answer = predictors.post("/v2/models/triple/infer", {"inputs": [tensor]})
    assert (status, [tensor["data"] for tensor in answer["outputs"]]) == (200, [["[3,7.5]"]])


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        (
            "/v1/projects/p/models/double:predict",
            {"instances": [1], "parameters": {"fail": True}},
            200,
            None,
        ),
        ("/v1/projects/p/models/double:predict", {"instances": [1], "fail": True}, 500, "Divide by zero"),
        ("/v1/models/double:predict", {"instances": [1], "fail": True}, 500, "Divide by zero"),
        (
            ENDPOINT + "/double:predict",
            {"instances": [1], "parameters": {"fail": True}},
            500,
            "The following exception has occurred: ZeroDivisionError. Arguments: ('Divide by zero',).",
        ),
        (
            "/v1/projects/p/models/double:predict",
            {"instances": [1], "bare": True},
            500,
            "the routine returned list, expected a dict with 'predictions'",
        ),
    ],
)
def test_what_a_predictor_raises(
    predictors: Rest, path: str, body: object, status: int, error: str | None
) -> None:
    got, answer = predictors.post(path, body)
    text = answer.get("error")
    assert (got, text["message"] if isinstance(text, dict) else text) == (status, error)
    assert predictors.post("/v1/models/double:predict", {"instances": [2]}) == (200, {"predictions": [4]})


# --- handlers ---


@pytest.fixture(scope="module")
def handlers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("handlers")
    write(folder / "csv" / "1", CSV, CSV_CLASSES)
    write(folder / "plain" / "1", {"handler.py": HANDLER}, 'handler_class = "handler.Plain"\n')
    with Triglot(folder, *FREE_PORTS, "--drain-delay", "0", python=environments.python("kserve")) as process:
        yield process.ports()[1]
        process.stop()


def test_a_handlers_own_kinds_of_content(handlers: int) -> None:
    path = f"{ENDPOINT}/csv:rawPredict"
    status, body, fields = post(handlers, path, b"1,2.5", Content_Type="text/csv; charset=utf-8")
    assert (status, body) == (201, b"2.0,5.0")
    assert (fields["content-type"], fields["x-model"]) == ("text/csv; charset=utf-8", "csv")
    status, body, fields = post(handlers, path, b"1,0", Content_Type="text/csv")
    assert (status, body, fields["content-type"]) == (200, b"2.0\n0.0\n", "text/plain; charset=utf-8")
    wrapped = {"httpBody": {"contentType": "text/csv", "data": "MQ=="}}
    status, body, _ = post(handlers, path, json.dumps(wrapped).encode(), Content_Type="application/json")
    assert (status, json.loads(body)) == (200, {"contentType": "text/csv; charset=utf-8", "data": "Mi4w"})


def test_a_handler_gets_json_from_all_other_interfaces(handlers: int) -> None:
    rest = Rest(handlers)
    for path in ("/v1/models/csv:predict", "/v1/projects/p/models/csv:predict"):
        assert rest.post(path, {"instances": [1, 2]}) == (200, {"predictions": [2.0, 4.0]})


def test_a_handlers_result_may_be_plain(handlers: int) -> None:
    status, body, _ = post(handlers, f"{ENDPOINT}/plain:rawPredict", b"anything", X_Who="me")
    assert (status, json.loads(body)) == (200, {"predictions": ["me"]})


@pytest.mark.parametrize(
    ("kind", "body", "status", "name", "text"),
    [
        ("text/plain", b"1", 400, "INVALID_ARGUMENT", "expected text/csv, got text/plain"),
        ("text/csv", b"busy", 503, "UNAVAILABLE", '{"queue": 7}'),
        ("text/csv", b"raise", 500, "INTERNAL", "An exception ValueError occurred. Arguments: ('no numbers', 3)."),
        ("text/csv", b"x", 500, "INTERNAL", 'An exception ValueError occurred. Arguments: ("could not convert'),
    ],
)
def test_what_a_handler_raises(handlers: int, kind: str, body: bytes, status: int, name: str, text: str) -> None:
    got, answer, _ = post(handlers, f"{ENDPOINT}/csv:rawPredict", body, Content_Type=kind)
    error = json.loads(answer)["error"]
    assert (got, error["code"], error["status"]) == (status, status, name)
    assert error["message"].startswith(text)


def test_the_containers_route_is_the_handlers(tmp_path: Path) -> None:
    """Status, headers and body as they are, errors included."""
    write(tmp_path / "csv" / "1", CSV, CSV_CLASSES)
    options = [*FREE_PORTS, "--drain-delay", "0", "--predict-route", "/ask"]
    with Triglot(tmp_path, *options, python=environments.python("kserve")) as process:
        port = process.ports()[1]
        assert post(port, "/ask", b"3", Content_Type="text/csv")[:2] == (201, b"6.0")
        status, body, fields = post(port, "/ask", b"busy", Content_Type="text/csv")
        assert (status, json.loads(body), fields["retry-after"]) == (503, {"detail": {"queue": 7}}, "9")
        assert post(port, "/ask", b"1", Content_Type="text/html")[0] == 415
        process.stop()


def test_a_handler_without_starlette(tmp_path: Path) -> None:
    code = {"handler.py": "class Handler:\n    def __init__(self, artifacts_uri, predictor=None): ...\n"}
    write(tmp_path / "m" / "1", code, 'handler_class = "handler.Handler"\n')
    with Triglot(tmp_path, *FREE_PORTS, "--no-exit-on-load-error", "--drain-delay", "0") as process:
        process.stderr.wait_for("handler_class needs starlette, which is not installed; run: pip install fastapi")
        process.stop()
