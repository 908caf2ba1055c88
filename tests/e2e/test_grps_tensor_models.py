"""Tensor models for grps' clients: each kind of message, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.e2e.server_process import ServerProcess
from tests.protocol_clients.channel import grpc_channel
from tests.protocol_clients.grps import failure, post, predict_streaming, predicted, tensors
from triglot.pb.grps.grps_pb2 import (
    DT_FLOAT32,
    DT_FLOAT64,
    DT_INT32,
    DT_INT64,
    DT_STRING,
    DT_UINT8,
    GenericMapData,
    GenericTensor,
    GrpsMessage,
)

MODELS = Path(__file__).resolve().parents[1] / "models"
OK = {"code": 200, "msg": "OK", "status": "SUCCESS"}


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@pytest.fixture(scope="module")
def channel(server: ServerProcess) -> Iterator[grpc.Channel]:
    """To the gRPC port of the server of small models."""
    with grpc_channel(port_of(server.grpc_address)) as channel:
        yield channel


@pytest.fixture(scope="module")
def two_inputs() -> Iterator[ServerProcess]:
    """A server of one model alone."""
    with ServerProcess(str(MODELS / "two_inputs")) as process:
        yield process


def floats(*values: float, name: str = "") -> GenericTensor:
    return GenericTensor(name=name, dtype=DT_FLOAT32, shape=[len(values)], flat_float32=values)


@pytest.mark.parametrize("model", ["half_plus_two-1", "half_plus_two"])
@pytest.mark.parametrize("name", ["x", ""])
def test_gtensors(channel: grpc.Channel, model: str, name: str) -> None:
    answer = predicted(channel, tensors(floats(1, 2, 5, name=name), model=model))
    assert list(answer.gtensors.tensors) == [floats(2.5, 3, 4.5, name="y")]


def test_ndarray(server: ServerProcess) -> None:
    query = "model=half_plus_two-1"
    status, answer = post(server.rest_address, {"ndarray": [1, 2, 5]}, query)
    assert (status, answer["status"]) == (200, OK)
    (tensor,) = answer["gtensors"]["tensors"]
    assert tensor == {"name": "y", "dtype": "DT_FLOAT32", "shape": [3], "flat_float32": [2.5, 3, 4.5]}
    status, answer = post(server.rest_address, {"ndarray": [1, 2, 5]}, f"{query}&return-ndarray=true")
    assert (status, answer["ndarray"]) == (200, [2.5, 3, 4.5])


@pytest.mark.parametrize(
    ("model", "data", "tensor"),
    [
        ("identity_int32-1", [[1, -2]], {"dtype": "DT_INT32", "flat_int32": [1, -2]}),
        ("identity_uint8-1", [[0, 255]], {"dtype": "DT_UINT8", "flat_uint8": [0, 255]}),
        ("identity_fp64-1", [[0.5, 2]], {"dtype": "DT_FLOAT64", "flat_float64": [0.5, 2]}),
        ("identity_fp16-1", [[0.5, 2]], {"dtype": "DT_FLOAT16", "flat_float16": [0.5, 2]}),
        ("identity_int64-1", [[1, -2]], {"dtype": "DT_INT64", "flat_int64": ["1", "-2"]}),
    ],
)
def test_ndarray_becomes_what_the_model_takes(
    server: ServerProcess, model: str, data: object, tensor: dict[str, object]
) -> None:
    status, answer = post(server.rest_address, {"ndarray": data}, f"model={model}")
    assert status == 200, answer
    assert answer["gtensors"]["tensors"] == [{"name": "y", "shape": [1, 2]} | tensor]


@pytest.mark.parametrize(("model", "data"), [("identity_int32-1", [[1.5]]), ("identity_uint8-1", [[256]])])
def test_ndarray_that_would_lose_something(server: ServerProcess, model: str, data: object) -> None:
    status, answer = post(server.rest_address, {"ndarray": data}, f"model={model}")
    assert (status, answer["status"]["status"]) == (500, "FAILURE"), answer


def test_text_and_bytes(server: ServerProcess, channel: grpc.Channel) -> None:
    """A single element comes back as what it came as."""
    assert predicted(channel, GrpsMessage(model="uppercase-1", str_data="grüße")).str_data == "GRÜSSE"
    assert predicted(channel, GrpsMessage(model="uppercase-1", bin_data=b"abc")).bin_data == b"ABC"
    assert post(server.rest_address, {"str_data": "abc"}, "model=uppercase-1") == (
        200,
        {"status": OK, "str_data": "ABC"},
    )
    assert post(server.rest_address, b"abc", "model=uppercase-1") == (200, b"ABC")


def test_identity_of_text_and_bytes(channel: grpc.Channel) -> None:
    """A single element fits an input of two dims, too."""
    assert predicted(channel, GrpsMessage(model="identity_bytes-1", str_data="中")).str_data == "中"
    for data in (b"\x00\xff", b""):
        answer = predicted(channel, GrpsMessage(model="identity_bytes-1", bin_data=data))
        assert (answer.WhichOneof("data_oneof"), answer.bin_data) == ("bin_data", data)


def test_texts_in_a_tensor(channel: grpc.Channel) -> None:
    request = GenericTensor(dtype=DT_STRING, shape=[2], flat_string=["a", "é"])
    answer = predicted(channel, tensors(request, model="uppercase-1"))
    (tensor,) = answer.gtensors.tensors
    assert (tensor.name, tensor.dtype, list(tensor.flat_string)) == ("upper", DT_STRING, ["A", "É"])


def integers(*values: int, name: str = "") -> GenericTensor:
    return GenericTensor(name=name, dtype=DT_INT32, shape=[len(values)], flat_int32=values)


def test_two_inputs(two_inputs: ServerProcess) -> None:
    """By name in any order, or all without a name in the model's order; the only model needs no name."""
    answers = [integers(8, 10, name="sum"), integers(2, 2, name="difference")]
    with grpc_channel(port_of(two_inputs.grpc_address)) as channel:
        for listed in (
            [integers(5, 6, name="a"), integers(3, 4, name="b")],
            [integers(3, 4, name="b"), integers(5, 6, name="a")],
            [integers(5, 6), integers(3, 4)],
        ):
            assert list(predicted(channel, tensors(*listed)).gtensors.tensors) == answers
        single = GrpsMessage(gmap=GenericMapData(s_i32={"a": 5, "b": 3}))
        assert list(predicted(channel, single).gtensors.tensors) == [
            integers(8, name="sum"),
            integers(2, name="difference"),
        ]


