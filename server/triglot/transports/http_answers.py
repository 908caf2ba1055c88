"""Answers of rows, as aiohttp sends them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload

from triglot.core.call import Call
from triglot.core.errors import Cancelled, ServingError, as_serving_error
from triglot.core.http import HttpResponse, HttpStream
from triglot.core.scattered import Scattered
from triglot.protocols import Route
from triglot.telemetry.observation import Observation
from triglot.transports.deflate import DEFLATED_WORK, accepted, deflate
from triglot.transports.http_errors import usual_error
from triglot.transports.off_loop import run_sized

T = TypeVar("T")

LAST_WORD_SECONDS = 1.0
"""What is left to write when a call's deadline is over."""


class _Pieces(Payload):
    """A body in pieces, each of which leaves from where it is."""

    def __init__(self, body: Scattered) -> None:
        super().__init__(body)
        self._size = len(body)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """See the base class."""
        return bytes(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """See the base class. The first piece goes with the headers."""
        for piece in self._value.pieces:
            await writer.write(piece)


def answer_of(route: Route, response: HttpResponse, headers: Mapping[str, str] | None = None) -> web.Response:
    """What is sent: `response`, with the row's headers and these."""
    given = response.body
    body = _Pieces(given) if isinstance(given, Scattered) else given
    # The content type as it is: aiohttp's argument refuses parameters.
    answer = web.Response(body=body, status=response.status, headers={hdrs.CONTENT_TYPE: response.content_type})
    if response.headers:
        answer.headers.extend(response.headers)
        if answer.headers.get("Connection") == "close":
            answer.force_close()
    if route.headers:
        answer.headers.update(route.headers)
    if headers:
        answer.headers.update(headers)
    return answer


def answer_of_error(route: Route, error: Exception, observed: Observation) -> web.Response:
    """What the client is told of an error."""
    # A function of its own: a frame that the error came through must not hold it, or what the frame holds, the
    # request among it, is left to the garbage collector.
    return answer_of_failure(route, as_serving_error(error, f"{route.verb} {route.method}"), observed)


def answer_of_failure(route: Route, error: ServingError, observed: Observation) -> web.Response:
    """An error in the route's form, or in the usual one."""
    response = usual_error(error) if route.encode_error is None else route.encode_error(error)
    observed.sent(len(response.body))
    headers = {} if error.retry_after is None else {"Retry-After": str(max(1, round(error.retry_after)))}
    return answer_of(route, response, headers)


async def compressed(http: web.BaseRequest, response: HttpResponse) -> HttpResponse:
    """The answer as the client likes it best; on a thread when that takes long."""
    wishes = http.headers.getall("Accept-Encoding", ())
    if not wishes or (wish := accepted(",".join(wishes))).coding == "identity":
        return response
    given = response.body
    body = await run_sized(len(given) * DEFLATED_WORK, lambda: deflate(bytes(given), wish))
    if body is None:
        return response
    headers = response.headers.items() if isinstance(response.headers, Mapping) else response.headers
    return replace(response, body=body, headers=[*headers, ("Content-Encoding", wish.coding)])


async def send_stream(
    http: web.BaseRequest, route: Route, stream: HttpStream, call: Call, observed: Observation
) -> web.StreamResponse:
    """Sends each chunk as one chunk of HTTP, when it comes; a slow client holds the next one up."""
    response = web.StreamResponse(headers={"Content-Type": stream.content_type, **route.headers})
    # A proxy that collects chunks would take from a stream what it is for.
    response.headers["X-Accel-Buffering"] = "no"
    if http.version >= HttpVersion11:
        response.enable_chunked_encoding()
    else:
        response.force_close()
    try:
        async with aclosing(stream.answers) as answers:
            if not stream.waits:
                await _send_headers(http, response)
            async for answer in answers:
                chunk = await run_sized(stream.answer_size(answer), stream.encode, answer)
                if not response.prepared:
                    await _send_headers(http, response)
                if chunk:
                    # The model ends at the deadline, and may have a last word.
                    await in_time(call, response.write(chunk), LAST_WORD_SECONDS, "while the client was reading")
                    observed.sent(len(chunk))
            if not response.prepared:
                await _send_headers(http, response)
            await response.write_eof()
    except ConnectionError:
        raise Cancelled("the client left in the middle of the answer") from None
    except BaseException:
        if response.prepared and http.transport is not None:
            http.transport.abort()  # Nothing else tells the client that this is not the end.
        raise
    return response


async def _send_headers(http: web.BaseRequest, response: web.StreamResponse) -> None:
    writer = await response.prepare(http)
    # aiohttp would keep the headers until the first chunk (since 3.12).
    if writer is not None and hasattr(writer, "send_headers"):
        writer.send_headers()


async def in_time(call: Call, work: Awaitable[T], spare: float, when: str) -> T:
    """What `work` gives until the call's deadline and `spare` seconds more. Raises `DeadlineExceeded`."""
    if call.remaining is None:
        return await work
    try:
        async with asyncio.timeout(call.remaining + spare) as scope:
            return await work
    except TimeoutError:
        if not scope.expired():
            raise
        raise call.overdue(when) from None
