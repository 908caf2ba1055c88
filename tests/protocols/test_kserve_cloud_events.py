"""CloudEvents to KServe V1's `:predict`, binary and structured, answered in the request's form (V2 spec 4.4)."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.process import PLAIN_MODELS
from tests.protocols.kserve_served import Served, serve_models

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/v1/models/half_plus_two:predict"
ATTRIBUTES = {
    "specversion": "1.0",
    "id": "36077800",
    "source": "io.kserve.kafka",
    "type": "com.example.sampletype1",
}
BINARY = {f"ce-{name}": value for name, value in ATTRIBUTES.items()}
DATA = {"instances": [1.0, 2.0]}
ANSWER = {"predictions": [2.5, 3.0]}
LARGE = [float(number) for number in range(40_000)]
STRUCTURED = "application/cloudevents+json"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with serve_models(
        [PLAIN_MODELS / "half_plus_two", predictor(tmp_path_factory.mktemp("json") / "echo")]
    ) as served:
        yield served


def predictor(folder: Path) -> Path:
    """A model that takes JSON itself."""
    folder.mkdir()
    (folder / "predictor.py").write_text(
        "class Echo:\n"
        "    @classmethod\n"
        "    def from_path(cls, model_dir):\n"
        "        return cls()\n\n"
        "    def predict(self, instances, **kwargs):\n"
        "        return instances\n"
    )
    (folder / "predictor.toml").write_text('prediction_class = "predictor.Echo"\n')
    return folder


async def post(served: Served, body: Any, headers: dict[str, str], path: str = PATH) -> tuple[int, Any, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, found, reply = await served.rest.call("POST", path, data, headers)
    return status, found, json.loads(reply)


def check_attributes(attributes: Any, model: str = "half_plus_two") -> None:
    assert attributes["specversion"] == "1.0"
    assert attributes["type"] == "io.kserve.inference.response"
    assert attributes["source"] == f"io.kserve.inference.{model}"
    assert attributes["id"] not in ("", ATTRIBUTES["id"])
    assert attributes["time"]


@pytest.mark.parametrize(
    "more",
    [
        {"Content-Type": "application/json"},
        {"Content-Type": "application/json; charset=UTF-8", "ce-time": "2026-01-01T00:00:00Z"},
        {"Content-Type": STRUCTURED},
        {"ce-extension": "x"},
    ],
)
async def test_binary_event(served: Served, more: dict[str, str]) -> None:
    status, headers, reply = await post(served, DATA, {**BINARY, **more})
    assert (status, reply, headers["Content-Type"]) == (200, ANSWER, "application/json")
    check_attributes({name.lower().removeprefix("ce-"): value for name, value in headers.items()})


@pytest.mark.parametrize(
    ("content_type", "more"),
    [
        (STRUCTURED, {"data": DATA}),
        (f"{STRUCTURED}; charset=UTF-8", {"data": DATA}),
        ("Application/CloudEvents+JSON;charset=utf-8", {"data": DATA, "time": "2026-01-01T00:00:00Z"}),
        (STRUCTURED, {"data": DATA, "time": None, "datacontenttype": "application/json", "extension": 1}),
        (STRUCTURED, {"data_base64": base64.b64encode(json.dumps(DATA).encode()).decode(), "specversion": "0.3"}),
    ],
)
async def test_structured_event(served: Served, content_type: str, more: dict[str, Any]) -> None:
    status, headers, reply = await post(served, {**ATTRIBUTES, **more}, {"Content-Type": content_type})
    assert (status, headers["Content-Type"]) == (200, STRUCTURED)
    check_attributes(reply)
    assert (reply["data"], reply["datacontenttype"]) == (ANSWER, "application/json")


async def test_model_that_takes_json(served: Served) -> None:
    path, data = "/v1/models/echo:predict", {"instances": [{"a": [1, None]}, "text"]}
    status, headers, reply = await post(served, data, BINARY, path)
    assert (status, reply) == (200, {"predictions": data["instances"]})
    check_attributes({name.lower().removeprefix("ce-"): value for name, value in headers.items()}, "echo")
    _, _, reply = await post(served, {**ATTRIBUTES, "data": data}, {"Content-Type": STRUCTURED}, path)
    check_attributes(reply, "echo")
    assert reply["data"] == {"predictions": data["instances"]}


@pytest.mark.parametrize("key", ["instances", "inputs"])
async def test_large_events(served: Served, key: str) -> None:
    expected = [number / 2 + 2 for number in LARGE]
    for body, headers in (
        ({key: LARGE}, BINARY),
        ({**ATTRIBUTES, "data": {key: LARGE}}, {"Content-Type": STRUCTURED}),
    ):
        status, _, reply = await post(served, body, headers)
        assert status == 200
        assert reply.get("data", reply) == {"predictions" if key == "instances" else "outputs": expected}


@pytest.mark.parametrize(
    ("body", "headers", "text"),
    [
        (
            {**ATTRIBUTES, "id": None, "data": DATA},
            {},
            "CloudEvent: expected the attribute 'id' as a string, got None",
        ),
        (
            {"specversion": "1.0", "data": DATA},
            {},
            "CloudEvent: expected the attribute 'id' as a string, got None",
        ),
        (
            {**ATTRIBUTES, "type": 1, "data": DATA},
            {},
            "CloudEvent: expected the attribute 'type' as a string, got 1",
        ),
        ({**ATTRIBUTES, "specversion": "2"}, {}, "CloudEvent: specversion: expected one of 1.0, 0.3, got '2'"),
        (ATTRIBUTES, {}, "CloudEvent: expected 'data', or 'data_base64', got none"),
        ({**ATTRIBUTES, "data_base64": "%"}, {}, "CloudEvent: data_base64: expected base64"),
        ({**ATTRIBUTES, "data": {}}, {}, "Missing 'inputs' or 'instances' key"),
        ({**ATTRIBUTES, "data": "text"}, {}, 'JSON Value: "text" Is not object'),
        (b"{", {}, "the body is not valid JSON"),
        (DATA, {**BINARY, "ce-specversion": "3"}, "CloudEvent: specversion: expected one of 1.0, 0.3, got '3'"),
        (b"not JSON", BINARY, "JSON Parse error: Invalid value. at offset: 0"),
    ],
)
async def test_errors_are_plain_json(served: Served, body: Any, headers: dict[str, str], text: str) -> None:
    status, found, reply = await post(served, body, headers or {"Content-Type": STRUCTURED})
    assert (status, found["Content-Type"], list(reply)) == (400, "application/json", ["error"])
    assert reply["error"].startswith(text)
    assert not any(name.lower().startswith("ce-") for name in found)


async def test_unknown_model_is_404(served: Served) -> None:
    for body, headers in ((DATA, BINARY), ({**ATTRIBUTES, "data": DATA}, {"Content-Type": STRUCTURED})):
        status, _, reply = await post(served, body, headers, "/v1/models/nothing:predict")
        assert (status, list(reply)) == (404, ["error"])


async def test_part_of_an_event_is_a_plain_request(served: Served) -> None:
    for missing in BINARY:
        some = {name: value for name, value in BINARY.items() if name != missing}
        status, headers, reply = await post(served, DATA, some)
        assert (status, reply) == (200, ANSWER)
        assert not any(name.lower().startswith("ce-") for name in headers)
