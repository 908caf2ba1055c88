"""A JSON null in an optional field is an absent field in the body of every route that takes JSON (V2 spec 3.2)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.protocols.kserve_served import Served, serve_models
from tests.protocols.tensor_places import PREFIX, memory

TFSERVING = Path(__file__).resolve().parents[1] / "models_tfserving"
MODEL = """import triglot


class Same(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [-1]), triglot.TensorSpec("bias", "FP32", [1], optional=True)]
    outputs = [triglot.TensorSpec("y", "INT32", [-1])]

    def infer(self, inputs, call):
        own = ("priority", "seed", "threads")
        text = {name: value for name, value in call.parameters.items() if name in own}
        return triglot.Answer({"y": inputs["x"]}, {"got": repr(text), "bias": "bias" in inputs})
"""
X = {"name": "x", "shape": [1], "datatype": "INT32", "data": [1]}
Y = {"name": "y"}
INFER, GENERATE, PREDICT = "/v2/models/same/infer", "/v2/models/same/generate", "/v1/models/half_plus_two:predict"
GTENSOR = {"name": "x", "dtype": "DT_INT32", "shape": [1], "flat_int32": [1]}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (INFER, {"id": None, "inputs": [X]}),
    (INFER, {"id": "", "parameters": None, "outputs": None, "inputs": [X]}),
    (INFER, {"model_name": None, "inputs": [X], "outputs": [{**Y, "parameters": None}]}),
    (INFER, {"inputs": [X], "parameters": {"headers": None, "content_type": None, "seed": None, "threads": 2}}),
    (INFER, {"inputs": [X], "parameters": {"priority": None, "timeout": None, "binary_data_output": None}}),
    (INFER, {"inputs": [X], "parameters": {"sequence_id": None, "sequence_start": None, "sequence_end": None}}),
    (INFER, {"inputs": [X], "parameters": {"signature_name": None, "triton_enable_empty_final_response": None}}),
    (INFER, {"inputs": [X], "outputs": [{**Y, "parameters": {"binary_data": None, "classification": None}}]}),
    (INFER, {"inputs": [X], "outputs": [{**Y, "parameters": {"shared_memory_region": None}}]}),
    (INFER, {"inputs": [{**X, "parameters": None}]}),
    (INFER, {"inputs": [{**X, "parameters": {"content_type": "np", "headers": None}}]}),
    (INFER, {"inputs": [{**X, "parameters": {"binary_data_size": None, "shared_memory_region": None}}]}),
    ("/v2/models/same/infer_stream", {"id": None, "inputs": [X], "parameters": {"seed": None}, "outputs": None}),
    (GENERATE, {"id": None, "x": 1, "parameters": None}),
    (GENERATE, {"x": 1, "bias": None, "seed": None, "signature_name": None}),
    (GENERATE, {"x": 1, "parameters": {"seed": None, "id": None, "bias": None, "priority": None}}),
    ("/v2/models/same/predict", {"x": [1], "bias": None, "parameters": {"seed": None}}),
    ("/v2/models/same/predict", {"x": [1], "parameters": None}),
    ("/v2/models/same/generate_stream", {"id": None, "x": 1, "parameters": {"seed": None}}),
    ("/v2/repository/index", {"ready": None}),
    ("/v2/repository/models/same/load", {"parameters": None}),
    ("/v2/repository/models/same/load", {"parameters": {"config": None, "file:1/model.py": None}}),
    (
        "/v2/repository/models/same/load",
        {"parameters": {"config": '{"max_batch_size": null, "input": null, "dynamic_batching": null}'}},
    ),
    ("/v2/repository/models/nothing/unload", {"parameters": {"unload_dependents": None}}),
    (PREDICT, {"signature_name": None, "instances": [1.0]}),
    (PREDICT, {"instances": [1.0], "inputs": None}),
    (PREDICT, {"inputs": [1.0], "instances": None}),
    (PREDICT, {"inputs": [float(number) for number in range(5000)], "signature_name": None}),
    (
        "/v1/models/half_plus_two:regress",
        {"context": None, "examples": [{"x": 1.0}], "signature_name": "regress_x_to_y"},
    ),
    (
        "/v1/models/half_plus_two:classify",
        {"context": None, "examples": [{"x": 1.0}], "signature_name": "classify_x_to_y"},
    ),
    (
        "/v1/projects/p/models/half_plus_two:predict",
        {"instances": [1.0], "signature_name": None, "httpBody": None},
    ),
    ("/grps/v1/infer/predict", {"model": None, "str_data": None, "gtensors": {"tensors": [GTENSOR]}}),
    (
        "/grps/v1/infer/predict",
        {"model": "same", "gmap": None, "gtensors": {"tensors": [{**GTENSOR, "flat_string": None}]}},
    ),
    ("/grps/v1/metadata/model", {"str_data": "same", "gmap": None}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "same").mkdir()
    (folder / "same" / "model.py").write_text(MODEL)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(models: Path) -> AsyncIterator[Served]:
    options: dict[str, Any] = {
        "model_control_mode": "explicit",
        "default_model": "same",
        "load_model": "*",
        "shared_memory_prefix": PREFIX,
    }
    async with serve_models([models, TFSERVING / "half_plus_two"], **options) as served:
        yield served


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


async def post(served: Served, path: str, body: Any) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json"}  # By which grps decides.
    status, _, reply = await served.rest.call("POST", path, json.dumps(body).encode(), headers)
    return status, reply


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_null_field_is_absent(served: Served, path: str, body: dict[str, Any]) -> None:
    status, reply = await post(served, path, body)
    assert status == 200, reply
    assert reply == (await post(served, path, without_nulls(body)))[1]


@pytest.mark.asyncio(loop_scope="module")
async def test_null_offset_of_shared_memory_is_0(served: Served) -> None:
    with memory(64) as made:
        body = {"key": made.key, "offset": None, "byte_size": 8, "name": None}
        assert await post(served, "/v2/systemsharedmemory/region/r/register", body) == (200, b"")
        _, _, reply = await served.rest.call("GET", "/v2/systemsharedmemory/region/r/status")
        assert json.loads(reply)[0]["offset"] == 0
        assert await post(served, "/v2/systemsharedmemory/unregister", {}) == (200, b"")


@pytest.mark.asyncio(loop_scope="module")
async def test_null_in_a_required_field_is_an_error_that_says_null(served: Served) -> None:
    for body, text in (
        ({"inputs": [{**X, "name": None}]}, "'name' of an input must be a string, got null"),
        ({"inputs": [{**X, "datatype": None}]}, "'datatype' of input 'x' must be a string, got null"),
        (
            {"inputs": [{**X, "shape": None}]},
            "'shape' of input 'x' must be an array of unsigned integers, got None",
        ),
    ):
        status, reply = await post(served, INFER, body)
        assert (status, json.loads(reply)["error"]) == (400, text)


@pytest.mark.asyncio(loop_scope="module")
async def test_null_takes_a_trace_setting_back_to_its_default(served: Served) -> None:
    changed = await post(served, "/v2/trace/setting", {"trace_rate": "7", "trace_count": None})
    assert json.loads(changed[1])["trace_rate"] == "7"
    assert json.loads((await post(served, "/v2/trace/setting", {"trace_rate": None}))[1])["trace_rate"] == "1000"
