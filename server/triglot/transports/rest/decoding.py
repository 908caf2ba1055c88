"""Requests over HTTP from their bodies to what their rows take: limits, inflating, and long texts on threads."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from triglot.config.options import Config
from triglot.core.call import Call
from triglot.core.errors import PayloadTooLarge
from triglot.core.http import HttpRequest
from triglot.protocols.rows import InflatedTooLarge, Route
from triglot.telemetry.calls import Observation
from triglot.transports.inflate import INFLATED_WORK, WINDOW_BITS, inflate
from triglot.transports.off_loop import OFF_LOOP_BYTES, OneAtATime
from triglot.transports.request_bytes import RequestBytes, Reservation
from triglot.transports.rest.bodies import body_at_once, read_body
from triglot.transports.rest.errors import UnknownCoding
from triglot.transports.rest.exchange import Exchange, RequestBody
from triglot.transports.rest.routes import Found
from triglot.transports.text_room import Place, TextRoom

FREE_BYTES = 64 * 1024
"""Of a body, that are taken however much other requests hold."""
_ADVICE = "; send large tensors as binary data, or raise the server's option"
TEXT_ON_LOOP = 32 * 1024
"""A text of more bytes is parsed on a thread: the slowest parser, of TensorFlow Serving's errors, takes 20 ms."""


class HttpDecoder:
    """Decodes the requests of all routes. On the loop. `request_bytes` counts bodies until they are decoded."""

    def __init__(self, config: Config, request_bytes: RequestBytes) -> None:
        self._request_bytes = request_bytes
        self._max_body = config.max_message_size
        # So that there is one large text at a time, and the values that are made of it. A parser holds the
        # interpreter most of the time anyway.
        self._long_texts = OneAtATime()
        self._text_room = TextRoom(config.max_json_size // 2)
        self._other_room = TextRoom(math.inf)

    def small_request(self, found: Found, http: Exchange, call: Call, observed: Observation) -> HttpRequest | None:
        """A request that nothing has to wait for: its body is small, and there; None for any other one.

        Raises `PayloadTooLarge`.
        """
        length = http.body.length
        if length is None or length > TEXT_ON_LOOP or "content-encoding" in http.headers:
            return None
        body = self._whole_body(found.route, http)
        return None if body is None else _received(found, http, body, call, observed)

    def _whole_body(self, route: Route, http: Exchange) -> bytes | None:
        limit, option = self._limit(route, http)
        try:
            return body_at_once(http.body, limit)
        except PayloadTooLarge as error:
            raise PayloadTooLarge(f"{error}{_advice(option)}") from None

    def _limit(self, route: Route, http: Exchange) -> tuple[int, str]:
        """The most bytes of a body, and the option that says so, if there is one."""
        route_limit = route.body_limit(http.headers)
        if route_limit is not None and route_limit < self._max_body:
            return route_limit, route.limit_option
        return self._max_body, "max_message_size"

    async def decode(self, found: Found, http: Exchange, call: Call, observed: Observation) -> Any:
        """What the row makes of the request; nothing else keeps the body.

        Raises what the row does, `InvalidArgument` for a body that is broken, and `PayloadTooLarge`.
        """
        request = self.small_request(found, http, call, observed)
        if request is not None:
            return found.route.decode(request)
        route = found.route
        window_bits = _window_bits(route, http)
        limit, option = self._limit(route, http)
        advice = _advice(option)
        body = self._whole_body(route, http)
        room = self._other_room if route.body_limit(http.headers) is None else self._text_room
        with self._request_bytes.reserve(FREE_BYTES) as reserved, room.place() as place:
            if body is None:
                body = await _read(http.body, limit, advice, reserved, place)
            else:
                reserved.grow(len(body))
            request = _received(found, http, body, call, observed)
            del body  # It may be inflated, and then takes no more memory.
            if route.inflate_limit is not None and route.inflate_limit < limit:
                limit, advice = route.inflate_limit, ""
            inflating = partial(_inflate, request, window_bits, limit, advice, reserved)
            return await self._decode_long(route, request, inflating if window_bits else None, call)

    async def _decode_long(
        self, route: Route, request: HttpRequest, inflating: Callable[[], None] | None, call: Call
    ) -> Any:
        """What the row's codec makes of a request that may be large, after `inflating` it."""
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
    """What a client is told whose body is too large, by this option."""
    return f"{_ADVICE} {option}" if option else ""


async def _read(body: RequestBody, limit: int, advice: str, reserved: Reservation, place: Place) -> bytes:
    """The body as it was sent, compressed or not."""
    try:
        return await read_body(body, limit, reserved, place)
    except PayloadTooLarge as error:
        raise PayloadTooLarge(f"{error}{advice}") from None


def _received(found: Found, http: Exchange, body: bytes, call: Call, observed: Observation) -> HttpRequest:
    """The request, whose body is there."""
    request = HttpRequest(
        found.variables, http.headers, body, http.verb, http.target, http.remote, call.permission
    )
    call.size = len(body)
    observed.received(call.size)
    if found.route.model_of is not None:
        call.model_name = found.route.model_of(request)
    return request


def _window_bits(route: Route, http: Exchange) -> int:
    """What zlib needs to know of the body's coding; 0: it is not compressed. Raises `UnknownCoding`."""
    if "content-encoding" not in http.headers:
        return 0
    coding = route.coding(http.values("content-encoding")[0])
    if coding not in WINDOW_BITS:
        raise UnknownCoding(f"Content-Encoding '{coding}' is not supported, use gzip or deflate")
    return WINDOW_BITS[coding]


def _inflate(request: HttpRequest, window_bits: int, limit: int, advice: str, reserved: Reservation) -> None:
    """Put the inflated body, which is counted as it grows, in place of the compressed one."""
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
