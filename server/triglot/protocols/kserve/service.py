"""KServe V2's calls, and its gRPC rows (spec 1.1, 1.5, 2.8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from triglot.core.call import Call
from triglot.core.coroutine_work import CoroutineWork
from triglot.core.errors import Internal, InvalidArgument, ModelNotFound, ServingError, Unavailable, Unimplemented
from triglot.core.model_loading import when_loaded
from triglot.core.operation import Operation, Permission
from triglot.core.running import Conversation, Defer, Requests, Running, Sink
from triglot.core.tensor import MessageBytes
from triglot.core.types import InferenceRequest, InferenceResponse, TensorSpec
from triglot.dataplane.dataplane import DataPlane
from triglot.dataplane.request_path import Decoupled
from triglot.model.signature import Signature
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.kserve.codec import (
    RAW_INPUTS,
    InferDecoder,
    encode_infer,
    name_request,
    packing_size,
    scatter_infer,
)
from triglot.protocols.kserve.extended_plane import ExtendedPlane
from triglot.protocols.kserve.extension import Extension
from triglot.protocols.kserve.parameters import wants_typed
from triglot.protocols.kserve.regions import Regions
from triglot.protocols.kserve.stream import DEFAULTS, InferStream, StreamLimits
from triglot.protocols.kserve.stream_requests import StreamRequests
from triglot.protocols.rows import InferenceHandler, Kind, Method, Service
from triglot.protocols.wire import check_control_size, length_prefix, parse, parse_control, rest_size, serialize
from triglot.telemetry.store import Telemetry
from triglot.version import __version__

SERVICE = "inference.GRPCInferenceService"
PROTOCOL = "kserve"
RepositoryChange = pb.RepositoryModelLoadRequest | pb.RepositoryModelUnloadRequest
EXTENSIONS = (
    "binary_tensor_data",
    "classification",
    "parameters",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "sequence",
)
CONFIG = "config"
FILE_PREFIX = "file:"
UNLOAD_DEPENDENTS = "unload_dependents"
OIP_PLATFORMS = {"onnxruntime_onnx": "onnx_onnxv1", "pytorch_libtorch": "pytorch_torchscript"}
"""The Open Inference Protocol's names of platforms that Triton names differently."""
NO_FILES = "models are loaded from the repository only; --allow-model-upload allows files in requests"


class UnaryInference(InferenceHandler):
    """The handler of requests with one response. `endpoint` names the route in the error of a decoupled model.

    `typed`: the default for outputs as `contents`, for requests without that parameter.
    """

    def __init__(
        self, dataplane: DataPlane, extended: ExtendedPlane, endpoint: str, *, typed: bool = False
    ) -> None:
        self._dataplane = dataplane
        self._extended = extended
        self._endpoint = endpoint
        self._typed = typed

    def start(self, request: InferenceRequest, call: Call, sink: Sink, defer: Defer | None = None) -> Running:
        if request.options is not None:
            return CoroutineWork(when_loaded(call, self._extended.infer, request, call), sink)
        call.model_name = request.model_name
        try:
            servable = self._dataplane.servable_of(call, request)
        except ServingError as error:
            call.request_id = request.id
            raise name_request(error, request.id) from None
        return self._dataplane.start(servable, request, call, sink, defer)

    def answer(self, response: InferenceResponse, request: InferenceRequest) -> InferenceResponse:
        if self._typed or request.parameters:
            response.typed = wants_typed(request, self._typed)
        return response

    def map_error(self, error: ServingError, request: InferenceRequest, _: Call) -> ServingError:
        if isinstance(error, Decoupled):
            return Unimplemented(f"{self._endpoint} doesn't support models with decoupled transaction policy")
        return name_request(error, request.id)


