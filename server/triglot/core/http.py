"""An HTTP request and its answer, as plain values: for routes, and for models that speak HTTP themselves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A REST request: `path` holds the decoded variables of the route's path, header names are lower case.

    `verb` and `target` (path and query) are as they were sent.
    """

    path: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes | bytearray
    verb: str = "GET"
    target: str = "/"


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A REST answer."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HttpStream:
    """An answer in pieces: each is sent at once, as one chunk of a chunked body. Closed when the client leaves."""

    chunks: AsyncGenerator[bytes, None]
    content_type: str
