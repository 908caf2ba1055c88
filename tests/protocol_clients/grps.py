"""Makes grps' calls with messages of `triglot.pb`, for tests that check a model's responses."""

from __future__ import annotations

import json
from http.client import HTTPConnection
from typing import Any

import grpc

from tests.process import SECONDS
from tests.protocol_clients.channel import rpc
from triglot.pb.grps.grps_pb2 import GenericTensor, GenericTensorData, GrpsMessage, Status

SERVICE = "/grps.protos.v1.GrpsService/"
PREDICT_PATH = "/grps/v1/infer/predict"


def tensors(*listed: GenericTensor, model: str = "") -> GrpsMessage:
    """Return a message with these tensors as its `gtensors`."""
    return GrpsMessage(model=model, gtensors=GenericTensorData(tensors=listed))


def predict(channel: grpc.Channel, request: GrpsMessage) -> GrpsMessage:
    """Call Predict; returns the response, which may report a failure."""
    answer: GrpsMessage = rpc(channel, SERVICE + "Predict", GrpsMessage)(
        request, timeout=SECONDS, wait_for_ready=True
    )
    return answer


def predicted(channel: grpc.Channel, request: GrpsMessage) -> GrpsMessage:
    """Call Predict; returns the response. Raise `AssertionError` when it reports a failure."""
    answer = predict(channel, request)
    assert (answer.status.code, answer.status.status) == (200, Status.SUCCESS), answer
    return answer


def failure(channel: grpc.Channel, request: GrpsMessage) -> str:
    """Call Predict; returns the failure's text. Raise `AssertionError` unless the response is only a failure."""
    answer = predict(channel, request)
    status = answer.status
    assert (status.code, status.status) == (500, Status.FAILURE), answer
    assert answer == GrpsMessage(status=status)
    return status.msg


def predict_streaming(channel: grpc.Channel, request: GrpsMessage) -> list[GrpsMessage]:
    """Call PredictStreaming; returns all responses."""
    call = channel.unary_stream(
        SERVICE + "PredictStreaming",
        request_serializer=GrpsMessage.SerializeToString,
        response_deserializer=GrpsMessage.FromString,
    )
    return list(call(request, timeout=SECONDS))


def post(address: str, body: object, query: str = "", path: str = PREDICT_PATH) -> tuple[int, Any]:
    """Send a POST request with a JSON body, or with bytes as they are.

    Return the response's status, and its decoded JSON; its bytes if it has another content type.
    """
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
