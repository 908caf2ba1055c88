"""Vertex AI's endpoints: what its clients send and read, and what is answered where something is not served."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from google.protobuf import json_format

import triglot
from tests.access.access_files import client, write
from tests.transports.live import Live, live
from triglot import TensorSpec
from triglot.config.options import ConfigError
from triglot.core.call import Call
from triglot.pb.vertex import prediction_service_pb2 as pb
from triglot.pb.vertex.http_body_pb2 import HttpBody

pytestmark = pytest.mark.both_transports

VALUE: Any = type(pb.PredictRequest().parameters)
LOCATION = "projects/p/locations/us-central1"
ENDPOINTS = "42=sums, 43 = sums/1,half-1=half"
GOOGLES = {"x-goog-api-client": "gl-python/3.11 gapic/2.7"}


class Sums(triglot.Model):
    """Integers, and a keyword."""

    inputs = [TensorSpec("x", "INT64", [-1, 2])]
    outputs = [TensorSpec("sum", "INT64", [-1])]
    takes_parameters = True

    def infer(self, inputs: Mapping[str, Any], call: Call) -> dict[str, Any]:
        return {"sum": inputs["x"].sum(axis=1) + call.parameters.get("add", 0)}


class Half(triglot.Model):
    inputs = [TensorSpec("x", "FP32", [-1]), TensorSpec("note", "BYTES", [-1], optional=True)]
    outputs = [TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"y": inputs["x"] / 2}


class Mixed(triglot.Model):
    """An integer and a text for each instance, and two outputs."""

    inputs = [TensorSpec("n", "INT32", [-1]), TensorSpec("text", "BYTES", [-1])]
    outputs = inputs

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return dict(inputs)


class Failing(Half):
    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        raise triglot.InvalidArgument("Divide by zero")


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[Live]:
    models = {"sums": Sums(), "half": Half(), "mixed": Mixed(), "failing": Failing()}
    async with live(models, vertex_endpoints=ENDPOINTS, **options) as server:
        yield server


async def ask(
    server: Live, target: str, body: object = None, verb: str = "POST", headers: Mapping[str, str] | None = None
) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body)
    url = f"{server.url.removesuffix('/v2')}/{target}"
    async with server.session.request(verb, url, data=data, headers=headers) as answer:
        return answer.status, json.loads(await answer.read())


def deployed(model: str) -> dict[str, str]:
    """What Vertex AI adds to predictions."""
    return {
        "deployedModelId": model,
        "model": f"{LOCATION}/models/{model}",
        "modelDisplayName": model,
        "modelVersionId": "1",
    }


def error(code: int, status: str, message: str) -> tuple[int, Any]:
    return code, {"error": {"code": code, "message": message, "status": status}}


@pytest.mark.parametrize("api", ["v1", "v1beta1"])
@pytest.mark.parametrize(
    ("endpoint", "model", "body", "predictions"),
    [
        ("half", "half", {"instances": [1.0, 2]}, [0.5, 1.0]),
        ("half-1", "half", {"instances": [{"x": 1.0}]}, [0.5]),
        ("sums", "sums", {"instances": [[1, 2]]}, [3]),
        ("42", "sums", {"instances": [[1.0, 2.0], [3e2, -4.0]]}, [3, 296]),
        ("43", "sums", {"instances": [[1e16, 0.0]], "parameters": {"add": 2}}, [10**16 + 2]),
        ("mixed", "mixed", {"instances": [{"n": 1.0, "text": 'a "2.0'}]}, [{"n": 1, "text": 'a "2.0'}]),
        ("mixed", "mixed", {"instances": [{"n": 3.0, "text": "\\\\1.0\\"}]}, [{"n": 3, "text": "\\\\1.0\\"}]),
    ],
)
async def test_predictions_of_an_endpoint(
    api: str, endpoint: str, model: str, body: object, predictions: list[Any]
) -> None:
    """As google-cloud-aiplatform sends them: a protobuf Value has no integers, and 1 comes as 1.0."""
    async with served() as server:
        target = f"{api}/{LOCATION}/endpoints/{endpoint}:predict?%24alt=json%3Benum-encoding%3Dint"
        assert await ask(server, target, body) == (200, {"predictions": predictions, **deployed(model)})


@pytest.mark.parametrize("api", ["v1", "v1beta1"])
@pytest.mark.parametrize("method", ["rawPredict", "streamRawPredict"])
async def test_raw_predictions_are_the_containers(api: str, method: str) -> None:
    async with served() as server:
        for body, expected in (
            ({"instances": [[1, 2]]}, {"predictions": [3]}),
            ({"inputs": [[1, 2]]}, {"outputs": [3]}),
            ({"inputs": {"x": [[1, 2]]}, "signature_name": "serving_default"}, {"outputs": [3]}),
        ):
            url = f"{server.url.removesuffix('/v2')}/{api}/{LOCATION}/endpoints/42:{method}"
            async with server.session.post(url, data=json.dumps(body)) as answer:
                assert (answer.status, json.loads(await answer.read())) == (200, expected)
                assert answer.headers["X-Vertex-AI-Endpoint-Id"] == "42"
                assert answer.headers["X-Vertex-AI-Deployed-Model-Id"] == "sums"


async def test_a_raw_request_in_an_http_body_is_answered_in_one() -> None:
    """What google-cloud-aiplatform reads over REST: an object, and for a stream a list of them."""
    data = b'{"instances": [[1, 2]]}'
    body = {"httpBody": {"contentType": "application/json", "data": base64.b64encode(data).decode()}}
    async with served() as server:
        status, answer = await ask(server, f"v1/{LOCATION}/endpoints/42:rawPredict", body)
        _, stream = await ask(server, f"v1/{LOCATION}/endpoints/42:streamRawPredict", body)
    assert (status, answer["contentType"], stream) == (200, "application/json", [answer])
    assert json.loads(base64.b64decode(answer["data"])) == {"predictions": [3]}


async def test_what_an_endpoint_is() -> None:
    async with served() as server:
        model = {"id": "sums", "model": f"{LOCATION}/models/sums", "displayName": "sums", "modelVersionId": "1"}
        endpoint = f"{LOCATION}/endpoints/42"
        named = {"name": endpoint, "displayName": "sums", "deployedModels": [model], "trafficSplit": {"sums": 100}}
        assert await ask(server, f"v1/{endpoint}", verb="GET") == (200, named)
        missing = f"{LOCATION}/endpoints/9"
        text = f"The endpoint '{missing}' was not found, or is not ready."
        assert await ask(server, f"v1/{missing}", verb="GET") == error(404, "NOT_FOUND", text)


@pytest.mark.parametrize("method", ["predict", "rawPredict"])
@pytest.mark.parametrize(
    ("endpoint", "body", "code", "status", "text"),
    [
        ("42", {}, 400, "INVALID_ARGUMENT", "Missing 'inst"),
        ("42", {"instances": [[1.5, 2]]}, 400, "INVALID_ARGUMENT", "Failed to process element: 0"),
        ("42", {"instances": [{"y": 1}]}, 400, "INVALID_ARGUMENT", "Expected tensor name: x"),
        ("42", b"{bad", 400, "INVALID_ARGUMENT", "JSON Parse error"),
        ("42", {"instances": [[1, 2]], "parameters": 3}, 400, "INVALID_ARGUMENT", "expected 'parameters'"),
        ("failing", {"instances": [1.0]}, 400, "INVALID_ARGUMENT", "Divide by zero"),
        ("nobody", {"instances": [1.0]}, 404, "NOT_FOUND", f"The endpoint '{LOCATION}/endpoints/nobody' was not"),
    ],
)
async def test_an_error_has_googles_form(
    method: str, endpoint: str, body: object, code: int, status: str, text: str
) -> None:
    async with served() as server:
        got, answer = await ask(server, f"v1/{LOCATION}/endpoints/{endpoint}:{method}", body)
        assert (got, answer["error"]["code"], answer["error"]["status"]) == (code, code, status)
        if body != {} or method == "predict":
            assert answer["error"]["message"].startswith(text)
        assert (await ask(server, f"v1/{LOCATION}/endpoints/42:{method}", {"instances": [[1, 2]]}))[0] == 200


@pytest.mark.parametrize(
    ("verb", "target"),
    [
        ("POST", f"v1/{LOCATION}/endpoints/42:explain"),
        ("POST", f"v1beta1/{LOCATION}/endpoints/42:serverStreamingPredict"),
        ("GET", f"v1/{LOCATION}/endpoints/42:predict"),
        ("GET", f"v1/{LOCATION}/endpoints"),
        ("POST", f"v1/{LOCATION}/publishers/google/models/m:predict"),
        ("GET", "v1beta1/projects/p/models"),
        ("DELETE", f"v1/{LOCATION}/models/sums"),
    ],
)
async def test_unserved_operations_are_refused_in_googles_format(verb: str, target: str) -> None:
    async with served() as server:
        code, answer = await ask(server, target, {}, verb)
    assert (code, answer["error"]["code"], answer["error"]["status"]) == (404, 404, "NOT_FOUND")
    assert answer["error"]["message"].startswith(f"{verb} /{target} is not supported")


@pytest.mark.parametrize(
    ("verb", "target", "body", "code", "status"),
    [
        ("POST", "v1/projects/p/models/sums:predict", {}, 400, "INVALID_ARGUMENT"),
        ("POST", "v1/projects/p/models/failing:predict", {"instances": [1.0]}, 400, "INVALID_ARGUMENT"),
        ("POST", "v1/projects/p/models/nobody:predict", {"instances": [1.0]}, 404, "NOT_FOUND"),
        ("GET", "v1/projects/p/models", None, 404, "NOT_FOUND"),
        ("GET", "v1/projects/p/models/sums/versions/1", None, 404, "NOT_FOUND"),
        ("POST", "v1/projects/p/models/sums:explain", {}, 404, "NOT_FOUND"),
    ],
)
async def test_googles_clients_get_googles_form_on_every_path_of_a_project(
    verb: str, target: str, body: object, code: int, status: str
) -> None:
    """Others get AI Platform's, but for a model that there is not."""
    async with served() as server:
        got, answer = await ask(server, target, body, verb, GOOGLES)
        assert (got, answer["error"]["code"], answer["error"]["status"]) == (code, code, status)
        _, plain = await ask(server, target, body, verb)
        is_models = code == 404 and body is not None and ":predict" in target
        assert plain["error"] == (answer["error"] if is_models else answer["error"]["message"])


