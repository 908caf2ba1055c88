"""Models of one matrix take inputs of any name and number type from clients of each protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest

from tests.process import FREE_PORTS, SECONDS, Triglot
from tests.protocol_clients import grps, tfserving
from tests.protocol_clients.channel import grpc_channel, rpc
from tests.protocol_clients.rest import Rest
from triglot.core.tensor import datatype_of
from triglot.pb.grps.grps_pb2 import GenericTensor
from triglot.pb.kserve import inference_pb2 as pb
from triglot.pb.tfserving import predict_pb2, tensor_pb2

pytest.importorskip("sklearn", reason="the ml environment has it")

import catboost
import joblib
import lightgbm
import pandas as pd
import xgboost
from sklearn.linear_model import LinearRegression

RANDOM = np.random.default_rng(1)
X = RANDOM.integers(-4, 5, (60, 3))
Y = X @ [1.0, -2, 0.5] + RANDOM.random(60)
FRAME = pd.DataFrame(X.astype("f8"), columns=["a", "b", "c"])
MODELS: dict[str, Any] = {
    "sklearn": LinearRegression().fit(FRAME, Y),
    "xgboost": xgboost.train({"nthread": 1}, xgboost.DMatrix(FRAME, Y), 4),
    "estimator": xgboost.XGBRegressor(n_estimators=4, n_jobs=1).fit(FRAME, Y),
    "lightgbm": lightgbm.train({"verbose": -1, "num_threads": 1}, lightgbm.Dataset(FRAME, Y), 4),
    "catboost": catboost.CatBoostRegressor(iterations=4, verbose=False, allow_writing_files=False).fit(FRAME, Y),
}
FILES = {"xgboost": "model.ubj", "lightgbm": "model.txt", "catboost": "model.cbm"}
Inputs = Mapping[str, Any]


@dataclass
class Served:
    """The server's REST and gRPC clients."""

    rest: Rest
    channel: grpc.Channel


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    for name, model in MODELS.items():
        (folder / name).mkdir()
        if name in FILES:
            model.save_model(str(folder / name / FILES[name]))
        else:
            joblib.dump(model, folder / name / "model.joblib")
    with Triglot(folder, *FREE_PORTS, "--drain-delay", "0") as server:
        grpc_port, rest_port = server.ports()
        with grpc_channel(grpc_port) as channel:
            yield Served(Rest(rest_port), channel)
        server.stop()
        assert "Traceback" not in server.stderr.text()
        assert "Warning" not in server.stderr.text()


@pytest.mark.parametrize("name", MODELS)
def test_metadata_have_the_columns(served: Served, name: str) -> None:
    status, metadata = served.rest.get(f"/v2/models/{name}")
    datatype = metadata["inputs"][0]["datatype"]
    assert status == 200
    assert metadata["inputs"] == [{"name": column, "datatype": datatype, "shape": [-1]} for column in FRAME]
    assert metadata["columns"] == [{"name": column, "datatype": datatype} for column in FRAME]


def expected(name: str) -> Any:
    data = xgboost.DMatrix(FRAME) if name == "xgboost" else FRAME
    return MODELS[name].predict(data)[:5]


# --- calls by protocol: the values of the output ---


def v2_rest(served: Served, model: str, inputs: Inputs) -> Any:
    listed = [
        {"name": name, "datatype": datatype_of(array), "shape": array.shape, "data": array.ravel().tolist()}
        for name, array in inputs.items()
    ]
    status, answer = served.rest.post(f"/v2/models/{model}/infer", {"inputs": listed})
    assert status == 200, answer
    return answer["outputs"][0]["data"]


def v2_grpc(served: Served, model: str, inputs: Inputs) -> Any:
    request = pb.ModelInferRequest(model_name=model)
    for name, array in inputs.items():
        request.inputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
        request.raw_input_contents.append(np.ascontiguousarray(array).tobytes())
    reply = rpc(served.channel, "ModelInfer", pb.ModelInferResponse)(request, timeout=SECONDS)
    dtype = {"FP32": "f4", "FP64": "f8"}[reply.outputs[0].datatype]
    return np.frombuffer(reply.raw_output_contents[0], dtype)


