"""grps messages that differ in their numbers only, while the model behind their name becomes another."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from tests.process import SECONDS, write_model
from tests.protocol_clients.channel import rpc
from triglot import Config, Server
from triglot.core.operation import EVERYTHING
from triglot.pb.grps import grps_pb2 as pb

MODEL = """
import triglot

class Sum(triglot.Model):
    inputs = [triglot.TensorSpec("{name}", "{datatype}", [-1])]
    outputs = [triglot.TensorSpec("y", "{datatype}", [-1])]

    def infer(self, inputs):
        return {{"y": inputs["{name}"] + {plus}}}
"""
PREDICT = "/grps.protos.v1.GrpsService/Predict"
PAIRS = [(0.5, 1.5), (2.5, 3.5), (float("inf"), -1.0), (0.0, -0.25)]


async def sums(channel: grpc.aio.Channel, model: str) -> list[list[float] | str]:
    """The answer to each pair, sent without a name: numbers, or the text of a failure."""
    answers: list[list[float] | str] = []
    for pair in PAIRS:
        tensor = pb.GenericTensor(dtype=pb.DT_FLOAT32, shape=[2], flat_float32=pair)
        message = pb.GrpsMessage(model=model, gtensors=pb.GenericTensorData(tensors=[tensor]))
        answer = await rpc(channel, "/grps.protos.v1.GrpsService/Predict", pb.GrpsMessage)(
            message, timeout=SECONDS
        )
        failed = answer.status.status == pb.Status.FAILURE
        answers.append(answer.status.msg if failed else list(answer.gtensors.tensors[0].flat_float32))
    return answers


@pytest.mark.parametrize("model", ["m-1", "m"])
async def test_the_model_becomes_another(tmp_path: Path, model: str) -> None:
    def write(**of: object) -> None:
        write_model(tmp_path / "m" / "1", MODEL.format(**of))

    write(name="a", datatype="FP32", plus=1)
    config = Config(grpc_port=0, rest_port=-1, model_control_mode="explicit", load_model="*")
    async with (
        Server([tmp_path], config) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        assert await sums(channel, model) == [[value + 1 for value in pair] for pair in PAIRS]
        write(name="b", datatype="FP32", plus=10)
        await server.dataplane.load_model(EVERYTHING, "m")
        assert await sums(channel, model) == [[value + 10 for value in pair] for pair in PAIRS]
        write(name="c", datatype="FP64", plus=1)
        await server.dataplane.load_model(EVERYTHING, "m")
        refused = "input 'c' of model 'm' expects DT_FLOAT64 (FP64), got DT_FLOAT32 (FP32)"
        assert await sums(channel, model) == [refused] * len(PAIRS)
        await server.dataplane.unload_model(EVERYTHING, "m")
        assert all(isinstance(answer, str) for answer in await sums(channel, model))
        write(name="d", datatype="FP32", plus=2)
        await server.dataplane.load_model(EVERYTHING, "m")
        assert await sums(channel, model) == [[value + 2 for value in pair] for pair in PAIRS]
        # Calls of other tasks, with other numbers, get their own.
        answers = await asyncio.gather(*[sums(channel, model) for _ in range(8)])
        assert answers == [[[value + 2 for value in pair] for pair in PAIRS]] * 8
