"""One call over HTTP, from its request to its answer, whichever transport carries it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from triglot.core.call import Call
from triglot.core.errors import Code, ServingError, Unavailable, outcome
from triglot.core.http import HttpResponse, HttpStream
from triglot.core.running import Cancellable, Outcome
from triglot.core.timer_wheel import TimerWheel
from triglot.telemetry.observation import Observation
from triglot.transports.call_task import CallTask
from triglot.transports.http_answers import (
    check_fields,
    compressed,
    error_response,
    failure_response,
    fields_of,
    send_stream,
)
from triglot.transports.http_decoding import HttpDecoder
from triglot.transports.http_exchange import Exchange
from triglot.transports.http_origins import Origins
from triglot.transports.http_routes import Found
from triglot.transports.off_loop import OFF_LOOP_BYTES
from triglot.transports.shutdown import SHUTTING_DOWN

log = logging.getLogger(__name__)

MODEL_VARIABLE = "model"
"""What a route's path calls the name of the model, known before the request is understood."""
LATE_SECONDS = 0.02
"""After its deadline a call is ended that has not said by itself what was late."""
STREAM_HEADERS = {"X-Accel-Buffering": "no"}
"""A proxy that collects chunks would take from a stream what it is for."""


class OpenCalls(Protocol):
    """What calls share. See `HttpCalls`."""

    loop: asyncio.AbstractEventLoop
    timers: TimerWheel
    timeout: float
    origins: Origins
    decoder: HttpDecoder
    open: set[HttpCall]
    grace_is_over: bool

    def admit(self) -> None:
        """Raises `Unavailable` when no call is taken."""

    def discard(self, call: HttpCall) -> None:
        """It has ended."""


