"""The rows over HTTP/1.1, carried by aiohttp."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import PayloadEncodingError

from triglot.config import Config
from triglot.core.call import Call
from triglot.core.errors import (
    Cancelled,
    Code,
    InvalidArgument,
    PayloadTooLarge,
    ServingError,
    Unavailable,
    as_serving_error,
    outcome,
)
from triglot.core.http import HttpRequest, HttpResponse, HttpStream
from triglot.protocols import Operation, Route
from triglot.telemetry.observation import Observation
from triglot.telemetry.store import Endpoint, Telemetry
from triglot.transports.deflate import DEFLATED_WORK, accepted, deflate
from triglot.transports.http_errors import UnknownCoding, error_body, usual_error
from triglot.transports.inflate import INFLATED_WORK, WINDOW_BITS, inflate
from triglot.transports.off_loop import run_sized
from triglot.transports.shutdown import SHUTTING_DOWN

T = TypeVar("T")

CLEAN_UP_SECONDS = 1.0
"""What is left to write and close when the grace period, or a call's deadline, is over."""
KEEP_ALIVE_SECONDS = 75
"""Longer than the idle time of the usual proxies, so that they close first and no request is lost."""
RETRY_AFTER_SECONDS = 1.0
"""Until a connection may be free."""
LONGEST_LINE = 64 * 1024
"""Bytes of a request's path, and of a header."""
MODEL_VARIABLE = "model"
"""What a route's path calls the name of the model, known before the request is understood."""


class HttpServer:
    """Serves rows on one port. `start` binds; `stop` waits for calls."""

    def __init__(self, routes: Iterable[Route], config: Config, telemetry: Telemetry) -> None:
        self._host, self._port = config.host, config.rest_port
        self._max_body = config.max_message_size
        self._timeout = config.rest_timeout or None
        self._most_calls = config.max_connections or math.inf
        application = web.Application(middlewares=[web.middleware(_as_json)])
        for route in routes:
            endpoint = telemetry.endpoint(
                route.protocol, "REST", route.method, inference=route.operation is Operation.INFER
            )
            application.router.add_route(route.verb, route.path, partial(self._respond, route, endpoint))
        # The task of a request whose client is gone is cancelled, and its work is not started.
        self._runner = web.AppRunner(
            application,
            handler_cancellation=True,
            keepalive_timeout=KEEP_ALIVE_SECONDS,
            access_log=None,
            # The grace period is kept here: aiohttp would give it twice.
            shutdown_timeout=CLEAN_UP_SECONDS,
            # Inflated here: bounded by the result's size, off the loop, and with our own errors.
            auto_decompress=False,
            max_line_size=LONGEST_LINE,
            max_field_size=LONGEST_LINE,
        )
        self._grace = config.grace
        self._listener: socket.socket | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._draining = self._stopping = self._grace_is_over = False

    async def start(self) -> int:
        """Bind and serve; the port. Raises `OSError` when the address cannot be bound."""
        await self._runner.setup()
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._listener = socket.create_server((self._host, self._port), family=family)
        await web.SockSite(self._runner, self._listener).start()
        port: int = self._listener.getsockname()[1]
        return port

    def drain(self) -> None:
        """Have each connection closed with its next answer, so that clients go elsewhere."""
        self._draining = True

    async def stop(self) -> None:
        """Refuse new calls, wait for the others as long as the grace period, answer the rest with 503."""
        self._draining = self._stopping = True
        await self._stop_listening()
        await _wait(self._calls, self._grace)
        self._grace_is_over = True
        for call in self._calls:
            call.cancel()
        await _wait(self._calls, CLEAN_UP_SECONDS)
        await self._runner.cleanup()

    async def _stop_listening(self) -> None:
        if self._listener is None:
            return  # It was never started.
        # asyncio would forget a connection that it has accepted, but not yet served, when the listener closes.
        asyncio.get_running_loop().remove_reader(self._listener)
        for _ in range(3):
            await asyncio.sleep(0)
        for site in self._runner.sites:
            await site.stop()

    async def _respond(self, route: Route, endpoint: Endpoint, http: web.Request) -> web.StreamResponse:
        """The answer to one request, whatever happens; `_handle` shows how a call goes well."""
        headers = {name.lower(): value for name, value in http.headers.items()}
        call = Call(read_metadata=headers.items)
        if self._timeout is not None:
            call.limit(self._timeout, f"the server's rest_timeout of {self._timeout:g} seconds")
        if endpoint.inference:
            call.model_name = http.match_info.get(MODEL_VARIABLE, "")
        observed = Observation(endpoint, call)
        code = Code.CANCELLED
        task = asyncio.current_task()
        assert task is not None  # aiohttp runs every handler in a task.
        try:
            self._admit()
            self._calls.add(task)
            response = await self._handle(route, http, headers, call, observed)
            code = Code.OK
        except Exception as error:
            code = outcome(error)
            response = _told(route, error, observed)
        except asyncio.CancelledError:
            if not self._grace_is_over:
                raise
            task.uncancel()
            code = Code.UNAVAILABLE
            response = _failed(route, Unavailable(SHUTTING_DOWN), observed)
        finally:
            self._calls.discard(task)
            observed.end(code)
        if self._draining:
            response.force_close()
        return response

    def _admit(self) -> None:
        """Raises `Unavailable` when no call is taken."""
        if self._stopping:
            raise Unavailable(SHUTTING_DOWN)
        if len(self._calls) >= self._most_calls:
            text = f"{self._most_calls} calls are open, as many as max_connections allows"
            raise Unavailable(text, retry_after=RETRY_AFTER_SECONDS)

    async def _handle(
        self, route: Route, http: web.Request, headers: Mapping[str, str], call: Call, observed: Observation
    ) -> web.StreamResponse:
        answering = self._answer(route, http, headers, call, observed)
        response = await _in_time(call, answering, 0.0, "before there was an answer")
        if isinstance(response, HttpStream):
            return await _send_stream(http, route, response, call, observed)
        return _response(route, response)

    async def _answer(
        self, route: Route, http: web.Request, headers: Mapping[str, str], call: Call, observed: Observation
    ) -> HttpResponse | HttpStream:
        request = await self._read(route, http, headers, observed)
        call.size = len(request.body)
        decoded = await run_sized(route.text_size(request), route.decode, request)
        observed.decoded()
        answer = await route.call(decoded, call)
        observed.answered()
        response = await run_sized(route.answer_size(answer), route.encode, answer, decoded)
        if isinstance(response, HttpResponse):
            if route.compress_from is not None and len(response.body) >= route.compress_from:
                response = await _compressed(http, response)
            observed.encoded(len(response.body))
        return response

    async def _read(
        self, route: Route, http: web.Request, headers: Mapping[str, str], observed: Observation
    ) -> HttpRequest:
        coding = route.coding(http.headers.get("Content-Encoding", ""))
        if coding not in WINDOW_BITS:
            raise UnknownCoding(f"Content-Encoding '{coding}' is not supported, use gzip or deflate")
        limit = self._max_body
        route_limit = route.body_limit(headers)
        if route_limit is not None:
            limit = min(limit, route_limit)
        body = await _read_body(http, limit) if http.can_read_body else b""
        observed.received(len(body))
        bits = WINDOW_BITS[coding]
        if bits and body:
            most = limit if route.inflate_limit is None else min(limit, route.inflate_limit)
            body = await run_sized(len(body) * INFLATED_WORK, inflate, body, bits, most)
        return HttpRequest(http.match_info, headers, body, http.method, http.raw_path, http.remote or "")


