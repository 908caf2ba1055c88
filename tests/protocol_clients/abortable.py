"""Sends the same request, with BYTES input `x`, by each inference method; reports how it ends for the client."""

from __future__ import annotations

import asyncio
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc.aio

from tests.process import SECONDS
from triglot.core.tensor import pack_bytes, unpack_bytes
from triglot.pb.grps.grps_pb2 import DT_STRING, GrpsMessage
from triglot.pb.kserve import inference_pb2 as pb
from triglot.pb.tfserving import predict_pb2, tensor_pb2

LEFT = "left"
"""Outcome: the client cancelled the request."""
CUT_OFF = "cut off"
"""Outcome: the connection was closed in the middle of the response."""
IN_BAND = "in band"
"""Outcome: a response of ModelStreamInfer contained an error, which has no code there."""


Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Request:
    """A request to `model` with `count` elements, each of them `text`.

    `timeout`: the client's deadline in seconds, None for no deadline. `parameters` are KServe's.
    """

    model: str
    text: str
    timeout: float | None = None
    parameters: tuple[tuple[str, Any], ...] = ()
    count: int = 1


class Attempt:
    """A request in progress. `answers` are the texts of the responses received so far."""

    def __init__(self, run: Callable[[Attempt], Awaitable[str]]) -> None:
        self.answers: list[str] = []
        self.trace, self.parent = random.randbytes(16).hex(), random.randbytes(8).hex()
        """Ids of the client's trace and span, which is the parent of the server's."""
        self.leave: Callable[[], object]
        """Cancels the request."""
        self._task: asyncio.Task[str] = asyncio.ensure_future(run(self))
        self.leave = self._task.cancel

    @property
    def context(self) -> tuple[tuple[str, str], ...]:
        """Metadata or headers with the `traceparent` of the client's span."""
        return (("traceparent", f"00-{self.trace}-{self.parent}-01"),)

    @property
    def over(self) -> bool:
        """Whether the request has ended for the client."""
        return self._task.done()

    async def wait_ended(self) -> str:
        """Wait for the outcome; raises `AssertionError` after `SECONDS`.

        It is the name of a gRPC code, an HTTP status, the grps status in a response, or a constant above.
        """
        await asyncio.wait([self._task], timeout=SECONDS)
        assert self._task.done(), "the client still waits"
        return LEFT if self._task.cancelled() else self._task.result()


class Client(ABC):
    """A client of one inference method of a protocol. `endpoint`: protocol, transport and method in telemetry."""

    streams = False
    """Whether a call can have several responses."""
    endpoint: tuple[str, str, str]
    good = "OK"
    """Outcome of a request that succeeds."""
    sequences = False
    """Whether requests of this method can belong to a sequence."""

    def __init__(self, channel: grpc.aio.Channel, session: aiohttp.ClientSession, url: str) -> None:
        self.channel = channel
        self.session = session
        self.url = url

    def begin(self, request: Request) -> Attempt:
        """Send a request."""
        return Attempt(lambda attempt: self.run(request, attempt))

    @abstractmethod
    async def run(self, request: Request, attempt: Attempt) -> str:
        """Send a request and read its responses into `attempt`; returns the outcome."""


# --- gRPC ---


class GrpcClient(Client):
    """A client over the gRPC channel."""

    async def run(self, request: Request, attempt: Attempt) -> str:
        call = self.call(request, attempt.context)
        attempt.leave = call.cancel
        try:
            return await self.read(call, attempt)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        except asyncio.CancelledError:
            return LEFT  # Raised by grpc.aio after call.cancel().

    @abstractmethod
    def call(self, request: Request, metadata: Metadata) -> Any:
        """Start the RPC and return it."""

    @abstractmethod
    async def read(self, call: Any, attempt: Attempt) -> str:
        """Read the responses; returns the outcome of an RPC with status OK."""


