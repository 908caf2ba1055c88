"""Errors in HTTP: the status of each code, and the default body (spec 3.6)."""

from __future__ import annotations

import json

from triglot.core.errors import Code, PayloadTooLarge, ServingError, Unimplemented
from triglot.core.http import HttpResponse
from triglot.transports.rest.fields import MAX_QUOTED

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
