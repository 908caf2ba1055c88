"""An HTTP request and its answer, as plain values: for routes, and for models that speak HTTP themselves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from triglot.core.permission import EVERYTHING, Permission
from triglot.core.scattered import Scattered


@dataclass(slots=True)
class HttpRequest:
    """A REST request: `path` holds the decoded variables of the route's path, header names are lower case.

    `verb` and `target` (path and query) are as they were sent, `remote` is the client's address, if it has one.
    `permission` is its call's, for codecs that ask for a model before the call begins.
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
    """A REST answer; `headers` are pairs where a name comes several times."""

    body: bytes | Scattered
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] | Sequence[tuple[str, str]] = field(default_factory=dict)


def _no_work(_: Any) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class HttpStream:
    """An answer in pieces. Closed when the client leaves.

    `encode` makes of each of the `answers` a chunk, which is sent at once, as one chunk of a chunked body; b"" is
    left out. It may run off the loop: `answer_size` tells how many bytes of text it has to print, about. `waits`:
    the headers go with the first chunk, so that an error before it has a status, and so has a `ServingError` that
    is the first of the answers.
    """

    answers: AsyncGenerator[Any, None]
    content_type: str
    encode: Callable[[Any], bytes] = bytes
    answer_size: Callable[[Any], int] = _no_work
    waits: bool = False
