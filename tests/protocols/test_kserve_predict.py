"""`predict` through a real port: plain JSON, forms, files, and streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from random import Random
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio

from tests.transports.live import Live, live
from triglot import InvalidArgument, Model, TensorSpec
from triglot.protocols.kserve.predict import Part, form_parts

pytestmark = pytest.mark.asyncio(loop_scope="module")
FILE = bytes(range(256)) * 3 + b"\r\n--\r\n"


class Sizes(Model):
    """Takes files."""

    inputs = [TensorSpec("file", "BYTES", [-1]), TensorSpec("scale", "FP32", [1], optional=True)]
    outputs = [TensorSpec("size", "FP32", [-1]), TensorSpec("head", "BYTES", [-1])]

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        files = inputs["file"]
        scale = inputs.get("scale", [1])[0]
        heads = np.array([file[254:257] for file in files], object)
        return {"size": np.array([len(file) * scale for file in files], "f4"), "head": heads}


class Rows(Model):
    """Takes rows of two inputs."""

    inputs = [TensorSpec("a", "FP32", [-1, 2]), TensorSpec("b", "INT8", [-1])]
    outputs = [TensorSpec("y", "FP32", [-1, 2])]

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"y": np.where(inputs["a"] > 9, np.nan, inputs["a"] * inputs["b"][:, np.newaxis]).astype("f4")}


class Words(Model):
    inputs, outputs = [TensorSpec("text", "BYTES", [1])], [TensorSpec("word", "BYTES", [1])]

    def infer(self, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for word in inputs["text"][0].split():
            yield {"word": np.array([word], object)}
            if word == b"fail":
                raise OSError("secret")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Live]:
    async with live({"sizes": Sizes(), "rows": Rows(), "words": Words()}) as server:
        yield server


async def post(server: Live, path: str, body: Any, **headers: str) -> tuple[int, str, bytes]:
    data = body if isinstance(body, bytes | aiohttp.FormData) else json.dumps(body).encode()
    own = {} if isinstance(body, aiohttp.FormData) else {"Content-Type": "application/json"}
    named = own | {name.replace("_", "-"): value for name, value in headers.items()}
    async with server.session.post(f"{server.url}/models/{path}", data=data, headers=named) as response:
        return response.status, response.headers["Content-Type"], await response.read()


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ({"a": [[1, 2], [3, 4]], "b": [1, 2]}, [[1, 2], [6, 8]]),
        ({"a": [1, 2], "b": 1}, [[1, 2]]),
        ([{"a": [1, 2], "b": 1}, {"b": 2, "a": [3, 4]}], [[1, 2], [6, 8]]),
        ({"a": [[1, 10]], "b": [1], "parameters": {"any": 1}}, [[1, None]]),
        ({"a": [], "b": []}, "unexpected shape for input 'a'"),
        ({"a": [1, 2]}, "expected 2 inputs but got 1"),
        ({"a": [1, 2], "b": 1, "c": 2}, "unexpected input 'c', expected ['a', 'b']"),
        ({"a": [1, 2], "b": 300}, "input 'b': expected INT8 values, got int64"),
        ({"a": [1, 2], "b": 1.5}, "input 'b': expected INT8 values, got float64"),
        ({"a": [[1], [1, 2]], "b": [1, 2]}, "input 'a': cannot be converted to an array"),
        ({"a": {"b64": "!"}, "b": 1}, "input 'a': expected base64, got something else"),
        ({"a": {"b65": "!"}, "b": 1}, "input 'a': expected values, lists, or {\"b64\": TEXT}, got another object"),
        ({"a": [1, 2], "b": 1, "parameters": {"signature_name": "z"}}, "has no signature 'z'"),
        ({"a": [1, 2], "b": 1, "parameters": [1]}, "'parameters': expected an object"),
        ([{"a": [1, 2], "b": 1}, {"a": [1, 2]}], "row 1: expected the members ['a', 'b'], got ['a']"),
        ([[1, 2]], "expected an object, or a list of objects, with ['a', 'b'], got an array"),
        (b"{", "failed to parse the request JSON"),
        (b"[" * 2000, "failed to parse the request JSON"),
        (b'{"a": ' + b"[" * 900 + b"]" * 900 + b', "b": 1}', "nested too deep"),
    ],
)
async def test_json_of_rows(server: Live, body: Any, answer: Any) -> None:
    for version in ("", "/versions/1"):
        status, _, text = await post(server, f"rows{version}/predict", body)
        if isinstance(answer, str):
            assert status == 400, text
            assert answer in json.loads(text)["error"]
        else:
            assert (status, json.loads(text)) == (200, {"y": answer})


async def test_a_file_as_the_body(server: Live) -> None:
    expected = {"size": [len(FILE)], "head": [{"b64": "/v8A"}]}
    for kind in ("image/jpeg", "application/octet-stream", "application/x-www-form-urlencoded"):
        status, _, text = await post(server, "sizes/predict", FILE, Content_Type=kind)
        assert (status, json.loads(text)) == (200, expected)
    status, _, text = await post(server, "sizes/predict", b'{"file": "abc"}', Content_Type="text/plain")
    assert (status, json.loads(text)["size"]) == (200, [15])
    status, _, text = await post(
        server, "sizes/predict", b'{"file": "abc"}', Content_Type="application/x-www-form-urlencoded"
    )
    assert (status, json.loads(text)["size"]) == (200, [3])


async def test_a_form_with_files(server: Live) -> None:
    form = aiohttp.FormData()
    form.add_field("file", FILE, filename="a.jpg", content_type="image/jpeg")
    form.add_field("file", b"", filename="größe;.jpg")
    form.add_field("scale", "2")
    status, _, text = await post(server, "sizes/predict", form)
    assert (status, json.loads(text)) == (200, {"size": [2 * len(FILE), 0], "head": [{"b64": "/v8A"}, ""]})
    other = aiohttp.FormData({"scale": "x", "file": "text"})
    other._is_multipart = True
    status, _, text = await post(server, "sizes/predict", other)
    assert (status, "failed to parse the request JSON" in json.loads(text)["error"]) == (400, True)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", "expected a form whose parts end with the boundary"),
        (b"--b\r\n", "expected a form whose parts end with the boundary"),
        (b"--b\r\nX: y\r\n\r\nz\r\n--b--\r\n", "expected a name in each part of the form, got none"),
        (
            b'--b\r\nContent-Disposition: form-data; name="z"\r\n\r\nz\r\n--b--\r\n',
            "unexpected field 'z', expected ['file', 'scale']",
        ),
    ],
)
async def test_forms_that_are_refused(server: Live, body: bytes, error: str) -> None:
    status, _, text = await post(server, "sizes/predict", body, Content_Type="multipart/form-data; boundary=b")
    assert (status, error in json.loads(text)["error"]) == (400, True), text


async def test_damaged_forms_are_refused_or_read() -> None:
    form = b"--b\r\nContent-Disposition: form-data; name=z; filename*=utf-8''a%20b\r\n\r\nc\r\n--b--\r\n"
    kind = "multipart/form-data; boundary=b"
    assert form_parts(form, kind) == [Part("z", b"c")]
    random = Random(1)
    damage = [b'"', b";", b"=", b"*", b"'", b"%", b"\r\n", b":", b"(", b"\\", b"\xff", b"\0", b"[", b"*0*", b""]
    refused = 0
    for _ in range(5000):
        damaged, damaged_kind = bytearray(form), kind
        for _ in range(random.randint(1, 6)):
            at = random.randrange(len(form))
            damaged[at : at + random.choice([0, 1, 3])] = random.choice(damage)
        if random.random() < 0.2:
            at = random.randrange(len(kind))
            damaged_kind = kind[:at] + random.choice(damage).decode(errors="surrogateescape") + kind[at:]
        try:
            form_parts(bytes(damaged), damaged_kind)
        except InvalidArgument:
            refused += 1
    assert 0 < refused < 5000


async def test_a_stream_is_events_or_lines(server: Live) -> None:
    body = {"text": "to be"}
    status, kind, text = await post(server, "words/predict", body)
    assert (status, kind) == (200, "text/event-stream; charset=utf-8")
    assert text == b'data: {"word":["to"]}\n\ndata: {"word":["be"]}\n\n'
    status, kind, text = await post(server, "words/predict", body, Accept="application/x-ndjson")
    assert (status, kind, text) == (200, "application/x-ndjson", b'{"word":["to"]}\n{"word":["be"]}\n')
    status, kind, text = await post(server, "words/predict", {"text": "fail"}, Accept="application/x-ndjson")
    first, last = map(json.loads, text.splitlines())
    assert (status, first) == (200, {"word": ["fail"]})
    assert last["error"].startswith("words version 1 failed, error ")


async def test_infer_names_the_route_of_plain_json(server: Live) -> None:
    status, _, text = await post(server, "rows/infer", {"a": [1, 2], "b": 1})
    assert status == 400
    assert json.loads(text)["error"].endswith("; for plain JSON, use the path that ends with /predict")