def test_what_a_model_cannot_take(two_inputs: ServerProcess) -> None:
    with grpc_channel(port_of(two_inputs.grpc_address)) as channel:
        for request, part in (
            (tensors(integers(1, name="a")), "b"),
            (tensors(integers(1, name="a"), integers(1, name="c")), "c"),
            (tensors(integers(1, name="a"), integers(1)), "name"),
            (tensors(floats(1, name="a"), integers(1, name="b")), "FP32"),
            (tensors(GenericTensor(dtype=DT_INT32, shape=[2], flat_int32=[1]), integers(1)), "2"),
            (GrpsMessage(str_data="1"), "str_data"),
            (GrpsMessage(gmap=GenericMapData(s_i32={"a": 1})), "b"),
            (GrpsMessage(), ""),
        ):
            text = failure(channel, request)
            assert text
            assert part in text, text


def test_names_of_models(channel: grpc.Channel) -> None:
    for model in ("half_plus_two-9", "nothing-1", "nothing"):
        text = failure(channel, tensors(floats(1), model=model))
        assert model in text
        assert "not found" in text
    assert "not found" in failure(channel, tensors(floats(1)))


def test_streams_of_a_tensor_model(server: ServerProcess, channel: grpc.Channel) -> None:
    """A generator's answers, one message each; a model that answers once streams one."""
    messages = predict_streaming(channel, GrpsMessage(model="token_stream-1", str_data="to be or not"))
    assert [message.str_data for message in messages] == ["to", "be", "or", "not"]
    assert {message.status.code for message in messages} == {200}
    assert "PredictStreaming" in failure(channel, GrpsMessage(model="token_stream-1", str_data="to be"))
    (message,) = predict_streaming(channel, tensors(floats(1), model="half_plus_two-1"))
    assert list(message.gtensors.tensors) == [floats(2.5, name="y")]
    assert post(server.rest_address, b"to be", "model=token_stream-1&streaming=true") == (200, b"tobe")


@pytest.mark.parametrize(
    ("model", "tensor"),
    [
        ("identity_uint8-1", GenericTensor(name="x", dtype=DT_UINT8, shape=[1, 2], flat_uint8=[0, 255])),
        ("identity_int64-1", GenericTensor(name="x", dtype=DT_INT64, shape=[1, 1], flat_int64=[-(2**63)])),
        ("identity_fp64-1", GenericTensor(name="x", dtype=DT_FLOAT64, shape=[2, 1], flat_float64=[0.1, 1e300])),
    ],
)
def test_identities(channel: grpc.Channel, model: str, tensor: GenericTensor) -> None:
    (answer,) = predicted(channel, tensors(tensor, model=model)).gtensors.tensors
    tensor.name = "y"
    assert answer == tensor
