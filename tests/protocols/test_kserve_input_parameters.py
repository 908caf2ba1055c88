"""What a request says of single inputs reaches the model, over gRPC and REST and wherever it runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import numpy as np
import pytest

from tests.process import SECONDS
from tests.protocol_clients.channel import SERVICE
from triglot import testing
from triglot.pb.kserve import inference_pb2 as pb

MODEL = """
import json
import triglot


class Told(triglot.Model):
    inputs = [triglot.TensorSpec("a", "INT32", [-1]), triglot.TensorSpec("b", "INT32", [-1])]
    outputs = [triglot.TensorSpec("told", "BYTES", [-1])]
    EXTRA

    def infer(self, inputs, call):
        told = {name: dict(values) for name, values in call.input_parameters.items()}
        return {"told": [json.dumps([told, len(inputs["a"])]).encode()] * len(inputs["a"])}
"""
OF_A = {"content_type": "np", "count": 3, "share": 0.5, "on": True}


def grpc_request(of_a: dict[str, Any], of_b: dict[str, Any] | None = None) -> bytes:
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    request = pb.ModelInferRequest(model_name="told")
    for name, parameters in (("a", of_a), ("b", of_b or {})):
        tensor = request.inputs.add(name=name, datatype="INT32", shape=[1])
        for key, value in parameters.items():
            setattr(tensor.parameters[key], kinds[type(value)], value)
        request.raw_input_contents.append(np.array([7], np.int32).tobytes())
    return request.SerializeToString()


class Clients:
    def __init__(self, channel: grpc.aio.Channel, session: aiohttp.ClientSession, url: str) -> None:
        self._infer = channel.unary_unary(SERVICE + "ModelInfer")
        self._session, self._url = session, url

    async def by_grpc(self, of_a: dict[str, Any], of_b: dict[str, Any] | None = None) -> Any:
        reply = pb.ModelInferResponse.FromString(await self._infer(grpc_request(of_a, of_b), timeout=SECONDS))
        return json.loads(reply.raw_output_contents[0][4:])

    async def by_rest(self, of_a: dict[str, Any], of_b: dict[str, Any] | None = None) -> Any:
        inputs: list[dict[str, Any]] = [
            {"name": name, "datatype": "INT32", "shape": [1], "parameters": parameters or {}, "data": [7]}
            for name, parameters in (("a", of_a), ("b", of_b))
        ]
        # The second one as bytes behind the JSON.
        del inputs[1]["data"]
        inputs[1]["parameters"] = {**(of_b or {}), "binary_data_size": 4}
        text = json.dumps({"inputs": inputs}).encode()
        headers = {"Inference-Header-Content-Length": str(len(text))}
        body = text + np.array([7], np.int32).tobytes()
        async with self._session.post(self._url, data=body, headers=headers) as response:
            assert response.status == 200
            return json.loads((await response.json())["outputs"][0]["data"][0])


@asynccontextmanager
async def serving(folder: Path, extra: str = "", **options: Any) -> AsyncIterator[Clients]:
    (folder / "told").mkdir()
    (folder / "told" / "model.py").write_text(MODEL.replace("EXTRA", extra))
    async with (
        testing.serve(folder / "told", **options) as server,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
        aiohttp.ClientSession() as session,
    ):
        yield Clients(channel, session, f"{server.url}/v2/models/told/infer")


@pytest.mark.parametrize("extra", ["", 'execution = "process"'])
async def test_model_gets_the_input_parameters(extra: str, tmp_path: Path) -> None:
    async with serving(tmp_path, extra) as clients:
        for ask in (clients.by_grpc, clients.by_rest):
            assert await ask({}) == [{}, 1]
            for _ in range(3):  # Requests that are like another one may take another way.
                assert await ask(OF_A, {"content_type": "str"}) == [{"a": OF_A, "b": {"content_type": "str"}}, 1]
            assert await ask({}) == [{}, 1]
            assert await ask(OF_A) == [{"a": OF_A}, 1]


async def test_what_means_something_to_the_server_is_left_out(tmp_path: Path) -> None:
    async with serving(tmp_path) as clients:
        assert await clients.by_rest({}, {"mine": 1}) == [{"b": {"mine": 1}}, 1]


async def test_requests_that_say_unlike_things_share_no_batch(tmp_path: Path) -> None:
    extra = "max_batch_size = 8\n    dynamic_batching = triglot.DynamicBatching(max_queue_delay=0.05)"
    async with serving(tmp_path, extra) as clients:
        parameters: list[dict[str, Any]] = [{}, {"on": True}, {"on": 1}, {"on": 1.0}, {"on": "1"}, {"off": True}]
        answers = await asyncio.gather(*(clients.by_grpc(parameter) for parameter in parameters for _ in range(4)))
        expected = [{"a": parameter} if parameter else {} for parameter in parameters for _ in range(4)]
        assert [json.dumps(parameters_seen) for parameters_seen, _ in answers] == [
            json.dumps(parameter) for parameter in expected
        ]


async def test_nor_an_answer_of_the_cache(tmp_path: Path) -> None:
    async with serving(tmp_path, "response_cache = True", response_cache_bytes=1 << 20) as clients:
        for of_a, of_b in (({}, {}), (OF_A, {}), ({}, OF_A), ({"on": True}, {}), ({"on": 1}, {})):
            expected = {name: own for name, own in (("a", of_a), ("b", of_b)) if own}
            for _ in range(2):
                parameters_seen, _ = await clients.by_grpc(of_a, of_b)
                assert json.dumps(parameters_seen, sort_keys=True) == json.dumps(expected, sort_keys=True)
