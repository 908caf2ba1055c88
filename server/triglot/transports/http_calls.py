"""Calls over HTTP: each request becomes one call of its row, and whatever comes of it an answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any

from triglot.config import Config
from triglot.core.call import Call
from triglot.core.errors import Code, PayloadTooLarge, Unavailable, outcome
from triglot.core.http import HttpRequest, HttpResponse, HttpStream
from triglot.protocols import InflatedTooLarge, Operation, Route
from triglot.telemetry.observation import Observation
from triglot.telemetry.store import Telemetry
from triglot.transports.http_answers import (
    check_fields,
    compressed,
    error_response,
    failure_response,
    fields_of,
    in_time,
    send_stream,
)
from triglot.transports.http_bodies import body_at_once, read_body
from triglot.transports.http_errors import UnknownCoding
from triglot.transports.http_exchange import Clock, Exchange, RequestBody
from triglot.transports.http_origins import Origins
from triglot.transports.http_routes import Found, Refused, Router
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
NO_FIELDS: Mapping[str, str] = {}


class HttpCalls:
    """Rows, the calls of them that are open, and how new ones are taken. On the loop.

    `request_bytes` counts their bodies until they are decoded, those of gRPC too.
    """

    def __init__(
        self, routes: Iterable[Route], config: Config, telemetry: Telemetry, request_bytes: RequestBytes
    ) -> None:
        self._router = Router()
        for route in routes:
            is_inference = route.operation is Operation.INFER
            endpoint = telemetry.endpoint(route.protocol, "REST", route.method, inference=is_inference)
            self._router.add(route, endpoint)
        self._request_bytes = request_bytes
        self._origins = Origins(config)
        self.clock = Clock()
        self._max_body = config.max_message_size
        self._timeout = config.rest_timeout or None
        self._most = config.max_connections or math.inf
        # So that there is one large text at a time, and the values that are made of it. A parser holds the
        # interpreter most of the time anyway.
        self._long_texts = OneAtATime()
        self._text_room = TextRoom(config.max_json_size // 2)
        self._other_room = TextRoom(math.inf)
        self._open: set[Any] = set()
        """The tasks that run calls."""
        self._ended = asyncio.Event()
        self._stopping = self._grace_is_over = False
        self.draining = False
        """Whether connections are to be closed with their next answers."""

    def drain(self) -> None:
        """Have each connection closed with its next answer."""
        self.draining = True

    def refuse(self) -> None:
        """Take no more calls; connections are closed as after `drain`."""
        self.draining = self._stopping = True

    async def finish(self, grace: float) -> None:
        """Wait for the open calls, so many seconds; answer the rest with 503."""
        await self._all_ended(grace)
        self._grace_is_over = True
        for call in self._open:
            call.cancel()
        await self._all_ended(CLEAN_UP_SECONDS)

    async def _all_ended(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while self._open:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            pass  # Some go on.

    async def serve(self, http: Exchange) -> None:
        """Answer a request, whatever happens; `_call` shows how a call goes well."""
        if http.verb == "OPTIONS" and (preflight := self._origins.preflight(http.headers)) is not None:
            self._send(http, preflight, NO_FIELDS)
            return
        try:
            found = self._router.find(http.verb, http.target)
            expected = http.headers.get("expect")
            if expected is not None and not http.is_old and expected.lower() != "100-continue":
                raise Refused(HTTPStatus.EXPECTATION_FAILED)
        except Refused as refused:
            self._send(http, refused.answer, NO_FIELDS)
            return
        await self._serve(found, http)

    def _send(self, http: Exchange, response: HttpResponse, row: Mapping[str, str]) -> None:
        http.respond(response.status, fields_of(response, row, self._origins.allow(http.headers)), response.body)

    async def _serve(self, found: Found, http: Exchange) -> None:
        route, call = found.route, self._call_of(found, http)
        observed = Observation(found.endpoint, call)
        code = Code.CANCELLED
        response: HttpResponse | None = None
        task = asyncio.current_task()
        try:
            self._origins.check(route, http.headers)
            self._admit()
            self._open.add(task)
            response = await self._answer(route, http, found.variables, call, observed)
            code = Code.OK
        except Exception as error:
            code = outcome(error)
            response = error_response(route, error, observed)
        except asyncio.CancelledError:
            if not self._grace_is_over:
                raise
            if (running := asyncio.current_task()) is not None:
                running.uncancel()
            code = Code.UNAVAILABLE
            response = failure_response(route, Unavailable(SHUTTING_DOWN), observed)
        finally:
            self._open.discard(task)
            if self._stopping and not self._open:
                self._ended.set()
            observed.end(code)
        if response is not None and not http.begun:
            self._send(http, response, route.headers)

    def _call_of(self, found: Found, http: Exchange) -> Call:
        call = Call(read_metadata=http.headers.items)
        if self._timeout is not None:
            call.limit(self._timeout, f"the server's rest_timeout of {self._timeout:g} seconds")
        if found.endpoint.inference:
            call.model_name = found.variables.get(MODEL_VARIABLE, "")
        return call

    async def _answer(
        self, route: Route, http: Exchange, variables: Mapping[str, str], call: Call, observed: Observation
    ) -> HttpResponse | None:
        """What is to be sent; None where that has been done."""
        answering = self._call(route, http, variables, call, observed)
        if call.deadline is None:
            answer = await answering
        else:
            answer = await in_time(call, answering, 0.0, "before there was an answer")
        if not isinstance(answer, HttpStream):
            check_fields(answer)
            return answer
        # A proxy that collects chunks would take from a stream what it is for.
        head = HttpResponse(b"", 200, answer.content_type, {"X-Accel-Buffering": "no"})
        fields = fields_of(head, route.headers, self._origins.allow(http.headers))
        await send_stream(http, answer, fields, call, observed)
        return None

    def _admit(self) -> None:
        """Raises `Unavailable` when no call is taken."""
        if self._stopping:
            raise Unavailable(SHUTTING_DOWN)
        if len(self._open) >= self._most:
            text = f"{self._most} calls are open, as many as max_connections allows"
            raise Unavailable(text, retry_after=RETRY_AFTER_SECONDS)

    async def _call(
        self,
        route: Route,
        http: Exchange,
        variables: Mapping[str, str],
        call: Call,
        observed: Observation,
    ) -> HttpResponse | HttpStream:
        decoded = await self._decode(route, http, variables, call, observed)
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
        http: Exchange,
        variables: Mapping[str, str],
        call: Call,
        observed: Observation,
    ) -> Any:
        """What the row's codec makes of the request; nothing else keeps the body."""
        headers = http.headers
        window_bits = _window_bits(route, http)
        limit, option = self._max_body, "max_message_size"
        route_limit = route.body_limit(headers)
        if route_limit is not None and route_limit < limit:
            limit, option = route_limit, route.limit_option
        advice = f"{_ADVICE} {option}" if option else ""
        try:
            body = body_at_once(http.body, limit)
        except PayloadTooLarge as error:
            raise PayloadTooLarge(f"{error}{advice}") from None
        request = HttpRequest(variables, headers, body or b"", http.verb, http.target, http.remote)
        if body is None or window_bits or len(body) > TEXT_ON_LOOP:
            room = self._other_room if route_limit is None else self._text_room
            with self._request_bytes.reserve(FREE_BYTES) as reserved, room.place() as place:
                if body is None:
                    request.body = await _read(http.body, limit, advice, reserved, place)
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


async def _read(body: RequestBody, limit: int, advice: str, reserved: Reservation, place: Place) -> bytes:
    """The body as it was sent, compressed or not."""
    try:
        return await read_body(body, limit, reserved, place)
    except PayloadTooLarge as error:
        raise PayloadTooLarge(f"{error}{advice}") from None


def _received(route: Route, request: HttpRequest, call: Call, observed: Observation) -> None:
    """The body is there."""
    call.size = len(request.body)
    observed.received(call.size)
    if route.model_of is not None:
        call.model_name = route.model_of(request)


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
