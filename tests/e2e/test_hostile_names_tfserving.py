"""Hostile names, versions and labels over TensorFlow Serving, AI Platform and grps: all are refused."""

from __future__ import annotations

import json
from urllib.parse import quote

import grpc
import pytest

from tests.e2e.hostile_names import INVALID, NAMES, VERSIONS, ExposedServer, the_same
from tests.process import SECONDS
from tests.protocol_clients.channel import rpc
from tests.protocol_clients.grps import PREDICT_PATH, tensors
from tests.protocol_clients.grps import SERVICE as GRPS
from triglot.pb.grps.grps_pb2 import GrpsMessage
from triglot.pb.tfserving import inference_pb2, management_pb2, metadata_pb2, model_pb2, predict_pb2

# --- TensorFlow Serving ---


@pytest.mark.parametrize("text", NAMES)
def test_names_over_tensorflow_serving_grpc(exposed: ExposedServer, text: str) -> None:
    spec = model_pb2.ModelSpec(name=exposed.name(text))
    refuses_spec(exposed, spec)


@pytest.mark.parametrize("text", [*NAMES, *VERSIONS])
def test_labels_over_tensorflow_serving_grpc(exposed: ExposedServer, text: str) -> None:
    label = exposed.name(text)
    refuses_spec(exposed, model_pb2.ModelSpec(name=label, version_label=label))
    # The status is that of all versions, whatever the label (tfs 3.6).
    refuses_spec(exposed, model_pb2.ModelSpec(name="good", version_label=label), status=False)


@pytest.mark.parametrize("version", [-(2**63), -1, 2, 2**63 - 1])
def test_versions_over_tensorflow_serving_grpc(exposed: ExposedServer, version: int) -> None:
    refuses_spec(exposed, model_pb2.ModelSpec(name="good", version={"value": version}))


def refuses_spec(exposed: ExposedServer, spec: model_pb2.ModelSpec, *, status: bool = True) -> None:
    """In every RPC that names a model."""
    prediction, model = "/tensorflow.serving.PredictionService/", "/tensorflow.serving.ModelService/"
    metadata = metadata_pb2.GetModelMetadataRequest(model_spec=spec, metadata_field=["signature_def"])
    task = inference_pb2.InferenceTask(model_spec=spec, method_name="tensorflow/serving/classify")
    for method, request in (
        (prediction + "Predict", predict_pb2.PredictRequest(model_spec=spec)),
        (prediction + "Classify", inference_pb2.ClassificationRequest(model_spec=spec)),
        (prediction + "Regress", inference_pb2.RegressionRequest(model_spec=spec)),
        (prediction + "MultiInference", inference_pb2.MultiInferenceRequest(tasks=[task])),
        (prediction + "GetModelMetadata", metadata),
    ):
        exposed.refuses(method, request, predict_pb2.PredictResponse)
    if status:
        all_versions = management_pb2.GetModelStatusRequest(model_spec=spec)
        exposed.refuses(model + "GetModelStatus", all_versions, management_pb2.GetModelStatusResponse)


@pytest.mark.parametrize("text", NAMES)
def test_names_over_tensorflow_serving_rest(exposed: ExposedServer, text: str) -> None:
    for name in the_same(exposed.name(text)):
        for which in ("", "/versions/1", "/labels/stable"):
            for verb in ("predict", "classify", "regress"):
                status, content = exposed.http("POST", f"/v1/models/{name}{which}:{verb}", b'{"instances": [1]}')
                assert status in (400, 404), (name, which, status, content)
            if name in ("", "/"):
                continue  # The list of all models.
            for metadata in ("", "/metadata"):
                status, content = exposed.http("GET", f"/v1/models/{name}{which}{metadata}")
                assert status in (400, 404), (name, which, status, content)
        status, content = exposed.http("GET", f"/v1/models/good/labels/{name}/metadata")
        assert status in (400, 404), (name, status, content)
        status, content = exposed.http("POST", f"/v1/models/good/labels/{name}:predict", b'{"instances": [1]}')
        assert status in (400, 404), (name, status, content)


