"""A REST call, from its HTTP request to its response, over any transport."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

from triglot.access import REST
from triglot.core.call import Call
from triglot.core.coroutine_work import CoroutineWork
from triglot.core.errors import Code, ServingError, Unavailable, as_serving_error, outcome, refusal_of
from triglot.core.http import HttpResponse, StreamForm
from triglot.core.permission import ClientLimits, OperationDenied
from triglot.core.running import Running
from triglot.core.timer_wheel import TimerWheel
from triglot.core.trace_context import NO_CONTEXT, TRACEPARENT, TRACESTATE
from triglot.transports.rest.answers import (
    LAST_MESSAGE_SECONDS,
    check_fields,
    compressed,
    error_response,
    failure_response,
    fields_of,
    in_time,
    refusal_response,
)
from triglot.transports.rest.decoding import HttpDecoder
from triglot.transports.rest.errors import default_error
from triglot.transports.rest.exchange import Exchange
from triglot.transports.rest.fields import Fields
from triglot.transports.rest.origins import Origins
from triglot.transports.rest.routes import Found
from triglot.transports.row_call import RowCall
from triglot.transports.shutdown import SHUTTING_DOWN

if TYPE_CHECKING:
    from triglot.access.control import AccessControl

log = logging.getLogger(__name__)

MODEL_VARIABLE = "model"
"""Variable of a route's path with the model's name, which is known before the request is decoded."""
LATE_SECONDS = 0.02
"""Delay after the deadline before a call is ended that has not ended on its own with a more specific error."""
MAX_UNWRITTEN = 16
MAX_UNWRITTEN_BYTES = 64 * 1024
"""Chunks of a stream that wait until the client has read those before them."""
STREAM_HEADERS = {"X-Accel-Buffering": "no"}
"""Headers of streams: a proxy that buffers responses would defeat the purpose."""


class OpenCalls(Protocol):
    """The state that calls share; see `HttpCalls`."""

    loop: asyncio.AbstractEventLoop
    timers: TimerWheel
    timeout: float
    timeout_source: str
    origins: Origins
    access: AccessControl | None
    decoder: HttpDecoder
    open: set[HttpCall]
    grace_is_over: bool

    def admit(self) -> None:
        """Raises `Unavailable` when no further call is accepted."""

    def discard(self, call: HttpCall) -> None:
        """Remove a call that has ended."""


class HttpCall(RowCall):
    """A REST call; its response goes to an `Exchange`. On the event loop.

    `ended` is called once, when the response has been sent, or the exchange aborted.
    """

    __slots__ = (
        "_calls",
        "_changed",
        "_chunks",
        "_ended",
        "_expires",
        "_form",
        "_found",
        "_http",
        "_is_late",
        "_limits",
        "_unwritten",
        "_writer",
    )

    def __init__(self, calls: OpenCalls, found: Found, http: Exchange, ended: Callable[[Any], object]) -> None:
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
        self._ended = ended
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
            request = calls.decoder.small_request(found, http, call)
            if request is None:
                self._run(self._decode_and_submit, http)
            else:
                self._submit(found.route.decode(request))
        except Exception as error:
            self._fail(error)

    def _is_permitted(self, access: AccessControl, http: Exchange) -> bool:
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

    async def _decode_and_submit(self, http: Exchange) -> None:
        self._submit(await self._calls.decoder.decode(self._found, http, self.call))

    def _start_coroutine(self, request: Any) -> Running:
        route = self._found.route
        assert route.call is not None
        return CoroutineWork(route.call(request, self.call), self, self._name)

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
            self._run(self._compress, self._exchange, encoded)
        else:
            self._send_whole(encoded)

    async def _compress(self, http: Exchange, response: HttpResponse) -> None:
        self._send_whole(await compressed(http, response))

    # --- streams ---

    def _begin_stream(self, form: StreamForm) -> None:
        self.streams = True
        self._form = form
        self._chunks: deque[bytes] = deque()
        self._unwritten = 0
        self._changed = asyncio.Event()
        self.call.permission.follow(self.cancel)
        self._stop_timer()  # From here on the stream checks its deadline, and reports how it ends.
        if not form.waits:
            self._begin_response(HTTPStatus.OK)

    def _begin_response(self, status: int) -> None:
        assert self._form is not None
        http = self._exchange
        head = HttpResponse(b"", status, self._form.content_type, STREAM_HEADERS)
        if self.call.span is not None:
            self.call.span.end_http(status)
        self._writer = self._calls.loop.create_task(self._write(http, status, self._fields(head, http)))

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

    async def _write(self, http: Exchange, status: int, fields: Fields) -> None:
        """Send the chunks as the client reads them."""
        try:
            await http.begin(status, fields)
            while self._chunks or not self._closed:
                if not self._chunks:
                    self._changed.clear()
                    self.resume()
                    await self._changed.wait()
                    continue
                chunk = self._chunks.popleft()
                self._unwritten -= len(chunk)
                # The model ends at the deadline, and may send a last chunk after it.
                await in_time(
                    self.call, http.write(chunk), LAST_MESSAGE_SECONDS, "while the client read the response"
                )
            await http.finish()
        except asyncio.CancelledError:
            return  # The call has ended. If raised, the task would keep it, and its frames.
        except Exception as error:
            self._broken(error)
        else:
            self._end(Code.OK)
            self._ended(self)

    def _broken(self, error: Exception) -> None:
        """End a stream of which no more can be sent."""
        running = self._running
        code = Code.CANCELLED if isinstance(error, ConnectionError) else outcome(error)
        self._end(code).abort()
        self._ended(self)
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

    def _send_whole(self, response: HttpResponse) -> None:
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
            self._ended(self)

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
        self._ended(self)

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
            self.call.permission.unfollow(self.cancel)
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
