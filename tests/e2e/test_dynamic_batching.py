"""Dynamic batching as clients of a real server meet it: who shares a batch, who is refused (spec 5.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

from tests.e2e.server_process import ServerProcess
from tests.process import SECONDS
from tests.protocol_clients.channel import SERVICE, grpc_channel, rpc
from tests.protocol_clients.rest import Rest
from tests.protocol_clients.tfserving import failure, predict, predict_request
from tests.waiting import ever_later
from triglot.pb.kserve import inference_pb2 as pb

MODEL = """
import numpy as np

import triglot


class Doubles(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1]), triglot.TensorSpec("size", "INT32", [-1])]
    max_batch_size = 8

    def infer(self, inputs):
        x = inputs["x"]
        if (x < 0).any():
            raise triglot.InvalidArgument("below zero")
        return {"y": x * 2, "size": np.full(len(x), len(x), np.int32)}
"""
AT_ONCE = "dynamic_batching { }"
FULL = "dynamic_batching { max_queue_delay_microseconds: 3600000000 }"
IMPATIENT = """dynamic_batching {
  max_queue_delay_microseconds: 3600000000
  default_queue_policy { default_timeout_microseconds: 3600000000 allow_timeout_override: true }
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Models that run at once, that wait for a full batch, and that let a request say how long it waits."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in (("at_once", AT_ONCE), ("full", FULL), ("impatient", IMPATIENT)):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.py").write_text(MODEL)
        (folder / name / "config.pbtxt").write_text(config)
    with ServerProcess(str(folder)) as process:
        yield process


@pytest.fixture
def channel(server: ServerProcess) -> Iterator[grpc.Channel]:
    with grpc_channel(int(server.grpc_address.rpartition(":")[2])) as channel:
        yield channel


def request(model: str, *values: float, **parameters: int) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model)
    message.inputs.add(name="x", datatype="FP32", shape=[len(values)])
    message.raw_input_contents.append(np.array(values, "<f4").tobytes())
    for name, value in parameters.items():
        message.parameters[name].int64_param = value
    return message


def ask(channel: grpc.Channel, message: pb.ModelInferRequest, timeout: float = SECONDS) -> Any:
    """A call that continues by itself."""
    return rpc(channel, "ModelInfer", pb.ModelInferResponse).future(message, timeout=timeout)


def answer(response: pb.ModelInferResponse) -> tuple[list[float], list[int]]:
    """What was doubled, and with how many rows in all."""
    tensors = dict(zip([output.name for output in response.outputs], response.raw_output_contents, strict=True))
    return np.frombuffer(tensors["y"], "<f4").tolist(), np.frombuffer(tensors["size"], "<i4").tolist()


def doubled(*values: float) -> tuple[list[float], list[int]]:
    """The answer in a full batch."""
    return [2 * value for value in values], [8] * len(values)


def test_a_lone_request_is_executed_at_once(channel: grpc.Channel) -> None:
    assert answer(ask(channel, request("at_once", 1, 2)).result()) == ([2, 4], [2, 2])


def test_calls_at_the_same_time_share_a_batch_and_each_gets_its_own_rows(channel: grpc.Channel) -> None:
    calls = [ask(channel, request("full", *values)) for values in ([1], [2, 3], [4, 5, 6], [7], [8])]
    answers = [answer(call.result()) for call in calls]
    assert answers == [doubled(1), doubled(2, 3), doubled(4, 5, 6), doubled(7), doubled(8)]


def test_clients_of_every_protocol_share_a_batch(server: ServerProcess, channel: grpc.Channel) -> None:
    rest = Rest(int(server.rest_address.rpartition(":")[2]))
    tensor = {"name": "x", "datatype": "FP32", "shape": [2], "data": [3, 4]}
    with ThreadPoolExecutor(4) as threads:
        kserve: Future[Any] = threads.submit(rest.post, "/v2/models/full/infer", {"inputs": [tensor]})
        tensorflow_rest: Future[Any] = threads.submit(rest.post, "/v1/models/full:predict", {"instances": [5]})
        tensorflow = threads.submit(predict, channel, predict_request("full", [6, 7, 8]))
        assert answer(ask(channel, request("full", 1, 2)).result()) == doubled(1, 2)
        status, body = kserve.result()
        assert (status, [tensor["data"] for tensor in body["outputs"]]) == (200, [[6, 8], [8, 8]])
        assert tensorflow_rest.result() == (200, {"predictions": [{"y": 10, "size": 8}]})
        assert list(tensorflow.result().outputs["y"].float_val) == [12, 14, 16]


def test_streams_share_a_batch_with_other_calls(channel: grpc.Channel) -> None:
    stream = channel.stream_stream(
        f"{SERVICE}ModelStreamInfer",
        request_serializer=pb.ModelInferRequest.SerializeToString,
        response_deserializer=pb.ModelStreamInferResponse.FromString,
    )
    messages: Sequence[pb.ModelInferRequest] = [request("full", value) for value in (1, 2, 3)]
    other = ask(channel, request("full", 4, 5, 6, 7, 8))
    responses = list(stream(iter(messages), timeout=SECONDS))
    assert [response.error_message for response in responses] == [""] * 3
    assert sorted(answer(response.infer_response) for response in responses) == [
        doubled(1),
        doubled(2),
        doubled(3),
    ]
    assert answer(other.result()) == doubled(4, 5, 6, 7, 8)


def test_an_error_reaches_every_member_and_the_next_batch_runs(channel: grpc.Channel) -> None:
    calls = [ask(channel, request("full", value)) for value in (1, 2, 3, -4, 5, 6, 7, 8)]
    expected = (grpc.StatusCode.INVALID_ARGUMENT, "below zero")
    assert [failure(call.result) for call in calls] == [expected] * 8
    assert answer(ask(channel, request("full", *range(8))).result()) == doubled(*range(8))


def test_who_leaves_leaves_the_others_alone(channel: grpc.Channel) -> None:
    cancelled = ask(channel, request("full", 1, 2))
    cancelled.cancel()
    assert answer(ask(channel, request("full", *range(8))).result()) == doubled(*range(8))


def test_a_request_is_not_held_back_until_its_deadline(channel: grpc.Channel) -> None:
    for later in ever_later(1):
        call = ask(channel, request("full", 1), timeout=later)
        if (error := call.exception()) is None:
            assert answer(call.result()) == ([2], [1])
            break
        assert isinstance(error, grpc.RpcError)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_request_that_waits_longer_than_it_says_is_refused(channel: grpc.Channel) -> None:
    call = ask(channel, request("impatient", 1, timeout=1000))
    assert failure(call.result) == (grpc.StatusCode.UNAVAILABLE, "Request timeout expired")


def test_what_is_larger_than_a_batch_is_refused(channel: grpc.Channel) -> None:
    code, text = failure(ask(channel, request("at_once", *range(9))).result)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert text.endswith("inference request batch-size must be <= 8 for 'at_once'")


def test_many_clients(channel: grpc.Channel) -> None:
    calls = [ask(channel, request("at_once", *range(value, value + 1 + value % 4))) for value in range(300)]
    for value, call in enumerate(calls):
        assert answer(call.result())[0] == [2 * index for index in range(value, value + 1 + value % 4)]
