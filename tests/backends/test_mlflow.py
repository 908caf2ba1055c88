"""Models in MLflow's format in a real server, held against what MLflow's own loader answers."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

pytest.importorskip("mlflow", reason="the mlflow environment has it")

import pandas as pd

from tests.backends.mlflow_models import SAVED, example, invoke, predict, save, save_chats
from tests.process import FREE_PORTS, PLAIN_MODELS, SECONDS, Triglot
from tests.protocol_clients.channel import grpc_channel, rpc
from tests.protocol_clients.rest import Rest
from triglot import backends
from triglot.core.call import Call
from triglot.core.tensor import datatype_of, pack_bytes, unpack_bytes
from triglot.pb.kserve import inference_pb2 as pb

pytestmark = pytest.mark.filterwarnings("ignore")  # Of MLflow and the libraries, when they save and load.


@dataclass
class Served:
    """The server's two ports, and the repository."""

    rest: Rest
    channel: grpc.Channel
    folder: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    save(folder)
    with Triglot(folder, *FREE_PORTS, "--drain-delay", "0") as server:
        grpc_port, rest_port = server.ports()
        with grpc_channel(grpc_port) as channel:
            yield Served(Rest(rest_port), channel, folder)
        server.stop()
        assert "Traceback" not in server.stderr.text()


def expected(served: Served, name: str) -> Any:
    """What MLflow answers."""
    return predict(served.folder / name, SAVED[name][1])


def arrays(name: str) -> dict[str, Any]:
    """The data to score as tensors: a column each of a frame, text as objects."""
    data = SAVED[name][1]
    if isinstance(data, np.ndarray):
        return {"any": data}
    if isinstance(data, dict):
        return data
    return {column: _column(data[column]) for column in data}


def _column(series: Any) -> Any:
    values = [
        json.dumps(value)
        if isinstance(value, list)
        else value.isoformat()
        if hasattr(value, "isoformat")
        else value
        for value in series.tolist()
    ]
    if all(isinstance(value, str | bytes) for value in values):
        return np.array([value if isinstance(value, bytes) else value.encode() for value in values], object)
    return series.to_numpy()


def assert_equal(outputs: Mapping[str, Any], wanted: Any) -> None:
    """Whether V2's outputs hold what MLflow answers: an array, a frame, a dict, or other JSON."""
    if isinstance(wanted, pd.DataFrame | dict):
        assert list(outputs) == list(wanted)
        for name, array in outputs.items():
            _assert_array(array, np.asarray(wanted[name]))
    elif isinstance(wanted, list):
        (array,) = outputs.values()
        assert json.loads(array.item()) == wanted
    else:
        (array,) = outputs.values()
        _assert_array(array, np.asarray(wanted))


def _assert_array(array: Any, wanted: Any) -> None:
    if wanted.dtype.kind == "M":
        wanted = np.array([pd.Timestamp(value).isoformat() for value in wanted])
    if wanted.dtype.kind in "OUST":
        array = np.array([value.decode() if isinstance(value, bytes) else value for value in array.ravel()])
        array = array.reshape(wanted.shape)
    else:
        assert array.dtype == wanted.dtype
    np.testing.assert_array_equal(array, wanted)


BY_REST = sorted(SAVED.keys() - {"python_kinds"})
"""Without the one whose binary column has bytes that are not UTF-8, which have no form in V2's JSON."""


@pytest.mark.parametrize("name", BY_REST)
def test_v2_over_rest(served: Served, name: str) -> None:
    inputs = [
        {
            "name": tensor,
            "datatype": datatype_of(array),
            "shape": array.shape,
            "data": [value.decode() if isinstance(value, bytes) else value for value in array.ravel().tolist()],
        }
        for tensor, array in arrays(name).items()
    ]
    assert_equal(infer(served, name, inputs), expected(served, name))


def infer(served: Served, name: str, inputs: list[dict[str, Any]]) -> dict[str, Any]:
    """The outputs for a call in V2's JSON."""
    status, answer = served.rest.post(f"/v2/models/{name}/infer", {"inputs": inputs})
    assert status == 200, answer
    return {
        output["name"]: np.array(output["data"], _dtype(output["datatype"])).reshape(output["shape"])
        for output in answer["outputs"]
    }


