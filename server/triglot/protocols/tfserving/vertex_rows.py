"""The rows of Vertex AI's PredictionService: its paths' calls over gRPC (tfs 7.7).

Strategy: a request becomes the body that REST has, and the body of the response a message, by protobuf's own JSON
mapping.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from google.protobuf import json_format

from triglot.core.call import Call
from triglot.core.errors import Internal, InvalidArgument
from triglot.core.http import HttpRequest
from triglot.core.model_loading import when_loaded
from triglot.core.operation import Operation
from triglot.core.tensor import MessageBytes
from triglot.dataplane.dataplane import DataPlane
from triglot.pb.vertex import http_body_pb2, prediction_service_pb2
from triglot.protocols.rows import Kind, Method, Service
from triglot.protocols.tfserving.ai_platform import Predicted
from triglot.protocols.tfserving.rest_predict import text_size
from triglot.protocols.tfserving.rows import PROTOCOL
from triglot.protocols.tfserving.vertex import PREDICT, RAW, EndpointRequest, Vertex, encode_endpoint
from triglot.protocols.wire import parse, parse_control, serialize

SERVICE = "google.cloud.aiplatform.v1.PredictionService"
OFF_LOOP_BYTES = 16384
"""Longest body that is decoded on the event loop."""
_ENDPOINT = re.compile(
    r"projects/(?P<project>[^/:]+)/locations/(?P<location>[^/:]+)/endpoints/(?P<endpoint>[^/:]+)"
)


@dataclass(frozen=True, slots=True)
class Received:
    """A request as REST has it, for the endpoint with this resource name."""

    method: str
    endpoint: str
    body: bytes
    content_type: str


Answered = tuple[Predicted, EndpointRequest]


def vertex_service(vertex: Vertex, dataplane: DataPlane) -> Service:
    """Return the service, with the methods that are served."""
    predict = partial(_predict, vertex, dataplane)

    def row(name: str, decode: Any, encode: Any) -> Method:
        return Method(name, Kind.UNARY, Operation.INFER, decode, predict, encode, _answer_size, len)

    stream = Method(
        "StreamRawPredict",
        Kind.SERVER_STREAM,
        Operation.INFER,
        partial(_decode_raw, prediction_service_pb2.StreamRawPredictRequest),
        None,
        _encode_raw,
        _answer_size,
        len,
        iterate=partial(_stream, vertex, dataplane),
    )
    raw = partial(_decode_raw, prediction_service_pb2.RawPredictRequest)
    methods = (row("Predict", _decode, _encode), row("RawPredict", raw, _encode_raw), stream)
    return Service(SERVICE, methods, PROTOCOL)


def _decode(data: MessageBytes) -> Received:
    """Decode a Predict request, whose Values take many times their bytes: of at most 1 MiB."""
    request = parse_control(prediction_service_pb2.PredictRequest, data)
    endpoint = request.endpoint
    request.ClearField("endpoint")
    try:
        body = json_format.MessageToJson(request, indent=None).encode(errors="surrogatepass")
    except (json_format.Error, ValueError) as error:
        raise InvalidArgument(f"instances: {error}") from None
    return Received(PREDICT, endpoint, body, "application/json")


def _decode_raw(message_class: Any, data: MessageBytes) -> Received:
    request = parse(message_class, data)
    return Received(RAW, request.endpoint, request.http_body.data, request.http_body.content_type)


async def _predict(vertex: Vertex, dataplane: DataPlane, received: Received, call: Call) -> Answered:
    match = _ENDPOINT.fullmatch(received.endpoint)
    if match is None:
        expected = "projects/PROJECT/locations/LOCATION/endpoints/ENDPOINT"
        raise InvalidArgument(f"endpoint: expected {expected}, got {received.endpoint!r}")
    headers = {"content-type": received.content_type}
    http = HttpRequest(match.groupdict(), headers, received.body, "POST", permission=call.permission)
    call.model_name = vertex.model_of(http)
    decode = partial(vertex.decode_endpoint, received.method, http)
    request = await dataplane.off_loop(decode) if len(received.body) > OFF_LOOP_BYTES else decode()
    return await vertex.predict(request, call), request


async def _stream(vertex: Vertex, dataplane: DataPlane, received: Received, call: Call) -> AsyncIterator[Answered]:
    yield await when_loaded(call, _predict, vertex, dataplane, received, call)


def _answer_size(answered: Answered) -> int:
    return text_size(answered[0].response.outputs)


def _encode(answered: Answered) -> bytes:
    response = prediction_service_pb2.PredictResponse()
    body = bytes(encode_endpoint(*answered).body)
    try:
        json_format.Parse(body, response, ignore_unknown_fields=True)
    except json_format.Error as error:
        raise Internal(f"the response has no form in protobuf's Values: {error}") from None
    return serialize(response)


def _encode_raw(answered: Answered) -> bytes:
    response = encode_endpoint(*answered)
    return serialize(http_body_pb2.HttpBody(content_type=response.content_type, data=bytes(response.body)))
