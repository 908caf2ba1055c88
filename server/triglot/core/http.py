"""HTTP requests and responses as plain values: for routes, and for models that handle HTTP themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from triglot.core.errors import Code, ServingError
from triglot.core.operation import EVERYTHING, Permission
from triglot.core.tensor import Scattered

CODE_OF: Final = {
    401: Code.UNAUTHENTICATED,
    403: Code.PERMISSION_DENIED,
    404: Code.NOT_FOUND,
    409: Code.ABORTED,
    429: Code.RESOURCE_EXHAUSTED,
    501: Code.UNIMPLEMENTED,
    503: Code.UNAVAILABLE,
    504: Code.DEADLINE_EXCEEDED,
}
"""The error of an HTTP status; others are INVALID_ARGUMENT below 500, and INTERNAL."""
STATUS_OF: Final = {
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
"""The HTTP status of an error, where a route has no form of its own."""


@dataclass(slots=True)
class HttpRequest:
    """A REST request: `path` holds the decoded variables of the route's path; header names are lower case.

    `verb` and `target` (path and query) are as sent; `remote` is the client's address, "" if it has none.
    `permission` is that of the call, for codecs that look up a model before the call begins.
    """

    path: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes | bytearray
    verb: str = "GET"
    target: str = "/"
    remote: str = ""
    permission: Permission = EVERYTHING


@dataclass(slots=True)
class HttpResponse:
    """A REST response; `headers` are pairs if names repeat."""

    body: bytes | Scattered
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] | Sequence[tuple[str, str]] = field(default_factory=dict)


def error_of(status: int, body: bytes) -> ServingError:
    """Return the error that a model's own HTTP response means: its text is FastAPI's `detail`, or the body."""
    try:
        text = json.loads(body)["detail"]
    except (ValueError, TypeError, KeyError, RecursionError):
        text = body.decode(errors="replace")
    other = Code.INVALID_ARGUMENT if status < 500 else Code.INTERNAL
    return ServingError(text if isinstance(text, str) else json.dumps(text), code=CODE_OF.get(status, other))


def no_work(_: Any) -> int:
    """Estimates the cost of encoding or decoding as 0."""
    return 0


@dataclass(frozen=True, slots=True)
class StreamForm:
    """How the responses of one stream are sent: each as one chunk of a chunked body, at once.

    `encode` turns a response into a chunk; b"" is skipped. It may run off the event loop, which `answer_size`
    decides: an estimate of the bytes of text that it prints. `encode_error` makes the last chunk of a stream that
    fails. `waits`: the headers are sent with the first chunk, so that an error before it has a status; one before
    the model is called has a response of its own.
    """

    content_type: str
    encode: Callable[[Any], bytes]
    encode_error: Callable[[ServingError], bytes]
    answer_size: Callable[[Any], int] = no_work
    waits: bool = False
