"""KServe V2 over gRPC, through a real port: what only gRPC has (spec 0, 1, 2)."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

import triglot
from tests.protocol_clients.kserve_async import SERVICE as SERVICE_PATH
from tests.protocol_clients.kserve_async import Infer, Tensor, grpc_message
from tests.protocols.kserve_served import Served, serve_models
from tests.protocols.wire_bytes import PADDING, field
from triglot.core.errors import Code
from triglot.core.tensor import pack_bytes
from triglot.pb import service as service_descriptor
from triglot.pb.grpc.health.v1 import health_pb2 as health
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.kserve.service import SERVICE, KServe
from triglot.protocols.protocol import Context
from triglot.protocols.registry import rows
from triglot.protocols.rows import Kind
from triglot.transports.grpc_calls import endpoint_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.both_transports]
Request = pb.ModelInferRequest
X = {"name": "x", "datatype": "FP32", "shape": [1, 2]}
TWO = struct.pack("<2f", 1.0, 2.0)
INVALID = Code.INVALID_ARGUMENT
KINDS = {
    (False, False): Kind.UNARY,
    (False, True): Kind.SERVER_STREAM,
    (True, True): Kind.BIDI_STREAM,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    async with serve_models() as opened:
        yield opened


async def call(served: Served, rpc: str, request: Any, reply: Any) -> Any:
    """The reply, or the code and text of the error."""
    code, text, data = await served.grpc.call(
        rpc, request if isinstance(request, bytes) else request.SerializeToString()
    )
    return (code, text) if code is not Code.OK else reply.FromString(data)


async def infer(served: Served, **request: Any) -> Any:
    return await call(
        served, "ModelInfer", Request(**{"model_name": "identity_fp32", **request}), pb.ModelInferResponse
    )


async def assert_that_all_is_well(served: Served) -> None:
    reply = await infer(served, inputs=[X], raw_input_contents=[TWO])
    assert list(reply.raw_output_contents) == [TWO]


async def test_every_row_is_a_method_of_its_service() -> None:
    server = triglot.Server([])
    services, _ = rows(Context(server.dataplane, server.telemetry, server.config))
    assert len(services) == 9
    for service in services:
        methods = service_descriptor(service.name).methods_by_name
        names = [method.name for method in service.methods]
        assert len(set(names)) == len(names)
        for method in service.methods:
            described = methods[method.name]
            assert method.kind is KINDS[described.client_streaming, described.server_streaming], method.name


async def test_methods_of_one_name_are_counted_separately() -> None:
    """TensorFlow Serving's and Vertex AI's PredictionService each have a Predict."""
    server = triglot.Server([])
    services, _ = rows(Context(server.dataplane, server.telemetry, server.config))
    methods = [(service, method) for service in services for method in service.methods]
    endpoints = [endpoint_of(server.telemetry, *row) for row in methods]
    assert [endpoint.rpc for endpoint in endpoints] == [
        f"{service.name}/{method.name}" for service, method in methods
    ]
    assert len(set(map(id, endpoints))) == len(methods)
    assert [endpoint_of(server.telemetry, *row) for row in methods] == endpoints


async def test_the_six_calls_of_the_protocol_are_served() -> None:
    server = triglot.Server([])
    service = KServe(server.dataplane, "name", server.telemetry).grpc_service()
    names = {method.name for method in service.methods}
    assert {"ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer"} <= names


async def test_golden_request_and_response(served: Served) -> None:
    """The request of spec A.1 for another model; the answer has the form of A.2."""
    tail = bytes.fromhex("1a0137 2a0d 0a0178 120446503332 1a020102 3203 0a0179 3a08 0000803f 00000040")
    reply = await call(served, "ModelInfer", field(1, "identity_fp32") + tail, pb.ModelInferResponse)
    assert reply == pb.ModelInferResponse(
        model_name="identity_fp32",
        model_version="1",
        id="7",
        outputs=[{"name": "y", "datatype": "FP32", "shape": [1, 2]}],
        raw_output_contents=[TWO],
    )


async def test_every_output_is_raw_and_in_order(served: Served) -> None:
    numbers = pb.InferTensorContents(int_contents=[5])
    empty = pb.InferTensorContents()
    for contents, shape, raw in ((numbers, [1], [10, 0]), (empty, [0], [])):
        tensors = [{"name": name, "datatype": "INT32", "shape": shape, "contents": contents} for name in "ab"]
        reply = await infer(served, model_name="two_inputs", inputs=tensors)
        assert [output.name for output in reply.outputs] == ["sum", "difference"]
        assert not any(output.HasField("contents") for output in reply.outputs)
        assert list(reply.raw_output_contents) == ([struct.pack("<i", n) for n in raw] or [b"", b""])


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (
            Request(inputs=[{**X, "contents": {"fp32_contents": [1, 2]}}], raw_input_contents=[TWO]),
            "contents field must not be specified when using raw_input_contents for 'x' for model 'identity_fp32'",
        ),
        (Request(inputs=[{}] * 1025), "the request has more than 1024 inputs"),
    ],
)
async def test_requests_that_are_refused(served: Served, request_: pb.ModelInferRequest, text: str) -> None:
    request_.model_name = "identity_fp32"
    for padding in (b"", PADDING):
        assert await call(served, "ModelInfer", request_.SerializeToString() + padding, None) == (INVALID, text)
        await assert_that_all_is_well(served)


async def test_a_region_of_shared_memory_is_not_found(served: Served) -> None:
    parameters = {
        "shared_memory_region": pb.InferParameter(string_param="r"),
        "shared_memory_byte_size": pb.InferParameter(int64_param=8),
    }
    found = await infer(served, inputs=[{**X, "parameters": parameters}])
    assert found == (Code.NOT_FOUND, "Unable to find shared memory region: 'r'")


@pytest.mark.parametrize(
    "rpc",
    [
        "ServerLive",
        "ServerReady",
        "ModelReady",
        "ServerMetadata",
        "ModelMetadata",
        "ModelInfer",
        "RepositoryIndex",
    ],
)
@pytest.mark.parametrize(
    "data", [b"\xff", b"\x0a\x05a", b"\x0a\x01\xff", b"\x0b" * 5000, b"\x0a\x01\xff" + PADDING]
)
async def test_bytes_that_are_no_message(served: Served, rpc: str, data: bytes) -> None:
    code, text, _ = await served.grpc.call(rpc, data)
    if data[:2] == b"\x0a\x01" and rpc in ("ServerLive", "ServerReady", "ServerMetadata"):
        assert code is Code.OK  # An unknown field, whatever it holds.
    else:
        assert code is INVALID
        assert text.startswith("the request is not a valid ")
    await assert_that_all_is_well(served)


async def test_parameters_that_clients_send_without_a_need(served: Served) -> None:
    """Spec 0.8 and 0.9: unknown tensor parameters, a streaming flag on a unary call, either kind of priority."""
    size = {"binary_data_size": pb.InferParameter(int64_param=8)}
    for priority in (pb.InferParameter(int64_param=1), pb.InferParameter(uint64_param=1)):
        parameters = {
            "triton_enable_empty_final_response": pb.InferParameter(bool_param=False),
            "priority": priority,
            "timeout": pb.InferParameter(int64_param=5_000_000),
            "sequence_id": pb.InferParameter(string_param="u1"),
        }
        reply = await infer(
            served, inputs=[{**X, "parameters": size}], raw_input_contents=[TWO], parameters=parameters
        )
        assert list(reply.raw_output_contents) == [TWO]


async def test_typed_inputs(served: Served) -> None:
    reply = await infer(served, inputs=[{**X, "contents": {"fp32_contents": [1, 2]}}])
    assert list(reply.raw_output_contents) == [TWO]
    text = {"name": "x", "datatype": "BYTES", "shape": [1, 2], "contents": {"bytes_contents": [b"\xff", b""]}}
    reply = await infer(served, model_name="identity_bytes", inputs=[text])
    assert list(reply.raw_output_contents) == [b"\1\0\0\0\xff\0\0\0\0"]


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("versions", "", True),
        ("versions", "10", True),
        ("versions", "3", False),
        ("nothing", "", False),
        ("", "", False),
        ("versions", "one", False),
        ("versions", "01", INVALID),
        ("versions", "-1", INVALID),
    ],
)
async def test_model_ready(served: Served, name: str, version: str, expected: bool | Code) -> None:
    found = await call(
        served, "ModelReady", pb.ModelReadyRequest(name=name, version=version), pb.ModelReadyResponse
    )
    assert (found[0] if isinstance(found, tuple) else found.ready) == expected


async def test_live_ready_and_metadata_of_the_server(served: Served) -> None:
    assert (await call(served, "ServerLive", b"", pb.ServerLiveResponse)).live
    assert (await call(served, "ServerReady", b"", pb.ServerReadyResponse)).ready
    metadata = await call(served, "ServerMetadata", b"", pb.ServerMetadataResponse)
    assert (metadata.name, metadata.version) == ("triglot", triglot.__version__)
    assert {"binary_tensor_data", "parameters", "classification", "statistics"} <= set(metadata.extensions)


async def test_metadata_of_models(served: Served) -> None:
    request = pb.ModelMetadataRequest(name="batching")
    metadata = await call(served, "ModelMetadata", request, pb.ModelMetadataResponse)
    assert metadata == pb.ModelMetadataResponse(
        name="batching",
        versions=["1"],
        platform="python",
        inputs=[
            {"name": "rows", "datatype": "FP32", "shape": [-1, 3]},
            {"name": "factor", "datatype": "FP32", "shape": [-1]},
        ],
        outputs=[{"name": "scaled", "datatype": "FP32", "shape": [-1, 3]}],
    )
    for version, versions in (("", ["1", "2", "10"]), ("2", ["2"])):
        request = pb.ModelMetadataRequest(name="versions", version=version)
        assert list((await call(served, "ModelMetadata", request, pb.ModelMetadataResponse)).versions) == versions
    request = pb.ModelMetadataRequest(name="nothing")
    assert await call(served, "ModelMetadata", request, None) == (
        Code.NOT_FOUND,
        "Request for unknown model: 'nothing' is not found",
    )
    request = pb.ModelMetadataRequest(name="versions", version="one")
    code, text = await call(served, "ModelMetadata", request, None)
    assert code is Code.NOT_FOUND
    assert text == "Request for unknown model: 'versions' version one is not found, only 1, 2, 10"


@pytest.mark.parametrize(
    "rpc",
    ["Nothing", "/inference.Nothing/ModelInfer"],
)
async def test_calls_that_are_not_offered(served: Served, rpc: str) -> None:
    code, _, _ = await served.grpc.call(rpc, b"")
    assert code is Code.UNIMPLEMENTED


async def test_a_large_answer_to_a_small_request(served: Served) -> None:
    """Spec 0.10: the usual limit of 4 MiB is the client's to raise, not ours to keep."""
    shape = [1, 2**21 + 1]
    tensor = Tensor("x", "FP32", shape, bytes(4 * shape[1]))
    message = grpc_message(Infer("identity_fp32", [tensor]))
    reply = await call(served, "ModelInfer", message, pb.ModelInferResponse)
    assert len(reply.raw_output_contents[0]) == 4 * shape[1]