class HttpCall:
    """A `Running`. On the loop. `ended` is called once: the answer is sent, or the exchange aborted.

    A row with an `inference` whose request is small and has come runs without a coroutine.
    """

    __slots__ = (
        "_callbacks",
        "_calls",
        "_cancels",
        "_ended",
        "_expires",
        "_found",
        "_http",
        "_is_late",
        "_observed",
        "_request",
        "_running",
        "call",
    )

    def __init__(self, calls: OpenCalls, found: Found, http: Exchange, ended: Callable[[Any], object]) -> None:
        self.call = call = Call(read_metadata=http.headers.items)
        if found.endpoint.inference:
            call.model_name = found.variables.get(MODEL_VARIABLE, "")
        self._calls = calls
        self._found = found
        self._http: Exchange | None = http
        self._ended = ended
        self._observed = Observation(found.endpoint, call)
        self._request: Any = None
        self._running: Cancellable | None = None
        self._cancels = 0
        self._callbacks: list[Callable[[Any], object]] = []
        self._expires = 0
        self._is_late = False

    def start(self) -> None:
        """Answer the request, or begin to."""
        calls, found, http = self._calls, self._found, self._http
        assert http is not None
        call, route = self.call, found.route
        if calls.timeout:
            call.limit(calls.timeout, f"the server's rest_timeout of {calls.timeout:g} seconds")
            assert call.deadline is not None
            self._expires = calls.timers.add(self, call.deadline + LATE_SECONDS)
        try:
            calls.origins.check(route, http.headers)
            calls.admit()
            calls.open.add(self)
            if route.inference is not None:
                request = calls.decoder.small_request(found, http, call, self._observed)
                if request is not None:
                    self._submit(route.decode(request))
                    return
        except Exception as error:
            self._fail(error)
            return
        self._run(self._serve(http))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that goes on with the call, and raises nothing."""
        task = CallTask(work, self._calls.loop, self._run_ended)
        self._running = task
        task.start()

    def _run_ended(self, task: CallTask) -> None:
        if self._running is task and self._http is not None:  # It was cancelled before it began.
            self._leave()

    async def _serve(self, http: Exchange) -> None:
        found = self._found
        try:
            request = await self._calls.decoder.decode(found, http, self.call, self._observed)
            if found.route.inference is not None:
                self._submit(request)
                return
            self._observed.decoded()
            self._request = request
            assert found.route.call is not None
            answer = await found.route.call(request, self.call)
            self._observed.answered()
            self._respond(answer)
        except asyncio.CancelledError:
            self._leave()
        except Exception as error:
            self._fail(error)

    def _submit(self, request: Any) -> None:
        self._observed.decoded()
        self._request = request
        inference = self._found.route.inference
        assert inference is not None
        running = inference.submit(request, self.call, self._done)
        if self._http is not None:
            self._running = running
            if self._cancels:
                running.cancel()

    def _done(self, ended: Outcome) -> None:
        if ended.cancelled:
            self._leave()
            return
        self._observed.answered()
        inference = self._found.route.inference
        assert inference is not None
        if (failure := ended.error) is not None:
            ended.error = None
            self._fail(inference.map_error(failure, ended, self._request))
            return
        try:
            self._respond(inference.answer(ended, self._request))
        except Exception as error:
            self._fail(error)

    def _respond(self, answer: Any) -> None:
        route = self._found.route
        if route.answer_size(answer) > OFF_LOOP_BYTES:
            self._run(self._encode_long(answer))
        else:
            self._send_or_stream(route.encode(answer, self._request))

    async def _encode_long(self, answer: Any) -> None:
        try:
            self._send_or_stream(await asyncio.to_thread(self._found.route.encode, answer, self._request))
        except asyncio.CancelledError:
            self._leave()
        except Exception as error:
            self._fail(error)

    def _send_or_stream(self, response: HttpResponse | HttpStream) -> None:
        route, http = self._found.route, self._http
        assert http is not None
        if isinstance(response, HttpStream):
            self._run(self._stream(http, response))
        elif (
            route.compress_from is not None
            and len(response.body) >= route.compress_from
            and "accept-encoding" in http.headers
        ):
            self._run(self._compress(http, response))
        else:
            self._send(response)

    async def _compress(self, http: Exchange, response: HttpResponse) -> None:
        try:
            self._send(await compressed(http, response))
        except asyncio.CancelledError:
            self._leave()
        except Exception as error:
            self._fail(error)

    async def _stream(self, http: Exchange, stream: HttpStream) -> None:
        self._stop_timer()  # From here on a stream sees to its deadline, and says how it ends.
        head = HttpResponse(b"", 200, stream.content_type, STREAM_HEADERS)
        try:
            await send_stream(http, stream, self._fields(head, http), self.call, self._observed)
            self._stop(Code.OK)
            self._ended(self)
        except asyncio.CancelledError:
            self._leave()
        except Exception as error:
            self._fail(error)

    def _send(self, response: HttpResponse) -> None:
        check_fields(response)
        self._observed.encoded(len(response.body))
        self._answer(Code.OK, response)

    # --- ends ---

    def _fail(self, error: Exception) -> None:
        # Its frames hold what they came through: nothing here may keep it.
        self._answer(outcome(error), error_response(self._found.route, error, self._observed))

    def _leave(self) -> None:
        """It was cancelled."""
        if self._is_late:
            self._tell(self.call.overdue("before there was an answer"))
        elif self._calls.grace_is_over:
            self._tell(Unavailable(SHUTTING_DOWN))
        elif (http := self._http) is not None:
            self._stop(Code.CANCELLED)
            http.abort()
            self._ended(self)

    def _tell(self, error: ServingError) -> None:
        self._answer(error.code, failure_response(self._found.route, error, self._observed))

    def _answer(self, code: Code, response: HttpResponse) -> None:
        http = self._http
        assert http is not None
        if http.begun:
            self._stop(code)  # It was a stream, whose end says no more.
            self._ended(self)
            return
        # Counted before the client hears of it, so that who asks next finds it.
        self._stop(code)
        try:
            http.respond(response.status, self._fields(response, http), response.body)
        except Exception:
            log.exception("%s %s: an answer that cannot be sent", http.verb, http.target)
            http.abort()
        self._ended(self)

    def _fields(self, response: HttpResponse, http: Exchange) -> Any:
        return fields_of(response, self._found.route.headers, self._calls.origins.allow(http.headers))

    def _stop(self, code: Code) -> None:
        """It is over: let go of everything."""
        self._stop_timer()
        self._http = self._running = self._request = None
        self._calls.discard(self)
        self._observed.end(code)
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def _stop_timer(self) -> None:
        if self._expires:
            self._calls.timers.discard(self, self._expires)
            self._expires = 0

    def expire(self) -> None:
        """Its deadline has passed, and nobody has said so."""
        self._is_late = True
        self.cancel()

    # --- Running ---

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        self._cancels += 1
        if self._running is not None:
            self._running.cancel()

    def cancelling(self) -> int:
        """How often it was cancelled and has not ended yet."""
        return self._cancels if self._http is not None else 0

    def done(self) -> bool:
        """Whether it has ended."""
        return self._http is None

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        """Call it when this has ended, which it has not."""
        self._callbacks.append(callback)
