"""The interface of a transport for one HTTP request and its response, and what results and errors become."""

from __future__ import annotations

import asyncio
import json
import re
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from email.utils import formatdate
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any, Final

from triglot.core.call import Call
from triglot.core.compiling import mypyc_attr
from triglot.core.errors import (
    InvalidArgument,
    PayloadTooLarge,
    ServingError,
    Unimplemented,
    as_serving_error,
    retry_hint,
)
from triglot.core.http import STATUS_OF, HttpRequest, HttpResponse
from triglot.core.tensor import Scattered
from triglot.protocols.rows import Route
from triglot.transports.off_loop import take_once
from triglot.transports.rest.fields import MAX_QUOTED, Fields

JOINED_BYTES: Final = 64 * 1024
"""Parts of a body up to this total size are joined when it is read."""
READ_AHEAD: Final = 512 * 1024
"""Bytes of a body that are received before it is read; beyond that, the client has to wait."""


class Clock:
    """Formats the Date header field, once per second."""

    __slots__ = ("_date", "_second")

    def __init__(self) -> None:
        self._second = 0
        self._date = ""

    def date(self) -> str:
        """Return the current time as an HTTP date."""
        second = int(time.time())
        if second != self._second:
            self._second, self._date = second, formatdate(second, usegmt=True)
        return self._date


@mypyc_attr(allow_interpreted_subclasses=True)
class RequestBody:
    """A request's body, which may still be arriving. `length`: its length in bytes, if known."""

    __slots__ = ("length",)
    length: int | None

    @abstractmethod
    def complete_body(self) -> bytes | None:
        """Return the body if all of it has arrived; None if not, or if it is invalid."""

    @abstractmethod
    def read(self) -> Coroutine[Any, Any, bytes]:
        """Return what has arrived since the last call, at least one byte; b"" at the end.

        Raise `InvalidArgument` for an invalid body.
        """


@mypyc_attr(allow_interpreted_subclasses=True)
class Exchange:
    """A request, and the way to send its response.

    `fields` are the request's header fields, names in lower case; `headers` has the last value of each.
    `is_http10`: the client speaks HTTP/1.0. `begun`: the response's head has been sent.
    """

    __slots__ = ("begun", "body", "fields", "headers", "is_http10", "target", "verb")

    def __init__(
        self, verb: str, target: str, fields: Fields, body: RequestBody, *, is_http10: bool = False
    ) -> None:
        self.verb = verb
        self.target = target
        self.fields = fields
        self.headers: Mapping[str, str] = dict(fields)
        self.body = body
        self.is_http10 = is_http10
        self.begun = False

    @property
    @abstractmethod
    def remote(self) -> str:
        """The client's address; "" where it has none."""

    @abstractmethod
    def certificate_names(self) -> Sequence[str]:
        """Return the names in the client's certificate; none without one."""

    @abstractmethod
    def respond(self, status: int, fields: Fields, body: bytes | Scattered) -> None:
        """Send a complete response."""

    @abstractmethod
    def begin(self, status: int, fields: Fields) -> Coroutine[Any, Any, None]:
        """Send the head of a response whose body follows in chunks."""

    @abstractmethod
    def write(self, chunk: bytes) -> Coroutine[Any, Any, None]:
        """Send a chunk.

        Waits while the client does not read. Raise `ConnectionError` when it has disconnected.
        """

    @abstractmethod
    def finish(self) -> Coroutine[Any, Any, None]:
        """End a response that was begun."""

    @abstractmethod
    def abort(self) -> None:
        """Break off a response that was begun: the client sees that it is incomplete."""

    def values(self, name: str) -> list[str]:
        """Return all values of a header field, in order."""
        return [value for field, value in self.fields if field == name]


