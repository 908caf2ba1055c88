"""Makes HTTP responses of rows' results and errors."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from functools import lru_cache
from http import HTTPStatus
from typing import TypeVar

from triglot.core.call import Call
from triglot.core.errors import Code, PayloadTooLarge, ServingError, Unimplemented, as_serving_error, retry_hint
from triglot.core.http import HttpResponse
from triglot.core.tensor import Scattered
from triglot.protocols.rows import Route
from triglot.transports.deflate import DEFLATED_WORK, accepted, deflate
from triglot.transports.off_loop import run_sized
from triglot.transports.rest.exchange import Exchange
from triglot.transports.rest.fields import MAX_QUOTED, Fields

T = TypeVar("T")

LAST_MESSAGE_SECONDS = 1.0
"""Seconds after a call's deadline in which its stream may still be written."""
FIXED_FIELDS = (("Server", "triglot"), ("X-Content-Type-Options", "nosniff"))
"""Header fields of every response."""
MAX_CACHED_TYPES = 64
"""Content types whose fields are cached."""
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_FIXED_NAMES = frozenset(name.lower() for name, _ in FIXED_FIELDS)


STATUS = {
    Code.CANCELLED: 400,
    Code.UNKNOWN: 400,
    Code.INVALID_ARGUMENT: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 400,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 400,
    Code.ABORTED: 409,
    Code.OUT_OF_RANGE: 400,
    Code.UNIMPLEMENTED: 501,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
    Code.DATA_LOSS: 500,
    Code.UNAUTHENTICATED: 401,
}


class UnknownCoding(Unimplemented):
    """The request has a content coding that the server does not support."""


def default_error(error: ServingError) -> HttpResponse:
    """Returns the response for an error, for routes without a form of their own."""
    status = 413 if isinstance(error, PayloadTooLarge) else STATUS[error.code]
    headers = {"Accept-Encoding": "gzip, deflate"} if isinstance(error, UnknownCoding) else {}
    # No charset: a stock client compares the content type literally (KServe V2, spec 0.3).
    return HttpResponse(error_body(error.message), status, headers=headers)


def error_body(text: str) -> bytes:
    """Returns the JSON of an error."""
    return json.dumps({"error": text}).encode()


def grpc_only(what: str, verb: str, content_type: str) -> str:
    """Returns the text for a request that is not a gRPC call, to a method or a port that takes nothing else."""
    given = f"a {verb[:MAX_QUOTED]} request"
    if verb == "POST":
        given = f"content type {content_type[:MAX_QUOTED]!r}" if content_type else "no content type"
    return (
        f"{what} takes gRPC calls: POST requests over HTTP/2 of content type application/grpc, got {given}; "
        "clients of gRPC-Web and Connect need a proxy that translates"
    )


def fields_of(response: HttpResponse, row: Mapping[str, str], origin: Mapping[str, str]) -> Fields:
    """Returns a response's header fields: its own, its row's, and those that let another `origin` read it.

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
    """Raises `ValueError` for a header field, maybe made by a model, that would inject another one."""
    own = response.headers
    if not own:
        return
    for field in own.items() if isinstance(own, Mapping) else own:
        if any(map(_CONTROL.search, field)):
            raise ValueError(f"a header field has a control character: {field!r}")


def error_response(route: Route, error: Exception, headers: Mapping[str, str], call: Call) -> HttpResponse:
    """Returns the response for an exception; `headers` are the request's."""
    # A function of its own: a traceback refers to the frames that the error passed through. If one of these
    # referred to the error, the cycle, with the request in it, would live until garbage collection.
    return failure_response(route, as_serving_error(error, f"{route.verb} {route.method}"), headers, call)


def failure_response(route: Route, error: ServingError, headers: Mapping[str, str], call: Call) -> HttpResponse:
    """Returns the response for an error, in the route's own form if it has one."""
    encoded = default_error(error) if route.encode_error is None else route.encode_error(error, headers)
    return _with_headers(error, encoded, call)


def refusal_response(route: Route, error: ServingError, call: Call) -> HttpResponse:
    """Returns the response for a call that the client may not make.

    It has the usual form, unless the route has one of its own for refusals.
    """
    encode = default_error if route.encode_refusal is None else route.encode_refusal
    return _with_headers(error, encode(error), call)


def _with_headers(error: ServingError, response: HttpResponse, call: Call) -> HttpResponse:
    """Add the header fields that belong to the error, and count the response."""
    call.sent(len(response.body))
    if response.status == HTTPStatus.UNAUTHORIZED:
        # No Basic: browsers would ask for a password themselves, and keep it.
        response = _with_field(response, response.body, "WWW-Authenticate", 'Bearer realm="triglot"')
    seconds = retry_hint(error, 1)
    return response if seconds is None else _with_field(response, response.body, "Retry-After", str(seconds))


def _with_field(response: HttpResponse, body: bytes | Scattered, name: str, value: str) -> HttpResponse:
    own = response.headers
    fields = own.items() if isinstance(own, Mapping) else own
    kept = [field for field in fields if field[0].lower() != name.lower()]
    return replace(response, body=body, headers=[*kept, (name, value)])


async def compressed(http: Exchange, response: HttpResponse) -> HttpResponse:
    """Returns the response in the coding that the client prefers; compressed on a thread if it takes long."""
    headers = http.values("accept-encoding")
    if not headers or (preference := accepted(",".join(headers))).coding == "identity":
        return response
    given = response.body
    body = await run_sized(len(given) * DEFLATED_WORK, lambda: deflate(bytes(given), preference))
    if body is None:
        return response
    return _with_field(response, body, "Content-Encoding", preference.coding)


async def in_time(call: Call, work: Awaitable[T], spare: float, when: str) -> T:
    """Await `work` until `spare` seconds after the call's deadline. Raises `DeadlineExceeded` after that."""
    if call.remaining is None:
        return await work
    try:
        async with asyncio.timeout(call.remaining + spare) as scope:
            return await work
    except TimeoutError:
        if not scope.expired():
            raise
        raise call.overdue(when) from None
