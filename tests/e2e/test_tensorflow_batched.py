"""A SavedModel that is batched as TensorFlow Serving's flags say, by `triglot tfserving` as a process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tests.e2e.server_process import QUICK
from tests.process import SECONDS, Triglot
from tests.protocol_clients.channel import grpc_channel
from tests.protocol_clients.rest import Rest
from tests.protocol_clients.tfserving import predict, predict_request

pytestmark = pytest.mark.newest
PARAMETERS = """
max_batch_size { value: 6 }
batch_timeout_micros { value: 60000000 }  # No test waits for it: the batch fills up before.
allowed_batch_sizes: 6
"""


@pytest.fixture(scope="module")
def ports(tensorflow: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """Those of a server of half plus two."""
    file = tmp_path_factory.mktemp("parameters") / "batching.config"
    file.write_text(PARAMETERS)
    flags = (f"--model_base_path={models / 'half_plus_two'}", "--model_name=m", "--enable_batching")
    with Triglot(
        *flags, f"--batching_parameters_file={file}", command="tfserving", environment=QUICK, python=tensorflow
    ) as server:
        yield server.ports()


def test_requests_of_both_interfaces_are_executed_together(ports: tuple[int, int]) -> None:
    with grpc_channel(ports[0]) as channel, ThreadPoolExecutor(3) as pool:
        first = pool.submit(predict, channel, predict_request("m", [1.0, 2.0]))
        other = pool.submit(predict, channel, predict_request("m", [3.0]))
        rest = pool.submit(Rest(ports[1]).post, "/v1/models/m:predict", {"instances": [4.0, 5.0, 6.0]})
        assert list(first.result(SECONDS).outputs["y"].float_val) == [2.5, 3.0]
        assert list(other.result(SECONDS).outputs["y"].float_val) == [3.5]
        assert rest.result(SECONDS) == (200, {"predictions": [4.0, 4.5, 5.0]})


def test_a_request_that_is_too_large(ports: tuple[int, int]) -> None:
    with grpc_channel(ports[0]) as channel, pytest.raises(grpc.RpcError) as caught:
        predict(channel, predict_request("m", [0.0] * 7))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "Task size 7 is larger than maximum input batch size 6"