async def _read_body(http: web.Request, limit: int) -> bytes:
    """The whole body. Raises `PayloadTooLarge` before more than `limit` bytes are kept."""
    if (http.content_length or 0) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in http.content.iter_any():
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            chunks.append(chunk)
    except (web.RequestPayloadError, PayloadEncodingError) as error:
        raise InvalidArgument(f"the request body is broken: {error}") from None
    return b"".join(chunks)


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"the request body is larger than {limit} bytes; send large tensors as binary data, and see the server's "
        "option max_message_size"
    )


async def _wait(tasks: set[asyncio.Task[Any]], seconds: float) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=seconds)


def _response(route: Route, response: HttpResponse, headers: Mapping[str, str] | None = None) -> web.Response:
    answer = web.Response(
        body=response.body,
        status=response.status,
        # As it is: aiohttp's argument refuses parameters.
        headers={"Content-Type": response.content_type},
    )
    answer.headers.extend(response.headers)
    answer.headers.update(route.headers)
    answer.headers.update(headers or {})
    if answer.headers.get("Connection") == "close":
        answer.force_close()
    return answer


async def _compressed(http: web.Request, response: HttpResponse) -> HttpResponse:
    """The answer as the client likes it best; on a thread when that takes long."""
    wish = accepted(",".join(http.headers.getall("Accept-Encoding", ())))
    if wish.coding == "identity":
        return response
    body = await run_sized(len(response.body) * DEFLATED_WORK, deflate, response.body, wish)
    if body is None:
        return response
    headers = response.headers.items() if isinstance(response.headers, Mapping) else response.headers
    return replace(response, body=body, headers=[*headers, ("Content-Encoding", wish.coding)])


async def _in_time(call: Call, work: Awaitable[T], spare: float, when: str) -> T:
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


async def _send_stream(
    http: web.Request, route: Route, stream: HttpStream, call: Call, observed: Observation
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
                    await _in_time(call, response.write(chunk), CLEAN_UP_SECONDS, "while the client was reading")
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


async def _send_headers(http: web.Request, response: web.StreamResponse) -> None:
    writer = await response.prepare(http)
    # aiohttp would keep the headers until the first chunk (since 3.12).
    if writer is not None and hasattr(writer, "send_headers"):
        writer.send_headers()


def _told(route: Route, error: Exception, observed: Observation) -> web.Response:
    """What the client is told of an error."""
    # A function of its own: a frame that the error came through must not hold it, or what the frame holds, the
    # request among it, is left to the garbage collector.
    return _failed(route, as_serving_error(error, f"{route.verb} {route.path}"), observed)


def _failed(route: Route, error: ServingError, observed: Observation) -> web.Response:
    """An error in the route's form, or in the usual one."""
    response = usual_error(error) if route.encode_error is None else route.encode_error(error)
    observed.sent(len(response.body))
    headers = {} if error.retry_after is None else {"Retry-After": str(max(1, round(error.retry_after)))}
    return _response(route, response, headers)


async def _as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """aiohttp's own refusals (no route, wrong method) in the protocols' form."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        kept = {name: value for name, value in error.headers.items() if name == "Allow"}
        body = error_body(error.reason)
        return web.Response(body=body, status=error.status, content_type="application/json", headers=kept)