class KServe:
    """The calls that gRPC and REST share."""

    def __init__(
        self,
        dataplane: DataPlane,
        server_name: str,
        telemetry: Telemetry,
        extensions: Sequence[Extension] = (),
        regions: Regions | None = None,
        *,
        max_upload: int = 0,
        oip_platforms: bool = False,
        typed_contents: bool = False,
        stream_limits: StreamLimits = DEFAULTS,
    ) -> None:
        self.max_upload = max_upload
        """Largest request in bytes that loads a model from files in it; 0: uploads are disabled."""
        self.extensions = extensions
        self._dataplane = dataplane
        self._extended = ExtendedPlane(dataplane, regions or Regions())
        self._server_name = server_name
        self._typed = typed_contents
        self._stream_limits = stream_limits
        self._platforms = OIP_PLATFORMS if oip_platforms else {}
        self._decode = InferDecoder()
        self._streamed = telemetry.endpoint(PROTOCOL, "GRPC", "ModelStreamInfer", inference=True)

    async def server_live(self, _: pb.ServerLiveRequest, __: Call) -> pb.ServerLiveResponse:
        """Return that the server is live: it answers."""
        return pb.ServerLiveResponse(live=True)

    async def server_ready(self, _: pb.ServerReadyRequest, __: Call) -> pb.ServerReadyResponse:
        """Return whether the server and its models are ready."""
        return pb.ServerReadyResponse(ready=self._dataplane.ready)

    async def model_ready(self, request: pb.ModelReadyRequest, call: Call) -> pb.ModelReadyResponse:
        """Return whether the model is ready; an unknown one is not, without an error (spec 0.11).

        Raise `InvalidArgument`.
        """
        try:
            ready = await self._dataplane.check_ready(call.permission, request.name, request.version)
            return pb.ModelReadyResponse(ready=ready)
        except ModelNotFound:
            return pb.ModelReadyResponse(ready=False)

    async def require_model_ready(self, request: pb.ModelReadyRequest, call: Call) -> pb.ModelReadyRequest:
        """Return the request of a ready model, for REST (spec 3.6). Raise `ModelNotFound`, or `Unavailable`."""
        if not await self._dataplane.check_ready(call.permission, request.name, request.version):
            raise Unavailable(f"model '{request.name}' is not ready")
        return request

    def require_model(self, permission: Permission, name: str, version: str) -> Signature:
        """Return a model's signature.

        Raise `ModelNotFound`, `InvalidArgument` or `Unavailable` if it has none ready.
        """
        return self._dataplane.servable(permission, name, version).signature

    async def model_names(self, _: None, call: Call) -> list[str]:
        """Return the names of the served models that the client may use, ready or not."""
        return self._dataplane.model_names(call.permission)

    async def server_metadata(self, _: pb.ServerMetadataRequest, __: Call) -> pb.ServerMetadataResponse:
        """Return the server's metadata, with the extensions that are enabled: clients rely on them (spec 3.2)."""
        names = [*EXTENSIONS, *(name for extension in self.extensions for name in extension.names)]
        return pb.ServerMetadataResponse(name=self._server_name, version=__version__, extensions=names)

    async def model_metadata(self, request: pb.ModelMetadataRequest, call: Call) -> pb.ModelMetadataResponse:
        """Return a model's metadata. Raise `ModelNotFound`, `InvalidArgument` or `Unavailable`."""
        return (await self.model_and_columns(request, call))[0]

    async def model_and_columns(
        self, request: pb.ModelMetadataRequest, call: Call
    ) -> tuple[pb.ModelMetadataResponse, Sequence[TensorSpec]]:
        """Return a model's metadata, and the columns that it knows, for which gRPC's message has no field."""
        model = self._dataplane.metadata(call.permission, request.name, request.version)
        message = pb.ModelMetadataResponse(
            name=model.name,
            versions=[*model.versions, *model.version_names],
            platform=self._platforms.get(model.platform, model.platform),
            inputs=map(_tensor_metadata, model.signature.inputs),
            outputs=map(_tensor_metadata, model.signature.outputs),
        )
        return message, model.columns

    def inference(self, endpoint: str) -> UnaryInference:
        """Return the runner of a route's requests; `endpoint` names the route in a decoupled model's error."""
        return UnaryInference(self._dataplane, self._extended, endpoint, typed=self._typed)

    def converse(self, requests: Requests, call: Call, sink: Sink) -> Conversation:
        """Run ModelStreamInfer; requests are decoded here, since one that cannot be decoded gets an error in band.

        The responses are encoded, and counted with their requests.
        """
        end_on_error = call.metadata.get("triton_grpc_error") == "true"
        handler = StreamRequests(
            self._decode,
            self._dataplane,
            self._extended,
            call,
            self._streamed,
            end_on_error=end_on_error,
            typed=self._typed,
        )
        return InferStream(handler, self._stream_limits, requests, sink)

    async def repository_index(self, request: pb.RepositoryIndexRequest, call: Call) -> pb.RepositoryIndexResponse:
        """Return all versions of the configured models with their states, and other loadable models (spec 3.9).

        A configured model of which no version is known is listed without one, with a reason.
        """
        _refuse_repository(request.repository_name)
        response = pb.RepositoryIndexResponse()
        for entry in self._dataplane.versions(call.permission):
            if entry.ready or not request.ready:
                files = entry.files
                response.models.add(
                    name=files.name, version=str(files.version), state=entry.state.value, reason=entry.reason
                )
        if not request.ready:
            for name, problem in self._dataplane.broken(call.permission).items():
                response.models.add(name=name, state="UNAVAILABLE", reason=problem.message)
            for name, why in (await self._dataplane.never_loaded(call.permission)).items():
                response.models.add(name=name, state="UNAVAILABLE" if why else "", reason=why)
        return response

    async def load_model(self, request: pb.RepositoryModelLoadRequest, call: Call) -> str:
        """Load a model; returns its name once it serves (spec 3.9).

        Raise `ServingError` as `Manager.load_model`.
        """
        name = call.subject = _model_to_change(request)
        parameters = dict(request.parameters)
        sent = {key: parameters.pop(key) for key in sorted(parameters) if key.startswith(FILE_PREFIX)}
        if sent and not self.max_upload:
            refused = next(iter(sent))
            raise Internal(
                f"failed to load '{name}', failed to poll from model repository: '{refused}': {NO_FILES}"
            )

        files = {
            key.removeprefix(FILE_PREFIX): _of_kind(key, parameter, "bytes_param")
            for key, parameter in sent.items()
        }
        config = _parameter(parameters, CONFIG, "string_param")
        await self._dataplane.load_model(call.permission, name, config, files)
        return name

    async def unload_model(self, request: pb.RepositoryModelUnloadRequest, call: Call) -> str:
        """Unload a model; returns its name once it takes no calls (spec 3.9). Raise as `Manager.unload_model`."""
        name = call.subject = _model_to_change(request)
        dependents = _parameter(request.parameters, UNLOAD_DEPENDENTS, "bool_param")
        await self._dataplane.unload_model(call.permission, name, dependents=bool(dependents))
        return name

    def grpc_service(self) -> Service:
        """Return the rows of GRPCInferenceService; an RPC without a row answers UNIMPLEMENTED."""
        health, metadata, infer = Operation.HEALTH, Operation.METADATA, Operation.INFER
        return Service(
            SERVICE,
            (
                _unary("ServerLive", health, pb.ServerLiveRequest, self.server_live),
                _unary("ServerReady", health, pb.ServerReadyRequest, self.server_ready),
                _unary("ModelReady", health, pb.ModelReadyRequest, self.model_ready),
                _unary("ServerMetadata", metadata, pb.ServerMetadataRequest, self.server_metadata),
                _unary("ModelMetadata", metadata, pb.ModelMetadataRequest, self.model_metadata),
                Method(
                    "ModelInfer",
                    Kind.UNARY,
                    infer,
                    self._decode,
                    None,
                    encode_infer,
                    packing_size,
                    partial(rest_size, cut=RAW_INPUTS),
                    scatter_infer,
                    inference=self.inference("ModelInfer RPC"),
                ),
                Method(
                    "ModelStreamInfer",
                    Kind.BIDI_STREAM,
                    infer,
                    bytes,
                    None,
                    bytes,
                    converse=self.converse,
                ),
                _unary("RepositoryIndex", Operation.MODEL_INDEX, pb.RepositoryIndexRequest, self.repository_index),
                _change("RepositoryModelLoad", pb.RepositoryModelLoadRequest, self.load_model, self.max_upload),
                _change("RepositoryModelUnload", pb.RepositoryModelUnloadRequest, self.unload_model),
                *(method for extension in self.extensions for method in extension.methods()),
            ),
            PROTOCOL,
        )