@mypyc_attr(allow_interpreted_subclasses=True)
class IncomingBody(RequestBody):
    """A body that a transport feeds as it arrives, and that is read once. On the event loop.

    Subclasses implement `want`.
    """

    __slots__ = ("_error", "_parts", "_size", "_waiter", "has_ended", "paused")

    def __init__(self, length: int | None) -> None:
        self.length = length
        self.has_ended = False
        """Whether the body is complete."""
        self.paused = False
        """Whether too much of it is waiting to be read."""
        self._parts: deque[bytes] = deque()
        self._size = 0
        self._error: str | None = None
        self._waiter: asyncio.Future[None] | None = None

    def want(self, *, more: bool) -> None:
        """Have the transport stop, or continue, receiving the body."""

    def feed(self, data: bytes) -> None:
        """Add the next part."""
        self._parts.append(data)
        self._size += len(data)
        if self._size > READ_AHEAD and not self.paused:
            self.paused = True
            self.want(more=False)
        self._wake()

    def end(self) -> None:
        """Note that the body is complete."""
        self.has_ended = True
        self._wake()

    def fail(self, problem: str) -> None:
        """Note that the body is invalid, or incomplete."""
        if not self.has_ended and self._error is None:
            self._error = problem
            self._wake()

    def complete_body(self) -> bytes | None:
        return self._take(self._size) if self.has_ended else None

    def read(self) -> Coroutine[Any, Any, bytes]:
        return take_once(self._is_empty, self._new_waiter, partial(self._take, JOINED_BYTES))

    def _is_empty(self) -> bool:
        """Whether nothing has arrived, not even the end. Raise `InvalidArgument`."""
        if self._parts or self.has_ended:
            return False
        if self._error is not None:
            raise InvalidArgument(f"the request body is invalid: {self._error}")
        return True

    def _new_waiter(self) -> asyncio.Future[None]:
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def _take(self, joined: int) -> bytes:
        """Return all waiting parts if they have at most `joined` bytes, else the first one."""
        parts = self._parts
        if len(parts) > 1 and self._size <= joined:
            taken = b"".join(parts)
            parts.clear()
        else:
            taken = parts.popleft() if parts else b""
        self._size -= len(taken)
        if self.paused and self._size <= READ_AHEAD:
            self.paused = False
            self.want(more=True)
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


# --- requests whose bodies have arrived ---

TEXT_ON_LOOP: Final = 32 * 1024
"""Texts above this size are parsed on a thread: the slowest, of small values of which the last is wrong, take
20 ms.
"""


def limit_of(route: Route, headers: Mapping[str, str], most: int) -> tuple[int, str]:
    """Return the limit on a request's body in bytes, and the option that sets it, if any; `most`: the server's."""
    own = route.body_limit(headers)
    return (most, "max_message_size") if own is None or own >= most else (own, route.limit_option)


def complete_body(incoming: RequestBody, limit: int, option: str) -> bytes | None:
    """Return the body if all of it has arrived; None if not, or if it is invalid. Raise `PayloadTooLarge`."""
    if (incoming.length or 0) > limit:
        raise too_large(limit, option)
    body = incoming.complete_body()
    if body is not None and len(body) > limit:
        raise too_large(limit, option)
    return body


def too_large(limit: int, option: str) -> PayloadTooLarge:
    """Return the error for a body beyond the limit that this option sets."""
    return PayloadTooLarge(f"the request body is larger than {limit} bytes{advice_on(option)}")


def advice_on(option: str) -> str:
    """Return what a client can do whose body exceeds the limit that this option sets, if any does."""
    return f"; send large tensors as binary data, or raise the server's option {option}" if option else ""


def small_request(
    route: Route, variables: Mapping[str, str], http: Exchange, most: int, call: Call
) -> HttpRequest | None:
    """Return a request whose small body has arrived and can be decoded at once; None for any other.

    Raise `PayloadTooLarge`.
    """
    length = http.body.length
    if length is None or length > TEXT_ON_LOOP or "content-encoding" in http.headers:
        return None
    body = complete_body(http.body, *limit_of(route, http.headers, most))
    return None if body is None else received(route, variables, http, body, call)


def received(route: Route, variables: Mapping[str, str], http: Exchange, body: bytes, call: Call) -> HttpRequest:
    """Return the request with its body, and notes its size and model."""
    request = HttpRequest(variables, http.headers, body, http.verb, http.target, http.remote, call.permission)
    call.size = len(body)
    call.received(call.size)
    if route.model_of is not None:
        call.model_name = route.model_of(request)
    return request


# --- responses of results and errors ---

FIXED_FIELDS: Final = (("Server", "triglot"), ("X-Content-Type-Options", "nosniff"))
"""Header fields of every response."""
MAX_CACHED_TYPES: Final = 64
"""Content types whose fields are cached."""
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_FIXED_NAMES: Final = frozenset(name.lower() for name, _ in FIXED_FIELDS)


@mypyc_attr(native_class=False)
class UnknownCoding(Unimplemented):
    """The request has a content coding that the server does not support."""


