"""grps over HTTP (grps 3): the same calls, with JSON or binary bodies.

Strategy: decoding checks content type, query and body, and keeps errors in the body in the request: a stream has
started before they are reported, in its last document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import parse_qs

from triglot.core.call import Call
from triglot.core.errors import InvalidArgument, ServingError, own_copy
from triglot.core.http import HttpRequest, HttpResponse, StreamForm
from triglot.core.operation import Operation
from triglot.core.running import Defer, Running, Sink
from triglot.core.types import HttpChunk, InferenceResponse
from triglot.model.signature import ModelMetadata
from triglot.protocols.api_operation import ALLOW, ApiOperation
from triglot.protocols.grps import openapi
from triglot.protocols.grps.answers import Answer
from triglot.protocols.grps.codec import decode_answer
from triglot.protocols.grps.json_printer import answer_size, print_message, print_ndarray
from triglot.protocols.grps.json_reader import read_message, read_model_name
from triglot.protocols.grps.mapping import answer_message
from triglot.protocols.grps.message import FAILURE, OK, BadRequest, Message, Status, failure_of
from triglot.protocols.grps.request import Request
from triglot.protocols.grps.service import PROTOCOL, Grps, worded
from triglot.protocols.json.dialect import DEFAULT_LIMITS, SIZE_OPTION, JsonLimits
from triglot.protocols.json.text import read_body
from triglot.protocols.rows import InferenceHandler, Route

PREFIX = "/grps/v1"
PREDICT = f"{PREFIX}/infer/predict"
TEXT_PER_BYTE = 8
"""Estimates of the text per byte of a serialized message: many small tensors are much text."""
READ = ("GET", "HEAD", "POST")
JSON, BYTES, TEXT = "application/json", "application/octet-stream", "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class HttpRules:
    """How the predict paths behave (grps 3.5, 3.6).

    `path`: an additional predict path, if not empty. `customized_body`: the model gets the HTTP requests
    unchanged. `streaming_mode` and `streaming_key` say where a request asks for a stream; `streaming_content_type`
    is the content type of streams. `always_200`: errors have HTTP status 200 (grps 0).
    """

    path: str = ""
    customized_body: bool = False
    streaming_mode: str = "query_param"
    streaming_key: str = "streaming"
    streaming_content_type: str = BYTES
    always_200: bool = False


@dataclass(frozen=True, slots=True)
class DecodedPredict:
    """A predict call over HTTP: the request, and the form of its response."""

    request: Request
    streaming: bool
    as_ndarray: bool = False


class Http(InferenceHandler):
    """Decodes requests, runs them, and encodes answers."""

    def __init__(self, service: Grps, rules: HttpRules, limits: JsonLimits = DEFAULT_LIMITS) -> None:
        self._service = service
        self._rules = rules
        self._limits = limits

    def decode(self, http: HttpRequest) -> DecodedPredict:
        """Decode a request. Raise `BadRequest` for errors besides those in the body."""
        query = _query(http)
        streaming = self._wants_stream(http, query)
        if self._rules.customized_body:
            return DecodedPredict(Request(query.get("model", ""), http=http), streaming)
        as_ndarray = query.get("return-ndarray", "").lower() == "true"
        media_type = _media_type(http)
        if streaming and as_ndarray:
            raise BadRequest("Bad Request, err: Streaming and ret ndarray are not supported at the same time.")
        try:
            message = _read_body(media_type, bytes(http.body), self._limits)
            request = self._service.request_of(message, message.model or query.get("model", ""))
        except ServingError as error:
            request = Request(query.get("model", ""), error=own_copy(error))
        return DecodedPredict(request, streaming, as_ndarray)

    def _wants_stream(self, http: HttpRequest, query: dict[str, str]) -> bool:
        """Whether the request asks for a stream, in the configured place (grps 3.5)."""
        key = self._rules.streaming_key
        if self._rules.streaming_mode == "query_param":
            return query.get(key, "").lower() == "true"
        if self._rules.streaming_mode == "header_param":
            return http.headers.get(key.lower(), "").lower() == "true"
        try:
            return read_body(bytes(http.body), None, lambda body: body.get(key) is True, self._limits)
        except InvalidArgument:
            return False

    def body_limit(self, headers: Mapping[str, str]) -> int | None:
        """Return the largest body in bytes. None: the server's limit."""
        is_json = not self._rules.customized_body and headers.get("content-type", "").lower().startswith(JSON)
        return self._limits.size if is_json else None

    @property
    def documented(self) -> ApiOperation:
        """Predict in the OpenAPI document."""
        rules = self._rules
        in_query = rules.streaming_mode == "query_param"
        return openapi.predict_operation(
            rules.streaming_content_type,
            customized=rules.customized_body,
            streaming_query=rules.streaming_key if in_query else "",
        )

    def example_of(self, model: ModelMetadata, _: str) -> ApiOperation | None:
        """Return an example for a model; none for customised HTTP, which a project parses itself."""
        return None if self._rules.customized_body else openapi.predict_of(model)

    def start(self, decoded: DecodedPredict, call: Call, sink: Sink, defer: Defer | None = None) -> Running:
        return self._service.start(decoded.request, call, sink, defer, streams=decoded.streaming)

    def answer(self, response: Any, decoded: DecodedPredict) -> Answer:
        if isinstance(response, InferenceResponse):
            return answer_message(response, decoded.request.message)
        return cast("Answer", response)

    def map_error(self, error: ServingError, _: DecodedPredict, call: Call) -> ServingError:
        return worded(error, call)

    def stream_form(self, decoded: DecodedPredict) -> StreamForm | None:
        """Return the form of a stream: an error is the last answer (grps 3.5, 3.6)."""
        if not decoded.streaming:
            return None
        return StreamForm(self._rules.streaming_content_type, _chunk, self._last_chunk, _printing_size)

    def _last_chunk(self, error: ServingError) -> bytes:
        """Return an error as the last chunk of a stream."""
        if self._rules.customized_body:
            return error.message.encode()
        return _chunk(Message(status=failure_of(error)))

    def encode(self, answer: Answer, decoded: DecodedPredict) -> HttpResponse:
        """Encode an answer in the requested form. Raise `Internal` if it has no ndarray form."""
        if self._rules.customized_body:
            exchange = decoded.request.exchange
            own = None if exchange is None else exchange.http_response
            return own or HttpResponse(b"", content_type=TEXT)
        message = _message(answer)
        message.status = OK
        if decoded.as_ndarray:
            return HttpResponse(print_ndarray(message))
        if isinstance(message.data, bytes) and message.data:
            return HttpResponse(message.data, content_type=BYTES)
        return HttpResponse(print_message(message))

    def encode_error(self, error: ServingError, _: Mapping[str, str]) -> HttpResponse:
        """Encode an error, with its status in the body (grps 3.4); plain text in customised HTTP."""
        status = failure_of(error)
        code = 200 if self._rules.always_200 else status.code
        if self._rules.customized_body:
            return HttpResponse(error.message.encode(), code, TEXT)
        return HttpResponse(print_message(Message(status=status)), code)

    def encode_status(self, status: Status, _: Any) -> HttpResponse:
        """Encode health: HTTP's status is the one in the body."""
        code = 200 if self._rules.always_200 else status.code
        return HttpResponse(print_message(Message(status=status)), code)


