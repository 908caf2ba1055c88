"""Decodes HTTP requests: body limits, decompression, and long texts on threads."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from triglot.config.options import Config
from triglot.core.call import Call
from triglot.core.errors import InvalidArgument, PayloadTooLarge
from triglot.core.http import HttpRequest
from triglot.protocols.rows import InflatedTooLarge, Route
from triglot.transports.growing import GrowingBytes
from triglot.transports.inflate import INFLATED_WORK, WINDOW_BITS, inflate
from triglot.transports.off_loop import OFF_LOOP_BYTES, OneAtATime
from triglot.transports.request_bytes import RequestBytes, Reservation
from triglot.transports.rest.exchange import Exchange, RequestBody, UnknownCoding
from triglot.transports.rest.routes import Found
from triglot.transports.text_room import CHECK_SECONDS, MIN_PROGRESS, Place, TextRoom

FREE_BYTES = 64 * 1024
"""Bytes of a body that are accepted even if other requests have used up the buffer limit."""
_ADVICE = "; send large tensors as binary data, or raise the server's option"
TEXT_ON_LOOP = 32 * 1024
"""Texts above this size are parsed on a thread: the slowest, of small values of which the last is wrong, take
20 ms.
"""


IDLE_SECONDS = 120.0
"""Seconds without a byte after which reading is abandoned.

