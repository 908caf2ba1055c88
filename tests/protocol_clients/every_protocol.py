"""Makes the same call over each interface of a server in this process: a float as input, a float as output.

The functions return the output or the error in the terms of `Outcome`, whatever the protocol.
"""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import grpc
import grpc.aio

from tests.transports.live import Live
from triglot.core.errors import Code
from triglot.pb.grps import grps_pb2
from triglot.pb.kserve import inference_pb2
from triglot.pb.tfserving import predict_pb2, tensor_pb2

MODEL = "scripted"
PREDICT = "/tensorflow.serving.PredictionService/Predict"
GRPS = "/grps.protos.v1.GrpsService/"
_CODES = {
    200: Code.OK,
    400: Code.INVALID_ARGUMENT,
    429: Code.RESOURCE_EXHAUSTED,
    503: Code.UNAVAILABLE,
    504: Code.DEADLINE_EXCEEDED,
}
_FLOAT = struct.Struct("<f")


class Outcome(NamedTuple):
    """The result of a call. `retry`: seconds after which the client may retry, if the response has that."""

    code: Code
    text: str = ""
    value: float = 0.0
    retry: float | None = None


Interface = Callable[..., Awaitable[Outcome]]
"""Makes a call over one interface: `interface(live, value)`; KServe's also accept `parameters`."""


# --- gRPC ---


def _hint(metadata: Any) -> float | None:
    # Iterated as pairs, which works in every release of grpcio.
    value = dict(iter(metadata or ())).get("grpc-retry-pushback-ms")
    return None if value is None else int(value) / 1000


async def _grpc(server: Live, method: str, request: bytes, timeout: float | None = None) -> tuple[Outcome, bytes]:
    call = server.channel.unary_unary(method)(request, timeout=timeout)
    try:
        answer = bytes(await call)
    except grpc.aio.AioRpcError as error:
        code = Code(error.code().value[0])
        return Outcome(code, str(error.details()), retry=_hint(error.trailing_metadata())), b""
    return Outcome(Code.OK, retry=_hint(await call.trailing_metadata())), answer


def infer_message(value: float, parameters: dict[str, int] | None = None) -> inference_pb2.ModelInferRequest:
    message = inference_pb2.ModelInferRequest(model_name=MODEL, raw_input_contents=[_FLOAT.pack(value)])
    message.inputs.add(name="x", datatype="FP32", shape=[1])
    for name, number in (parameters or {}).items():
        message.parameters[name].int64_param = number
    return message


async def kserve_grpc(
    server: Live, value: float, parameters: dict[str, int] | None = None, timeout: float | None = None
) -> Outcome:
    request = infer_message(value, parameters).SerializeToString()
    outcome, answer = await _grpc(server, "/inference.GRPCInferenceService/ModelInfer", request, timeout)
    return outcome._replace(value=_FLOAT.unpack(answer[-4:])[0]) if answer else outcome


async def kserve_stream(server: Live, value: float, parameters: dict[str, int] | None = None) -> Outcome:
    async def requests() -> AsyncIterator[bytes]:
        yield infer_message(value, parameters).SerializeToString()

    *_, answer = [answer async for answer in server.stream_infer(requests())]
    if answer.error_message:
        # Errors of a stream have a text, but no code.
        text = answer.error_message
        full, late = "Exceeds maximum queue size" in text, " passed " in text
        code = Code.RESOURCE_EXHAUSTED if full else Code.DEADLINE_EXCEEDED if late else Code.UNKNOWN
        return Outcome(code, text)
    return Outcome(Code.OK, value=_FLOAT.unpack(answer.infer_response.raw_output_contents[0])[0])


async def tfserving_grpc(server: Live, value: float) -> Outcome:
    request = predict_pb2.PredictRequest(model_spec={"name": MODEL})
    request.inputs["x"].dtype = tensor_pb2.DT_FLOAT
    request.inputs["x"].tensor_shape.dim.add(size=1)
    request.inputs["x"].float_val.append(value)
    outcome, answer = await _grpc(server, PREDICT, request.SerializeToString())
    if outcome.code is not Code.OK:
        return outcome
    return outcome._replace(value=predict_pb2.PredictResponse.FromString(answer).outputs["y"].float_val[0])


def grps_message(value: float) -> grps_pb2.GrpsMessage:
    message = grps_pb2.GrpsMessage(model=MODEL)
    message.gtensors.tensors.add(name="x", dtype=grps_pb2.DT_FLOAT32, shape=[1], flat_float32=[value])
    return message


def _grps_outcome(answer: bytes, retry: float | None) -> Outcome:
    message = grps_pb2.GrpsMessage.FromString(answer)
    if message.status.code != 200:
        return Outcome(_CODES[message.status.code], message.status.msg, retry=retry)
    return Outcome(Code.OK, value=message.gtensors.tensors[0].flat_float32[0])