@pytest.mark.parametrize(
    ("service", "code", "status"),
    [
        ("", Code.OK, health.HealthCheckResponse.SERVING),
        (SERVICE, Code.OK, health.HealthCheckResponse.SERVING),
        ("versions", Code.OK, health.HealthCheckResponse.SERVING),
        ("nothing", Code.NOT_FOUND, 0),
    ],
)
async def test_health(served: Served, service: str, code: Code, status: int) -> None:
    request = health.HealthCheckRequest(service=service).SerializeToString()
    found, _, data = await served.grpc.call("/grpc.health.v1.Health/Check", request)
    assert found is code
    assert health.HealthCheckResponse.FromString(data).status == status


async def test_loading_is_refused_whatever_field_names_the_model(served: Served) -> None:
    """Spec 0.15: the model's name may come where others put the repository's."""
    for rpc in ("RepositoryModelLoad", "RepositoryModelUnload"):
        for request in (field(1, "versions"), field(2, "versions")):
            code, text, _ = await served.grpc.call(rpc, request)
            assert code is Code.UNAVAILABLE
            assert text.startswith("explicit model load / unload is not allowed")
        code, text, _ = await served.grpc.call(rpc, field(1, "r") + field(2, "versions"))
        assert (code, text) == (Code.UNIMPLEMENTED, "'repository_name' specification is not supported")


@pytest.mark.parametrize("model", ["misbehaving", "misbehaving_async"])
@pytest.mark.parametrize("what", ["value error", "cancelled", "exit"])
async def test_a_stream_outlives_a_failure_of_the_models_own(served: Served, model: str, what: str) -> None:
    stream = served.grpc.channel.stream_stream(SERVICE_PATH + "ModelStreamInfer")(timeout=5)
    for word in (what, "not at all"):
        how = Tensor("how", "BYTES", [1], pack_bytes([word.encode()]))
        await stream.write(grpc_message(Infer(model, [how], id=word)).SerializeToString())
    replies = [pb.ModelStreamInferResponse.FromString(await stream.read()) for _ in range(2)]
    await stream.done_writing()
    assert [reply.infer_response.id for reply in replies] == [what, "not at all"]
    assert [bool(reply.error_message) for reply in replies] == [True, False]
    assert "secret" not in replies[0].error_message
