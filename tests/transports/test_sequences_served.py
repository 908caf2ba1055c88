"""Sequences through real ports: their order on a stream, what is refused, and a server that ends."""

from __future__ import annotations

import asyncio
import json
import logging
import struct
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from tests.scheduling.sequence_models import HOUR, LONG, Summing
from tests.transports.live import METHOD, Live, live
from tests.waiting import until
from triglot import Call, Model, TensorSpec
from triglot.core.tensor import pack_bytes
from triglot.model.scheduling import ControlInput, OldestStrategy, SequenceBatching
from triglot.pb.kserve import inference_pb2 as pb

pytestmark = pytest.mark.both_transports

VALUE = struct.Struct("<f")


class Words(Model):
    """Numbers the requests of its only sequence."""

    inputs = [TensorSpec("x", "BYTES", [1])]
    outputs = [TensorSpec("y", "INT32", [1])]
    sequence_batching = SequenceBatching(max_idle=HOUR)

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        self.lengths.append(len(inputs["x"][0]))
        return {"y": np.array([len(self.lengths)], np.int32)}


class Yielding(Summing):
    """Decoupled: the sum so far, twice."""

    def __init__(self) -> None:
        super().__init__(SequenceBatching(max_idle=HOUR, controls=LONG.controls))
        self.sum = 0.0

    def infer(self, inputs: Mapping[str, Any], call: Call) -> Any:
        self.sum = float(inputs["x"].item()) + (0 if inputs["start"].item() else self.sum)
        for _ in range(2):
            yield {"y": np.full((1, 1), self.sum, np.float32)}


def message(
    model: str,
    raw: bytes,
    at: int,
    last: int,
    *,
    sequence_id: int = 5,
    datatype: str = "FP32",
    shape: tuple[int, ...] = (1, 1),
) -> bytes:
    """Request number `at` of a sequence."""
    made = pb.ModelInferRequest(model_name=model, id=str(at), raw_input_contents=[raw])
    made.inputs.add(name="x", datatype=datatype, shape=shape)
    made.parameters["sequence_id"].int64_param = sequence_id
    made.parameters["sequence_start"].bool_param = at == 0
    made.parameters["sequence_end"].bool_param = at == last
    return made.SerializeToString()


def number(model: str, value: float, at: int, last: int, *, sequence_id: int = 5) -> bytes:
    return message(model, VALUE.pack(value), at, last, sequence_id=sequence_id)


async def sending(*messages: bytes) -> AsyncIterator[bytes]:
    for line in messages:
        yield line


def value(response: pb.ModelInferResponse) -> float:
    return float(VALUE.unpack(response.raw_output_contents[0])[0])


async def ask(server: Live, request: bytes) -> float:
    return value(pb.ModelInferResponse.FromString(await server.infer(request, timeout=20)))


async def test_requests_of_a_stream_come_in_their_order() -> None:
    model = Words()
    async with live({"words": model}) as server:
        requests = [
            # Large ones are taken apart on a thread.
            message(
                "words", pack_bytes([b"x" * (at + 200_000 * (at % 3 == 0))]), at, 19, datatype="BYTES", shape=(1,)
            )
            for at in range(20)
        ]
        answers = [response async for response in server.stream_infer(sending(*requests))]
        assert [answer.error_message for answer in answers] == [""] * 20
        assert [length % 200_000 for length in model.lengths] == [*range(20)]
        assert [answer.infer_response.id for answer in answers] == [str(at) for at in range(20)]
        assert server.leases() == 0


async def test_a_decoupled_model_has_sequences_on_a_stream() -> None:
    async with live({"yielding": Yielding()}) as server:
        requests = [number("yielding", at + 1, at, 3) for at in range(4)]
        answers = [response async for response in server.stream_infer(sending(*requests))]
        assert [answer.error_message for answer in answers] == [""] * 8
        assert [value(answer.infer_response) for answer in answers] == [1, 1, 3, 3, 6, 6, 10, 10]


async def test_invalid_id_harms_no_other_request() -> None:
    """A lone half of a surrogate pair, as JSON can write it, beside a sequence that waits for the same batch."""
    ids = replace(LONG, controls=[*LONG.controls[:3], ControlInput("id", "CORRID", "BYTES")])
    strategy = OldestStrategy(max_queue_delay=HOUR, preferred_sizes=[2])
    model = Summing(replace(ids, strategy=strategy))
    async with live({"sum": model}) as server:
        asked = []
        for sequence_id in ("one", "\ud800", "two"):
            body = json.dumps(
                {
                    "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [3]}],
                    "parameters": {"sequence_id": sequence_id, "sequence_start": True, "sequence_end": True},
                }
            )
            asked.append(asyncio.ensure_future(post(server, body)))
            if sequence_id == "\ud800":
                status, answer = await asked.pop()
                assert status == 400
                assert "parameter 'sequence_id': expected UTF-8, got '\\ud800'" in answer["error"]
            else:
                await until(lambda: server.leases() >= len(asked))
        for status, answer in await asyncio.gather(*asked):
            assert (status, answer["outputs"][0]["data"]) == (200, [3])
        await until(lambda: not server.leases())
    (seen,) = model.seen
    assert seen["id"].reshape(-1).tolist()[:2] == [b"one", b"two"]


async def post(server: Live, body: str) -> tuple[int, dict[str, Any]]:
    async with server.session.post(f"{server.url}/models/sum/infer", data=body) as response:
        return response.status, await response.json()


async def test_a_server_that_ends_lets_sequences_end_first(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "triglot")
    async with live({"sum": Summing(LONG)}) as server:
        assert await ask(server, number("sum", 1, 0, 9)) == 1
        draining = asyncio.ensure_future(server.server.drain(0.001))
        await until(lambda: server.server.dataplane.stopping)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(server, number("sum", 1, 0, 9, sequence_id=6))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "the server is shutting down" in str(caught.value.details())
        assert await ask(server, number("sum", 2, 1, 9)) == 3
        assert not draining.done()
        assert await ask(server, number("sum", 3, 9, 9)) == 6
        async with asyncio.timeout(20):
            await draining
    logged = [record.getMessage() for record in caplog.records]
    assert (
        "draining: readiness is off, requests are accepted for another 0 s, and new sequences are rejected"
        in logged
    )
    assert any(line.startswith("waiting up to ") for line in logged)


async def test_a_server_does_not_wait_for_sequences_for_ever() -> None:
    async with live({"sum": Summing(LONG)}, grace=0.05) as server:
        assert await ask(server, number("sum", 1, 0, 9)) == 1
        async with asyncio.timeout(20):
            await server.server.drain(0.001)
        assert server.leases() == 1


@pytest.mark.parametrize("cancels", ["first", "middle", "last"])
async def test_a_client_that_leaves(cancels: str) -> None:
    """The next request, or the next START, is served."""
    at = {"first": 0, "middle": 1, "last": 2}[cancels]
    model = Summing(LONG, rows=1)
    async with live({"sum": model}) as server:
        for before in range(at):
            await ask(server, number("sum", 1, before, 2))
        call = server.channel.unary_unary(METHOD + "ModelInfer")(number("sum", 1, at, 2))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await ask(server, number("sum", 7, 0, 0)) == 7
        await until(lambda: not server.leases())
