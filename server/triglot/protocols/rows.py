"""What every protocol hands to the transports: rows. Nothing here performs I/O.

A `Method` is one RPC, a `Route` one REST operation on the same calls. A transport turns bytes into a row's
call and its answer into bytes, and knows nothing else of a protocol.
"""

from __future__ import annotations

import enum
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from triglot.core.call import Call
from triglot.core.errors import InvalidArgument, PayloadTooLarge, ServingError
from triglot.core.http import HttpRequest, HttpResponse, HttpStream
from triglot.core.operation import Operation
from triglot.core.running import Defer, Done, OnLoop
from triglot.core.scattered import Scattered
from triglot.model.metadata import ModelMetadata
from triglot.protocols.openapi.operation import ApiOperation

_PATTERN = re.compile(r":[^{}]*}")
MAX_CONTROL_BYTES = 1024 * 1024
"""The largest request that names things and holds no tensor."""


class Kind(enum.Enum):
    """How many messages go each way."""

    UNARY = "unary"
    SERVER_STREAM = "server stream"
    BIDI_STREAM = "bidirectional stream"


class Inferring(Protocol):
    """What a row calls whose requests run a model once. On the loop."""

    def submit(self, request: Any, call: Call, done: Done, defer: Defer | None = None, /) -> OnLoop:
        """Run it; `done` is called with its `Outcome`, maybe before this returns. Raises `ServingError`."""

    def answer(self, outcome: Any, request: Any, /) -> Any:
        """What the row encodes of an outcome without an error."""

    def map_error(self, error: ServingError, outcome: Any, request: Any, /) -> ServingError:
        """The outcome's error in the protocol's words. Not raised: frames that it came through would keep it."""


def _status_only(_: ServingError) -> None:
    """An error is gRPC's status, and no answer."""


def no_work(_: Any) -> int:
    """The size of what costs nothing to encode, or to decode."""
    return 0


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC: `decode` the request, `call`, `encode` each answer.

    UNARY: `call(request, call)` is awaited, or, where a model answers, `inference` runs it without a coroutine.
    SERVER_STREAM: `call` returns an async iterator of answers.
    BIDI_STREAM: it is given an async iterator of requests, a `Duplex` where `decode` is `bytes`, and returns one
    of answers.
    `answer_size` tells how many bytes `encode` has to work through one by one, about: it may run off the loop.
    `decode_size` tells the same of `decode`, and is asked for large requests only. `scatter` does what `encode`
    does, without a copy of large arrays, for transports that can send pieces. `details` makes of an error's
    text what the client sees. `encode_error` makes an answer of an error, where messages of a protocol have them.
    """

    name: str
    kind: Kind
    operation: Operation
    decode: Callable[[bytes], Any]
    call: Callable[[Any, Call], Awaitable[Any] | AsyncIterator[Any]] | None
    encode: Callable[[Any], bytes]
    answer_size: Callable[[Any], int] = no_work
    decode_size: Callable[[bytes], int] = no_work
    scatter: Callable[[Any], bytes | Scattered] | None = None
    details: Callable[[str], str] = str
    encode_error: Callable[[ServingError], bytes | None] = _status_only
    inference: Inferring | None = None


@dataclass(frozen=True, slots=True)
class Service:
    """A gRPC service by its full name; `protocol` is what the telemetry counts its calls under."""

    name: str
    methods: tuple[Method, ...]
    protocol: str = "grpc"


class DamagedBody(InvalidArgument):
    """The request's body is not what its Content-Encoding says."""


class InflatedTooLarge(PayloadTooLarge):
    """The request's body is inflated to more than the route takes."""


def content_coding(header: str) -> str:
    """The coding of a Content-Encoding header, as HTTP defines it."""
    return header.strip().lower().removeprefix("x-") or "identity"


def _control_size(_: Mapping[str, str]) -> int:
    return MAX_CONTROL_BYTES


def _body_size(request: HttpRequest) -> int:
    return len(request.body)


@lru_cache(maxsize=1024)
def _template(path: str) -> str:
    return _PATTERN.sub("}", path)


@dataclass(frozen=True, slots=True)
class Route:
    """One REST operation. `path` has `{name}` or `{name:regex}` variables; the verb "*" is any.

    `call(request, call)` is awaited, or, where a model answers, `inference` runs the request without a coroutine.
    `encode` is given the answer and the decoded request. Both codec functions may run off the event loop:
    `text_size` and `answer_size` tell how many bytes of text they have to parse and print, about.
    `body_limit` gives the largest body, compressed or not, for a request with these headers; None: the server's.
    `limit_option` is the server's option that it comes from, if there is one.
    Answers of `compress_from` bytes and more are compressed as the client likes it best; None: none are.
    `coding` reads the Content-Encoding header; a compressed body may grow to `inflate_limit`, or `body_limit`.
    `encode_error` gives an error the protocol's own form; without it, it is `{"error": TEXT}` with the usual
    status. `headers` are those of every answer, errors among them. `any_origin`: web pages of any origin may call
    it. The telemetry counts calls under `protocol` and `method`, and those that cannot be understood under the
    model that the path's variable `model` names, or `model_of` finds.
    `documented` are its operations in the OpenAPI document: one, or several where it takes its paths apart itself;
    none for a row that only refuses what no other one takes. `of_model` gives that of a single model, if it has
    one, or, without a path, examples for the row's own; the server's address may stand in it.
    """

    verb: str
    path: str
    operation: Operation
    decode: Callable[[HttpRequest], Any]
    call: Callable[[Any, Call], Awaitable[Any]] | None
    encode: Callable[[Any, Any], HttpResponse | HttpStream]
    text_size: Callable[[HttpRequest], int] = _body_size
    answer_size: Callable[[Any], int] = no_work
    body_limit: Callable[[Mapping[str, str]], int | None] = _control_size
    limit_option: str = ""
    coding: Callable[[str], str] = content_coding
    inflate_limit: int | None = None
    compress_from: int | None = None
    encode_error: Callable[[ServingError], HttpResponse] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    any_origin: bool = False
    model_of: Callable[[HttpRequest], str] | None = None
    name: str = ""
    protocol: str = ""
    inference: Inferring | None = None
    documented: tuple[ApiOperation, ...] = ()
    of_model: Callable[[ModelMetadata, str], ApiOperation | None] | None = None

    @property
    def template(self) -> str:
        """The path without what variables have to match."""
        return _template(self.path)

    @property
    def method(self) -> str:
        """What the telemetry calls it: its name, or its path's template."""
        return self.name or self.template
