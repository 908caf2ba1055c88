"""gRPC's own services through their stock clients: health, and reflection as grpcurl and its like use it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.e2e.server_process import ServerProcess
from tests.transports.grpc_transport import transport_options

pytestmark = pytest.mark.both_transports

INFERENCE = "inference.GRPCInferenceService"
SERVING = health_pb2.HealthCheckResponse.SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
SECONDS = 30
KNOWN = [
    "",
    INFERENCE,
    "half_plus_two",
    "tensorflow.serving.PredictionService",
    # As TensorFlow Serving's own health service has them.
    "PredictionService",
    "ModelService",
]


@pytest.fixture
def channel(server: ServerProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc_address) as channel:
        yield channel


def test_the_transport_is_the_chosen_one(server: ServerProcess) -> None:
    """gRPC's core begins with a setting of its own, GRPC_ALLOW_TRUE_BINARY_METADATA; ours does not know it."""
    host, port = server.grpc_address.split(":")
    with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        with connection.makefile("rb") as answer:
            header = answer.read(9)
            settings = answer.read(int.from_bytes(header[:3]))
    assert header[3] == 4
    named = {int.from_bytes(settings[at : at + 2]) for at in range(0, len(settings), 6)}
    assert (0xFE03 in named) is (transport_options().get("grpc_transport") == "aio")


@pytest.mark.parametrize("service", KNOWN)
def test_health_check(channel: grpc.Channel, service: str) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    assert stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=SECONDS).status == SERVING


def test_health_check_of_an_unknown_service(channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="nope"), timeout=SECONDS)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(("service", "status"), [*((name, SERVING) for name in KNOWN), ("nope", SERVICE_UNKNOWN)])
def test_health_watch(channel: grpc.Channel, service: str, status: int) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=SECONDS)
    assert next(watch).status == status
    watch.cancel()


@pytest.mark.newest
def test_health_list(channel: grpc.Channel) -> None:
    statuses = health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest(), timeout=SECONDS).statuses
    assert set(KNOWN) <= set(statuses)
    assert {status.status for status in statuses.values()} == {SERVING}


@pytest.fixture
def pool(channel: grpc.Channel) -> descriptor_pool.DescriptorPool:
    return descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))


def test_reflection_lists_the_services(channel: grpc.Channel) -> None:
    assert set(ProtoReflectionDescriptorDatabase(channel).get_services()) >= {
        INFERENCE,
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }


def test_reflection_describes_every_service(channel: grpc.Channel, pool: descriptor_pool.DescriptorPool) -> None:
    for name in ProtoReflectionDescriptorDatabase(channel).get_services():
        service = pool.FindServiceByName(name)
        assert service.full_name == name
        assert service.methods


def test_a_call_made_of_reflected_descriptors(channel: grpc.Channel, pool: descriptor_pool.DescriptorPool) -> None:
    method = pool.FindServiceByName(INFERENCE).FindMethodByName("ModelInfer")
    assert method is not None
    request = message_factory.GetMessageClass(method.input_type)()
    call = channel.unary_unary(
        f"/{INFERENCE}/{method.name}",
        request_serializer=type(request).SerializeToString,
        response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
    )
    values: Any = request  # The fields are known at run time alone.
    values.model_name, values.id = "half_plus_two", "7"
    values.inputs.add(name="x", datatype="FP32", shape=[2]).contents.fp32_contents.extend([1, 2])
    response = call(values, timeout=SECONDS)
    assert (response.id, response.model_version) == ("7", "1")
    assert np.frombuffer(response.raw_output_contents[0], "<f4").tolist() == [2.5, 3]


def reflect(
    channel: grpc.Channel, version: str, *requests: reflection_pb2.ServerReflectionRequest
) -> list[reflection_pb2.ServerReflectionResponse]:
    """Both versions have the same messages; only v1alpha has a stock package."""
    call = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    return list(call(iter(requests), timeout=SECONDS))


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_by_raw_call(channel: grpc.Channel, version: str) -> None:
    request = reflection_pb2.ServerReflectionRequest
    services, files, unknown = reflect(
        channel,
        version,
        request(list_services="*", host="me"),
        request(file_containing_symbol=INFERENCE),
        request(file_by_filename="nothing.proto"),
    )
    assert INFERENCE in [service.name for service in services.list_services_response.service]
    assert services.valid_host == services.original_request.host == "me"
    (first, *_) = files.file_descriptor_response.file_descriptor_proto
    file = descriptor_pb2.FileDescriptorProto.FromString(first)
    assert file.package == "inference"
    assert "GRPCInferenceService" in [service.name for service in file.service]
    assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


@pytest.mark.parametrize(
    "symbol",
    [
        "inference.ModelInferRequest",
        "inference.ModelInferRequest.InferInputTensor",
        f"{INFERENCE}.ModelInfer",
        "inference.ModelInferRequest.model_name",
    ],
)
@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_finds_every_kind_of_symbol(channel: grpc.Channel, version: str, symbol: str) -> None:
    request = reflection_pb2.ServerReflectionRequest
    by_symbol, part = reflect(
        channel, version, request(file_containing_symbol=INFERENCE), request(file_containing_symbol=symbol)
    )
    assert not part.error_response.error_message
    assert part.file_descriptor_response == by_symbol.file_descriptor_response


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflected_files_come_with_what_they_import(channel: grpc.Channel, version: str) -> None:
    """Well-known types too: a client that knows nothing can build a pool of the answer alone."""
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=INFERENCE)
    (response,) = reflect(channel, version, request)
    files = map(
        descriptor_pb2.FileDescriptorProto.FromString,
        response.file_descriptor_response.file_descriptor_proto,
    )
    by_name = {file.name: file for file in files}
    assert {name for file in by_name.values() for name in file.dependency} <= set(by_name)
