"""Calls over HTTP: each request becomes one call of its row, and whatever comes of it an answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from triglot.config import Config
from triglot.core.call import Call
from triglot.core.errors import Code, PayloadTooLarge, Unavailable, outcome
from triglot.core.http import HttpRequest, HttpResponse, HttpStream
from triglot.protocols import Route
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
from triglot.transports.inflate import INFLATED_WORK, WINDOW_BITS, inflate
from triglot.transports.off_loop import OFF_LOOP_BYTES, run_sized
from triglot.transports.shutdown import SHUTTING_DOWN

CLEAN_UP_SECONDS = 1.0
"""What is left to write and close when the grace period is over."""
RETRY_AFTER_SECONDS = 1.0
"""Until a connection may be free."""
_ADVICE = "send large tensors as binary data, and see the server's option max_message_size"
MODEL_VARIABLE = "model"
"""What a route's path calls the name of the model, known before the request is understood."""


class HttpCalls:
    """The calls that are open, and how new ones are taken. On the loop."""

    def __init__(self, config: Config) -> None:
        self._max_body = config.max_message_size
        self._timeout = config.rest_timeout or None
        self._most = config.max_connections or math.inf
        self._loop = asyncio.get_running_loop()
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
        body = await self._read(route, http, headers, observed)
        request = HttpRequest(variables, headers, body, http.method, http.raw_path, http.remote or "")
        call.size = len(body)
        if call.size > OFF_LOOP_BYTES and route.text_size(request) > OFF_LOOP_BYTES:
            decoded = await asyncio.to_thread(route.decode, request)
        else:
            decoded = route.decode(request)
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

    async def _read(
        self, route: Route, http: web.BaseRequest, headers: Mapping[str, str], observed: Observation
    ) -> bytes:
        coding = "identity"
        if "content-encoding" in headers:
            coding = route.coding(http.headers["Content-Encoding"])  # Of several the first.
            if coding not in WINDOW_BITS:
                raise UnknownCoding(f"Content-Encoding '{coding}' is not supported, use gzip or deflate")
        limit = self._max_body
        route_limit = route.body_limit(headers)
        if route_limit is not None:
            limit = min(limit, route_limit)
        try:
            body = body_at_once(http, limit)
            if body is None:
                body = await read_body(http, limit)
        except PayloadTooLarge as error:
            if limit < self._max_body:
                raise  # No option of the server's changes a route's own limit.
            raise PayloadTooLarge(f"{error}; {_ADVICE}") from None
        observed.received(len(body))
        bits = WINDOW_BITS[coding]
        if bits and body:
            most = limit if route.inflate_limit is None else min(limit, route.inflate_limit)
            body = await run_sized(len(body) * INFLATED_WORK, inflate, body, bits, most)
        return body


async def _wait(tasks: set[asyncio.Task[Any]], seconds: float) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=seconds)