def _model_to_change(request: RepositoryChange) -> str:
    """Return the model to load or unload. Raise `InvalidArgument` or `Unimplemented`."""
    if request.model_name:
        _refuse_repository(request.repository_name)
        return request.model_name
    if not request.repository_name:
        raise InvalidArgument("expected a model name, got none")
    # KServe's own stubs send the model's name in the repository's field (spec 0.15).
    return request.repository_name


def _parameter(parameters: Mapping[str, pb.ModelRepositoryParameter], key: str, field: str) -> Any:
    """Return the value of the only parameter allowed, or None.

    Raise `InvalidArgument` for another or another type.
    """
    for other in sorted(parameters):
        if other != key:
            raise InvalidArgument(f"unexpected parameter '{other}', expected '{key}'")
    return _of_kind(key, parameters[key], field) if key in parameters else None


def _of_kind(key: str, parameter: pb.ModelRepositoryParameter, field: str) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    if kind != field:
        raise InvalidArgument(f"parameter '{key}': expected {field}, got {kind or 'nothing'}")
    return getattr(parameter, field)


def _refuse_repository(name: str) -> None:
    if name:
        raise Unimplemented("'repository_name' specification is not supported")


def _tensor_metadata(spec: TensorSpec) -> pb.ModelMetadataResponse.TensorMetadata:
    # An empty shape would mean a scalar; V2 has no notation for any rank.
    shape = (-1,) if spec.shape is None else spec.shape
    return pb.ModelMetadataResponse.TensorMetadata(name=spec.name, datatype=spec.datatype, shape=shape)


def _change(name: str, request_class: Any, call: Any, max_upload: int = 0) -> Method:
    def decode(data: MessageBytes) -> Any:
        if not max_upload:  # Else the transport's limit applies.
            check_control_size(len(data), f": {NO_FILES}")
        return parse(request_class, data)

    return Method(name, Kind.UNARY, Operation.MODEL_CONTROL, decode, call, _encode_changed)


def _encode_changed(name: str) -> bytes:
    """Encode the reply. Triton's has no fields; KServe's has the model's name and a success flag (spec 1.6)."""
    encoded = name.encode()
    return length_prefix(1, len(encoded)) + encoded + b"\x10\x01"


def _unary(name: str, operation: Operation, request_class: Any, call: Any) -> Method:
    return Method(name, Kind.UNARY, operation, partial(parse_control, request_class), call, serialize)
