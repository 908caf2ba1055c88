"""grps' calls, and its gRPC rows (grps 1, 4).

Strategy: a grps project's model gets the message as it was sent, and its response is sent unchanged, with a status
added. For all other models the message's tensors become the inputs, and the outputs a message. Errors of a call
are reported in the message's status: gRPC's own status is OK.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import (
    Internal,
    InvalidArgument,
    ModelNotFound,
    PermissionDenied,
    ServingError,
    Unauthenticated,
    Unimplemented,
    own_copy,
)
from triglot.core.operation import EVERYTHING, Operation, Permission
from triglot.core.running import Defer, Running, Sink
from triglot.core.tensor import MessageBytes
from triglot.core.types import Exchange, InferenceRequest, InferenceResponse, TensorSpec
from triglot.dataplane.control import ONLINE, Arguments
from triglot.dataplane.dataplane import DataPlane
from triglot.dataplane.request_path import Decoupled
from triglot.pb.grps import grps_pb2 as pb
from triglot.protocols.grps.answers import (
    answer_size,
    encode_answer,
    encode_item,
    encoded_answer,
    scatter_answer,
    scatter_item,
)
from triglot.protocols.grps.codec import (
    check_tensors,
    decode_message,
    decoding_size,
    encode_message,
    model_of,
)
from triglot.protocols.grps.mapping import bind_message, tensors_of
from triglot.protocols.grps.message import FAILURE, OK, BadRequest, Message, NoSuchModel, Status, failure_of
from triglot.protocols.grps.request import Request, RequestDecoder
from triglot.protocols.rows import InferenceHandler, Kind, Method, Service
from triglot.protocols.wire import parse_control
from triglot.repository.manager.plan import State
from triglot.scheduling.servable import Servable

log = logging.getLogger(__name__)

SERVICE = "grps.protos.v1.GrpsService"
PROTOCOL = "grps"
NOT_READY = Status(503, "Service Unavailable", FAILURE)


def find_servable(
    dataplane: DataPlane, permission: Permission, model_id: str, default_model: str, call: Call | None = None
) -> Servable:
    """Return the version for a request, to be leased by `with`; of a `call`, the one that runs it.

    Without an id that is the default model, or the only one. A model that is not a grps project's is found by its
    bare name, too. Models that the permission does not cover count as unknown; an id that can mean no other model
    raises `PermissionDenied`. Raise `ModelNotFound`, and `Unavailable` for one that is not ready.
    """
    if model_id:
        # Most ids have this form, and are not ambiguous.
        model, _, version = model_id.rpartition("-")
        if model and version.isdecimal():
            try:
                return dataplane.servable(permission, model, version)
            except (ModelNotFound, InvalidArgument, PermissionDenied):
                pass
    name = model_id or default_model or _only_model(dataplane, permission)
    if not model_id and dataplane.knows(permission, name):
        servable = dataplane.servable(permission, name)
        return servable if call is None else dataplane.routed(servable, call)
    for model, version in _candidates(name):
        if not dataplane.knows(permission, model):
            continue
        try:
            return _version(dataplane, permission, model, version)
        except (ModelNotFound, InvalidArgument):
            continue
    if not dataplane.knows(permission, name):
        if not any(map(permission.covers, (name, *[model for model, _ in _candidates(name)]))):
            which = f"model '{model_id}'" if model_id else "the default model"
            raise PermissionDenied(f"{permission.who} may not use {which}")
        raise ModelNotFound(f"Model {name} not found.")
    servable = dataplane.servable(permission, name)
    if servable.model.takes_messages:
        raise ModelNotFound(f"Model {name} not found. Models of a project are named NAME-VERSION.")
    return servable if call is None else dataplane.routed(servable, call)


def _only_model(dataplane: DataPlane, permission: Permission) -> str:
    names = dataplane.model_names(permission)
    if len(names) != 1:
        raise ModelNotFound(
            f"Model not found. Name one in the request or set default_model: this server has {len(names)} models."
        )
    return names[0]


def _candidates(model_id: str) -> Iterator[tuple[str, str]]:
    """Yield each (name, version) that an id may mean: both may contain dashes."""
    name, dash, version = model_id.rpartition("-")
    while dash:
        if version:
            yield name, version
        name, dash, rest = name.rpartition("-")
        version = f"{rest}-{version}"


def _version(dataplane: DataPlane, permission: Permission, model: str, version: str) -> Servable:
    """Return a version by its number, or by its label, which is the version's name in a project."""
    if version.isdecimal():
        return dataplane.servable(permission, model, version)
    return dataplane.servable(permission, model, label=version)