def _dtype(datatype: str) -> Any:
    return object if datatype == "BYTES" else datatype.lower().replace("fp", "float")


@pytest.mark.parametrize("name", SAVED)
def test_v2_over_grpc(served: Served, name: str) -> None:
    request = pb.ModelInferRequest(model_name=name)
    for tensor, array in arrays(name).items():
        request.inputs.add(name=tensor, datatype=datatype_of(array), shape=array.shape)
        raw = pack_bytes(array.ravel().tolist()) if array.dtype.hasobject else array.tobytes()
        request.raw_input_contents.append(raw)
    reply = rpc(served.channel, "ModelInfer", pb.ModelInferResponse)(request, timeout=SECONDS)
    outputs = {}
    for output, raw in zip(reply.outputs, reply.raw_output_contents, strict=True):
        count = int(np.prod(output.shape))
        data = (
            unpack_bytes(raw, count) if output.datatype == "BYTES" else np.frombuffer(raw, _dtype(output.datatype))
        )
        outputs[output.name] = np.array(data, _dtype(output.datatype)).reshape(tuple(output.shape))
    assert_equal(outputs, expected(served, name))


# --- examples ---


@pytest.mark.parametrize("name", BY_REST)
def test_sample_of_the_page_is_the_input_example(served: Served, name: str) -> None:
    _, details = served.rest.get(f"/grps/v1/monitor/model?name={name}")
    inputs = [
        {
            "name": tensor["name"],
            "datatype": tensor["datatype"],
            "shape": tensor["sample"]["shape"],
            "data": tensor["sample"]["data"],
        }
        for tensor in details["serves"]["signatures"]["serving_default"]["inputs"]
    ]
    outputs = infer(served, name, inputs)
    assert_equal(outputs, predict(served.folder / name, example(served.folder / name)))


# --- /invocations ---


def bodies(name: str) -> list[tuple[str, str]]:
    """The data to score in every form of MLflow's that has it, each with its content type."""
    data = SAVED[name][1]
    if isinstance(data, np.ndarray):
        forms: list[Any] = [{"instances": data.tolist()}, {"inputs": data.tolist()}]
    elif isinstance(data, dict):
        rows = [{key: value[at].tolist() for key, value in data.items()} for at in range(2)]
        forms = [{"inputs": {key: value.tolist() for key, value in data.items()}}, {"instances": rows}]
    else:
        plain = data.map(_plain)
        records = plain.to_dict("records")
        turned = [{key: row[key] for key in reversed(list(row))} | {"further": "x"} for row in records]
        forms = [
            {"dataframe_split": plain.to_dict("split")},
            {"dataframe_records": turned},
        ]
        # In the other forms, MLflow does not decode base64, and refuses columns of lists.
        if name not in ("python_kinds", "python_nested"):
            forms += [{"inputs": records}, {"instances": records}]
    return [(json.dumps(form), "application/json") for form in forms]


