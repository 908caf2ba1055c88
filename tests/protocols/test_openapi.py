"""The OpenAPI document: every route is in it and nothing else, and its examples work as they stand."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import triglot
from tests.process import PLAIN_MODELS, write_model
from tests.transports.live import live
from triglot import testing
from triglot.core.http import HttpRequest, HttpResponse
from triglot.core.tensor import Array
from triglot.model.signature import ModelMetadata, Signature
from triglot.protocols.api_operation import SCHEMAS
from triglot.protocols.openapi.routes import openapi_routes
from triglot.protocols.protocol import Context
from triglot.protocols.registry import rows
from triglot.protocols.rows import Route
from triglot.run import DEMO
from triglot.telemetry.store import Telemetry
from triglot.transports.rest.routes import Refused, Router

Operations = dict[tuple[str, str], dict[str, Any]]
OWN: dict[str, Any] = {
    "grps_path": "/own/grps",
    "monitoring_path": "/own/metrics",
    "predict_route": "/own/predict",
    "health_route": "/own/health",
}
"""Paths of the configuration."""
CATCH_ALL = re.compile(r"\{path:[^/]*\}$")
"""What the path of a row ends in that only refuses what no other row takes."""
ADDRESS = "http://127.0.0.1:8000"
"""What stands in code of a server on any free port."""
X = triglot.TensorSpec("x", "FP32", [-1])


class Echo(triglot.Model):
    inputs = [X]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": inputs["x"]}


class Client:
    """Of a server's REST port."""

    def __init__(self, server: triglot.Server, session: aiohttp.ClientSession) -> None:
        self.url = f"http://127.0.0.1:{server.rest_port}"
        self._session = session

    async def call(self, verb: str, path: str, **options: Any) -> tuple[int, bytes, Mapping[str, str]]:
        async with self._session.request(verb, self.url + path, **options) as answer:
            return answer.status, await answer.read(), answer.headers

    async def document(self) -> Any:
        status, body, headers = await self.call("GET", "/openapi.json")
        assert (status, headers["Content-Type"]) == (200, "application/json")
        return json.loads(body)


@asynccontextmanager
async def serving(*paths: Path, **options: Any) -> AsyncIterator[Client]:
    async with testing.serve(*paths, **options) as server, aiohttp.ClientSession() as session:
        yield Client(server.server, session)


@asynccontextmanager
async def holding(models: Mapping[str, triglot.Model], **options: Any) -> AsyncIterator[Client]:
    async with live(models, **options) as running:
        yield Client(running.server, running.session)


def operations(document: Any) -> Operations:
    """By method and path."""
    return {
        (verb.upper(), path): operation
        for path, methods in document["paths"].items()
        for verb, operation in methods.items()
    }


def router_of(routes: list[Route]) -> Router:
    router = Router()
    for route in routes:
        router.add(route, Telemetry().endpoint("test", "REST", route.method, inference=False))
    return router


def routes_of(config: triglot.Config) -> list[Route]:
    server = triglot.Server([], config)
    _, routes = rows(Context(server.dataplane, server.telemetry, config))
    return routes


@pytest.mark.parametrize("protocols", ["kserve,tfserving,grps", "kserve", "grps", "tfserving,grps"])
async def test_every_route_is_in_the_document_and_nothing_else(protocols: str) -> None:
    config = triglot.Config(protocols=protocols, **OWN)
    routes, found = routes_of(config), set[int]()
    router = router_of(routes)
    async with holding({"echo": Echo()}, protocols=protocols, **OWN) as client:
        document = await client.document()
    for verb, path in operations(document):
        try:
            found.add(id(router.find(verb, re.sub(r"\{\w+\}", "1", path)).route))
        except Refused:
            pytest.fail(f"{verb} {path} is no route")
    others = [route for route in routes if id(route) not in found]
    assert [f"{route.verb} {route.path}" for route in others if not CATCH_ALL.search(route.path)] == []
    assert not any(route.documented for route in others)


async def test_operations_have_names_of_their_own_and_their_protocols() -> None:
    async with holding({"echo": Echo()}) as client:
        document = await client.document()
    found = operations(document)
    names = [operation["operationId"] for operation in found.values()]
    assert len(set(names)) == len(names)
    assert all(operation["summary"] for operation in found.values())
    tags = {path: operation["tags"] for (_, path), operation in found.items()}
    assert tags["/v2/models/echo/infer"] == ["KServe V2"]
    assert tags["/v1/models/echo:predict"] == ["TensorFlow Serving"]
    assert tags["/v1/projects/{project}/models/{model}:predict"] == ["AI Platform and Vertex AI"]
    assert tags["/grps/v1/infer/predict"] == ["grps"]
    assert tags["/metrics"] == tags["/docs"] == ["Monitor"]