@pytest.mark.parametrize(
    "target",
    [
        "v1/projects/p/models/half:predict",
        "v1/projects/p/models/half/versions/1:predict",
        f"v1/{LOCATION}/endpoints/half:predict",
        f"v1beta1/{LOCATION}/endpoints/half:rawPredict",
    ],
)
async def test_refusals_have_googles_form(target: str, tmp_path: Any) -> None:
    token = secrets.token_hex(16)
    rules = write(tmp_path / "access.toml", client("reader", [token], ["inspect"]))
    async with served(access=str(rules)) as server:
        code, answer = await ask(server, target, {"instances": [1.0]})
        assert (code, answer["error"]["code"], answer["error"]["status"]) == (401, 401, "UNAUTHENTICATED")
        assert answer["error"]["message"].startswith("infer needs credentials")
        bearer = {"authorization": f"Bearer {token}"}
        code, answer = await ask(server, target, {"instances": [1.0]}, headers=bearer)
        assert (code, answer["error"]["code"], answer["error"]["status"]) == (403, 403, "PERMISSION_DENIED")


SERVICE = "/google.cloud.aiplatform.v1.PredictionService/"


def values(*given: Any) -> list[Any]:
    return [json_format.ParseDict(instance, VALUE()) for instance in given]


async def call(server: Live, method: str, request: Any) -> bytes:
    """The response's bytes; of a stream the only message's."""
    data = request.SerializeToString()
    if method.startswith("Stream"):
        (answer,) = [message async for message in server.channel.unary_stream(SERVICE + method)(data)]
    else:
        answer = await server.channel.unary_unary(SERVICE + method)(data)
    assert isinstance(answer, bytes)
    return answer