def _plain(value: Any) -> Any:
    """A value as MLflow's clients write it in JSON."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if isinstance(value, pd.Timestamp) else value


def post(port: int, path: str, body: str, content_type: str) -> tuple[int, Any]:
    headers = {"Content-Type": content_type}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body.encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.parametrize("name", SAVED)
def test_invocations(served: Served, name: str) -> None:
    for body, content_type in bodies(name):
        status, answer = post(served.rest.port, f"/invocations/{name}", body, content_type)
        assert (status, answer) == (200, invoke(served.folder / name, body, content_type)), body


@pytest.mark.parametrize("name", ["sklearn", "sklearn_words", "python_frame", "lightgbm_booster"])
def test_csv(served: Served, name: str) -> None:
    body = SAVED[name][1].to_csv(index=False)
    answer = post(served.rest.port, f"/invocations/{name}", body, "text/csv; charset=utf-8")
    assert answer == (200, invoke(served.folder / name, body, "text/csv"))


def test_params(served: Served) -> None:
    frame = {"dataframe_split": SAVED["python_frame"][1].to_dict("split")}
    body = json.dumps(frame | {"params": {"factor": 3, "offsets": [5, 6], "unknown": 1}})
    answer = post(served.rest.port, "/invocations/python_frame", body, "application/json")
    assert answer == (200, invoke(served.folder / "python_frame", body, "application/json"))


ROW = {"age": 0.5, "income": 1.0, "rooms": 2}
REFUSED: dict[str, tuple[str, Any, str]] = {
    "fraction": ("sklearn", ROW | {"rooms": 2.5}, "'rooms': expected whole numbers that INT64 can hold, got 2.5"),
    "null": ("sklearn", ROW | {"rooms": None}, "'rooms': expected whole numbers that INT64 can hold, got nan"),
    "text": ("sklearn", ROW | {"age": "0.5"}, "'age': expected numbers, got '0.5'"),
    "boolean": ("sklearn", ROW | {"rooms": True}, "'rooms': expected whole numbers for INT64, got BOOL"),
    "missing": ("sklearn", {"age": 0.5}, "missing input 'income', 'rooms', got 'age'"),
    "number as text": ("sklearn_words", {"age": 0.5, "city": 3}, "'city': expected text, got 3"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_loses_a_value_is_refused(served: Served, what: str) -> None:
    name, row, text = REFUSED[what]
    status, answer = served.rest.post(f"/invocations/{name}", {"dataframe_records": [row]})
    assert (status, answer["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert answer["message"].removeprefix("column ") == text


@pytest.mark.parametrize(
    ("body", "content_type", "status", "code", "text"),
    [
        ("[[1]]", "application/json", 400, "INVALID_PARAMETER_VALUE", "object"),
        ('{"columns": []}', "application/json", 400, "INVALID_PARAMETER_VALUE", "exactly one of dataframe_split"),
        ('{"inputs": [], "instances": []}', "application/json", 400, "INVALID_PARAMETER_VALUE", "exactly one"),
        ('{"dataframe_split": {"data": []}}', "application/json", 400, "INVALID_PARAMETER_VALUE", "'columns'"),
        ("a,b\n1", "text/csv", 400, "INVALID_PARAMETER_VALUE", "row 1: expected 2 cells, got 1"),
        ("", "application/json; format=pandas-split", 415, "INVALID_PARAMETER_VALUE", "pandas-split"),
        ("", "application/vnd.apache.parquet", 415, "INVALID_PARAMETER_VALUE", "parquet"),
    ],
)
def test_bad_body(served: Served, body: str, content_type: str, status: int, code: str, text: str) -> None:
    got, answer = post(served.rest.port, "/invocations/sklearn", body, content_type)
    assert (got, answer["error_code"]) == (status, code)
    assert text in answer["message"]


def test_body_of_a_chat_is_the_data(tmp_path: Path) -> None:
    """So are the predictions."""
    save_chats(tmp_path)
    messages = [{"role": "user", "content": "What is MLflow?"}]
    bodies = [{"messages": messages}, {"messages": messages, "max_tokens": 9, "custom_inputs": {"a": "b"}}]
    with Triglot(tmp_path, *FREE_PORTS, "--drain-delay", "0") as server:
        _, port = server.ports()
        for name, body in [("chat", body) for body in bodies] + [("whole", body) for body in bodies]:
            text = json.dumps(body)
            status, answer = post(port, f"/invocations/{name}", text, "application/json")
            expected = invoke(tmp_path / name, text, "application/json")
            assert (status, answer | {"id": 0}) == (200, expected | {"id": 0})
        server.stop()


def test_path_names_a_model_if_several_are_served(served: Served) -> None:
    status, answer = served.rest.post("/invocations", {"instances": []})
    assert (status, answer["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert answer["message"] == f"expected the path /invocations/MODEL, as {len(SAVED)} models are served"
    status, answer = served.rest.post("/invocations/other", {"instances": []})
    assert (status, answer["error_code"]) == (404, "RESOURCE_DOES_NOT_EXIST")


def test_path_names_no_model_if_only_one_is_mlflows(served: Served) -> None:
    """As on MLServer, where the rows are those of a model of its MLflow runtime."""
    folder = served.folder / "sklearn"
    body = json.dumps({"dataframe_records": [ROW]})
    with Triglot(folder, PLAIN_MODELS / "half_plus_three", *FREE_PORTS, "--drain-delay", "0") as server:
        _, port = server.ports()
        answer = post(port, "/invocations", body, "application/json")
        assert answer == (200, invoke(folder, body, "application/json"))
        server.stop()


def test_ping_and_version(served: Served) -> None:
    for path in ("/ping", "/health"):
        with urllib.request.urlopen(f"http://127.0.0.1:{served.rest.port}{path}", timeout=SECONDS) as response:
            assert (response.status, response.read()) == (200, b"\n")
    with urllib.request.urlopen(f"http://127.0.0.1:{served.rest.port}/version", timeout=SECONDS) as response:
        assert response.read().decode() == version("mlflow-skinny")


def test_casts_as_mlflow_on_demand(served: Served) -> None:
    rows = [ROW | {"rooms": 2.9}, ROW | {"rooms": "7"}, ROW | {"age": 1, "rooms": True}, ROW | {"income": "2.5"}]
    body = json.dumps({"dataframe_records": rows})
    folder = served.folder / "sklearn"
    with Triglot(folder, *FREE_PORTS, "--drain-delay", "0", "--mlflow-casts") as server:
        _, port = server.ports()
        assert post(port, "/invocations", body, "application/json") == (
            200,
            invoke(folder, body, "application/json"),
        )
        status, answer = post(port, "/invocations", body.replace('"7"', '"x"'), "application/json")
        assert (status, answer["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
        server.stop()


def test_metadata(served: Served) -> None:
    status, metadata = served.rest.get("/v2/models/sklearn")
    kinds = {"age": "FP64", "income": "FP64", "rooms": "INT64"}
    assert (status, metadata["platform"]) == (200, "mlflow")
    assert metadata["inputs"] == [{"name": n, "datatype": kind, "shape": [-1]} for n, kind in kinds.items()]
    assert metadata["outputs"] == [{"name": "output-1", "datatype": "INT64", "shape": [-1]}]
    assert metadata["columns"] == [{"name": n, "datatype": kind} for n, kind in kinds.items()]


OLD = """
flavors:
  python_function:
    env: {conda: conda.yaml, virtualenv: python_env.yaml}
    loader_module: mlflow.sklearn
    model_path: model.pkl
    predict_fn: predict
    python_version: 3.11.7
  sklearn:
    code: null
    pickled_model: model.pkl
    serialization_format: cloudpickle
    sklearn_version: 1.9.1
