"""KServe V2's calls, and the rows that offer them over gRPC (spec 1.1, 1.5, 2.8)."""

from __future__ import annotations

from functools import partial
from typing import Any

from triglot.core.errors import ModelNotFound, QueueFull, Unavailable, Unimplemented
from triglot.core.types import Call, InferenceRequest, InferenceResponse, TensorSpec
from triglot.core.validation import InvalidRequest
from triglot.dataplane import DataPlane, Decoupled
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols import Kind, Method, Operation, Service
from triglot.protocols.kserve.codec import decode_infer, encode_infer
from triglot.protocols.wire import parse, serialize
from triglot.version import __version__

SERVICE = "inference.GRPCInferenceService"
EXTENSIONS = ("binary_tensor_data", "parameters")


class KServe:
    """The calls that gRPC and REST share."""

    def __init__(self, dataplane: DataPlane, server_name: str) -> None:
        self._dataplane = dataplane
        self._server_name = server_name

    async def server_live(self, _: pb.ServerLiveRequest, __: Call) -> pb.ServerLiveResponse:
        """A server that answers is live."""
        return pb.ServerLiveResponse(live=True)

    async def server_ready(self, _: pb.ServerReadyRequest, __: Call) -> pb.ServerReadyResponse:
        """See `DataPlane.ready`."""
        return pb.ServerReadyResponse(ready=self._dataplane.ready)

    async def model_ready(self, request: pb.ModelReadyRequest, _: Call) -> pb.ModelReadyResponse:
        """An unknown model is not ready, rather than an error (spec 0.11). Raises `InvalidArgument`."""
        try:
            return pb.ModelReadyResponse(ready=self._dataplane.model_ready(request.name, request.version))
        except ModelNotFound:
            return pb.ModelReadyResponse(ready=False)

    async def require_model_ready(self, request: pb.ModelReadyRequest, _: Call) -> pb.ModelReadyRequest:
        """REST's form of `model_ready` (spec 3.6). Raises `ModelNotFound`, and `Unavailable` when not ready."""
        if not self._dataplane.model_ready(request.name, request.version):
            raise Unavailable(f"model '{request.name}' is not ready")
        return request

    async def model_names(self, _: None, __: Call) -> list[str]:
        """Every model that is wanted, ready or not."""
        return self._dataplane.model_names()

    async def server_metadata(self, _: pb.ServerMetadataRequest, __: Call) -> pb.ServerMetadataResponse:
        """Only extensions that work are named: clients act on them (spec 3.2)."""
        return pb.ServerMetadataResponse(name=self._server_name, version=__version__, extensions=EXTENSIONS)

    async def model_metadata(self, request: pb.ModelMetadataRequest, _: Call) -> pb.ModelMetadataResponse:
        """Raises `ModelNotFound`, `InvalidArgument` or `Unavailable`."""
        model = self._dataplane.metadata(request.name, request.version)
        return pb.ModelMetadataResponse(
            name=model.name,
            versions=model.versions,
            platform=model.platform,
            inputs=map(_tensor_metadata, model.signature.inputs),
            outputs=map(_tensor_metadata, model.signature.outputs),
        )

    async def infer(self, door: str, request: InferenceRequest, call: Call) -> InferenceResponse:
        """One answer; `door` is how the error of a decoupled model names the way the call came."""
        try:
            return await self._dataplane.infer(request, call)
        except Decoupled:
            raise Unimplemented(f"{door} doesn't support models with decoupled transaction policy") from None
        except (InvalidRequest, QueueFull) as error:
            error.message = f"[request id: {request.id or '<id_unknown>'}] {error.message}"
            raise

    def grpc_service(self) -> Service:
        """The rows of GRPCInferenceService; an RPC without one answers UNIMPLEMENTED."""
        return Service(
            SERVICE,
            (
                _unary("ServerLive", Operation.HEALTH, pb.ServerLiveRequest, self.server_live),
                _unary("ServerReady", Operation.HEALTH, pb.ServerReadyRequest, self.server_ready),
                _unary("ModelReady", Operation.HEALTH, pb.ModelReadyRequest, self.model_ready),
                _unary("ServerMetadata", Operation.INSPECT, pb.ServerMetadataRequest, self.server_metadata),
                _unary("ModelMetadata", Operation.INSPECT, pb.ModelMetadataRequest, self.model_metadata),
                Method(
                    "ModelInfer",
                    Kind.UNARY,
                    Operation.INFER,
                    decode_infer,
                    partial(self.infer, "ModelInfer RPC"),
                    encode_infer,
                ),
            ),
        )


def _tensor_metadata(spec: TensorSpec) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(name=spec.name, datatype=spec.datatype, shape=spec.shape)


def _unary(name: str, operation: Operation, request_class: Any, call: Any) -> Method:
    return Method(name, Kind.UNARY, operation, partial(parse, request_class), call, serialize)