def grps_routes(service: Grps, rules: HttpRules, limits: JsonLimits = DEFAULT_LIMITS) -> list[Route]:
    """Return the rows of grps' HTTP interface, except those of its monitor."""
    http, plain = Http(service, rules, limits), Http(service, HttpRules(always_200=rules.always_200))
    health, described = Operation.HEALTH, Operation.METADATA

    def control(
        path: str, operation: Operation, decode: Any, call: Any, encode: Any, documented: ApiOperation
    ) -> Callable[[str], Route]:
        return lambda verb: Route(
            verb,
            f"{PREFIX}/{path}",
            operation,
            decode,
            call,
            encode,
            encode_error=plain.encode_error,
            protocol=PROTOCOL,
            documented=(documented,),
        )

    both: list[Callable[[str], Route]] = [
        control(f"health/{name}", operation, _nothing, call, plain.encode_status, documented)
        for name, operation, call, documented in (
            ("online", Operation.GRPS_STATE, service.set_online, openapi.ONLINE),
            ("offline", Operation.GRPS_STATE, service.set_offline, openapi.OFFLINE),
            ("live", health, service.live, openapi.LIVE),
            ("ready", health, service.ready, openapi.READY),
        )
    ]
    server, model = service.server_metadata, service.model_metadata
    both.append(control("metadata/server", described, _nothing, server, _encode_message, openapi.SERVER))
    metadata = control("metadata/model", described, _model_name, model, _encode_message, openapi.MODEL)
    rows = [row(verb) for row in both for verb in READ]
    rows += [metadata("POST"), _predict_row(http, PREDICT)("POST")]
    if rules.path:
        # First, so that the project's own path takes precedence.
        rows = [*map(_predict_row(http, rules.path), READ), *rows]
    verbs: dict[str, list[str]] = {}
    for row in rows:
        verbs.setdefault(row.path, []).append(row.verb)
    return [*rows, *[_options_row(path, [*allowed, "OPTIONS"]) for path, allowed in verbs.items()]]