async def grps_grpc(server: Live, value: float) -> Outcome:
    outcome, answer = await _grpc(server, GRPS + "Predict", grps_message(value).SerializeToString())
    return _grps_outcome(answer, outcome.retry) if outcome.code is Code.OK else outcome


async def grps_grpc_stream(server: Live, value: float) -> Outcome:
    call = server.channel.unary_stream(GRPS + "PredictStreaming")(grps_message(value).SerializeToString())
    answers = [bytes(answer) async for answer in call]
    return _grps_outcome(answers[-1], _hint(await call.trailing_metadata()))


# --- REST ---


async def _rest(server: Live, path: str, body: object) -> tuple[int, Any, float | None]:
    url = server.url.removesuffix("/v2") + path
    async with server.session.post(url, json=body) as response:
        retry = response.headers.get("Retry-After")
        return response.status, json.loads(await response.read()), None if retry is None else float(retry)


async def kserve_rest(server: Live, value: float, parameters: dict[str, int] | None = None) -> Outcome:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [value]}
    body = {"inputs": [tensor], "parameters": parameters or {}}
    status, answer, retry = await _rest(server, f"/v2/models/{MODEL}/infer", body)
    if status != 200:
        return Outcome(_CODES[status], answer["error"], retry=retry)
    return Outcome(Code.OK, value=answer["outputs"][0]["data"][0])


async def tfserving_rest(server: Live, value: float) -> Outcome:
    status, answer, retry = await _rest(server, f"/v1/models/{MODEL}:predict", {"instances": [value]})
    if status != 200:
        return Outcome(_CODES[status], answer["error"], retry=retry)
    return Outcome(Code.OK, value=answer["predictions"][0])


async def ai_platform(server: Live, value: float) -> Outcome:
    path = f"/v1/projects/some/models/{MODEL}:predict"
    status, answer, retry = await _rest(server, path, {"instances": [value]})
    if status != 200:
        return Outcome(_CODES[status], answer["error"], retry=retry)
    return Outcome(Code.OK, value=answer["predictions"][0])


def _document(answer: Any, retry: float | None) -> Outcome:
    status = answer["status"]
    if status["code"] != 200:
        return Outcome(_CODES[status["code"]], status["msg"], retry=retry)
    return Outcome(Code.OK, value=answer["gtensors"]["tensors"][0]["flat_float32"][0])


def grps_body(value: float) -> dict[str, Any]:
    tensor = {"name": "x", "dtype": "DT_FLOAT32", "shape": [1], "flat_float32": [value]}
    return {"model": MODEL, "gtensors": {"tensors": [tensor]}}


async def grps_rest(server: Live, value: float) -> Outcome:
    status, answer, retry = await _rest(server, "/grps/v1/infer/predict", grps_body(value))
    outcome = _document(answer, retry)
    assert outcome.code is _CODES[status]
    return outcome


def _last(documents: str) -> str:
    """Return the last of a stream's JSON documents, each of which ends with "}" on a line of its own."""
    return "{" + documents.rstrip().rpartition("\n}\n{")[2].removeprefix("{")


async def grps_rest_stream(server: Live, value: float) -> Outcome:
    url = server.url.removesuffix("/v2") + "/grps/v1/infer/predict?streaming=true"
    async with server.session.post(url, json=grps_body(value)) as response:
        assert response.status == 200
        return _document(json.loads(_last(await response.text())), None)


UNARY: dict[str, Interface] = {
    "KServe gRPC": kserve_grpc,
    "KServe REST": kserve_rest,
    "TF Serving gRPC": tfserving_grpc,
    "TF Serving REST": tfserving_rest,
    "AI Platform": ai_platform,
    "grps gRPC": grps_grpc,
    "grps HTTP": grps_rest,
}
STREAMS: dict[str, Interface] = {
    "KServe stream": kserve_stream,
    "grps gRPC stream": grps_grpc_stream,
    "grps HTTP stream": grps_rest_stream,
}
INTERFACES = UNARY | STREAMS


# --- health and metadata over every interface ---


async def looks(server: Live) -> None:
    """Call health and metadata over every interface. Raise an error for any response that is not successful."""
    root = server.url.removesuffix("/v2")
    paths = ("/v2/health/live", "/v2/health/ready", f"/v2/models/{MODEL}", f"/v1/models/{MODEL}", "/metrics")
    for path in paths:
        async with server.session.get(root + path) as response:
            assert response.status == 200, (path, await response.text())
    for method in ("/grpc.health.v1.Health/Check", "/inference.GRPCInferenceService/ServerReady"):
        await server.channel.unary_unary(method)(b"")
