"""TensorFlow Serving's calls with messages of ours, for tests that need no TensorFlow themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import grpc

from process import SECONDS, rpc
from triglot.pb.tfserving import error_codes_pb2, management_pb2, predict_pb2, tensor_pb2
from waiting import wait_until

PREDICT = "/tensorflow.serving.PredictionService/Predict"
GET_MODEL_STATUS = "/tensorflow.serving.ModelService/GetModelStatus"
RELOAD = "/tensorflow.serving.ModelService/HandleReloadConfigRequest"


def predict_request(model: str, values: Sequence[float] = (), label: str = "") -> predict_pb2.PredictRequest:
    """Of a model whose input is `x`, a list of floats."""
    request = predict_pb2.PredictRequest(model_spec={"name": model, "version_label": label})
    if not label:
        request.model_spec.ClearField("version_label")
    request.inputs["x"].dtype = tensor_pb2.DT_FLOAT
    request.inputs["x"].tensor_shape.dim.add(size=len(values))
    request.inputs["x"].float_val.extend(values)
    return request


def predict(channel: grpc.Channel, request: predict_pb2.PredictRequest) -> predict_pb2.PredictResponse:
    """Raises `grpc.RpcError`."""
    response: predict_pb2.PredictResponse = rpc(channel, PREDICT, predict_pb2.PredictResponse)(
        request, timeout=SECONDS, wait_for_ready=True
    )
    return response


class Status(NamedTuple):
    """What GetModelStatus says of a version; `error` is "" and `code` OK unless it could not be loaded."""

    version: int
    state: str
    error: str = ""
    code: str = "OK"


def statuses(channel: grpc.Channel, model: str) -> list[Status]:
    """The versions of a model. Raises `grpc.RpcError`."""
    call = rpc(channel, GET_MODEL_STATUS, management_pb2.GetModelStatusResponse)
    response = call(management_pb2.GetModelStatusRequest(model_spec={"name": model}), timeout=SECONDS)
    state_name, code_name = management_pb2.ModelVersionStatus.State.Name, error_codes_pb2.Code.Name
    return [
        Status(one.version, state_name(one.state), one.status.error_message, code_name(one.status.error_code))
        for one in response.model_version_status
    ]


def failure(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    """The code and the text with which a call fails. Raises `AssertionError` when it does not."""
    try:
        answer = call()
    except grpc.RpcError as error:
        return error.code(), error.details()
    raise AssertionError(f"no error, but {answer!r}")


class Caller:
    """Asks all the time, on a thread of its own, until the `with` block ends, which begins with the first answer.

    `answers` are the answers in their order, each once as long as it stays the same. An error is raised by the end
    of the block.
    """

    def __init__(self, ask: Callable[[], Any]) -> None:
        self.answers: list[Any] = []
        self._ask = ask
        self._ends = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            while not self._ends.is_set():
                answer = self._ask()
                if self.answers[-1:] != [answer]:
                    self.answers.append(answer)
        except Exception as error:
            self._error = error

    def __enter__(self) -> Self:
        self._thread.start()
        wait_until(lambda: self._error is not None or bool(self.answers))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join(SECONDS)
        if self._error is not None:
            raise self._error

    def wait_for(self, answer: object) -> None:
        """Until this is the answer. Raises `AssertionError` when it takes too long, or an error comes instead."""
        wait_until(lambda: self._error is not None or self.answers[-1:] == [answer])