@pytest.mark.parametrize(
    ("endpoint", "instances", "parameters", "model", "predictions"),
    [
        ("half", [1, 2.5], None, "half", [0.5, 1.25]),
        ("42", [[1, 2], [3, -4]], {"add": 2}, "sums", [5.0, 1.0]),
        ("43", [[1e16, 2]], None, "sums", [1e16 + 2]),
        (
            "mixed",
            [{"n": 7, "text": "1.0 \N{PLACE OF INTEREST SIGN}"}],
            None,
            "mixed",
            [{"n": 7.0, "text": "1.0 \N{PLACE OF INTEREST SIGN}"}],
        ),
    ],
)
async def test_predictions_over_grpc(
    endpoint: str, instances: list[Any], parameters: Any, model: str, predictions: list[Any]
) -> None:
    request = pb.PredictRequest(endpoint=f"{LOCATION}/endpoints/{endpoint}", instances=values(*instances))
    if parameters is not None:
        request.parameters.CopyFrom(values(parameters)[0])
    async with served() as server:
        answer = pb.PredictResponse.FromString(await call(server, "Predict", request))
    assert json_format.MessageToDict(answer) == {"predictions": predictions, **deployed(model)}


@pytest.mark.parametrize("method", ["RawPredict", "StreamRawPredict"])
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"instances": [[1, 2]]}, {"predictions": [3]}),
        ({"inputs": {"x": [[1, 2]]}}, {"outputs": [3]}),
        ({"instances": [{"x": [1, 2]}]}, {"predictions": [3]}),
    ],
)
async def test_raw_predictions_over_grpc(method: str, body: object, expected: object) -> None:
    request = pb.RawPredictRequest(endpoint=f"{LOCATION}/endpoints/42")
    request.http_body.data = json.dumps(body).encode()
    async with served() as server:
        answer = HttpBody.FromString(await call(server, method, request))
    assert (answer.content_type, json.loads(answer.data)) == ("application/json", expected)


