"""Calls over HTTP: each request becomes one call of its row, and whatever comes of it an answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from aiohttp import web

from triglot.config import Config
from triglot.core.call import Call
from triglot.core.errors import Code, PayloadTooLarge, Unavailable, outcome
from triglot.core.http import HttpRequest, HttpResponse, HttpStream
from triglot.protocols import InflatedTooLarge, Route
from triglot.telemetry.observation import Observation
from triglot.telemetry.store import Endpoint
from triglot.transports.http_answers import (
    answer_of,
    answer_of_error,
    answer_of_failure,
    compressed,
    in_time,
    send_stream,
)
from triglot.transports.http_bodies import body_at_once, read_body
from triglot.transports.http_errors import UnknownCoding
from triglot.transports.http_origins import Origins
from triglot.transports.inflate import INFLATED_WORK, WINDOW_BITS, inflate
from triglot.transports.off_loop import OFF_LOOP_BYTES, OneAtATime
from triglot.transports.request_bytes import RequestBytes, Reservation
from triglot.transports.shutdown import SHUTTING_DOWN
from triglot.transports.text_room import Place, TextRoom

CLEAN_UP_SECONDS = 1.0
"""What is left to write and close when the grace period is over."""
RETRY_AFTER_SECONDS = 1.0
"""Until a connection may be free."""
FREE_BYTES = 64 * 1024
"""Of a body, that are taken however much other requests hold."""
_ADVICE = "; send large tensors as binary data, and see the server's option"
TEXT_ON_LOOP = 32 * 1024
"""A text of more bytes is parsed on a thread: the slowest parser, of TensorFlow Serving's errors, takes 20 ms."""
MODEL_VARIABLE = "model"
"""What a route's path calls the name of the model, known before the request is understood."""


