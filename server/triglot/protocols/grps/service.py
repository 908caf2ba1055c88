"""grps' calls, and the rows that offer them over gRPC (grps 1, 4).

Strategy: a grps project is given the message as it was sent, and what it answers leaves as it is, with a status
added. For every other model the message's tensors become the inputs, and its outputs a message. Errors of a call
are told in the message: gRPC's own status stays OK.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import (
    Internal,
    InvalidArgument,
    PermissionDenied,
    ServingError,
    Unauthenticated,
    Unimplemented,
    own_copy,
)
from triglot.core.operation import Operation
from triglot.core.permission import EVERYTHING, Permission
from triglot.core.running import Defer, Done
from triglot.core.types import Exchange, InferenceRequest, InferenceResponse
from triglot.dataplane.control import ONLINE, Arguments
from triglot.dataplane.dataplane import DataPlane, Decoupled
from triglot.dataplane.inference import Inference, run
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
from triglot.protocols.grps.errors import BadRequest, NoSuchModel, failure_of
from triglot.protocols.grps.layouts import RequestDecoder
from triglot.protocols.grps.lookup import find_servable
from triglot.protocols.grps.mapping import answer_message, bind_message, tensors_of
from triglot.protocols.grps.message import FAILURE, OK, Message, Status
from triglot.protocols.grps.metadata import model_text
from triglot.protocols.grps.request import Request
from triglot.protocols.rows import Kind, Method, Service
from triglot.protocols.wire import parse_control
from triglot.scheduling.servable import Servable

log = logging.getLogger(__name__)

SERVICE = "grps.protos.v1.GrpsService"
PROTOCOL = "grps"
NOT_READY = Status(503, "Service Unavailable", FAILURE)


class Undecodable(Internal):
    """The bytes are no message: an error of the call, not of the model (grps 4)."""


Convert = Callable[[InferenceResponse, Message | None], Any]
"""What makes an answer of a model's outputs and the message that asked for them; None: one of gtensors."""


