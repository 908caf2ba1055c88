"""Half of a surrogate pair, which JSON can write and UTF-8 cannot, wherever a REST request has a text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import triglot
from tests.scheduling.scripted_models import Plain
from tests.transports.live import live

pytestmark = pytest.mark.both_transports

HALF = "\ud800"
PADDING = (0, 3000)
"""Bytes of blanks: a longer body has another parser."""
INTERNAL = b"the server's log has the details"


class Echo(triglot.Model):
    inputs = [triglot.TensorSpec("x", "BYTES", [-1])]
    outputs = [triglot.TensorSpec("y", "BYTES", [-1])]

    def infer(self, inputs: Any) -> Any:
        return {"y": inputs["x"]}


def spoiled(value: Any) -> Iterator[Any]:
    """The value with one of its texts, or one more, that has half of a pair."""
    if isinstance(value, str):
        yield HALF + value
        yield HALF
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from ({**value, key: other} for other in spoiled(item))
            yield {(HALF + name if name == key else name): item for name, item in value.items()}
        yield {**value, HALF: 1}
        yield {**value, "more": HALF}
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from ([*value[:at], other, *value[at + 1 :]] for other in spoiled(item))


def infer(datatype: str, item: Any) -> dict[str, Any]:
    tensor = {"name": "x", "datatype": datatype, "shape": [1], "data": [item], "parameters": {"a": "b"}}
    outputs = [{"name": "y", "parameters": {"c": "d"}}]
    return {"id": "i", "parameters": {"p": "v", "q": 1}, "inputs": [tensor], "outputs": outputs}


def bodies(model: str, datatype: str, item: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    yield f"/v2/models/{model}/infer", infer(datatype, item)
    for path in ("predict", "generate", "generate_stream"):
        yield f"/v2/models/{model}/{path}", {"x": item, "id": "i", "parameters": {"k": "v"}}
    named = {"signature_name": "serving_default"}
    yield f"/v1/models/{model}:predict", {**named, "instances": [{"x": item}]}
    yield f"/v1/models/{model}:predict", {**named, "inputs": {"x": [item]}}
    yield f"/v1/models/{model}:classify", {**named, "context": {"a": "b"}, "examples": [{"x": item}]}
    yield f"/v1/models/{model}:regress", {**named, "examples": [{"x": ["a"], "y": {"b64": "YQ=="}}]}
    yield f"/v1/projects/p/models/{model}:predict", {**named, "instances": [{"x": item}], "k": "v"}
    key = "flat_float32" if datatype == "FP32" else "flat_string"
    tensor = {"name": "x", "dtype": "DT_FLOAT32" if datatype == "FP32" else "DT_STRING", "shape": [1], key: [item]}
    for query in ("", "?streaming=true", "?return-ndarray=true"):
        path = f"/grps/v1/infer/predict{query}"
        yield path, {"model": f"{model}-1", "gtensors": {"tensors": [tensor]}}
        yield path, {"model": f"{model}-1", "str_data": "a"}
        yield path, {"model": f"{model}-1", "gmap": {"s_s": {"a": "b"}}}
        yield path, {"model": f"{model}-1", "ndarray": [1.0], "status": {"msg": "m", "status": "SUCCESS"}}


CONTROL: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v2/repository/index", {"ready": True, "n": "m"}),
    ("/v2/repository/models/numbers/load", {"parameters": {"config": "{}", "file:1/model.py": "YQ=="}}),
    ("/v2/repository/models/numbers/unload", {"parameters": {"unload_dependents": "a"}}),
    ("/v2/logging", {"log_info": True, "log_format": "default"}),
    ("/v2/trace/setting", {"trace_level": ["OFF"], "trace_rate": "1"}),
    ("/v2/models/numbers/trace/setting", {"trace_level": ["OFF"], "log_frequency": "1"}),
    ("/v2/systemsharedmemory/region/r/register", {"key": "/none", "offset": 0, "byte_size": 1}),
    ("/grps/v1/metadata/model", {"str_data": "m"}),
)


@pytest.mark.parametrize(
    "requests",
    [tuple(bodies("numbers", "FP32", 1.0)), tuple(bodies("texts", "BYTES", "a")), CONTROL],
    ids=["numbers", "texts", "control"],
)
async def test_is_no_error_of_the_server(requests: tuple[tuple[str, dict[str, Any]], ...]) -> None:
    models = {"numbers": Plain(lambda inputs: {"y": inputs["x"]}), "texts": Echo()}
    wrong = []
    async with live(
        models,
        protocols="kserve,tfserving,grps",
        model_control_mode="explicit",
        load_model="*",
        shared_memory_prefix="/",
    ) as here:
        url = f"http://127.0.0.1:{here.server.rest_port}"
        for path, body in requests:
            for value in spoiled(body):
                for blanks in PADDING:
                    text = json.dumps(value)[:-1] + " " * blanks + "}"
                    headers = {"Content-Type": "application/json"}
                    async with here.session.post(url + path, data=text.encode(), headers=headers) as response:
                        answer = await response.read()
                    # grps says 500 of what is wrong with a request; nobody else does.
                    if INTERNAL in answer or (response.status == 500 and not path.startswith("/grps")):
                        wrong.append((path, text[:200], answer[:200]))
    assert not wrong


async def test_of_a_parameter_is_a_wrong_request() -> None:
    async with live({"numbers": Plain(lambda _: {})}, model_control_mode="explicit", load_model="*") as here:
        url = f"http://127.0.0.1:{here.server.rest_port}/v2/repository/models/numbers/load"
        for parameters in ({"config": HALF}, {HALF: "a"}, {HALF: True}):
            async with here.session.post(url, data=json.dumps({"parameters": parameters})) as response:
                assert response.status == 400
                assert "has a lone surrogate, expected Unicode text" in (await response.json())["error"]