class HttpCalls:
    """The calls that are open, and how new ones are taken. On the loop.

    `request_bytes` counts their bodies until they are decoded; `origins` knows which web pages may call.
    """

    def __init__(self, config: Config, request_bytes: RequestBytes, origins: Origins) -> None:
        self._request_bytes = request_bytes
        self._origins = origins
        self._max_body = config.max_message_size
        self._timeout = config.rest_timeout or None
        self._most = config.max_connections or math.inf
        self._loop = asyncio.get_running_loop()
        # So that there is one large text at a time, and the values that are made of it. A parser holds the
        # interpreter most of the time anyway.
        self._long_texts = OneAtATime()
        self._text_room = TextRoom(config.max_json_size // 2)
        self._other_room = TextRoom(math.inf)
        self._open: set[asyncio.Task[Any]] = set()
        self._draining = self._stopping = self._grace_is_over = False

    def drain(self) -> None:
        """Have each connection closed with its next answer."""
        self._draining = True

    def refuse(self) -> None:
        """Take no more calls; connections are closed as after `drain`."""
        self._draining = self._stopping = True

    async def finish(self, grace: float) -> None:
        """Wait for the open calls, so many seconds; answer the rest with 503."""
        await _wait(self._open, grace)
        self._grace_is_over = True
        for call in self._open:
            call.cancel()
        await _wait(self._open, CLEAN_UP_SECONDS)

    async def respond(
        self, route: Route, endpoint: Endpoint, variables: Mapping[str, str], http: web.BaseRequest
    ) -> web.StreamResponse:
        """The answer to one request, whatever happens; `_answer` shows how a call goes well."""
        headers = {name.lower(): value for name, value in http.headers.items()}
        call = Call(read_metadata=headers.items)
        if self._timeout is not None:
            call.limit(self._timeout, f"the server's rest_timeout of {self._timeout:g} seconds")
        if endpoint.inference:
            call.model_name = variables.get(MODEL_VARIABLE, "")
        observed = Observation(endpoint, call)
        code = Code.CANCELLED
        task = asyncio.current_task(self._loop)
        assert task is not None  # aiohttp runs every handler in a task.
        try:
            self._origins.check(route, headers)
            self._admit()
            self._open.add(task)
            answering = self._answer(route, http, variables, headers, call, observed)
            if call.deadline is None:
                answer = await answering
            else:
                answer = await in_time(call, answering, 0.0, "before there was an answer")
            response = (
                await send_stream(http, route, answer, call, observed)
                if isinstance(answer, HttpStream)
                else answer_of(route, answer)
            )
            code = Code.OK
        except Exception as error:
            code = outcome(error)
            response = answer_of_error(route, error, observed)
        except asyncio.CancelledError:
            if not self._grace_is_over:
                raise
            task.uncancel()
            code = Code.UNAVAILABLE
            response = answer_of_failure(route, Unavailable(SHUTTING_DOWN), observed)
        finally:
            self._open.discard(task)
            observed.end(code)
        if self._draining:
            response.force_close()
        return response

    def _admit(self) -> None:
        """Raises `Unavailable` when no call is taken."""
        if self._stopping:
            raise Unavailable(SHUTTING_DOWN)
        if len(self._open) >= self._most:
            text = f"{self._most} calls are open, as many as max_connections allows"
            raise Unavailable(text, retry_after=RETRY_AFTER_SECONDS)

    async def _answer(
        self,
        route: Route,
        http: web.BaseRequest,
        variables: Mapping[str, str],
        headers: Mapping[str, str],
        call: Call,
        observed: Observation,
    ) -> HttpResponse | HttpStream:
        decoded = await self._decode(route, http, variables, headers, call, observed)
        observed.decoded()
        answer = await route.call(decoded, call)
        observed.answered()
        if route.answer_size(answer) > OFF_LOOP_BYTES:
            response = await asyncio.to_thread(route.encode, answer, decoded)
        else:
            response = route.encode(answer, decoded)
        if isinstance(response, HttpResponse):
            if route.compress_from is not None and len(response.body) >= route.compress_from:
                response = await compressed(http, response)
            observed.encoded(len(response.body))
        return response

    async def _decode(
        self,
        route: Route,
        http: web.BaseRequest,
        variables: Mapping[str, str],
        headers: Mapping[str, str],
        call: Call,
        observed: Observation,
    ) -> Any:
        """What the row's codec makes of the request; nothing else keeps the body."""
        window_bits = _window_bits(route, http, headers)
        limit, option = self._max_body, "max_message_size"
        route_limit = route.body_limit(headers)
        if route_limit is not None and route_limit < limit:
            limit, option = route_limit, route.limit_option
        advice = f"{_ADVICE} {option}" if option else ""
        try:
            body = body_at_once(http, limit)
        except PayloadTooLarge as error:
            raise PayloadTooLarge(f"{error}{advice}") from None
        request = HttpRequest(variables, headers, body or b"", http.method, http.raw_path, http.remote or "")
        if body is None or window_bits or len(body) > TEXT_ON_LOOP:
            room = self._other_room if route_limit is None else self._text_room
            with self._request_bytes.reserve(FREE_BYTES) as reserved, room.place() as place:
                if body is None:
                    request.body = await self._read(http, limit, advice, reserved, place)
                else:
                    reserved.grow(len(body))
                _received(route, request, call, observed)
                if route.inflate_limit is not None and route.inflate_limit < limit:
                    limit, advice = route.inflate_limit, ""
                inflating = partial(_inflate, request, window_bits, limit, advice, reserved)
                return await self._decode_long(route, request, inflating if window_bits else None, call)
        # Nothing has to wait, so nothing is counted.
        _received(route, request, call, observed)
        return route.decode(request)

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

    async def _read(
        self, http: web.BaseRequest, limit: int, advice: str, reserved: Reservation, place: Place
    ) -> bytes:
        """The body as it was sent, compressed or not."""
        try:
            return await read_body(http, limit, reserved, place)
        except PayloadTooLarge as error:
            raise PayloadTooLarge(f"{error}{advice}") from None


def _received(route: Route, request: HttpRequest, call: Call, observed: Observation) -> None:
    """The body is there."""
    call.size = len(request.body)
    observed.received(call.size)
    if route.model_of is not None:
        call.model_name = route.model_of(request)


def _window_bits(route: Route, http: web.BaseRequest, headers: Mapping[str, str]) -> int:
    """What zlib needs to know of the body's coding; 0: it is not compressed. Raises `UnknownCoding`."""
    if "content-encoding" not in headers:
        return 0
    coding = route.coding(http.headers["Content-Encoding"])  # Of several the first.
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


async def _wait(tasks: set[asyncio.Task[Any]], seconds: float) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=seconds)
