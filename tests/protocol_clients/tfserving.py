"""Makes TensorFlow Serving's gRPC calls with messages of `triglot.pb`, for tests that do not need TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import grpc

from tests.process import SECONDS
from tests.protocol_clients.channel import rpc
from triglot.pb.tfserving import error_codes_pb2, management_pb2, predict_pb2, tensor_pb2

PREDICT = "/tensorflow.serving.PredictionService/Predict"
GET_MODEL_STATUS = "/tensorflow.serving.ModelService/GetModelStatus"
RELOAD = "/tensorflow.serving.ModelService/HandleReloadConfigRequest"


def predict_request(model: str, values: Sequence[float] = (), label: str = "") -> predict_pb2.PredictRequest:
    """Return a request with the float input `x`, of shape [values]; `label` is the version label, if any."""
    request = predict_pb2.PredictRequest(model_spec={"name": model, "version_label": label})
    if not label:
        request.model_spec.ClearField("version_label")
    request.inputs["x"].dtype = tensor_pb2.DT_FLOAT
    request.inputs["x"].tensor_shape.dim.add(size=len(values))
    request.inputs["x"].float_val.extend(values)
    return request


def predict(channel: grpc.Channel, request: predict_pb2.PredictRequest) -> predict_pb2.PredictResponse:
    """Call Predict. Raise `grpc.RpcError`."""
    response: predict_pb2.PredictResponse = rpc(channel, PREDICT, predict_pb2.PredictResponse)(
        request, timeout=SECONDS, wait_for_ready=True
    )
    return response


class Status(NamedTuple):
    """Status of a version in GetModelStatus; `error` is "" and `code` OK unless it failed to load."""

    version: int
    state: str
    error: str = ""
    code: str = "OK"


def statuses(channel: grpc.Channel, model: str) -> list[Status]:
    """Call GetModelStatus; returns the status of each version of a model. Raise `grpc.RpcError`."""
    call = rpc(channel, GET_MODEL_STATUS, management_pb2.GetModelStatusResponse)
    response = call(management_pb2.GetModelStatusRequest(model_spec={"name": model}), timeout=SECONDS)
    state_name, code_name = management_pb2.ModelVersionStatus.State.Name, error_codes_pb2.Code.Name
    return [
        Status(
            status.version,
            state_name(status.state),
            status.status.error_message,
            code_name(status.status.error_code),
        )
        for status in response.model_version_status
    ]


def failure(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    """Return the status code and text with which a call fails. Raise `AssertionError` when it succeeds."""
    try:
        answer = call()
    except grpc.RpcError as error:
        return error.code(), error.details()
    raise AssertionError(f"no error, but {answer!r}")
