"""Triton's generate routes, and MLServer's infer_stream, whose responses are server-sent events (spec 3.8).

Strategy: a stream's headers wait for its first response, so that an error before it gets a status of its own. Once
execution has started, an error is an event like the responses, first or last. A slow client applies back-pressure
to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from triglot.core.awaiting import Responses
from triglot.core.call import Call
from triglot.core.errors import InvalidArgument, ServingError, Unimplemented
from triglot.core.http import HttpRequest, HttpResponse, StreamForm
from triglot.core.operation import Operation
from triglot.core.running import Defer, Running, Sink
from triglot.core.types import InferenceRequest, InferenceResponse
from triglot.dataplane.dataplane import DataPlane
from triglot.model.signature import Signature
from triglot.model.validation import InvalidRequest
from triglot.protocols.json.dialect import DEFAULT_LIMITS, SIZE_OPTION, JsonLimits
from triglot.protocols.kserve import openapi as api
from triglot.protocols.kserve.codec import name_request, packing_size
from triglot.protocols.kserve.extension import MODEL, MODEL_PATHS
from triglot.protocols.kserve.generate_json import decode_generate, encode_error, encode_event, encode_generate
from triglot.protocols.kserve.rest import (
    RestInfer,
    body_limit,
    decode_infer,
    encode_infer,
    json_length,
)
from triglot.protocols.rows import InferenceHandler, Method, Route, content_coding
from triglot.scheduling.servable import Servable

EVENTS = "text/event-stream; charset=utf-8"
Decoded = InferenceRequest | RestInfer
"""A request of Triton's flat JSON, or one in the form of infer."""


def _request_of(decoded: Decoded) -> InferenceRequest:
    return decoded.request if isinstance(decoded, RestInfer) else decoded


def _encode_for(decoded: Decoded) -> Callable[[InferenceResponse], bytes]:
    """Return what encodes a response in the form of its request."""
    return partial(_infer_body, decoded) if isinstance(decoded, RestInfer) else encode_generate


class NotOneResponse(Unimplemented):
    """The model gave no response, or several, to a call that takes one.

    Like a decoupled model's error for infer: nothing failed, the model needs another route.
    """

    def __init__(self) -> None:
        super().__init__(
            "generate expects model to produce exactly 1 response, use generate stream for model that generates "
            "various number of responses"
        )


class Generate:
    """The calls, and their rows. Triton's metadata lists no extension for them."""

    names: Sequence[str] = ()

    def __init__(self, dataplane: DataPlane, limits: JsonLimits = DEFAULT_LIMITS) -> None:
        self._dataplane = dataplane
        self._limits = limits

    def methods(self) -> Sequence[Method]:
        """Return no rows: the calls are REST only."""
        return ()

    def routes(self) -> Sequence[Route]:
        """Return the rows, each with and without a version."""
        return [
            row(path)
            for path in MODEL_PATHS
            for row in (self._generate, self._generate_stream, self._infer_stream)
        ]

    def _generate(self, path: str) -> Route:
        return Route(
            "POST",
            path + "/generate",
            Operation.INFER,
            self._decode,
            self.generate,
            lambda response, decoded: HttpResponse(_encode_for(decoded)(response)),
            answer_size=printing_size,
            body_limit=lambda _: self._limits.size,
            limit_option=SIZE_OPTION,
            coding=identity_only,
            name="generate",
            documented=(api.GENERATE,),
        )

    def _generate_stream(self, path: str) -> Route:
        return Route(
            "POST",
            path + "/generate_stream",
            Operation.INFER,
            self._decode,
            inference=Streaming(self._dataplane),
            stream_form=lambda decoded: stream_form(_encode_for(decoded)),
            body_limit=lambda _: self._limits.size,
            limit_option=SIZE_OPTION,
            coding=identity_only,
            name="generate_stream",
            documented=(api.GENERATE_STREAM,),
            of_model=api.stream_of if path == MODEL else None,
        )

    def _infer_stream(self, path: str) -> Route:
        return Route(
            "POST",
            path + "/infer_stream",
            Operation.INFER,
            self._decode_infer,
            inference=Streaming(self._dataplane),
            stream_form=lambda decoded: stream_form(_encode_for(decoded)),
            text_size=json_length,
            body_limit=partial(body_limit, self._limits),
            limit_option=SIZE_OPTION,
            name="infer_stream",
            documented=(api.INFER_STREAM,),
        )

    def _decode(self, http: HttpRequest) -> Decoded:
        """Decode a body. Raise as `decode_generate`, after errors for an unknown or unavailable model."""
        name, version = http.path["model"], http.path.get("version", "")
        servable = self._dataplane.servable(http.permission, name, version)
        body = bytes(http.body)
        request = decode_generate(body, name, version, partial(signature_of, servable), self._limits)
        return self._decode_infer(http) if request is None else request

    def _decode_infer(self, http: HttpRequest) -> RestInfer:
        self._dataplane.servable(http.permission, http.path["model"], http.path.get("version", ""))
        rest = decode_infer(http, self._limits)
        if rest.binary_by_default or rest.binary_outputs:
            raise InvalidArgument("events are JSON: binary outputs are not supported")
        if rest.request.options is not None:
            raise InvalidArgument("infer_stream supports neither shared memory nor classification; use infer")
        return rest

    async def generate(self, decoded: Decoded, call: Call) -> InferenceResponse:
        """Return the only response. Raise `NotOneResponse`, and `ServingError` as `DataPlane.infer`."""
        handler = Streaming(self._dataplane)
        only: InferenceResponse | None = None
        try:
            async with aclosing(Responses(partial(handler.start, decoded, call))) as responses:
                async for response in responses:
                    if only is not None:
                        raise NotOneResponse
                    only = response
        except ServingError as error:
            raise name_request(error, _request_of(decoded).id) from None
        if only is None:
            raise NotOneResponse
        return only


