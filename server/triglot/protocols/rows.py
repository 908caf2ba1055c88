"""Rows: the table entries by which a protocol describes its RPCs and REST routes to the transports. No I/O.

A `Method` is one RPC, a `Route` one REST operation on the same calls. A transport passes a row the bytes of a
request and sends the bytes of its response; it knows nothing else about a protocol.
"""

from __future__ import annotations

import enum
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from triglot.core.awaiting import Responses
from triglot.core.call import Call
from triglot.core.errors import InvalidArgument, PayloadTooLarge, ServingError
from triglot.core.http import HttpRequest, HttpResponse, StreamForm, no_work
from triglot.core.operation import Operation
from triglot.core.running import Conversation, Defer, Requests, Running, Sink
from triglot.core.tensor import MessageBytes, Scattered
from triglot.model.signature import ModelMetadata
from triglot.protocols.api_operation import ApiOperation

_PATTERN = re.compile(r":[^{}]*}")
MAX_CONTROL_BYTES = 1024 * 1024
"""Largest request in bytes without tensors: names, settings and the like."""


class Kind(enum.Enum):
    """Streaming kind of an RPC: how many messages go each way."""

    UNARY = "unary"
    SERVER_STREAM = "server stream"
    BIDI_STREAM = "bidirectional stream"


class InferenceHandler(ABC):
    """Runs a model for each request of a row, without a coroutine. On the event loop."""

    __slots__ = ()

    @abstractmethod
    def start(self, request: Any, call: Call, sink: Sink, defer: Defer | None = None, /) -> Running:
        """Start the request; `sink` gets its response, maybe before this returns. Raise `ServingError`."""

    @abstractmethod
    def answer(self, response: Any, request: Any, /) -> Any:
        """Return what the row's `encode` takes, for what the sink got."""

    @abstractmethod
    def map_error(self, error: ServingError, request: Any, call: Call, /) -> ServingError:
        """Return the error that the sink got as the protocol words it.

        Returned, not raised: a traceback would keep it alive.
        """

    async def infer(self, request: Any, call: Call, start: Callable[..., Running] | None = None) -> Any:
        """Return the answer to one request, started by `start`, or else as a row starts it.

        Raise `ServingError`, worded by `map_error` once it has started.
        """
        responses = Responses(partial(start or self.start, request, call))
        try:
            response = await responses.only()
        except ServingError as error:
            raise self.map_error(error, request, call) from None
        return self.answer(response, request)


def _status_only(_: ServingError) -> None:
    """Encode no body: the error is gRPC's status only."""


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC: `decode` the request, run it, `encode` each response. A row has one function that runs it:

    `inference` runs a model's request without a coroutine; `call(request, call)` is awaited, for one response;
    `iterate` returns an async iterator over the responses of a stream, for one request or an async iterator over
    those of a bidirectional stream; `converse` runs such a stream on its requests' bytes.

    `answer_size` and `decode_size` estimate how many bytes `encode` and `decode` process one by one; if many, the
    codec runs off the event loop. `decode_size` is called for large requests only. `scatter` is `encode` without a
    copy of large arrays, for transports that can send pieces. `details` turns an error's text into what the client
    sees. `encode_error` encodes an error as a response, in protocols whose messages can hold one.
    """

    name: str
    kind: Kind
    operation: Operation
    decode: Callable[[MessageBytes], Any]
    call: Callable[[Any, Call], Coroutine[Any, Any, Any]] | None
    encode: Callable[[Any], bytes]
    answer_size: Callable[[Any], int] = no_work
    decode_size: Callable[[MessageBytes], int] = no_work
    scatter: Callable[[Any], bytes | Scattered] | None = None
    details: Callable[[str], str] = str
    encode_error: Callable[[ServingError], bytes | None] = _status_only
    inference: InferenceHandler | None = None
    iterate: Callable[[Any, Call], AsyncIterator[Any]] | None = None
    converse: Callable[[Requests, Call, Sink], Conversation] | None = None


@dataclass(frozen=True, slots=True)
class Service:
    """A gRPC service by its full name; telemetry counts its calls under `protocol`."""

    name: str
    methods: tuple[Method, ...]
    protocol: str = "grpc"


class DamagedBody(InvalidArgument):
    """The request's body does not decompress as its Content-Encoding says."""


