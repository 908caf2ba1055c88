"""Answers of rows, and errors, as they are handed to whatever carries HTTP."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import lru_cache
from http import HTTPStatus
from typing import TypeVar

from triglot.core.call import Call
from triglot.core.errors import Cancelled, ServingError, as_serving_error
from triglot.core.http import HttpResponse, HttpStream
from triglot.core.scattered import Scattered
from triglot.protocols.rows import Route
from triglot.telemetry.calls import Observation
from triglot.transports.deflate import DEFLATED_WORK, accepted, deflate
from triglot.transports.off_loop import run_sized
from triglot.transports.rest.errors import usual_error
from triglot.transports.rest.exchange import Exchange
from triglot.transports.rest.fields import Fields

T = TypeVar("T")

LAST_WORD_SECONDS = 1.0
"""What is left to write when a call's deadline is over."""
FIXED_FIELDS = (("Server", "triglot"), ("X-Content-Type-Options", "nosniff"))
"""Of every answer."""
MOST_TYPES = 64
"""Content types that are remembered."""
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_FIXED_NAMES = frozenset(name.lower() for name, _ in FIXED_FIELDS)


def fields_of(response: HttpResponse, row: Mapping[str, str], origin: Mapping[str, str]) -> Fields:
    """The header fields of an answer: its own, those of its row, and those that let another `origin` read it.

    A tuple of fields that many answers have.
    """
    if not (response.headers or row or origin):
        return _usual_fields(response.content_type)
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


@lru_cache(MOST_TYPES)
def _usual_fields(content_type: str) -> Fields:
    return (("Content-Type", content_type), *FIXED_FIELDS) if content_type else FIXED_FIELDS


def check_fields(response: HttpResponse) -> None:
    """Raises `ValueError` for a header field, which a model may have made, that would begin another one."""
    own = response.headers
    if not own:
        return
    for field in own.items() if isinstance(own, Mapping) else own:
        if any(map(_CONTROL.search, field)):
            raise ValueError(f"a header field has a control character: {field!r}")


def error_response(route: Route, error: Exception, observed: Observation) -> HttpResponse:
    """What the client gets for an error."""
    # A function of its own: a frame that the error came through must not hold it, or what the frame holds, the
    # request among it, is left to the garbage collector.
    return failure_response(route, as_serving_error(error, f"{route.verb} {route.method}"), observed)


def failure_response(route: Route, error: ServingError, observed: Observation) -> HttpResponse:
    """An error in the route's form, or in the usual one."""
    return _told(error, usual_error(error) if route.encode_error is None else route.encode_error(error), observed)


def refusal_response(error: ServingError, observed: Observation) -> HttpResponse:
    """An error that comes before the protocol's own: the client may not make the call."""
    return _told(error, usual_error(error), observed)


def _told(error: ServingError, response: HttpResponse, observed: Observation) -> HttpResponse:
    """With the fields that belong to the error."""
    observed.sent(len(response.body))
    if response.status == HTTPStatus.UNAUTHORIZED:
        # No Basic: browsers would ask for a password themselves, and keep it.
        response = _with_field(response, response.body, "WWW-Authenticate", 'Bearer realm="triglot"')
    if error.retry_after is None:
        return response
    return _with_field(response, response.body, "Retry-After", str(max(1, round(error.retry_after))))


def _with_field(response: HttpResponse, body: bytes | Scattered, name: str, value: str) -> HttpResponse:
    own = response.headers
    fields = own.items() if isinstance(own, Mapping) else own
    kept = [field for field in fields if field[0].lower() != name.lower()]
    return replace(response, body=body, headers=[*kept, (name, value)])


async def compressed(http: Exchange, response: HttpResponse) -> HttpResponse:
    """The answer as the client likes it best; on a thread when that takes long."""
    wishes = http.values("accept-encoding")
    if not wishes or (wish := accepted(",".join(wishes))).coding == "identity":
        return response
    given = response.body
    body = await run_sized(len(given) * DEFLATED_WORK, lambda: deflate(bytes(given), wish))
    if body is None:
        return response
    return _with_field(response, body, "Content-Encoding", wish.coding)


async def send_stream(
    http: Exchange, stream: HttpStream, fields: Fields, call: Call, observed: Observation
) -> None:
    """Sends each chunk when it comes; a slow client holds the next one up."""
    try:
        async with aclosing(stream.answers) as answers:
            if not stream.waits:
                await http.begin(200, fields)
            async for answer in answers:
                chunk = await run_sized(stream.answer_size(answer), stream.encode, answer)
                if not http.begun:
                    # An error comes first where a stream tells its errors by itself, and has nothing else to say.
                    failed = isinstance(answer, ServingError)
                    await http.begin(usual_error(answer).status if failed else 200, fields)
                if chunk:
                    # The model ends at the deadline, and may have a last word.
                    await in_time(call, http.write(chunk), LAST_WORD_SECONDS, "while the client read the response")
                    observed.sent(len(chunk))
            if not http.begun:
                await http.begin(200, fields)
            await http.finish()
    except ConnectionError:
        raise Cancelled("the client disconnected during the response") from None
    except BaseException:
        if http.begun:
            http.abort()  # Nothing else tells the client that this is not the end.
        raise


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