def default_error(error: ServingError) -> HttpResponse:
    """Return the response for an error, for routes without a form of their own."""
    status = 413 if isinstance(error, PayloadTooLarge) else STATUS_OF[error.code]
    headers = {"Accept-Encoding": "gzip, deflate"} if isinstance(error, UnknownCoding) else {}
    # No charset: a stock client compares the content type literally (KServe V2, spec 0.3).
    return HttpResponse(error_body(error.message), status, headers=headers)


def error_body(text: str) -> bytes:
    """Return the JSON of an error."""
    return json.dumps({"error": text}).encode()


def grpc_only(what: str, verb: str, content_type: str) -> str:
    """Return the text for a request that is not a gRPC call, to a method or a port that takes nothing else."""
    given = f"a {verb[:MAX_QUOTED]} request"
    if verb == "POST":
        given = f"content type {content_type[:MAX_QUOTED]!r}" if content_type else "no content type"
    return (
        f"{what} takes gRPC calls: POST requests over HTTP/2 of content type application/grpc, got {given}; "
        "clients of gRPC-Web and Connect need a proxy that translates"
    )


def fields_of(response: HttpResponse, row: Mapping[str, str], origin: Mapping[str, str]) -> Fields:
    """Return a response's header fields: its own, its row's, and those that let another `origin` read it.

    Common combinations are a cached tuple.
    """
    if not (response.headers or row or origin):
        return _cached_fields(response.content_type)
    fields = [("Content-Type", response.content_type)] if response.content_type else []
    if response.headers:
        own = response.headers
        fields += own.items() if isinstance(own, Mapping) else own
    if row or origin or len(fields) > 1:
        names = _FIXED_NAMES.union(map(str.lower, row), map(str.lower, origin))
        fields = [field for field in fields if field[0].lower() not in names]
        fields += row.items()
    if origin:
        fields += *origin.items(), ("Vary", "Origin")
    fields += FIXED_FIELDS
    return fields


@lru_cache(MAX_CACHED_TYPES)
def _cached_fields(content_type: str) -> Fields:
    return (("Content-Type", content_type), *FIXED_FIELDS) if content_type else FIXED_FIELDS


def check_fields(response: HttpResponse) -> None:
    """Raise `ValueError` for a header field, maybe made by a model, that would inject another one."""
    own = response.headers
    if not own:
        return
    for field in own.items() if isinstance(own, Mapping) else own:
        if any(map(_CONTROL.search, field)):
            raise ValueError(f"a header field has a control character: {field!r}")


def error_response(route: Route, error: Exception, headers: Mapping[str, str], call: Call) -> HttpResponse:
    """Return the response for an exception; `headers` are the request's."""
    # A function of its own: a traceback refers to the frames that the error passed through. If one of these
    # referred to the error, the cycle, with the request in it, would live until garbage collection.
    return failure_response(route, as_serving_error(error, f"{route.verb} {route.method}"), headers, call)


def failure_response(route: Route, error: ServingError, headers: Mapping[str, str], call: Call) -> HttpResponse:
    """Return the response for an error, in the route's own form if it has one."""
    encoded = default_error(error) if route.encode_error is None else route.encode_error(error, headers)
    return _with_headers(error, encoded, call)


def refusal_response(route: Route, error: ServingError, call: Call) -> HttpResponse:
    """Return the response for a call that the client may not make.

    It has the usual form, unless the route has one of its own for refusals.
    """
    encode = default_error if route.encode_refusal is None else route.encode_refusal
    return _with_headers(error, encode(error), call)


def _with_headers(error: ServingError, response: HttpResponse, call: Call) -> HttpResponse:
    """Add the header fields that belong to the error, and count the response."""
    call.sent(len(response.body))
    if response.status == HTTPStatus.UNAUTHORIZED:
        # No Basic: browsers would ask for a password themselves, and keep it.
        response = with_field(response, response.body, "WWW-Authenticate", 'Bearer realm="triglot"')
    seconds = retry_hint(error, 1)
    return response if seconds is None else with_field(response, response.body, "Retry-After", str(seconds))


def with_field(response: HttpResponse, body: bytes | Scattered, name: str, value: str) -> HttpResponse:
    """Return the response with this body, and with the field in place of those of its name."""
    own = response.headers
    fields = own.items() if isinstance(own, Mapping) else own
    kept = [field for field in fields if field[0].lower() != name.lower()]
    return replace(response, body=body, headers=[*kept, (name, value)])