class InflatedTooLarge(PayloadTooLarge):
    """The request's decompressed body exceeds the route's limit."""


def content_coding(header: str) -> str:
    """Return the coding named by a Content-Encoding header, in lower case, without HTTP's legacy prefix `x-`."""
    return header.strip().lower().removeprefix("x-") or "identity"


def _control_size(_: Mapping[str, str]) -> int:
    return MAX_CONTROL_BYTES


def _body_size(request: HttpRequest) -> int:
    return len(request.body)


def _no_single_response(_: Any, __: Any) -> HttpResponse:
    raise NotImplementedError("each request of the route asks for a stream")


@lru_cache(maxsize=1024)
def _template(path: str) -> str:
    return _PATTERN.sub("}", path)


@dataclass(frozen=True, slots=True)
class Route:
    """One REST operation. `path` has `{name}` or `{name:regex}` variables; the verb "*" matches any.

    `call(request, call)` is awaited, or `inference` runs a model's request without a coroutine. `encode` gets the
    answer and the decoded request. `stream_form` returns the form of the responses to a decoded request that asks
    for a stream, else None; `inference` sends any number of them. `text_size` and `answer_size` estimate how many
    bytes of text `decode` parses and `encode` prints; if many, the codec runs off the event loop.

    `body_limit` returns the largest body in bytes, compressed or not, for a request with these headers; None: the
    server's limit. `limit_option` names the server's option that sets it, if there is one.
    Responses of `compress_from` bytes and more are compressed in the coding that the client prefers; None: never.
    `coding` parses the Content-Encoding header; a compressed body may grow to `inflate_limit`, or `body_limit`.
    `encode_error` encodes an error in the protocol's form, `encode_refusal` one of a client that may not make the
    call; the default is `{"error": TEXT}` with the usual status. The former gets the request's headers, too.
    `headers` are added to every response, also to errors. `any_origin` allows CORS requests from any origin.

    Telemetry counts calls under `protocol` and `method`, and those that cannot be decoded under the model in the
    path's variable `model`, or returned by `model_of`. `documented` are the row's operations in the OpenAPI
    document: one, or several if it parses its paths itself; none for a row that only rejects unmatched requests.
    `of_model` returns the operation of a single model, if it has one, or, with an empty path, examples for the
    row's own operation; its second argument is the server's address.
    """

    verb: str
    path: str
    operation: Operation
    decode: Callable[[HttpRequest], Any]
    call: Callable[[Any, Call], Coroutine[Any, Any, Any]] | None = None
    encode: Callable[[Any, Any], HttpResponse] = _no_single_response
    text_size: Callable[[HttpRequest], int] = _body_size
    answer_size: Callable[[Any], int] = no_work
    body_limit: Callable[[Mapping[str, str]], int | None] = _control_size
    limit_option: str = ""
    coding: Callable[[str], str] = content_coding
    inflate_limit: int | None = None
    compress_from: int | None = None
    encode_error: Callable[[ServingError, Mapping[str, str]], HttpResponse] | None = None
    encode_refusal: Callable[[ServingError], HttpResponse] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    any_origin: bool = False
    model_of: Callable[[HttpRequest], str] | None = None
    name: str = ""
    protocol: str = ""
    inference: InferenceHandler | None = None
    stream_form: Callable[[Any], StreamForm | None] | None = None
    documented: tuple[ApiOperation, ...] = ()
    of_model: Callable[[ModelMetadata, str], ApiOperation | None] | None = None

    @property
    def template(self) -> str:
        """The path with its variables, without their regular expressions."""
        return _template(self.path)

    @property
    def method(self) -> str:
        """The row's name in telemetry: `name`, or the path's template."""
        return self.name or self.template