is_signature_from_type_hint: false
mlflow_version: 2.22.2
model_size_bytes: 1172
model_uuid: 41eb86fb01af40e5a5bf99ed95d619dd
prompts: null
saved_input_example_info:
  artifact_path: input_example.json
  pandas_orient: split
  serving_input_path: serving_input_example.json
  type: dataframe
signature:
  inputs: '[{"type": "double", "name": "age", "required": true}, {"type": "string",
    "name": "city", "required": true}]'
  outputs: '[{"type": "tensor", "tensor-spec": {"dtype": "object", "shape": [-1]}}]'
  params: null
type_hint_from_example: false
utc_time_created: '2026-11-28 20:00:28.055900'
"""
"""The MLmodel that MLflow 2.22.2 writes of a pipeline."""


def test_file_of_mlflow_2(served: Served, tmp_path: Path) -> None:
    saved = {"columns": ["age", "city"], "data": [[0.5, "Bonn"]]}
    (tmp_path / "MLmodel").write_text(OLD)
    (tmp_path / "model.pkl").write_bytes((served.folder / "sklearn_words" / "model.pkl").read_bytes())
    (tmp_path / "input_example.json").write_text(json.dumps(saved))
    (tmp_path / "serving_input_example.json").write_text(json.dumps({"dataframe_split": saved}))
    model: Any = backends.load("mlflow", tmp_path / "MLmodel")
    call = Call()
    assert {name: column.tolist() for name, column in model.example.items()} == {"age": [0.5], "city": [b"Bonn"]}
    (tmp_path / "serving_input_example.json").unlink()
    assert backends.load("mlflow", tmp_path / "MLmodel").example == ()
    answer = model.infer(model.example, call)
    assert_equal(answer, predict(tmp_path, pd.DataFrame(saved["data"], columns=saved["columns"])))
