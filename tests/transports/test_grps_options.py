"""grps under the server's options: health, errors, default model, the custom path, and what / is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.transports.live import Live, live
from triglot import Model, TensorSpec

pytestmark = pytest.mark.both_transports

OK = {"code": 200, "msg": "OK", "status": "SUCCESS"}
JSON = {"Content-Type": "application/json"}


class Half(Model):
    inputs = [TensorSpec("x", "FP32", [-1])]
    outputs = [TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs: Any) -> dict[str, Any]:
        return {"y": inputs["x"] / 2}


class Double(Half):
    def infer(self, inputs: Any) -> dict[str, Any]:
        return {"y": inputs["x"] * 2}


async def ask(
    server: Live, verb: str, target: str, body: object = None, headers: Mapping[str, str] = JSON
) -> tuple[int, Any]:
    url = f"http://127.0.0.1:{server.server.rest_port}{target}"
    data = None if body is None else json.dumps(body)
    async with server.session.request(verb, url, data=data, headers=headers) as response:
        content = await response.read()
        is_json = response.headers["Content-Type"] == "application/json"
        return response.status, json.loads(content) if is_json else content


PREDICT = "/grps/v1/infer/predict"
READY = "/grps/v1/health/ready"


@pytest.mark.parametrize("online", [False, True])
async def test_health_from_the_start(online: bool) -> None:
    async with live({"half": Half()}, grps_online=online) as server:
        assert (await ask(server, "GET", READY))[0] == (200 if online else 503)


async def test_health_needs_ready_models() -> None:
    async with live({"half": Half()}, grps_online=True) as server:
        server.server.dataplane.stop()
        status, body = await ask(server, "GET", READY)
        assert (status, body["status"]["msg"]) == (503, "Service Unavailable")
        assert (await ask(server, "GET", "/grps/v1/health/live"))[0] == 200


async def test_errors_can_all_be_200() -> None:
    async with live({"half": Half()}, grps_http_errors="always_200") as server:
        for verb, target, body, code in (
            ("GET", READY, None, 503),
            ("POST", PREDICT, {}, 500),
            ("POST", f"{PREDICT}?model=nope", {"str_data": "x"}, 500),
            ("POST", "/grps/v1/metadata/model", {}, 400),
            ("POST", "/grps/v1/metadata/model", {"str_data": "nope"}, 404),
        ):
            status, answer = await ask(server, verb, target, body)
            assert (status, answer["status"]["code"], answer["status"]["status"]) == (200, code, "FAILURE")


async def test_a_request_without_a_model() -> None:
    asked = ("POST", f"{PREDICT}?return-ndarray=true", {"ndarray": [4]})
    async with live({"half": Half()}) as server:
        assert await ask(server, *asked) == (200, {"status": OK, "ndarray": [2.0]})
    async with live({"half": Half(), "double": Double()}, default_model="double") as server:
        assert await ask(server, *asked) == (200, {"status": OK, "ndarray": [8.0]})
    async with live({"half": Half(), "double": Double()}, default_model="double-1") as server:
        assert await ask(server, *asked) == (200, {"status": OK, "ndarray": [8.0]})
    async with live({"half": Half(), "double": Double()}) as server:
        status, answer = await ask(server, *asked)
        assert (status, answer["status"]["msg"]) == (
            500,
            "Model not found. Name one in the request or set default_model: this server has 2 models.",
        )


async def test_a_path_and_a_trigger_of_ones_own() -> None:
    options = {
        "grps_path": "/my/predict",
        "grps_streaming_mode": "header_param",
        "grps_streaming_key": "x-stream",
        "grps_streaming_content_type": "text/event-stream; charset=utf-8",
    }
    async with live({"half": Half()}, **options) as server:
        status, answer = await ask(server, "POST", "/my/predict?streaming=true", {"ndarray": [4]})
        assert (status, answer["gtensors"]["tensors"][0]["flat_float32"]) == (200, [2.0])
        url = f"http://127.0.0.1:{server.server.rest_port}{PREDICT}"
        headers = {**JSON, "X-Stream": "True"}
        async with server.session.post(url, json={"ndarray": [4]}, headers=headers) as response:
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert json.loads(await response.read())["status"] == OK


async def test_a_tensor_model_takes_no_http_request_as_it_is() -> None:
    async with live({"half": Half()}, grps_path="/mine", grps_customized_body=True) as server:
        for path in ("/mine", PREDICT):
            status, text = await ask(server, "POST", path, {"ndarray": [4]})
            assert (status, text) == (500, b"model 'half' takes tensors and cannot take customized HTTP requests")


@pytest.mark.parametrize(
    ("protocols", "accept", "page"),
    [
        ("kserve,tfserving,grps", "*/*", False),
        ("kserve,tfserving,grps", "text/html,application/xhtml+xml", True),
        ("grps,kserve,tfserving", "*/*", True),
        ("grps", "application/json", True),
    ],
)
async def test_what_lies_at_the_root(protocols: str, accept: str, page: bool) -> None:
    async with live({"half": Half()}, protocols=protocols) as server:
        status, answer = await ask(server, "GET", "/", headers={"Accept": accept})
        assert status == 200
        if page:
            assert b"<html" in answer
        else:
            assert answer == {"status": "alive"}


async def test_tensorflow_serving_alone_has_metrics_and_no_page() -> None:
    async with live({"half": Half()}, protocols="tfserving") as server:
        status, answer = await ask(server, "GET", "/")
        assert (status, b"404 Not Found" in answer) == (404, True)
        assert (await ask(server, "GET", PREDICT))[0] == 404
        status, answer = await ask(server, "GET", "/metrics")
        assert (status, b"triglot_" in answer) == (200, True)