async def test_a_server_with_some_protocols_has_their_routes_and_schemas_only() -> None:
    async with holding({"echo": Echo()}, protocols="kserve") as client:
        document = await client.document()
    assert {tag["name"] for tag in document["tags"]} == {"KServe V2", "Traffic", "Monitor"}
    assert not any(name.startswith(("Grps", "Predict")) for name in document["components"]["schemas"])
    assert "InferRequest" in document["components"]["schemas"]


@pytest.mark.parametrize("path", ["/openapi.json", "/docs"])
async def test_tensorflow_serving_alone_has_neither_document_nor_page(path: str) -> None:
    async with holding({"echo": Echo()}, protocols="tfserving") as client:
        assert (await client.call("GET", path))[0] == 404


async def test_a_projects_own_path_wins() -> None:
    async with holding({"echo": Echo()}, grps_path="/docs") as client:
        status, body, _ = await client.call("POST", "/docs", json={"model": "echo-1", "ndarray": [1.0]})
        assert (status, json.loads(body)["status"]["status"]) == (200, "SUCCESS")
        assert b"<html" not in (await client.call("GET", "/docs"))[1]
        document = await client.document()
    assert document["paths"]["/docs"]["get"]["tags"] == ["grps"]


def examples(document: Any) -> Iterator[tuple[str, str, Any]]:
    """Model, path and request."""
    for (_, path), operation in operations(document).items():
        content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        for name, example in content.get("examples", {}).items():
            yield name, path, example["value"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_every_example_of_every_model_works_as_it_stands() -> None:
    paths = [path for folder in (PLAIN_MODELS, DEMO) for path in folder.iterdir() if path.name != "__pycache__"]
    async with serving(*paths) as client:
        document = await client.document()
        shown = dict[str, set[str]]()
        for name, path, body in examples(document):
            status, answer, _ = await client.call("POST", path, json=body)
            assert status == 200, f"{path} {body}: {answer!r}"
            assert b'"error"' not in answer
            shown.setdefault(name, set()).add(path)
        for path, operation in ((path, operation) for (_, path), operation in operations(document).items()):
            for sample in operation.get("x-codeSamples", ()):
                assert await status_of(sample["source"].replace(ADDRESS, client.url)) == 200
                shown.setdefault(path.split("/")[3], set()).add(path)
    assert shown.keys() == {path.name for path in paths}
    assert shown["half_plus_two"] == {
        "/v2/models/half_plus_two/infer",
        "/v2/models/half_plus_two/predict",
        "/v1/models/half_plus_two:predict",
        "/grps/v1/infer/predict",
    }
    assert shown["token_stream"] == {
        "/v2/models/token_stream/generate_stream",
        "/v2/models/token_stream/predict",
    }


async def status_of(code: str) -> int:
    """The status that a client of this shell code gets."""
    assert code.endswith(" --output -")
    shell = await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        code.replace("--output -", "--output /dev/null -w '%{http_code}'"),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await shell.communicate()
    return int(output)


async def test_a_models_operation_has_its_tensors() -> None:
    async with serving(DEMO / "digits", PLAIN_MODELS / "half_plus_two") as client:
        found = operations(await client.document())
    infer = found["POST", "/v2/models/digits/infer"]
    assert "Inputs: image FP32 [-1,1,8,8]. Outputs: probabilities FP32 [-1,10]." in infer["description"]
    schema = infer["requestBody"]["content"]["application/json"]["schema"]["properties"]["inputs"]
    (image,) = schema["items"]["anyOf"]
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert image["properties"]["name"] == {"const": "image"}
    assert image["properties"]["datatype"] == {"const": "FP32"}
    assert image["properties"]["shape"]["minItems"] == image["properties"]["shape"]["maxItems"] == 4
    assert image["properties"]["shape"]["description"] == "[-1,1,8,8]"
    predict = found["POST", "/v1/models/half_plus_two:predict"]
    assert "Inputs: x FP32 [-1]. Outputs: y FP32 [-1]." in predict["description"]


class Odd(Echo):
    """As the test says."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


async def test_models_that_are_hard_to_describe() -> None:
    odd = {
        "names": Odd(inputs=[triglot.TensorSpec("a 'b' </script> é", "BYTES", [1])]),
        "any": Odd(inputs=[triglot.TensorSpec("x", "FP32", None)]),
        "nothing": Odd(inputs=[]),
        "optional": Odd(inputs=[X, triglot.TensorSpec("z", "INT8", [2], optional=True)]),
        "scalar": Odd(inputs=[triglot.TensorSpec("x", "INT64", [])]),
        "wide": Odd(inputs=[triglot.TensorSpec("x", "FP32", [10_000_000])]),
    }
    async with holding(odd) as client:
        document = await client.document()
        found = operations(document)
    shown = {name: body for name, path, body in examples(document) if path.endswith("/infer")}
    assert shown.keys() == {"names", "nothing", "optional", "scalar"}
    assert shown["names"]["inputs"][0]["name"] == "a 'b' </script> é"
    assert shown["nothing"] == {"inputs": []}
    assert (shown["scalar"]["inputs"][0]["shape"], shown["scalar"]["inputs"][0]["data"]) == ([], [1])
    inputs = {
        name: found["POST", f"/v2/models/{name}/infer"]["requestBody"]["content"]["application/json"]["schema"][
            "properties"
        ]["inputs"]
        for name in ("optional", "nothing", "any")
    }
    assert (inputs["optional"]["minItems"], inputs["optional"]["maxItems"]) == (1, 2)
    assert inputs["nothing"] == {"type": "array", "minItems": 0, "maxItems": 0}
    assert "minItems" not in inputs["any"]["items"]["anyOf"][0]["properties"]["shape"]
    assert "x-codeSamples" not in found["POST", "/v2/models/wide/infer"]


async def test_models_come_and_go(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_model(tmp_path / name, (PLAIN_MODELS / "half_plus_two" / "model.py").read_text())
    path = "/v2/models/two/infer"
    async with serving(tmp_path, model_control_mode="explicit", load_model="one") as client:
        before = await client.call("GET", "/openapi.json")
        assert path not in json.loads(before[1])["paths"]
        assert (await client.call("POST", "/v2/repository/models/two/load"))[0] == 200
        document = await client.document()
        assert path in document["paths"]
        assert "/v1/models/two:predict" in document["paths"]
        assert "two" in {name for name, at, _ in examples(document) if at == "/grps/v1/infer/predict"}
        assert (await client.call("POST", "/v2/repository/models/two/unload"))[0] == 200
        after = await client.call("GET", "/openapi.json")
        assert after[:2] == before[:2]
        assert after[2]["ETag"] == before[2]["ETag"]


async def test_known_document_is_not_modified() -> None:
    async with holding({"echo": Echo()}) as client:
        status, body, headers = await client.call("GET", "/openapi.json")
        tag = headers["ETag"]
        assert (status, headers["Cache-Control"], headers["Content-Encoding"]) == (200, "no-cache", "gzip")
        for sent in (tag, f'"other", {tag}', "*", tag.removeprefix("W/")):
            status, nothing, headers = await client.call("GET", "/openapi.json", headers={"If-None-Match": sent})
            assert (status, nothing, headers["ETag"]) == (304, b"", tag), sent
        status, again, _ = await client.call("GET", "/openapi.json", headers={"If-None-Match": '"other"'})
        assert (status, again) == (200, body)
        status, nothing, headers = await client.call("HEAD", "/openapi.json")
        assert (status, nothing, headers["ETag"]) == (200, b"", tag)


def test_a_document_of_many_models_is_made_off_the_loop_and_only_once() -> None:
    signature = Signature([X], [X])
    models = [ModelMetadata(f"m{number}", ["1"], "python", signature, False) for number in range(1000)]
    (route, *_) = openapi_routes([], lambda _: models, SCHEMAS, "name", ADDRESS)
    assert route.answer_size(models) > 1_000_000
    request = HttpRequest({}, {}, b"")
    first, again = route.encode(models, request), route.encode(list(models), request)
    assert isinstance(first, HttpResponse)
    assert isinstance(again, HttpResponse)
    assert again.body is first.body
    assert route.answer_size(models) == 0
    assert route.answer_size(models[1:]) > 0


async def test_the_page_comes_with_a_strict_policy() -> None:
    async with holding({"echo": Echo()}) as client:
        status, body, headers = await client.call("GET", "/docs")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.strip().partition(" ")[::2] for part in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["script-src"].startswith("'sha256-")
    assert not re.search(rb"""(src|href)=["']?(https?:)?//""", body)