class Undecodable(Internal):
    """The bytes are not a valid message: an error of the call, not of the model (grps 4)."""


Convert = Callable[[InferenceResponse, Message | None], Any]
"""Makes an answer from a model's outputs and the request's message; None: a request of gtensors."""


class Grps:
    """The calls that gRPC and HTTP share. `server_text` returns the text of ServerMetadata."""

    def __init__(
        self, dataplane: DataPlane, *, default_model: str, online: bool, server_text: Callable[[Permission], str]
    ) -> None:
        self._dataplane = dataplane
        self._default_model = default_model
        self._server_text = server_text
        self.online = online
        self._decode = RequestDecoder(self._decoded)
        dataplane.control.register_action(ONLINE, self._apply_online)

    # --- health and metadata ---

    async def set_online(self, _: Any, call: Call) -> Status:
        """Make health ready, for all models."""
        call.permission.check_all_models()
        await self._dataplane.control.act(ONLINE, {"online": True})
        return OK

    async def set_offline(self, _: Any, call: Call) -> Status:
        """Make health not ready, for all models; calls still run."""
        call.permission.check_all_models()
        await self._dataplane.control.act(ONLINE, {"online": False})
        return OK

    async def _apply_online(self, arguments: Arguments) -> None:
        self.online = arguments["online"]
        now = "online" if self.online else "offline"
        log.info("%s: grps health is now %sready", now, "" if self.online else "not ")

    async def live(self, _: Any, __: Call) -> Status:
        """Return that the server is live: it answers."""
        return OK

    async def ready(self, _: Any, __: Call) -> Status:
        """Return readiness: online, and all models ready (grps 3.2)."""
        return OK if self.online and self._dataplane.ready else NOT_READY

    async def server_metadata(self, _: Any, call: Call) -> Message:
        """Return the configured or generated description of the server."""
        return Message(data=self._server_text(call.permission), status=OK)

    async def model_metadata(self, name: str | None, call: Call) -> Message:
        """Return a model's description; the model is found by its name or its id.

        Raise `BadRequest` without a name, `NoSuchModel`, and `PermissionDenied` for a model that the client may
        not use.
        """
        permission = call.permission
        if name is None:
            raise BadRequest("No model name.")
        try:
            if self._dataplane.knows(permission, name):
                # The version that a project's configuration lists first (grps 3.7).
                version = self._dataplane.first_version(permission, name)
                servable = self._dataplane.servable(permission, name, version)
            else:
                servable = find_servable(self._dataplane, permission, name or "-", "")
        except PermissionDenied:
            raise
        except ServingError:
            raise NoSuchModel("Model not found.") from None
        return Message(data=model_text(servable), status=OK)

    # --- predict ---

    def decode(self, encoded: MessageBytes) -> Request:
        """Return the request of a serialized GrpsMessage; errors in its content are kept for the response.

        Raise `Undecodable`.
        """
        request = self._decode(encoded)
        request.encoded = encoded
        return request

    def _decoded(self, encoded: MessageBytes) -> Request:
        try:
            request = Request(model_of(encoded))
        except InvalidArgument as error:
            raise Undecodable(error.message) from None
        try:
            if self._takes_messages(request.model):
                check_tensors(encoded)
            else:
                request.message = decode_message(encoded)
        except ServingError as error:
            request.error = own_copy(error)
        return request

    def request_of(self, message: Message, model: str) -> Request:
        """Return the request of a message that was not sent as protobuf.

        Models that take messages get it serialized.

        Raise `InvalidArgument` if it cannot be serialized.
        """
        request = Request(model, message)
        try:
            takes_messages = self._takes_messages(request.model)
        except ServingError:
            return request  # The lookup fails again in `start`, which reports it.
        if takes_messages:
            request.encoded, request.message = encode_message(message), None
        return request

    def start(
        self, request: Request, call: Call, sink: Sink, defer: Defer | None = None, *, streams: bool = False
    ) -> Running:
        """Run a request with one response, or with `streams` any number: see `InferenceHandler`."""
        servable = self._servable(request, call)
        inference: InferenceRequest | None = None
        if servable.model.takes_messages:
            request.exchange = call.exchange = Exchange(_encoded(request), streams, request.http)
        else:
            inference = _inference(servable, request)
        return self._dataplane.start(servable, inference, call, sink, defer, streams=streams)

    def _servable(self, request: Request, call: Call) -> Servable:
        """Return the version for a request, and records its model in the call.

        Raise `ServingError`, also for errors in the request's content.
        """
        call.model_name = request.model
        servable = find_servable(self._dataplane, call.permission, request.model, self._default_model, call)
        call.model_name, call.model_version = servable.name, servable.version
        if request.error is not None:
            raise own_copy(request.error)
        return servable

    def _takes_messages(self, model: str) -> bool:
        # The client's permission is checked when the call runs; until then nothing about the model is disclosed.
        return find_servable(self._dataplane, EVERYTHING, model, self._default_model).model.takes_messages

    # --- gRPC ---

    async def grpc_model_metadata(self, request: pb.GrpsMessage, call: Call) -> Message:
        """Return what `model_metadata` does; for an empty name, gRPC has another error text than HTTP."""
        if request.HasField("str_data") and not request.str_data:
            raise BadRequest("The model name is empty.")
        return await self.model_metadata(request.str_data if request.HasField("str_data") else None, call)

    def grpc_service(self) -> Service:
        """Return the rows of GrpsService."""
        health, metadata, infer = Operation.HEALTH, Operation.METADATA, Operation.INFER
        return Service(
            SERVICE,
            (
                Method(
                    "Predict",
                    Kind.UNARY,
                    infer,
                    self.decode,
                    None,
                    encode_answer,
                    answer_size,
                    decoding_size,
                    scatter_answer,
                    encode_error=_encode_error,
                    inference=GrpsInference(self, encoded_answer),
                ),
                Method(
                    "PredictStreaming",
                    Kind.SERVER_STREAM,
                    infer,
                    self.decode,
                    None,
                    encode_item,
                    answer_size,
                    decoding_size,
                    scatter_item,
                    encode_error=_encode_error,
                    inference=GrpsInference(self, encoded_answer, streams=True),
                ),
                _control("Online", Operation.GRPS_STATE, self.set_online, _encode_status),
                _control("Offline", Operation.GRPS_STATE, self.set_offline, _encode_status),
                _control("CheckLiveness", health, self.live, _encode_status),
                _control("CheckReadiness", health, self.ready, _encode_status),
                _control("ServerMetadata", metadata, self.server_metadata, encode_message),
                _control("ModelMetadata", metadata, self.grpc_model_metadata, encode_message),
            ),
            PROTOCOL,
        )