def _options_row(path: str, verbs: list[str]) -> Route:
    """Return the row that lists a path's methods (grps 3.1)."""
    answer = HttpResponse(b"", content_type=TEXT, headers={"Allow": ", ".join(verbs)})
    return Route(
        "OPTIONS",
        path,
        Operation.PUBLIC,
        _nothing,
        _done,
        lambda *_: answer,
        protocol=PROTOCOL,
        documented=(ALLOW,),
    )


async def _done(*_: object) -> None:
    pass


def _predict_row(http: Http, path: str) -> Callable[[str], Route]:
    return lambda verb: Route(
        verb,
        path,
        Operation.INFER,
        http.decode,
        None,
        http.encode,
        inference=http,
        stream_form=http.stream_form,
        answer_size=_printing_size,
        text_size=_text_size,
        body_limit=http.body_limit,
        limit_option=SIZE_OPTION,
        encode_error=http.encode_error,
        name="predict",
        protocol=PROTOCOL,
        documented=(http.documented,),
        of_model=http.example_of,
    )


def _query(http: HttpRequest) -> dict[str, str]:
    """Return the query's parameters; the first of a repeated one counts."""
    parameters = parse_qs(http.target.partition("?")[2], keep_blank_values=True, errors="replace")
    return {name: values[0] for name, values in parameters.items()}


def _media_type(http: HttpRequest) -> str:
    """Return the content type, JSON or bytes, without its parameters (grps 3.3). Raise `BadRequest`."""
    header = http.headers.get("content-type")
    if header is None:
        raise BadRequest("No content type in headers.")
    media_type = header.partition(";")[0].strip().lower()
    if media_type not in (JSON, BYTES):
        raise BadRequest("Unsupported content type.")
    return media_type


def _text_size(http: HttpRequest) -> int:
    """Return how many bytes of the body are parsed as text."""
    return 0 if http.headers.get("content-type", "").lower().startswith(BYTES) else len(http.body)


def _read_body(media_type: str, body: bytes, limits: JsonLimits) -> Message:
    if not body:
        raise BadRequest("The http body is empty.")
    return Message(data=body) if media_type == BYTES else read_message(body, limits)


def _nothing(_: HttpRequest) -> None:
    """Ignore the body (grps 11.4)."""


def _model_name(http: HttpRequest) -> str | None:
    try:
        return read_model_name(bytes(http.body)) if http.body else None
    except InvalidArgument as error:
        raise BadRequest(error.message) from None


def _message(answer: Answer) -> Message:
    return answer if isinstance(answer, Message) else decode_answer(answer or b"")


def _chunk(answer: Message | bytes) -> bytes:
    """Encode one message of a stream: raw bytes, or a JSON document that ends with a newline."""
    if isinstance(answer, HttpChunk):
        return bytes(answer)
    message = _message(answer)
    if isinstance(message.data, bytes) and message.data:
        return message.data
    if message.status is None or message.status.status != FAILURE:
        message.status = OK
    return print_message(message) + b"\n"


def _encode_message(message: Message, _: Any) -> HttpResponse:
    return HttpResponse(print_message(message))


def _printing_size(answer: Answer) -> int:
    """Estimates how much text is printed, in bytes; a project's message is not decoded for it."""
    if isinstance(answer, HttpChunk):
        return 0
    return answer_size(answer) if isinstance(answer, Message) else len(answer or b"") * TEXT_PER_BYTE