@pytest.mark.parametrize("version", VERSIONS)
def test_versions_over_tensorflow_serving_rest(exposed: ExposedServer, version: str) -> None:
    if version.endswith("01"):
        return  # Leading zeros are fine here.
    for text in the_same(version):
        status, content = exposed.http("GET", f"/v1/models/good/versions/{text}")
        assert status in (400, 404), (text, status, content)
        status, content = exposed.http("POST", f"/v1/models/good/versions/{text}:predict", b'{"instances": [1]}')
        assert status in (400, 404), (text, status, content)


@pytest.mark.parametrize("text", NAMES)
def test_names_in_a_list_of_models(exposed: ExposedServer, text: str) -> None:
    reload = "/tensorflow.serving.ModelService/HandleReloadConfigRequest"
    request = management_pb2.ReloadConfigRequest()
    request.config.model_config_list.config.add(
        name=exposed.name(text), base_path=str(exposed.folder / "outside"), model_platform="tensorflow"
    )
    assert exposed.refuses(reload, request, management_pb2.ReloadConfigResponse) == INVALID


@pytest.mark.parametrize(
    "base_path", ["{folder}/outside", "{folder}/repository/../outside", "file://{folder}/outside"]
)
def test_list_of_models_outside_the_repository(exposed: ExposedServer, base_path: str) -> None:
    """Only who starts the server says where models lie."""
    request = management_pb2.ReloadConfigRequest()
    request.config.model_config_list.config.add(
        name="mine", base_path=exposed.name(base_path), model_platform="tensorflow"
    )
    with pytest.raises(grpc.RpcError) as caught:
        rpc(
            exposed.channel,
            "/tensorflow.serving.ModelService/HandleReloadConfigRequest",
            management_pb2.ReloadConfigResponse,
        )(request, timeout=SECONDS)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "this server's model list cannot be replaced" in caught.value.details()


# --- AI Platform ---


@pytest.mark.parametrize("text", NAMES)
def test_names_of_ai_platform(exposed: ExposedServer, text: str) -> None:
    for name in the_same(exposed.name(text)):
        for path in (
            f"/v1/projects/p/models/{name}:predict",
            f"/v1/projects/p/models/{name}/versions/v1:predict",
            f"/v1/projects/p/models/good/versions/{name}:predict",
        ):
            status, content = exposed.http("POST", path, b'{"instances": [1]}')
            assert status in (400, 404), (path, status, content)


# --- grps ---


def no_such_model(name: str) -> str:
    """Long texts are cut."""
    return f"Model {name} not found." if len(name) < 1000 else "Model "


@pytest.mark.parametrize("text", [*NAMES[1:], *(f"good-{version}" for version in VERSIONS)])
def test_names_over_grps(exposed: ExposedServer, text: str) -> None:
    """Errors are in the message (grps 3.4); the request that names no model goes to the only one."""
    name = exposed.name(text)
    predict = rpc(exposed.channel, GRPS + "Predict", GrpsMessage)
    answer = predict(tensors(model=name), timeout=SECONDS)
    assert answer.status.code == 500
    assert no_such_model(name) in answer.status.msg
    metadata = rpc(exposed.channel, GRPS + "ModelMetadata", GrpsMessage)
    answer = metadata(GrpsMessage(str_data=name), timeout=SECONDS)
    assert (answer.status.code, answer.status.msg) == (404, "Model not found.")


@pytest.mark.parametrize("text", [*NAMES[1:], *(f"good-{version}" for version in VERSIONS)])
def test_names_over_grps_http(exposed: ExposedServer, text: str) -> None:
    name = exposed.name(text)
    json_type = "Content-Type: application/json\r\n"
    body = json.dumps({"model": name, "ndarray": [1]}).encode()
    for path, content in (
        (PREDICT_PATH, body),
        (f"{PREDICT_PATH}?model={quote(name, safe='')}", b'{"ndarray": [1]}'),
    ):
        status, answer = exposed.http("POST", path, content, json_type)
        assert status >= 400
        assert no_such_model(name) in json.loads(answer)["status"]["msg"]
    status, answer = exposed.http(
        "POST", "/grps/v1/metadata/model", json.dumps({"str_data": name}).encode(), json_type
    )
    assert status == 404
