"""AI Platform's `projects.predict`: what its documents say of answers, and what its clients send."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import pytest

import triglot
from tests.transports.live import Live, live
from triglot import TensorSpec
from triglot.core.errors import Code, FailedPrecondition, Internal, Unavailable

pytestmark = pytest.mark.both_transports

NUMBERS = {"predictions": [5, 4, 3]}
BODY = {"instances": [[4], [3], [2]], "signature_name": "serving_default"}


class Next(triglot.Model):
    """One output; or two, or a failure of its own."""

    inputs = [TensorSpec("x", "INT32", [-1, 1])]
    outputs = [TensorSpec("label", "INT32", [-1])]

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"label": inputs["x"][:, 0] + 1}


class Both(Next):
    outputs = [*Next.outputs, TensorSpec("score", "INT32", [-1])]

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().infer(inputs), "score": inputs["x"][:, 0]}


class Failing(Next):
    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        raise ValueError("a secret")


async def predict(server: Live, model: str, body: object) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body)
    url = f"{server.url.removesuffix('/v2')}/v1/projects/p/models/{model}:predict"
    async with server.session.post(url, data=data) as answer:
        return answer.status, json.loads(await answer.read())


@pytest.mark.parametrize(
    ("option", "named"), [("", []), ("n", ["n"]), ("other, n", ["n"]), ("*", ["m", "n"]), ("other", [])]
)
async def test_one_output_is_bare_values_unless_an_option_says_so(option: str, named: list[str]) -> None:
    async with live({"m": Next(), "n": Next(), "both": Both()}, named_predictions=option) as server:
        objects = {"predictions": [{"label": 5}, {"label": 4}, {"label": 3}]}
        for model in ("m", "n"):
            assert await predict(server, model, BODY) == (200, objects if model in named else NUMBERS)
        two = {"predictions": [{"label": 5, "score": 4}, {"label": 4, "score": 3}, {"label": 3, "score": 2}]}
        assert await predict(server, "both", BODY) == (200, two)


@pytest.mark.parametrize("signature", ["", '"signature_name": "serving_default", '])
@pytest.mark.parametrize("space", ["", " "])
async def test_rows_by_name_are_answered_by_name(signature: str, space: str) -> None:
    """By both parsers: the second one reads what has keys twice."""
    async with live({"m": Next()}) as server:
        for rows in ('[{"x": [4]}, {"x": [3]}]', '[{"x": [4], "x": [4]}, {"x": [3]}]'):
            body = f'{{{signature}"instances":{space}{rows}}}'.encode()
            assert await predict(server, "m", body) == (200, {"predictions": [{"label": 5}, {"label": 4}]})


DATA = json.dumps(BODY)
CODED = base64.b64encode(DATA.encode()).decode()


@pytest.mark.parametrize(
    "body",
    [
        {"httpBody": {"contentType": "application/json", "data": CODED}},
        {"httpBody": {"contentType": "application/json", "data": CODED.rstrip("=")}},
        {"httpBody": {"data": DATA, "extensions": []}},
        {"httpBody": BODY},
        {"httpBody": {"contentType": "application/json", "data": BODY}},
        {"httpBody": {"data": {"instances": BODY["instances"]}}},
        {"httpBody": {"data": f"\n {DATA}"}},
        b' {\n "httpBody" : {"data": "%b"} }' % base64.urlsafe_b64encode(DATA.encode()),
    ],
)
async def test_a_request_in_an_http_body(body: object) -> None:
    async with live({"m": Next()}) as server:
        assert await predict(server, "m", body) == (200, NUMBERS)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"httpBody": {"data": "no base64!"}}, "httpBody.data: expected base64 or a JSON object: "),
        ({"httpBody": {"data": "é"}}, "httpBody.data: expected base64 or a JSON object: "),
        ({"httpBody": {"data": 3}}, "httpBody.data: expected a string or an object, got a number"),
        ({"httpBody": {"data": [BODY]}}, "httpBody.data: expected a string or an object, got an array"),
        ({"httpBody": {"data": True}}, "httpBody.data: expected a string or an object, got a boolean"),
        ({"httpBody": {"data": ""}}, ""),
        ({"httpBody": {"data": "{}"}}, "Missing 'instances' key"),
        ({"httpBody": {"data": {}}}, "Missing 'instances' key"),
        ({"httpBody": {}}, "Missing 'instances' key"),
        ({"httpBody": 3}, "Missing 'instances' key"),
        ({"httpBody": {"data": json.dumps({"httpBody": {"data": DATA}})}}, "Missing 'instances'"),
        (b'{"httpBody": {"data": ', "the body is not valid JSON: "),
    ],
)
async def test_an_http_body_that_is_wrong(body: object, text: str) -> None:
    async with live({"m": Next()}) as server:
        status, answer = await predict(server, "m", body)
        assert status == 400
        assert answer["error"].startswith(f"Invalid inputs: {text}")
        assert await predict(server, "m", BODY) == (200, NUMBERS)


@pytest.mark.parametrize(
    "body", [{}, {"signature_name": "serving_default"}, {"inputs": [[4]]}, {"instance": [[4]]}]
)
async def test_missing_instances_are_an_error(body: dict[str, Any]) -> None:
    got = ", got 'inputs'" if "inputs" in body else ""
    async with live({"m": Next()}) as server:
        text = f"Invalid inputs: Missing 'instances' key{got} (Error code: 1)"
        assert await predict(server, "m", body) == (400, {"error": text})


class Dividing(Next):
    """Fails as graphs, estimators and routines do: with an error whose text is the client's to read."""

    def __init__(self, error: triglot.ServingError) -> None:
        self._error = error

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        raise self._error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (triglot.InvalidArgument("Divide by zero"), 400),
        (Internal("Divide by zero"), 500),
        (triglot.ServingError("Divide by zero", code=Code.OUT_OF_RANGE), 400),
        (FailedPrecondition("Divide by zero"), 400),
        (Unavailable("Divide by zero"), 503),
    ],
)
async def test_a_models_own_text_is_bare(error: triglot.ServingError, status: int) -> None:
    async with live({"m": Dividing(error)}) as server:
        assert await predict(server, "m", BODY) == (status, {"error": "Divide by zero"})


async def test_what_fails_in_other_models_stays_hidden(caplog: pytest.LogCaptureFixture) -> None:
    async with live({"m": Failing()}) as server:
        status, answer = await predict(server, "m", BODY)
    assert status == 500
    assert answer["error"].startswith("m version 1 failed, error ")
    assert "secret" not in answer["error"]
    assert "ValueError: a secret" in caplog.text
