"""ONNX models without a configuration: batched when the server's option says so, as in Triton."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest

from process import SECONDS
from protocol_clients.channel import SERVICE
from triglot import testing
from triglot.pb.kserve import inference_pb2 as pb
from triglot.pb.kserve import model_config_pb2 as config_pb

pytest.importorskip("onnxruntime")

FILE = Path(__file__).resolve().parents[1] / "models_triton" / "auto_onnx" / "1" / "model.onnx"
TENSORS = """
input { name: "INPUT0" data_type: TYPE_FP32 dims: [-1, 16] }
input { name: "INPUT1" data_type: TYPE_FP32 dims: [-1, 16] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [-1, 16] }
output { name: "OUTPUT1" data_type: TYPE_FP32 dims: [-1, 16] }
"""


class Client:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def _call(self, method: str, request: bytes) -> bytes:
        reply: bytes = await self._channel.unary_unary(SERVICE + method)(request, timeout=SECONDS)
        return reply

    async def config(self) -> config_pb.ModelConfig:
        reply = await self._call("ModelConfig", pb.ModelConfigRequest(name="model").SerializeToString())
        return pb.ModelConfigResponse.FromString(reply).config

    async def sum(self, rows: int) -> np.ndarray:
        """OUTPUT0 of so many rows; raises the call's error."""
        array = np.arange(16 * rows, dtype=np.float32)
        tensors = [
            pb.ModelInferRequest.InferInputTensor(name=name, datatype="FP32", shape=[rows, 16])
            for name in ("INPUT0", "INPUT1")
        ]
        request = pb.ModelInferRequest(
            model_name="model",
            inputs=tensors,
            outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="OUTPUT0")],
            raw_input_contents=[array.tobytes()] * 2,
        )
        reply = pb.ModelInferResponse.FromString(await self._call("ModelInfer", request.SerializeToString()))
        assert np.array_equal(np.frombuffer(reply.raw_output_contents[0], np.float32), array + array)
        return array

    async def executions(self) -> int:
        reply = await self._call("ModelStatistics", b"")
        return pb.ModelStatisticsResponse.FromString(reply).model_stats[0].execution_count


@asynccontextmanager
async def served(folder: Path, size: int, config: str = "") -> AsyncIterator[Client]:
    (folder / "model" / "1").mkdir(parents=True)
    shutil.copy(FILE, folder / "model" / "1")
    if config:
        (folder / "model" / "config.pbtxt").write_text(config)
    async with (
        testing.serve(folder, default_max_batch_size=size) as server,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
    ):
        yield Client(channel)


@pytest.mark.parametrize("config", ["", 'parameters { key: "intra_op_thread_count" value { string_value: "1" } }'])
async def test_with_the_option(tmp_path: Path, config: str) -> None:
    async with served(tmp_path, 4, config) as client:
        found = await client.config()
        assert found.max_batch_size == 4
        assert list(found.dynamic_batching.preferred_batch_size) == [4]
        assert (
            [list(tensor.dims) for tensor in found.input]
            == [list(tensor.dims) for tensor in found.output]
            == [[16]] * 2
        )
        await client.sum(4)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await client.sum(5)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "batch-size must be <= 4" in str(raised.value.details())
        before = await client.executions()
        await asyncio.gather(*(client.sum(1) for _ in range(64)))
        assert before + 16 <= await client.executions() <= before + 64


async def test_a_size_that_is_configured_stays(tmp_path: Path) -> None:
    async with served(tmp_path, 4, "max_batch_size: 8") as client:
        found = await client.config()
        assert (found.max_batch_size, found.WhichOneof("scheduling_choice")) == (8, None)
        await client.sum(8)


async def test_one_row_at_a_time_is_not_batched(tmp_path: Path) -> None:
    async with served(tmp_path, 1) as client:
        found = await client.config()
        assert (found.max_batch_size, found.WhichOneof("scheduling_choice")) == (1, None)


@pytest.mark.parametrize(
    ("size", "config"),
    [(0, ""), (4, TENSORS), (4, TENSORS.partition("output")[0])],
    ids=["without the option", "a configuration that says all", "one that says the inputs"],
)
async def test_batches_of_any_size(tmp_path: Path, size: int, config: str) -> None:
    async with served(tmp_path, size, config) as client:
        found = await client.config()
        assert (found.max_batch_size, found.WhichOneof("scheduling_choice")) == (0, None)
        assert [list(tensor.dims) for tensor in found.input] == [[-1, 16]] * 2
        await client.sum(5)


@pytest.mark.parametrize(
    "scheduling",
    ["dynamic_batching { preferred_batch_size: 3 max_queue_delay_microseconds: 7 }", "sequence_batching {}"],
)
async def test_a_scheduling_stays(tmp_path: Path, scheduling: str) -> None:
    async with served(tmp_path, 4, scheduling) as client:
        found = await client.config()
        assert found.max_batch_size == 4
        assert found.WhichOneof("scheduling_choice") == scheduling.split(maxsplit=1)[0]
        assert found.dynamic_batching.max_queue_delay_microseconds in (0, 7)
