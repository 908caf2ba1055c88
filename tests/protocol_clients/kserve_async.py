"""Asyncio clients for KServe over gRPC and over REST, with the same request and response classes."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
import grpc.aio
from yarl import URL

from triglot.core.errors import Code
from triglot.pb.kserve import inference_pb2 as pb

SERVICE = "/inference.GRPCInferenceService/"
# Spec 1.5 and 3.6, written independently of the server's table.
STATUS_OF = {
    Code.OK: 200,
    Code.INVALID_ARGUMENT: 400,
    Code.CANCELLED: 400,
    Code.NOT_FOUND: 404,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNIMPLEMENTED: 501,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
}


@dataclass(frozen=True)
class Tensor:
    name: str
    datatype: str
    shape: Sequence[int]
    raw: bytes = b""


@dataclass(frozen=True)
class Infer:
    """An inference with raw tensors."""

    model: str
    inputs: Sequence[Tensor]
    outputs: Sequence[str] = ()
    version: str = ""
    id: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """The result of an inference: an error's code and text, or a response."""

    code: Code
    text: str = ""
    model: str = ""
    version: str = ""
    id: str = ""
    outputs: Sequence[Tensor] = ()


class GrpcClient:
    name = "ModelInfer RPC"

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    def stub(self, rpc: str) -> Any:
        """Return the callable of a unary RPC with serialized messages."""
        return self.channel.unary_unary(rpc if "/" in rpc else SERVICE + rpc)

    async def call(self, rpc: str, request: bytes) -> tuple[Code, str, bytes]:
        """Make a unary call; returns its status code, the error's text, and the serialized response."""
        try:
            reply = await self.stub(rpc)(request, timeout=20)
        except grpc.aio.AioRpcError as error:
            return Code(error.code().value[0]), str(error.details()), b""
        return Code.OK, "", bytes(reply)

    async def infer(self, request: Infer) -> Answer:
        code, text, reply = await self.call("ModelInfer", grpc_message(request).SerializeToString())
        if code is not Code.OK:
            return Answer(code, text)
        message = pb.ModelInferResponse.FromString(reply)
        outputs = [
            Tensor(output.name, output.datatype, list(output.shape), raw)
            for output, raw in zip(message.outputs, message.raw_output_contents, strict=True)
        ]
        return Answer(code, text, message.model_name, message.model_version, message.id, outputs)


def grpc_message(request: Infer) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(
        model_name=request.model,
        model_version=request.version,
        id=request.id,
        inputs=[
            pb.ModelInferRequest.InferInputTensor(name=t.name, datatype=t.datatype, shape=t.shape)
            for t in request.inputs
        ],
        outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in request.outputs],
        raw_input_contents=[t.raw for t in request.inputs],
    )
    member = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    for key, value in request.parameters.items():
        setattr(message.parameters[key], member[type(value)], value)
    return message


class RestClient:
    name = "HTTP end point"

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def call(
        self, verb: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Send a request; returns status, headers and body of the response. `path` is sent as it is."""
        url = URL(path, encoded=True)
        async with self._session.request(
            verb, url, data=io.BytesIO(body) if body else None, headers=headers
        ) as response:
            return response.status, response.headers, await response.read()

    async def infer(self, request: Infer) -> Answer:
        path = f"/v2/models/{request.model}"
        path += f"/versions/{request.version}/infer" if request.version else "/infer"
        body, head = rest_body(request)
        status, headers, reply = await self.call(
            "POST", path, body, {"Inference-Header-Content-Length": str(head)}
        )
        if status != STATUS_OF[Code.OK]:
            assert headers["Content-Type"] == "application/json"
            error = json.loads(reply)
            assert list(error) == ["error"]
            return Answer(next(code for code, number in STATUS_OF.items() if number == status), error["error"])
        at = int(headers.get("Inference-Header-Content-Length", len(reply)))
        message = json.loads(reply[:at])
        outputs = []
        for output in message["outputs"]:
            size = output["parameters"]["binary_data_size"]
            raw, at = reply[at : at + size], at + size
            outputs.append(Tensor(output["name"], output["datatype"], output["shape"], raw))
        assert at == len(reply)
        return Answer(Code.OK, "", message["model_name"], message["model_version"], message.get("id", ""), outputs)


def rest_body(request: Infer) -> tuple[bytes, int]:
    """Return the body, with all tensors in binary form, and the length of its JSON part in bytes."""
    body = {
        "id": request.id,
        "parameters": {"binary_data_output": True, **request.parameters},
        "inputs": [
            {
                "name": t.name,
                "datatype": t.datatype,
                "shape": list(t.shape),
                "parameters": {"binary_data_size": len(t.raw)},
            }
            for t in request.inputs
        ],
        "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in request.outputs],
    }
    if not request.outputs:
        del body["outputs"]
    text = json.dumps(body).encode()
    return b"".join([text, *(t.raw for t in request.inputs)]), len(text)
