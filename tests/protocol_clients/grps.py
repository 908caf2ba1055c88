"""grps' calls with messages of ours, for tests that look at what a model answers."""

from __future__ import annotations

import json
from http.client import HTTPConnection
from typing import Any

import grpc

from process import SECONDS
from protocol_clients.channel import rpc
from triglot.pb.grps.grps_pb2 import GenericTensor, GenericTensorData, GrpsMessage, Status

SERVICE = "/grps.protos.v1.GrpsService/"
PREDICT_PATH = "/grps/v1/infer/predict"


def tensors(*listed: GenericTensor, model: str = "") -> GrpsMessage:
    """A message of gtensors."""
    return GrpsMessage(model=model, gtensors=GenericTensorData(tensors=listed))


def predict(channel: grpc.Channel, request: GrpsMessage) -> GrpsMessage:
    """The answer of Predict, which may be a failure."""
    answer: GrpsMessage = rpc(channel, SERVICE + "Predict", GrpsMessage)(
        request, timeout=SECONDS, wait_for_ready=True
    )
    return answer


def predicted(channel: grpc.Channel, request: GrpsMessage) -> GrpsMessage:
    """The answer of Predict. Raises `AssertionError` for a failure."""
    answer = predict(channel, request)
    assert (answer.status.code, answer.status.status) == (200, Status.SUCCESS), answer
    return answer


def failure(channel: grpc.Channel, request: GrpsMessage) -> str:
    """The text of a failure, which has nothing but a status. Raises `AssertionError` for anything else."""
    answer = predict(channel, request)
    status = answer.status
    assert (status.code, status.status) == (500, Status.FAILURE), answer
    assert answer == GrpsMessage(status=status)
    return status.msg


def predict_streaming(channel: grpc.Channel, request: GrpsMessage) -> list[GrpsMessage]:
    """All answers of PredictStreaming."""
    call = channel.unary_stream(
        SERVICE + "PredictStreaming",
        request_serializer=GrpsMessage.SerializeToString,
        response_deserializer=GrpsMessage.FromString,
    )
    return list(call(request, timeout=SECONDS))


def post(address: str, body: object, query: str = "", path: str = PREDICT_PATH) -> tuple[int, Any]:
    """Status and JSON of the answer to a JSON body, or to bytes, which are sent as they are."""
    encoded = isinstance(body, bytes)
    content_type = "application/octet-stream" if encoded else "application/json"
    connection = HTTPConnection(address, timeout=SECONDS)
    try:
        connection.request(
            "POST",
            f"{path}?{query}",
            body if isinstance(body, bytes) else json.dumps(body).encode(),
            {"Content-Type": content_type},
        )
        response = connection.getresponse()
        answer = response.read()
        if response.headers.get_content_type() == "application/json":
            return response.status, json.loads(answer)
        return response.status, answer
    finally:
        connection.close()
