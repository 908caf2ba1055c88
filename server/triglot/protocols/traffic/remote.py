"""A shadow on another server, by KServe V2 over gRPC."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from triglot.core.call import Call
from triglot.core.errors import Code, ServingError, error_of
from triglot.core.running import Sink
from triglot.core.tensor import (
    DATATYPES,
    Array,
    array_over,
    datatype_of,
    element_count,
    object_array,
    raw_buffer,
    unpack_bytes,
)
from triglot.core.types import InferenceResponse, InputTensor, OutputTensor
from triglot.model.validation import bind_inputs
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.kserve.codec import decode_infer, encode_parameters
from triglot.protocols.traffic.shadow import Copy

if TYPE_CHECKING:
    import grpc.aio

METHOD = "/inference.GRPCInferenceService/ModelInfer"


class Remote:
    """Runs copies on the server at an address, HOST:PORT of its gRPC port. On the event loop."""

    def __init__(self, address: str, model: str, version: str) -> None:
        self._address = address
        self._model = model
        self._version = version
        self._channel: grpc.aio.Channel | None = None
        self._running: set[asyncio.Task[None]] = set()

    def run(self, copy: Copy, call: Call, sink: Sink) -> None:
        """Start a copy. Raise `ServingError`, and `ImportError` without gRPC's library."""
        import grpc.aio  # noqa: PLC0415 - few servers have such a shadow.

        if self._channel is None:
            options = [("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)]
            self._channel = grpc.aio.insecure_channel(self._address, options)
        rpc = self._channel.unary_unary(METHOD, response_deserializer=pb.ModelInferResponse.FromString)
        request = _encoded(copy, self._model, self._version)

        async def infer() -> None:
            try:
                reply = await rpc(request, timeout=call.remaining)
                sink.send(_decoded(reply))
                sink.end(None)
            except grpc.aio.AioRpcError as error:
                code, text = Code(error.code().value[0]), error.details()
                sink.end(error_of({"code": code, "message": text, "retry_after": None}))
            except (ServingError, ValueError) as error:
                sink.end(ServingError(f"the response of {self._address}: {error}", code=Code.INTERNAL))

        task = asyncio.get_running_loop().create_task(infer())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def close(self) -> None:
        """Close the connection once its copies have ended."""
        if self._channel is not None:
            closing = asyncio.get_running_loop().create_task(self._channel.close(grace=None))
            self._running.add(closing)
            closing.add_done_callback(self._running.discard)
            self._channel = None


def _encoded(copy: Copy, model: str, version: str) -> bytes:
    """Return the ModelInferRequest of a copy: tensors, requested outputs and parameters. Raise `ServingError`."""
    request = copy.request
    name = request.signature_name or copy.servable.default_signature
    message = pb.ModelInferRequest(model_name=model, model_version=version, id=request.id)
    for key, array in bind_inputs(copy.servable.signatures[name], request).items():
        message.inputs.add(name=key, datatype=datatype_of(array), shape=array.shape)
        message.raw_input_contents.append(bytes(raw_buffer(array)))
    for output in request.outputs:
        message.outputs.add(name=output)
    encode_parameters(request.parameters, message.parameters)
    encoded: bytes = message.SerializeToString()
    return encoded


def _decoded(reply: Any) -> InferenceResponse:
    """Return a response; its tensors are read as a request's are. Raise `ServingError`."""
    message = pb.ModelInferRequest(model_name=reply.model_name, raw_input_contents=reply.raw_output_contents)
    for output in reply.outputs:
        message.inputs.add(
            name=output.name, datatype=output.datatype, shape=output.shape, contents=output.contents
        )
    tensors = decode_infer(message.SerializeToString()).inputs
    outputs = [OutputTensor(tensor.name, tensor.datatype, _array(tensor)) for tensor in tensors]
    return InferenceResponse(reply.model_name, reply.model_version, "", outputs)


def _array(tensor: InputTensor) -> Array:
    data: Any = tensor.data
    if hasattr(data, "reshape"):
        array: Array = data.reshape(tensor.shape)
        return array
    if tensor.datatype == "BYTES":
        return object_array(unpack_bytes(data, element_count(tensor.shape)), tensor.shape)
    return array_over(data, DATATYPES[tensor.datatype].dtype, tensor.shape)
