"""All REST calls of a server: each request becomes a call of its row."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Container, Coroutine, Iterable, Mapping
from http import HTTPStatus
from typing import Any, Final

from triglot.config.options import Config
from triglot.core.call import Call, TimerWheel
from triglot.core.coroutine_work import CoroutineWork
from triglot.core.errors import (
    RETRY_AFTER_SECONDS,
    Code,
    ModelNotLoaded,
    ServingError,
    Unavailable,
    as_serving_error,
    outcome,
    refusal_of,
)
from triglot.core.http import HttpResponse, StreamForm
from triglot.core.model_loading import when_loaded
from triglot.core.operation import REST, Authorizer, ClientLimits, Operation, OperationDenied
from triglot.core.roles import RunningCall
from triglot.core.running import Running
from triglot.core.trace_context import NO_CONTEXT, TRACEPARENT, TRACESTATE
from triglot.protocols.rows import Route
from triglot.telemetry.store import Telemetry
from triglot.transports.off_loop import pass_on, run_sized
from triglot.transports.request_bytes import RequestBytes
from triglot.transports.rest.coroutines import compressed, end_calls, write_chunks
from triglot.transports.rest.decoding import HttpDecoder
from triglot.transports.rest.exchange import (
    Clock,
    Exchange,
    check_fields,
    default_error,
    error_body,
    error_response,
    failure_response,
    fields_of,
    grpc_only,
    refusal_response,
    small_request,
)
from triglot.transports.rest.fields import Fields, repetition
from triglot.transports.rest.routes import Found, Origins, Refused, Router
from triglot.transports.row_call import SHUTTING_DOWN, RowCall

NO_FIELDS: Final[Mapping[str, str]] = {}


log = logging.getLogger(__name__)

MODEL_VARIABLE: Final = "model"
"""Variable of a route's path with the model's name, which is known before the request is decoded."""
LATE_SECONDS: Final = 0.02
"""Delay after the deadline before a call is ended that has not ended on its own with a more specific error."""
MAX_UNWRITTEN: Final = 16
MAX_UNWRITTEN_BYTES: Final = 64 * 1024
"""Chunks of a stream that wait until the client has read those before them."""
STREAM_HEADERS: Final = {"X-Accel-Buffering": "no"}
"""Headers of streams: a proxy that buffers responses would defeat the purpose."""


class HttpCall(RowCall):
    """A REST call; its response goes to an `Exchange`. On the event loop.

    `on_end` is called once, when the response has been sent, or the exchange aborted.
    """

    __slots__ = (
        "_calls",
        "_changed",
        "_chunks",
        "_expires",
        "_form",
        "_found",
        "_http",
        "_is_late",
        "_limits",
        "_on_end",
        "_unwritten",
        "_writer",
    )

    def __init__(self, calls: HttpCalls, found: Found, http: Exchange, on_end: Callable[[Any], object]) -> None:
        call = Call(read_metadata=http.headers.items, peer=http.remote)
        call.operation = found.route.operation
        if found.endpoint.inference:
            call.model_name = found.variables.get(MODEL_VARIABLE, "")
        else:
            call.subject = found.variables.get(MODEL_VARIABLE, "")
        if (parent := http.headers.get(TRACEPARENT)) is not None:
            call.context = parent, ",".join(http.values(TRACESTATE))
        else:
            call.context = NO_CONTEXT
        super().__init__()
        self._begin(found.route.inference, call)
        found.endpoint.begin(call)
        if call.span is not None:
            call.span.begin_http(http.verb, found.route.template, http.target.partition("?")[0])
        self._calls = calls
        self._found = found
        self._http: Exchange | None = http
        """Where the response goes; None once the call has ended, as it may refer to this call."""
        self._on_end = on_end
        self._expires = 0
        self._is_late = False
        self._form: StreamForm | None = None
        """The form of a stream's responses."""
        self._writer: asyncio.Task[None] | None = None
        """Sends the chunks of a stream."""
        self._limits: ClientLimits | None = None
        """Limits of the client that count this call, if any."""

    @property
    def _exchange(self) -> Exchange:
        assert self._http is not None
        return self._http

    def start(self) -> None:
        """Start the call; it may have ended when this returns."""
        calls, found, call = self._calls, self._found, self.call
        http = self._exchange
        if calls.timeout:
            call.limit(calls.timeout, calls.timeout_source)
            assert call.deadline is not None
            self._expires = calls.timers.add(self, call.deadline + LATE_SECONDS)
        try:
            calls.origins.check(found.route, http.headers)
            if calls.access is not None and not self._is_permitted(calls.access, http):
                return
            calls.admit()
            calls.open.add(self)
            request = small_request(found.route, found.variables, http, calls.max_body, call)
            if request is None:
                self._run(pass_on, self._submit, calls.decoder.decode, found, http, call)
                return
            try:
                decoded = found.route.decode(request)
            except ModelNotLoaded:
                self._run(pass_on, self._submit, when_loaded, call, run_sized, 0, found.route.decode, request)
                return
            self._submit(decoded)
        except Exception as error:
            self._fail(error)

    def _is_permitted(self, access: Authorizer, http: Exchange) -> bool:
        """Check the client's permission and limits; if it returns False, the call has been answered."""
        names = access.fields[REST]
        fields = [field for field in http.fields if field[0] in names]
        call = self.call
        try:
            call.permission = access.permission(self._found.route.operation, REST, fields, http.certificate_names)
            self._limits = call.permission.enter()
        except ServingError as error:
            if isinstance(error, OperationDenied):
                call.permission = error.permission
            self._answer(error.code, refusal_response(self._found.route, error, call), refusal_of(error))
            return False
        return True

    def _run(self, step: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        task = self._running = self._calls.loop.create_task(self._guarded(step, *arguments))
        task.add_done_callback(self._run_ended)

    def _start_coroutine(self, request: Any) -> Running:
        route = self._found.route
        assert route.call is not None
        return CoroutineWork(when_loaded(self.call, route.call, request, self.call), self, self._name)

    def _submit(self, request: Any) -> None:
        route = self._found.route
        if route.stream_form is not None and (form := route.stream_form(request)) is not None:
            self._begin_stream(form)
        super()._submit(request)

    @property
    def _name(self) -> str:
        return f"{self._found.route.verb} {self._found.route.method}"

    def _answer_size(self, answer: Any) -> int:
        return (self._form or self._found.route).answer_size(answer)

    def _encode(self, answer: Any) -> Any:
        if self._form is not None:
            return self._form.encode(answer)
        return self._found.route.encode(answer, self._request)

    def _send(self, encoded: HttpResponse) -> None:
        worth = self._found.route.compress_from
        if worth is not None and len(encoded.body) >= worth and "accept-encoding" in self._exchange.headers:
            self._run(pass_on, self._send_complete, compressed, self._exchange, encoded)
        else:
            self._send_complete(encoded)

    # --- streams ---

    def _begin_stream(self, form: StreamForm) -> None:
        self.streams = True
        self._form = form
        self._chunks: deque[bytes] = deque()
        self._unwritten = 0
        self._changed = asyncio.Event()
        self.call.permission.streams.add(self.cancel)
        self._stop_timer()  # From here on the stream checks its deadline, and reports how it ends.
        if not form.waits:
            self._begin_response(HTTPStatus.OK)

    def _begin_response(self, status: int) -> None:
        assert self._form is not None
        http = self._exchange
        head = HttpResponse(b"", status, self._form.content_type, STREAM_HEADERS)
        if self.call.span is not None:
            self.call.span.end_http(status)
        fields = self._fields(head, http)
        writing = write_chunks(
            http, self.call, status, fields, self._next_chunk, self._wait_for_chunk, self._written, self._broken
        )
        self._writer = self._calls.loop.create_task(writing)

    def _send_next(self, encoded: bytes) -> bool:
        if self._writer is None:
            self._begin_response(HTTPStatus.OK)
        if encoded:
            self._chunks.append(encoded)
            self._unwritten += len(encoded)
            self._changed.set()
        return len(self._chunks) < MAX_UNWRITTEN and self._unwritten < MAX_UNWRITTEN_BYTES

    def _finish(self) -> None:
        self._closed = True
        if self._writer is None:
            self._begin_response(HTTPStatus.OK)
        self._changed.set()

    def _next_chunk(self) -> bytes | None:
        """Return the next chunk, b"" if none waits, and None at the end."""
        if not self._chunks:
            return None if self._closed else b""
        chunk = self._chunks.popleft()
        self._unwritten -= len(chunk)
        return chunk

    def _wait_for_chunk(self) -> Coroutine[Any, Any, object]:
        self._changed.clear()
        self.resume()
        return self._changed.wait()

    def _written(self) -> None:
        """End a stream whose chunks have been sent."""
        self._end(Code.OK)
        self._on_end(self)

    def _broken(self, error: Exception) -> None:
        """End a stream of which no more can be sent."""
        running = self._running
        code = Code.CANCELLED if isinstance(error, ConnectionError) else outcome(error)
        self._end(code).abort()
        self._on_end(self)
        if running is not None:
            running.cancel()

    def _fail_stream(self, form: StreamForm, failure: ServingError) -> None:
        """End a stream with an error as its last chunk."""
        self.call.outcome = failure.code
        if self._writer is None:
            self._begin_response(default_error(failure).status)
        chunk = form.encode_error(failure)
        self.call.sent(len(chunk))
        self._send_next(chunk)
        self._finish()

    def _fail_run(self, error: ServingError) -> None:
        call = self.call
        if self._form is not None and (call.queued or call.began):
            self._fail_stream(self._form, error)
        else:
            self._fail(error)

    def cancel(self) -> None:
        super().cancel()
        if self._closed and not self.done():  # The client has not read what is left of a stream.
            self._end_cancelled()

    def _send_complete(self, response: HttpResponse) -> None:
        check_fields(response)
        self.call.encoded(len(response.body))
        self._answer(Code.OK, response)

    # --- ends ---

    def _fail(self, error: Exception) -> None:
        if self._form is not None and self._writer is not None:
            self._fail_stream(self._form, as_serving_error(error, self._name))
            return
        response = error_response(self._found.route, error, self._exchange.headers, self.call)
        self._answer(outcome(error), response, refusal_of(error))

    def _must_end(self) -> bool:
        return self._calls.grace_is_over

    def _end_cancelled(self) -> None:
        if self._is_late:
            self._answer_error(self.call.overdue("before the response was ready"))
        elif self._calls.grace_is_over:
            self._answer_error(Unavailable(SHUTTING_DOWN))
        else:
            self._end(Code.CANCELLED).abort()
            self._on_end(self)

    def _answer_error(self, error: ServingError) -> None:
        response = failure_response(self._found.route, error, self._exchange.headers, self.call)
        self._answer(error.code, response)

    def _answer(self, code: Code, response: HttpResponse, refusal: str = "") -> None:
        if (span := self.call.span) is not None:
            span.end_http(response.status)
        # Counted before it is sent, so that a client that has its response finds it in the metrics.
        http = self._end(code, refusal)
        try:
            if http.begun:
                http.abort()  # A stream: so that the client sees that it is incomplete.
            else:
                http.respond(response.status, self._fields(response, http), response.body)
        except Exception:
            log.exception("%s %s: cannot send the response", http.verb, http.target)
            http.abort()
        self._on_end(self)

    def _fields(self, response: HttpResponse, http: Exchange) -> Fields:
        fields = fields_of(response, self._found.route.headers, self._calls.origins.allow(http.headers))
        if (span := self.call.span) is None:
            return fields
        context = (TRACEPARENT, span.response_traceparent), *([(TRACESTATE, span.state)] if span.state else [])
        return (*fields, *context)

    def _end(self, code: Code, refusal: str = "") -> Exchange:
        """End and count the call; returns its exchange."""
        self._stop_timer()
        if self.streams:
            self.call.permission.streams.discard(self.cancel)
            if self._writer is not None:
                self._writer.cancel()
        self._calls.discard(self)
        if self._limits is not None:
            self._limits.leave()
            self._limits = None
        self._found.endpoint.end(self.call, code, refusal)
        http, self._http = self._exchange, None
        self._stop()
        return http

    def _stop_timer(self) -> None:
        if self._expires:
            self._calls.timers.discard(self, self._expires)
            self._expires = 0

    def expire(self) -> None:
        """Cancel the call: its deadline has passed, and it has not ended on its own."""
        self._is_late = True
        self.cancel()


class HttpCalls:
    """The routes, the open calls, and whether new ones are accepted. On the event loop.

    `request_bytes` counts bodies until they are decoded, those of gRPC too. `access` decides which calls a
    client may make; None: all. `grpc_methods`: paths at which clients of gRPC-Web or Connect may try to call.
    """

    def __init__(
        self,
        routes: Iterable[Route],
        config: Config,
        telemetry: Telemetry,
        request_bytes: RequestBytes,
        access: Authorizer | None = None,
        grpc_methods: Container[str] = (),
    ) -> None:
        self._router = Router()
        self._grpc_methods = grpc_methods
        for route in routes:
            is_inference = route.operation is Operation.INFER
            endpoint = telemetry.endpoint(route.protocol, "REST", route.method, inference=is_inference)
            if not endpoint.route[0]:
                endpoint.route = route.verb, route.template
            self._router.add(route, endpoint)
        self.loop = asyncio.get_running_loop()
        self.clock = Clock()
        self.timers = TimerWheel(self.loop)
        self.timeout = config.rest_timeout
        """Limit on the seconds of a call; 0: none."""
        self.timeout_source = config.rest_timeout_source
        self.origins = Origins(config)
        self.access = access
        self.decoder = HttpDecoder(config, request_bytes)
        self.max_body = config.max_message_size
        self.open: set[HttpCall] = set()
        self._most = config.max_connections or math.inf
        self._call_end = asyncio.Event()
        self._stopping = False
        self.grace_is_over = False
        """Whether cancelled calls end with UNAVAILABLE because the server stops."""
        self.draining = False
        """Whether connections are closed with their next response."""

    def drain(self) -> None:
        """Have each connection closed with its next response."""
        self.draining = True

    def refuse(self) -> None:
        """Accept no more calls; connections are closed as after `drain`."""
        self.draining = self._stopping = True

    def finish(self, grace: float) -> Coroutine[Any, Any, None]:
        """Wait up to `grace` seconds for open calls, then end the rest with 503."""
        return end_calls(self.open, self._call_end, grace, self._end_grace)

    def _end_grace(self) -> None:
        self.grace_is_over = True

    def start(self, http: Exchange, on_end: Callable[[Any], object]) -> RunningCall | None:
        """Start the call of a request; `on_end` is called when it has ended, maybe before this returns.

        Return the call, or None if it has ended.
        """
        if http.verb == "OPTIONS" and (preflight := self.origins.preflight(http.headers)) is not None:
            self._answer(http, preflight, on_end)
            return None
        if len(http.headers) < len(http.fields) and (problem := repetition(http.fields)):
            body = error_body(f"the request is not valid HTTP: {problem}")
            self._answer(http, HttpResponse(body, HTTPStatus.BAD_REQUEST), on_end)
            return None
        try:
            found = self._router.find(http.verb, http.target)
            expected = http.headers.get("expect")
            if expected is not None and not http.is_http10 and expected.lower() != "100-continue":
                raise Refused(HTTPStatus.EXPECTATION_FAILED)
        except Refused as refused:
            self._answer(http, self._grpc_answer(http) or refused.answer, on_end)
            return None
        call = HttpCall(self, found, http, on_end)
        call.start()
        return None if call.done() else call

    def _grpc_answer(self, http: Exchange) -> HttpResponse | None:
        """Return the answer to a request at the path of a gRPC method; None for any other path."""
        path = http.target.partition("?")[0]
        if path not in self._grpc_methods:
            return None
        body = error_body(grpc_only(path, http.verb, http.headers.get("content-type", "")))
        if http.verb == "POST":
            return HttpResponse(body, HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        return HttpResponse(body, HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": "POST"})

    def _answer(self, http: Exchange, response: HttpResponse, on_end: Callable[[Any], object]) -> None:
        """Answer a request that is not a call."""
        fields = fields_of(response, NO_FIELDS, self.origins.allow(http.headers))
        http.respond(response.status, fields, response.body)
        on_end(None)

    def admit(self) -> None:
        """Raise `Unavailable` when no further call is accepted."""
        if self._stopping:
            raise Unavailable(SHUTTING_DOWN)
        if len(self.open) >= self._most:
            text = f"{self._most} requests are in flight, the most that max_connections allows"
            raise Unavailable(text, retry_after=RETRY_AFTER_SECONDS)

    def discard(self, call: HttpCall) -> None:
        """Remove a call that has ended."""
        self.open.discard(call)
        if self._stopping and not self.open:
            self._call_end.set()
