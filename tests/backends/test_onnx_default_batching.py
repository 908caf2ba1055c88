"""ONNX models without a configuration: batched when the server's option says so, as in Triton."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.protocol_clients.channel import SERVICE
from triglot import testing
from triglot.core.errors import InvalidArgument
from triglot.pb.kserve import inference_pb2 as pb
from triglot.pb.kserve import model_config_pb2 as config_pb
from triglot.testing import KServeGrpc

pytest.importorskip("onnxruntime")

FILE = Path(__file__).resolve().parents[1] / "models_triton" / "auto_onnx" / "1" / "model.onnx"
TENSORS = """
input { name: "INPUT0" data_type: TYPE_FP32 dims: [-1, 16] }
input { name: "INPUT1" data_type: TYPE_FP32 dims: [-1, 16] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [-1, 16] }
output { name: "OUTPUT1" data_type: TYPE_FP32 dims: [-1, 16] }
"""


class Client(KServeGrpc):
    def config(self) -> config_pb.ModelConfig:
        request = pb.ModelConfigRequest(name="model")
        config: config_pb.ModelConfig = self.call(SERVICE + "ModelConfig", request, pb.ModelConfigResponse).config
        return config

    def sum(self, rows: int) -> None:
        """Call with so many rows. Raise the call's error."""
        array = np.arange(16 * rows, dtype=np.float32).reshape(rows, 16)
        outputs = self.infer("model", {"INPUT0": array, "INPUT1": array})
        assert np.array_equal(outputs["OUTPUT0"], array + array)

    def executions(self) -> int:
        reply = self.call(SERVICE + "ModelStatistics", pb.ModelStatisticsRequest(), pb.ModelStatisticsResponse)
        count: int = reply.model_stats[0].execution_count
        return count


@contextmanager
def served(folder: Path, size: int, config: str = "") -> Iterator[Client]:
    (folder / "model" / "1").mkdir(parents=True)
    shutil.copy(FILE, folder / "model" / "1")
    if config:
        (folder / "model" / "config.pbtxt").write_text(config)
    with testing.serve(folder, default_max_batch_size=size) as server, Client(server) as client:
        yield client


@pytest.mark.parametrize("config", ["", 'parameters { key: "intra_op_thread_count" value { string_value: "1" } }'])
def test_with_the_option(tmp_path: Path, config: str) -> None:
    with served(tmp_path, 4, config) as client:
        found = client.config()
        assert found.max_batch_size == 4
        assert list(found.dynamic_batching.preferred_batch_size) == [4]
        assert (
            [list(tensor.dims) for tensor in found.input]
            == [list(tensor.dims) for tensor in found.output]
            == [[16]] * 2
        )
        client.sum(4)
        with pytest.raises(InvalidArgument, match="batch-size must be <= 4"):
            client.sum(5)
        before = client.executions()
        with ThreadPoolExecutor(64) as pool:
            list(pool.map(client.sum, [1] * 64))
        assert before + 16 <= client.executions() <= before + 64


def test_a_size_that_is_configured_stays(tmp_path: Path) -> None:
    with served(tmp_path, 4, "max_batch_size: 8") as client:
        found = client.config()
        assert (found.max_batch_size, found.WhichOneof("scheduling_choice")) == (8, None)
        client.sum(8)


def test_one_row_at_a_time_is_not_batched(tmp_path: Path) -> None:
    with served(tmp_path, 1) as client:
        found = client.config()
        assert (found.max_batch_size, found.WhichOneof("scheduling_choice")) == (1, None)


@pytest.mark.parametrize(
    ("size", "config"),
    [(0, ""), (4, TENSORS), (4, TENSORS.partition("output")[0])],
    ids=["without the option", "a configuration that says all", "one that says the inputs"],
)
def test_batches_of_any_size(tmp_path: Path, size: int, config: str) -> None:
    with served(tmp_path, size, config) as client:
        found = client.config()
        assert (found.max_batch_size, found.WhichOneof("scheduling_choice")) == (0, None)
        assert [list(tensor.dims) for tensor in found.input] == [[-1, 16]] * 2
        client.sum(5)


@pytest.mark.parametrize(
    "scheduling",
    ["dynamic_batching { preferred_batch_size: 3 max_queue_delay_microseconds: 7 }", "sequence_batching {}"],
)
def test_a_scheduling_stays(tmp_path: Path, scheduling: str) -> None:
    with served(tmp_path, 4, scheduling) as client:
        found = client.config()
        assert found.max_batch_size == 4
        assert found.WhichOneof("scheduling_choice") == scheduling.split(maxsplit=1)[0]
        assert found.dynamic_batching.max_queue_delay_microseconds in (0, 7)