class Grps:
    """The calls that gRPC and HTTP share. `server_text` is what ServerMetadata answers."""

    def __init__(
        self, dataplane: DataPlane, *, default_model: str, online: bool, server_text: Callable[[Permission], str]
    ) -> None:
        self._dataplane = dataplane
        self._default_model = default_model
        self._server_text = server_text
        self.online = online
        self._decode = RequestDecoder(self._decoded)
        dataplane.control.register_action(ONLINE, self._turn)

    # --- health and metadata ---

    async def set_online(self, _: Any, call: Call) -> Status:
        """Health is ready from now on, that of all models."""
        call.permission.check_all_models()
        await self._dataplane.control.act(ONLINE, {"online": True})
        return OK

    async def set_offline(self, _: Any, call: Call) -> Status:
        """Health is not ready from now on, that of all models; calls still run."""
        call.permission.check_all_models()
        await self._dataplane.control.act(ONLINE, {"online": False})
        return OK

    async def _turn(self, arguments: Arguments) -> None:
        self.online = arguments["online"]
        now = "online" if self.online else "offline"
        log.info("%s: grps health is now %sready", now, "" if self.online else "not ")

    async def live(self, _: Any, __: Call) -> Status:
        """A server that answers is live."""
        return OK

    async def ready(self, _: Any, __: Call) -> Status:
        """Ready is who is online and has its models ready (grps 3.2)."""
        return OK if self.online and self._dataplane.ready else NOT_READY

    async def server_metadata(self, _: Any, call: Call) -> Message:
        """What the server's configuration says."""
        return Message(data=self._server_text(call.permission), status=OK)

    async def model_metadata(self, name: str | None, call: Call) -> Message:
        """What a model's configuration says, found by its name or its id.

        Raises `BadRequest` for no name, `NoSuchModel`, and `PermissionDenied` for others' models.
        """
        permission = call.permission
        if name is None:
            raise BadRequest("No model name.")
        try:
            if self._dataplane.knows(permission, name):
                # Of a project's versions the first that it lists (grps 3.7).
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

    def understand(self, encoded: bytes) -> Request:
        """The request of a serialized GrpsMessage; what is wrong with its content is told by its answer.

        Raises `Undecodable`.
        """
        request = self._decode(encoded)
        request.encoded = encoded
        return request

    def _decoded(self, encoded: bytes) -> Request:
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
        """The request of a message that came in another form; a model that takes messages gets it serialized.

        Raises `InvalidArgument` for what cannot be.
        """
        request = Request(model, message)
        try:
            takes_messages = self._takes_messages(request.model)
        except ServingError:
            return request  # Its answer will say so.
        if takes_messages:
            request.encoded, request.message = encode_message(message), None
        return request

    async def predict(self, request: Request, call: Call, convert: Convert = answer_message) -> Any:
        """One answer; `convert` makes it of a tensor model's outputs. Raises `ServingError`."""
        return await run(GrpsInference(self, convert), request, call)

    def submit(self, request: Request, call: Call, done: Done, defer: Defer | None = None) -> Inference:
        """See `Inferring`."""
        servable = self._lease(request, call)
        inference: InferenceRequest | None = None
        if servable.model.takes_messages:
            call.exchange = Exchange(_encoded(request), http=request.http)
        else:
            inference = _inference(servable, request)
        return self._dataplane.submit(servable, inference, call, done, defer)

    async def predict_stream(
        self, request: Request, call: Call, convert: Convert = answer_message
    ) -> AsyncGenerator[Any, None]:
        """As `predict`, the answers as the model gives them; an `HttpChunk` is no message."""
        with self._lease(request, call) as servable:
            if servable.model.takes_messages:
                call.exchange = Exchange(_encoded(request), streaming=True, http=request.http)
                async with aclosing(self._dataplane.exchange_stream_on(servable, call)) as answers:
                    async for answer in answers:
                        yield answer
                return
            inference = _inference(servable, request)
            async with aclosing(await self._dataplane.infer_stream_on(servable, inference, call)) as responses:
                async for response in responses:
                    yield convert(response, request.message)

    def _lease(self, request: Request, call: Call) -> Servable:
        """The version that a request goes to, for a `with` block; the call learns its name in any case.

        Raises `ServingError`, that of the request's content among them.
        """
        call.model_name = request.model
        servable = find_servable(self._dataplane, call.permission, request.model, self._default_model)
        call.model_name, call.model_version = servable.name, servable.version
        if request.error is not None:
            raise own_copy(request.error)
        return servable

    def _takes_messages(self, model: str) -> bool:
        # Whom the model is for is asked when the call is there; until then nothing is told of it.
        return find_servable(self._dataplane, EVERYTHING, model, self._default_model).model.takes_messages

    # --- gRPC ---

    async def grpc_model_metadata(self, request: pb.GrpsMessage, call: Call) -> Message:
        """As `model_metadata`, which has another text for an empty name over HTTP."""
        if request.HasField("str_data") and not request.str_data:
            raise BadRequest("The model name is empty.")
        return await self.model_metadata(request.str_data if request.HasField("str_data") else None, call)

    def grpc_service(self) -> Service:
        """The rows of GrpsService."""
        health, metadata, infer = Operation.HEALTH, Operation.METADATA, Operation.INFER
        return Service(
            SERVICE,
            (
                Method(
                    "Predict",
                    Kind.UNARY,
                    infer,
                    self.understand,
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
                    self.understand,
                    partial(self.predict_stream, convert=encoded_answer),
                    encode_item,
                    answer_size,
                    decoding_size,
                    scatter_item,
                    encode_error=_encode_error,
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


class GrpsInference:
    """See `Inferring`; `convert` makes the answer of a tensor model's outputs."""

    def __init__(self, service: Grps, convert: Convert) -> None:
        self.submit = service.submit
        self._convert = convert

    def answer(self, outcome: Inference, request: Request) -> Any:
        """See `Inferring`."""
        if outcome.request is None:
            return outcome.answer
        return self._convert(outcome.answer, request.message)

    def map_error(self, error: ServingError, outcome: Inference, _: Request) -> ServingError:
        """See `Inferring`."""
        if isinstance(error, Decoupled):
            name = outcome.servable.name
            return Unimplemented(f"model '{name}' returns a stream: call PredictStreaming, or request streaming")
        return error


def _control(name: str, operation: Operation, call: Any, encode: Callable[[Any], bytes]) -> Method:
    return Method(name, Kind.UNARY, operation, _parse, call, encode, encode_error=_encode_error)


def _parse(data: bytes) -> pb.GrpsMessage:
    try:
        message: pb.GrpsMessage = parse_control(pb.GrpsMessage, data)
    except InvalidArgument as error:
        raise Undecodable(error.message) from None
    return message


def _encoded(request: Request) -> bytes:
    """The request as a project takes it."""
    if request.encoded is None and request.message is not None:
        # The model became another kind of model since the request was decoded.
        return encode_message(request.message)
    return request.encoded or b""


def _inference(servable: Servable, request: Request) -> InferenceRequest:
    form, signature = request.form, servable.signature
    if form is not None and form.signature is signature:
        inputs = form.inputs(request.values)
    else:
        message = request.message = _message_for(servable, request)
        inputs = tensors_of(message) if signature.any_tensors else bind_message(message, signature, servable.name)
        if form is not None:
            form.learn(signature, message, inputs)
    return InferenceRequest(servable.name, str(servable.version), inputs=inputs)


def _message_for(servable: Servable, request: Request) -> Message:
    if request.http is not None:
        raise Unimplemented(f"model '{servable.name}' takes tensors and cannot take customized HTTP requests")
    if request.form is not None:
        return request.form.message(request.values)
    if request.message is None:
        # As in `_encoded`.
        return decode_message(request.encoded or b"")
    return request.message


def _encode_error(error: ServingError) -> bytes | None:
    """An error as the message that tells it. Who may not call is told by a status, as before the call."""
    if isinstance(error, Undecodable | Unauthenticated):
        return None
    return encode_message(Message(status=failure_of(error)))


def _encode_status(status: Status) -> bytes:
    return encode_message(Message(status=status))
