"""Decodes HTTP requests: body limits, decompression, and long texts on threads."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from triglot.config.options import Config
from triglot.core.call import Call
from triglot.core.errors import InvalidArgument, ModelNotLoaded, PayloadTooLarge
from triglot.core.http import HttpRequest
from triglot.core.model_loading import when_loaded
from triglot.protocols.rows import InflatedTooLarge, Route
from triglot.transports.growing import GrowingBytes
from triglot.transports.inflate import INFLATED_WORK, WINDOW_BITS, inflate
from triglot.transports.off_loop import OFF_LOOP_BYTES, OneAtATime, run_sized
from triglot.transports.request_bytes import RequestBytes, Reservation
from triglot.transports.rest.exchange import (
    TEXT_ON_LOOP,
    Exchange,
    RequestBody,
    UnknownCoding,
    advice_on,
    complete_body,
    limit_of,
    received,
    too_large,
)
from triglot.transports.rest.routes import Found
from triglot.transports.text_room import CHECK_SECONDS, MIN_PROGRESS, Place, TextRoom

FREE_BYTES = 64 * 1024
"""Bytes of a body that are accepted even if other requests have used up the buffer limit."""
IDLE_SECONDS = 120.0
"""Seconds without a byte after which reading is abandoned.

The same as HTTP/2's limit for clients that do not read.
"""
GRACE_SECONDS = 30.0
MIN_RATE = 240
"""Average bytes per second at which a body has to arrive after the first `GRACE_SECONDS`."""


async def read_body(incoming: RequestBody, limit: int, option: str, reserved: Reservation, place: Place) -> bytes:
    """Return the body, whose bytes are `reserved` as they arrive; `place` limits how many are read at once.

    Raise `PayloadTooLarge`, which names the `option`, before more than `limit` bytes are kept, `QueueFull` when
    all requests together hold too much, and `InvalidArgument` for a body that is invalid or arrives too slowly.
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
    raise too_large(limit, option)


class HttpDecoder:
    """Decodes requests whose bodies are large, compressed, or still arriving, of all routes.

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

    async def decode(self, found: Found, http: Exchange, call: Call) -> Any:
        """Return the decoded request; keep no reference to the body.

        Raise what the row's `decode` raises, `InvalidArgument` for an invalid body, and `PayloadTooLarge`.
        """
        route = found.route
        window_bits = _window_bits(route, http)
        limit, option = limit_of(route, http.headers, self._max_body)
        body = complete_body(http.body, limit, option)
        room = self._other_room if route.body_limit(http.headers) is None else self._text_room
        with self._request_bytes.reserve(FREE_BYTES) as reserved, room.place() as place:
            if body is None:
                body = await read_body(http.body, limit, option, reserved, place)
            else:
                reserved.grow(len(body))
            request = received(route, found.variables, http, body, call)
            del body  # If it is decompressed, this frees it.
            if route.inflate_limit is not None and route.inflate_limit < limit:
                limit, option = route.inflate_limit, ""
            inflating = partial(_inflate, request, window_bits, limit, option, reserved)
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
                with suppress(ModelNotLoaded):  # The body is decompressed then.
                    return await self._long_texts.run(
                        partial(_inflate_and_decode, route, inflating, request, call)
                    )
            call.size = len(request.body)
        if call.size > TEXT_ON_LOOP and route.text_size(request) > TEXT_ON_LOOP:
            return await when_loaded(call, self._long_texts.run, partial(route.decode, request))
        return await when_loaded(call, run_sized, 0, route.decode, request)


def _window_bits(route: Route, http: Exchange) -> int:
    """Return zlib's window bits for the body's coding; 0: not compressed. Raise `UnknownCoding`."""
    if "content-encoding" not in http.headers:
        return 0
    coding = route.coding(http.values("content-encoding")[0])
    if coding not in WINDOW_BITS:
        raise UnknownCoding(f"Content-Encoding '{coding}' is not supported, use gzip or deflate")
    return WINDOW_BITS[coding]


def _inflate(request: HttpRequest, window_bits: int, limit: int, option: str, reserved: Reservation) -> None:
    """Replace the body by the decompressed one, whose bytes are reserved as it grows."""
    compressed = bytes(request.body)
    try:
        request.body = inflate(compressed, window_bits, limit, reserved.grow)
    except InflatedTooLarge as error:
        if option:
            raise PayloadTooLarge(f"{error}{advice_on(option)}") from None
        raise
    reserved.shrink(len(compressed))


def _inflate_and_decode(route: Route, inflating: Callable[[], None], request: HttpRequest, call: Call) -> Any:
    inflating()
    call.size = len(request.body)
    return route.decode(request)