class Streaming(InferenceHandler):
    """The handler of requests with any number of responses; `request_of` returns what a route has decoded."""

    def __init__(self, dataplane: DataPlane, request_of: Callable[[Any], InferenceRequest] = _request_of) -> None:
        self._dataplane = dataplane
        self._request_of = request_of

    def start(self, decoded: Any, call: Call, sink: Sink, defer: Defer | None = None) -> Running:
        request = self._request_of(decoded)
        call.model_name, call.request_id = request.model_name, request.id
        try:
            servable = self._dataplane.servable_of(call, request)
        except ServingError as error:
            raise name_request(error, request.id) from None
        return self._dataplane.start(servable, request, call, sink, defer, streams=servable.decoupled)

    def answer(self, response: InferenceResponse, _: Any) -> InferenceResponse:
        return response

    def map_error(self, error: ServingError, decoded: Any, _: Call) -> ServingError:
        return name_request(error, self._request_of(decoded).id)


def signature_of(servable: Servable, name: str) -> Signature:
    """Return a signature by name. Raise `InvalidRequest`."""
    found = servable.signatures.get(name or servable.default_signature)
    if found is None:
        raise InvalidRequest(
            f"model '{servable.name}' has no signature '{name}', only {', '.join(sorted(servable.signatures))}"
        )
    return found


def identity_only(header: str) -> str:
    """Return the coding of a body that must not be compressed (spec 3.8). Raise `InvalidArgument`."""
    coding = content_coding(header)
    if coding != "identity":
        raise InvalidArgument(f"Content-Encoding '{coding}' is not supported by generate, expected identity")
    return coding


def stream_form(encode: Callable[[InferenceResponse], bytes]) -> StreamForm:
    """Return the form of a stream of events. Errors are events as well, once there has been one."""
    begun = False

    def event(response: InferenceResponse) -> bytes:
        nonlocal begun
        try:
            text = encode(response)
        except ServingError as error:
            if not begun:
                raise
            text = encode_error(error.message)
        begun = True
        return encode_event(text)

    def last(error: ServingError) -> bytes:
        return encode_event(encode_error(error.message))

    return StreamForm(EVENTS, event, last, printing_size, waits=True)


def _infer_body(rest: RestInfer, response: InferenceResponse) -> bytes:
    return bytes(encode_infer(response, rest).body)


def printing_size(answer: InferenceResponse) -> int:
    return sum([output.array.nbytes for output in answer.outputs]) + packing_size(answer)