class GrpsInference(InferenceHandler):
    """The handler of requests with one response, or with `streams` any number.

    `convert` makes an answer from a tensor model's outputs.
    """

    def __init__(self, service: Grps, convert: Convert, *, streams: bool = False) -> None:
        self._service = service
        self._convert = convert
        self._streams = streams

    def start(self, request: Request, call: Call, sink: Sink, defer: Defer | None = None) -> Running:
        return self._service.start(request, call, sink, defer, streams=self._streams)

    def answer(self, response: Any, request: Request) -> Any:
        return self._convert(response, request.message) if isinstance(response, InferenceResponse) else response

    def map_error(self, error: ServingError, _: Request, call: Call) -> ServingError:
        return worded(error, call)


def worded(error: ServingError, call: Call) -> ServingError:
    """Return an error of the data plane as grps words it."""
    if isinstance(error, Decoupled):
        name = call.model_name
        return Unimplemented(f"model '{name}' returns a stream: call PredictStreaming, or request streaming")
    return error


def _control(name: str, operation: Operation, call: Any, encode: Callable[[Any], bytes]) -> Method:
    return Method(name, Kind.UNARY, operation, _parse, call, encode, encode_error=_encode_error)


def _parse(data: MessageBytes) -> pb.GrpsMessage:
    try:
        message: pb.GrpsMessage = parse_control(pb.GrpsMessage, data)
    except InvalidArgument as error:
        raise Undecodable(error.message) from None
    return message