TF_DTYPES = {
    "i4": tensor_pb2.DT_INT32,
    "i8": tensor_pb2.DT_INT64,
    "f4": tensor_pb2.DT_FLOAT,
    "f8": tensor_pb2.DT_DOUBLE,
}


def tfserving_grpc(served: Served, model: str, inputs: Inputs) -> Any:
    request = predict_pb2.PredictRequest(model_spec={"name": model})
    for name, array in inputs.items():
        tensor = request.inputs[name]
        tensor.dtype = TF_DTYPES[array.dtype.str[1:]]
        for dim in array.shape:
            tensor.tensor_shape.dim.add(size=dim)
        tensor.tensor_content = np.ascontiguousarray(array).tobytes()
    output = tfserving.predict(served.channel, request).outputs["predict"]
    return output.double_val or output.float_val or np.frombuffer(output.tensor_content, OF_TF[output.dtype])


OF_TF = {tensor_pb2.DT_FLOAT: "f4", tensor_pb2.DT_DOUBLE: "f8"}


def tfserving_rest(served: Served, model: str, inputs: Inputs) -> Any:
    body = {"inputs": {name: array.tolist() for name, array in inputs.items()}}
    status, answer = served.rest.post(f"/v1/models/{model}:predict", body)
    assert status == 200, answer
    return answer["outputs"]


GRPS_FIELDS = {
    "i4": ("DT_INT32", "flat_int32"),
    "i8": ("DT_INT64", "flat_int64"),
    "f4": ("DT_FLOAT32", "flat_float32"),
    "f8": ("DT_FLOAT64", "flat_float64"),
}


def grps_grpc(served: Served, model: str, inputs: Inputs) -> Any:
    tensors = []
    for name, array in inputs.items():
        dtype, field = GRPS_FIELDS[array.dtype.str[1:]]
        tensors.append(GenericTensor(name=name, dtype=dtype, shape=array.shape, **{field: array.ravel().tolist()}))
    (output,) = grps.predicted(served.channel, grps.tensors(*tensors, model=model)).gtensors.tensors
    return list(output.flat_float64) or list(output.flat_float32)


CALLS: list[Callable[[Served, str, Inputs], Any]] = [v2_rest, v2_grpc, tfserving_grpc, tfserving_rest, grps_grpc]
SENT: dict[str, Inputs] = {
    "input-0 of INT64": {"input-0": X[:5].astype("i8")},
    "predict of INT32": {"predict": X[:5].astype("i4")},
    "FP32": {"x": X[:5].astype("f4")},
    "FP64": {"x": X[:5].astype("f8")},
    "columns": {"c": X[:5, 2].astype("f4"), "a": X[:5, 0].astype("i8"), "b": X[:5, 1:2].astype("f8")},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("sent", SENT)
@pytest.mark.parametrize("model", MODELS)
def test_answer_is_the_models_own(
    served: Served, model: str, sent: str, call: Callable[[Served, str, Inputs], Any]
) -> None:
    wanted = expected(model)
    np.testing.assert_array_equal(np.array(call(served, model, SENT[sent]), wanted.dtype).ravel(), wanted)


@pytest.mark.parametrize("model", MODELS)
def test_numbers_that_the_model_cannot_hold_are_refused(served: Served, model: str) -> None:
    inputs = [{"name": "i", "datatype": "INT64", "shape": [1, 3], "data": [2**53 + 1, 0, 0]}]
    status, answer = served.rest.post(f"/v2/models/{model}/infer", {"inputs": inputs})
    datatype = "FP64" if model in {"sklearn", "lightgbm"} else "FP32"
    assert status == 400
    assert f"expected numbers that {datatype} can hold, got 9007199254740993" in answer["error"]
