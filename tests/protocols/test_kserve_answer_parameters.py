"""Parameters that models give their answers, in every protocol (spec 2.4)."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from tests.protocols.stream_requests import (
    FINAL,
    VALUE,
    Inputs,
    answers,
    asking,
    parameters,
)
from tests.scheduling.scripted_models import Plain
from tests.transports.live import Live, live
from triglot import Model, TensorSpec
from triglot.core.types import Answer
from triglot.model.scheduling import DynamicBatching
from triglot.pb.kserve import inference_pb2 as pb

GIVEN: dict[str, Any] = {"flag": True, "count": -(1 << 63), "ratio": 0.5, "text": "é"}


async def rest(server: Live, model: str, call: str = "infer") -> tuple[int, Any]:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [3]}]}
    async with server.session.post(f"{server.url}/models/{model}/{call}", json=body) as response:
        return response.status, await response.json()


async def test_parameters_of_an_answer_reach_every_interface() -> None:
    async with live({"said": Plain(lambda inputs: Answer({"y": inputs["x"]}, GIVEN))}) as server:
        reply = pb.ModelInferResponse.FromString(await server.infer(asking("said", 3)))
        assert parameters(pb.ModelStreamInferResponse(infer_response=reply)) == GIVEN
        (streamed,) = await answers(server, asking("said", 3))
        assert parameters(streamed) == GIVEN | {FINAL: True}
        status, found = await rest(server, "said")
        assert (status, found["parameters"]) == (200, GIVEN)
        async with server.session.post(f"{server.url}/models/said/generate", json={"x": 3}) as response:
            assert await response.json() == {"model_name": "said", "model_version": "1", "y": 3} | GIVEN


@pytest.mark.parametrize(
    "given", [{"x": None}, {"x": [1]}, {"x": 1 << 63}, {"x": np.int64(1)}, {"": 1}, {1: 1}, {"x": b"b"}]
)
async def test_parameters_that_no_protocol_carries_are_the_models_fault(given: Any) -> None:
    async with live({"odd": Plain(lambda inputs: Answer({"y": inputs["x"]}, given))}) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.infer(asking("odd", 3))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "model 'odd' returned" in str(caught.value.details())
        status, found = await rest(server, "odd")
        assert (status, found["error"]) == (500, caught.value.details())


async def test_parameters_of_a_batch_are_those_of_each_request() -> None:
    class Joined(Model):
        inputs, outputs = [TensorSpec("x", "FP32", [-1])], [TensorSpec("y", "FP32", [-1])]
        max_batch_size = 8
        dynamic_batching = DynamicBatching()

        def infer(self, inputs: Inputs) -> Answer:
            return Answer({"y": inputs["x"]}, {"rows": len(inputs["x"])})

    async with live({"joined": Joined()}) as server:
        replies = await asyncio.gather(*(server.infer(asking("joined", at)) for at in range(20)))
    found = [pb.ModelInferResponse.FromString(reply) for reply in replies]
    assert [VALUE.unpack(response.raw_output_contents[0])[0] for response in found] == list(range(20))
    rows = [response.parameters["rows"].int64_param for response in found]
    assert all(1 <= row <= 8 for row in rows)


async def test_answers_with_parameters_are_not_kept() -> None:
    runs = 0

    def infer(inputs: Inputs) -> Answer:
        nonlocal runs
        runs += 1
        return Answer({"y": inputs["x"]}, {"run": runs} if inputs["x"][0] else {})

    model = Plain(infer)
    model.response_cache = True
    async with live({"kept": model}, response_cache_bytes=1 << 20) as server:
        for number, expected in ((1, 1), (1, 2), (0, 3), (0, 3)):
            reply = pb.ModelInferResponse.FromString(await server.infer(asking("kept", number)))
            assert runs == expected
            assert reply.parameters["run"].int64_param == (expected if number else 0)