The same as HTTP/2's limit for clients that do not read.
"""
GRACE_SECONDS = 30.0
MIN_RATE = 240
"""Average bytes per second at which a body has to arrive after the first `GRACE_SECONDS`."""


def body_at_once(incoming: RequestBody, limit: int) -> bytes | None:
    """Return the body if all of it has arrived; None if not, or if it is invalid.

    Raise `PayloadTooLarge`.
    """
    if (incoming.length or 0) > limit:
        raise _too_large(limit)
    body = incoming.complete_body()
    if body is not None and len(body) > limit:
        raise _too_large(limit)
    return body


async def read_body(incoming: RequestBody, limit: int, reserved: Reservation, place: Place) -> bytes:
    """Return the body, whose bytes are `reserved` as they arrive; `place` limits how many are read at once.

    Raise `PayloadTooLarge` before more than `limit` bytes are kept, `QueueFull` when all requests together
    hold too much, and `InvalidArgument` for a body that is invalid or arrives too slowly.
    """
    length = incoming.length
    body = GrowingBytes(length)
    size = 0
    now = asyncio.get_running_loop().time
    started = now()
    try:
        async with asyncio.timeout(min(IDLE_SECONDS, GRACE_SECONDS)) as time_limit:
            place.reading = time_limit
            while size <= limit:
                chunk = await incoming.read()
                reserved.grow(len(chunk))
                size += len(chunk)
                body.add(chunk)
                place.grow(len(chunk))
                if size == length or not chunk:
                    place.complete()
                    return body.take()
                if not place.may_continue:
                    time_limit.reschedule(None)
                    waited = now()
                    await place.wait()
                    started += now() - waited  # The wait was not caused by the client.
                time_limit.reschedule(min(now() + IDLE_SECONDS, started + GRACE_SECONDS + size / MIN_RATE))
    except TimeoutError:
        text = (
            f"the request body is incomplete: {size} bytes in {now() - started:.1f} seconds, expected at least "
            f"{MIN_RATE} bytes a second after {GRACE_SECONDS:g} seconds, and no pause of {IDLE_SECONDS:g} seconds"
        )
        if place.is_too_slow:
            text += "; while other requests wait for memory, "
            text += f"at least {MIN_PROGRESS} bytes in {CHECK_SECONDS:g} seconds"
        raise InvalidArgument(text) from None
    raise _too_large(limit)


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is larger than {limit} bytes")


class HttpDecoder:
    """Decodes the requests of all routes.

    On the event loop. `request_bytes` counts bodies until they are decoded.
    """

    def __init__(self, config: Config, request_bytes: RequestBytes) -> None:
        self._request_bytes = request_bytes
        self._max_body = config.max_message_size
        # Large texts, and the values parsed from them, are in memory one at a time. Parallel parsers would gain
        # little, because a parser holds the interpreter's lock most of the time.
        self._long_texts = OneAtATime()
        self._text_room = TextRoom(config.max_json_size // 2)
        self._other_room = TextRoom(math.inf)

    def small_request(self, found: Found, http: Exchange, call: Call) -> HttpRequest | None:
        """Return a request whose small body has arrived and can be decoded at once; None for any other.

        Raise `PayloadTooLarge`.
        """
        length = http.body.length
        if length is None or length > TEXT_ON_LOOP or "content-encoding" in http.headers:
            return None
        body = self._complete_body(found.route, http)
        return None if body is None else _received(found, http, body, call)

    def _complete_body(self, route: Route, http: Exchange) -> bytes | None:
        limit, option = self._limit(route, http)
        try:
            return body_at_once(http.body, limit)
        except PayloadTooLarge as error:
            raise PayloadTooLarge(f"{error}{_advice(option)}") from None

    def _limit(self, route: Route, http: Exchange) -> tuple[int, str]:
        """Return the limit on the body in bytes, and the option that sets it, if any."""
        route_limit = route.body_limit(http.headers)
        if route_limit is not None and route_limit < self._max_body:
            return route_limit, route.limit_option
        return self._max_body, "max_message_size"

    async def decode(self, found: Found, http: Exchange, call: Call) -> Any:
        """Return the decoded request; keep no reference to the body.

        Raise what the row's `decode` raises, `InvalidArgument` for an invalid body, and `PayloadTooLarge`.
        """
        request = self.small_request(found, http, call)
        if request is not None:
            return found.route.decode(request)
        route = found.route
        window_bits = _window_bits(route, http)
        limit, option = self._limit(route, http)
        advice = _advice(option)
        body = self._complete_body(route, http)
        room = self._other_room if route.body_limit(http.headers) is None else self._text_room
        with self._request_bytes.reserve(FREE_BYTES) as reserved, room.place() as place:
            if body is None:
                body = await _read(http.body, limit, advice, reserved, place)
            else:
                reserved.grow(len(body))
            request = _received(found, http, body, call)
            del body  # If it is decompressed, this frees it.
            if route.inflate_limit is not None and route.inflate_limit < limit:
                limit, advice = route.inflate_limit, ""
            inflating = partial(_inflate, request, window_bits, limit, advice, reserved)
            return await self._decode_long(route, request, inflating if window_bits else None, call)

    async def _decode_long(
        self, route: Route, request: HttpRequest, inflating: Callable[[], None] | None, call: Call
    ) -> Any:
        """Return the decoded request, which may be large, after calling `inflating`."""
        if inflating is not None and request.body:
            if len(request.body) * INFLATED_WORK <= OFF_LOOP_BYTES:
                inflating()
            elif route.body_limit(request.headers) is None:
                await asyncio.to_thread(inflating)
            else:
                return await self._long_texts.run(partial(_inflate_and_decode, route, inflating, request, call))
            call.size = len(request.body)
        if call.size > TEXT_ON_LOOP and route.text_size(request) > TEXT_ON_LOOP:
            return await self._long_texts.run(partial(route.decode, request))
        return route.decode(request)


def _advice(option: str) -> str:
    """Return what a client can do whose body exceeds the limit of this option."""
    return f"{_ADVICE} {option}" if option else ""


async def _read(body: RequestBody, limit: int, advice: str, reserved: Reservation, place: Place) -> bytes:
    """Return the body as it was sent."""
    try:
        return await read_body(body, limit, reserved, place)
    except PayloadTooLarge as error:
        raise PayloadTooLarge(f"{error}{advice}") from None


def _received(found: Found, http: Exchange, body: bytes, call: Call) -> HttpRequest:
    """Return the request with its body, and notes its size and model."""
    request = HttpRequest(
        found.variables, http.headers, body, http.verb, http.target, http.remote, call.permission
    )
    call.size = len(body)
    call.received(call.size)
    if found.route.model_of is not None:
        call.model_name = found.route.model_of(request)
    return request


def _window_bits(route: Route, http: Exchange) -> int:
    """Return zlib's window bits for the body's coding; 0: not compressed. Raise `UnknownCoding`."""
    if "content-encoding" not in http.headers:
        return 0
    coding = route.coding(http.values("content-encoding")[0])
    if coding not in WINDOW_BITS:
        raise UnknownCoding(f"Content-Encoding '{coding}' is not supported, use gzip or deflate")
    return WINDOW_BITS[coding]


def _inflate(request: HttpRequest, window_bits: int, limit: int, advice: str, reserved: Reservation) -> None:
    """Replace the body by the decompressed one, whose bytes are reserved as it grows."""
    compressed = bytes(request.body)
    try:
        request.body = inflate(compressed, window_bits, limit, reserved.grow)
    except InflatedTooLarge as error:
        if advice:
            raise PayloadTooLarge(f"{error}{advice}") from None
        raise
    reserved.shrink(len(compressed))


def _inflate_and_decode(route: Route, inflating: Callable[[], None], request: HttpRequest, call: Call) -> Any:
    inflating()
    call.size = len(request.body)
    return route.decode(request)
