"""Makes KServe's gRPC calls to a model with one INT32 element as input `x`, like `process.IDENTITY`."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from tests.process import SECONDS
from tests.protocol_clients.channel import rpc
from triglot.pb.kserve import inference_pb2 as pb


def server_ready(channel: grpc.Channel) -> bool:
    """Call ServerReady; returns whether the server is ready."""
    reply: pb.ServerReadyResponse = rpc(channel, "ServerReady", pb.ServerReadyResponse)(
        pb.ServerReadyRequest(), timeout=SECONDS
    )
    return reply.ready


def infer_request(model: str, value: int = 7, shape: Sequence[int] = (1,)) -> pb.ModelInferRequest:
    """Return a request with the INT32 element `value` as input `x`; `shape` is what the request declares."""
    return pb.ModelInferRequest(
        model_name=model,
        inputs=[pb.ModelInferRequest.InferInputTensor(name="x", datatype="INT32", shape=shape)],
        raw_input_contents=[value.to_bytes(4, "little", signed=True)],
    )


def infer(channel: grpc.Channel, model: str, value: int = 7, shape: Sequence[int] = (1,)) -> int:
    """Call ModelInfer; returns the INT32 element of the response."""
    call = rpc(channel, "ModelInfer", pb.ModelInferResponse)
    return answer_value(call(infer_request(model, value, shape), timeout=SECONDS))


def answer_value(response: pb.ModelInferResponse) -> int:
    """Return the INT32 element of the response's first output."""
    return int.from_bytes(response.raw_output_contents[0], "little", signed=True)