@pytest.mark.parametrize(
    ("endpoint", "instances", "code", "text"),
    [
        (
            f"{LOCATION}/endpoints/nobody",
            [1],
            "NOT_FOUND",
            f"The endpoint '{LOCATION}/endpoints/nobody' was not found",
        ),
        ("nobody", [1], "INVALID_ARGUMENT", "endpoint: expected projects/PROJECT/locations/"),
        (f"{LOCATION}/publishers/google/models/m", [1], "INVALID_ARGUMENT", "endpoint: expected projects/"),
        (f"{LOCATION}/endpoints/42", [[1.5, 2]], "INVALID_ARGUMENT", "Failed to process element: 0"),
        (f"{LOCATION}/endpoints/42", [], "INVALID_ARGUMENT", "Missing 'instances' key"),
        (f"{LOCATION}/endpoints/failing", [1], "INVALID_ARGUMENT", "Divide by zero"),
        (f"{LOCATION}/endpoints/half", [0] * 200_000, "INVALID_ARGUMENT", "the request has 2"),
    ],
)
async def test_errors_over_grpc(endpoint: str, instances: list[Any], code: str, text: str) -> None:
    async with served() as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(server, "Predict", pb.PredictRequest(endpoint=endpoint, instances=values(*instances)))
        error = caught.value
        assert (error.code().name, str(error.details())[: len(text)]) == (code, text)
        fine = pb.PredictRequest(endpoint=f"{LOCATION}/endpoints/half", instances=values(1))
        assert await call(server, "Predict", fine)


async def test_a_number_that_json_lacks_over_grpc() -> None:
    request = pb.PredictRequest(
        endpoint=f"{LOCATION}/endpoints/half", instances=[VALUE(number_value=float("nan"))]
    )
    async with served() as server:
        with pytest.raises(grpc.aio.AioRpcError, match="instances: "):
            await call(server, "Predict", request)


async def test_numbers_that_never_end_are_read_once() -> None:
    """A megabyte of digits, quotes and escapes: linear time, and an error."""
    async with served() as server:
        for body in (b"1" * 10**6, b'"' + rb"\"" * 500_000, b"1." * 500_000, b"1e" * 500_000, b"-" * 10**6):
            code, _ = await ask(server, f"v1/{LOCATION}/endpoints/42:predict", body)
            assert code == 400


@pytest.mark.parametrize("text", ["42", "=m", "42=", "42=a,42=b", "42=a,,=b"])
def test_endpoints_that_are_wrong(text: str) -> None:
    with pytest.raises(ConfigError, match="vertex_endpoints: expected ENDPOINT=MODEL"):
        triglot.Config(vertex_endpoints=text)