class KServeGrpc(GrpcClient):
    """ModelInfer."""

    endpoint = ("kserve", "GRPC", "ModelInfer")
    sequences = True

    def call(self, request: Request, metadata: Metadata) -> Any:
        infer = self.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        return infer(_kserve_message(request).SerializeToString(), timeout=request.timeout, metadata=metadata)

    async def read(self, call: Any, attempt: Attempt) -> str:
        attempt.answers.append(_kserve_text(pb.ModelInferResponse.FromString(await call)))
        return "OK"


class KServeStream(GrpcClient):
    """ModelStreamInfer with one request."""

    endpoint = ("kserve", "GRPC", "ModelStreamInfer")
    streams = True
    sequences = True

    def call(self, request: Request, metadata: Metadata) -> Any:
        infer = self.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        return infer(
            iter([_kserve_message(request).SerializeToString()]), timeout=request.timeout, metadata=metadata
        )

    async def read(self, call: Any, attempt: Attempt) -> str:
        outcome = "OK"
        async for data in call:
            answer = pb.ModelStreamInferResponse.FromString(data)
            if answer.error_message:
                outcome = IN_BAND
            else:
                attempt.answers.append(_kserve_text(answer.infer_response))
        return outcome


def _kserve_message(request: Request) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=request.model)
    message.raw_input_contents.append(pack_bytes([request.text.encode()] * request.count))
    message.inputs.add(name="x", datatype="BYTES", shape=[request.count])
    member = {bool: "bool_param", int: "int64_param", str: "string_param"}
    for key, value in request.parameters:
        setattr(message.parameters[key], member[type(value)], value)
    return message


def _kserve_text(message: pb.ModelInferResponse) -> str:
    (raw,) = message.raw_output_contents
    return bytes(unpack_bytes(raw, message.outputs[0].shape[0])[0]).decode()


class TensorFlowGrpc(GrpcClient):
    """PredictionService.Predict."""

    endpoint = ("tfserving", "GRPC", "Predict")

    def call(self, request: Request, metadata: Metadata) -> Any:
        message = predict_pb2.PredictRequest(model_spec={"name": request.model})
        message.inputs["x"].dtype = tensor_pb2.DT_STRING
        message.inputs["x"].tensor_shape.dim.add(size=request.count)
        message.inputs["x"].string_val.extend([request.text.encode()] * request.count)
        predict = self.channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
        return predict(message.SerializeToString(), timeout=request.timeout, metadata=metadata)

    async def read(self, call: Any, attempt: Attempt) -> str:
        response = predict_pb2.PredictResponse.FromString(await call)
        attempt.answers.append(response.outputs["y"].string_val[0].decode())
        return "OK"


class GrpsGrpc(GrpcClient):
    """GrpsService.Predict: the response message reports errors."""

    endpoint = ("grps", "GRPC", "Predict")

    def call(self, request: Request, metadata: Metadata) -> Any:
        predict = self.channel.unary_unary("/grps.protos.v1.GrpsService/Predict")
        return predict(_grps_message(request).SerializeToString(), timeout=request.timeout, metadata=metadata)

    async def read(self, call: Any, attempt: Attempt) -> str:
        return await _read_grps(GrpsMessage.FromString(await call), attempt)


class GrpsStreaming(GrpcClient):
    """GrpsService.PredictStreaming: the last response reports an error."""

    endpoint = ("grps", "GRPC", "PredictStreaming")
    streams = True

    def call(self, request: Request, metadata: Metadata) -> Any:
        predict = self.channel.unary_stream("/grps.protos.v1.GrpsService/PredictStreaming")
        return predict(_grps_message(request).SerializeToString(), timeout=request.timeout, metadata=metadata)

    async def read(self, call: Any, attempt: Attempt) -> str:
        outcome = "OK"
        async for data in call:
            outcome = await _read_grps(GrpsMessage.FromString(data), attempt)
        return outcome