def _encoded(request: Request) -> MessageBytes:
    """Return the request's bytes for a project's model."""
    if request.encoded is None and request.message is not None:
        # The model was replaced by one that takes messages after the request was decoded.
        return encode_message(request.message)
    return request.encoded or b""


def _inference(servable: Servable, request: Request) -> InferenceRequest:
    layout, signature = request.layout, servable.signature
    if layout is not None and layout.signature is signature:
        inputs = layout.inputs(request.values)
    else:
        message = request.message = _message_for(servable, request)
        inputs = tensors_of(message) if signature.any_tensors else bind_message(message, signature, servable.name)
        if layout is not None:
            layout.learn(signature, message, inputs)
    return InferenceRequest(servable.name, str(servable.version), inputs=inputs)


def _message_for(servable: Servable, request: Request) -> Message:
    if request.http is not None:
        raise Unimplemented(f"model '{servable.name}' takes tensors and cannot take customized HTTP requests")
    if request.layout is not None:
        return request.layout.message(request.values)
    if request.message is None:
        # The model was replaced by one that takes tensors.
        return decode_message(request.encoded or b"")
    return request.message


def _encode_error(error: ServingError) -> bytes | None:
    """Encode an error as a message. Clients without access get a gRPC status, as transports send before a call."""
    if isinstance(error, Undecodable | Unauthenticated):
        return None
    return encode_message(Message(status=failure_of(error)))


def _encode_status(status: Status) -> bytes:
    return encode_message(Message(status=status))


def model_text(servable: Servable) -> str:
    """Return the description in the model's own configuration, or else what it declares."""
    description = servable.model.description
    if description is None:
        signature = servable.signature
        description = {
            "name": servable.name,
            "version": str(servable.version),
            "platform": servable.platform,
            "inputs": _tensors(signature.inputs),
            "outputs": _tensors(signature.outputs),
        }
    return _yaml(dict(description))


def _tensors(specs: Iterable[TensorSpec]) -> list[dict[str, Any]]:
    return [
        {
            "name": spec.name,
            "datatype": spec.datatype,
            "shape": None if spec.shape is None else list(spec.shape),
        }
        for spec in specs
    ]


def server_text(server_name: str, dataplane: DataPlane, permission: Permission) -> str:
    """Return the server's name, and the models that the client may use: loaded ones, and failed ones."""
    models = [
        {"name": version.files.name, "version": str(version.files.version), "state": version.state.value}
        for version in dataplane.versions(permission)
        if version.state is not State.UNAVAILABLE or version.error is not None
    ]
    return _yaml({"server": {"name": server_name}, "models": models})


def _yaml(values: dict[str, Any]) -> str:
    import yaml  # noqa: PLC0415 - only calls for metadata of grps need it.

    text: str = yaml.safe_dump(values, allow_unicode=True)
    return text