def _grps_message(request: Request) -> GrpsMessage:
    message = GrpsMessage(model=f"{request.model}-1")
    message.gtensors.tensors.add(
        name="x", dtype=DT_STRING, shape=[request.count], flat_string=[request.text] * request.count
    )
    return message


async def _read_grps(answer: GrpsMessage, attempt: Attempt) -> str:
    if answer.status.code != 200:
        return f"status {answer.status.code}"
    attempt.answers.append(answer.gtensors.tensors[0].flat_string[0])
    return "OK"


# --- HTTP ---


class HttpClient(Client):
    """A client over the HTTP session."""

    good = "200"
    path: str

    async def run(self, request: Request, attempt: Attempt) -> str:
        url = self.url + self.path.format(model=request.model)
        try:
            async with self.session.post(url, json=self.body(request), headers=attempt.context) as response:
                if response.status != 200:
                    return str(response.status)
                return await self.read(response, attempt)
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError):
            return CUT_OFF

    @abstractmethod
    def body(self, request: Request) -> Any:
        """Return the request's JSON body."""

    @abstractmethod
    def text(self, answer: Any) -> str:
        """Return the text in a response."""

    async def read(self, response: aiohttp.ClientResponse, attempt: Attempt) -> str:
        """Read the response's body; returns the outcome of a request with status 200."""
        attempt.answers.append(self.text(await response.json()))
        return "200"


class KServeRest(HttpClient):
    """POST /v2/models/…/infer."""

    endpoint = ("kserve", "REST", "infer")
    path = "/v2/models/{model}/infer"
    sequences = True

    def body(self, request: Request) -> Any:
        tensor = {
            "name": "x",
            "datatype": "BYTES",
            "shape": [request.count],
            "data": [request.text] * request.count,
        }
        return {"inputs": [tensor], "parameters": dict(request.parameters)}

    def text(self, answer: Any) -> str:
        return str(answer["outputs"][0]["data"][0])


class TensorFlowRest(HttpClient):
    """POST /v1/models/…:predict."""

    endpoint = ("tfserving", "REST", "predict")
    path = "/v1/models/{model}:predict"

    def body(self, request: Request) -> Any:
        return {"instances": [request.text] * request.count}

    def text(self, answer: Any) -> str:
        return str(answer["predictions"][0])


class GrpsHttp(HttpClient):
    """POST /grps/v1/infer/predict."""

    endpoint = ("grps", "REST", "predict")
    path = "/grps/v1/infer/predict"

    def body(self, request: Request) -> Any:
        texts = [request.text] * request.count
        tensor = {"name": "x", "dtype": "DT_STRING", "shape": [request.count], "flat_string": texts}
        return {"model": f"{request.model}-1", "gtensors": {"tensors": [tensor]}}

    def text(self, answer: Any) -> str:
        return str(answer["gtensors"]["tensors"][0]["flat_string"][0])


class GrpsChunked(GrpsHttp):
    """POST /grps/v1/infer/predict?streaming=true: each response is a chunk, and so is an error."""

    path = "/grps/v1/infer/predict?streaming=true"
    streams = True

    async def read(self, response: aiohttp.ClientResponse, attempt: Attempt) -> str:
        """As in the base class."""
        while chunk := (await response.content.readchunk())[0]:
            answer = json.loads(chunk)
            if answer["status"]["code"] != 200:
                return f"status {answer['status']['code']}"
            attempt.answers.append(self.text(answer))
        return "200"


CLIENTS: dict[str, type[Client]] = {
    "kserve_grpc": KServeGrpc,
    "kserve_stream": KServeStream,
    "kserve_rest": KServeRest,
    "tfserving_grpc": TensorFlowGrpc,
    "tfserving_rest": TensorFlowRest,
    "grps_grpc": GrpsGrpc,
    "grps_streaming": GrpsStreaming,
    "grps_http": GrpsHttp,
    "grps_chunked": GrpsChunked,
}
