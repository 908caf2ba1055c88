"""All REST calls of a server: each request becomes a call of its row."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Container, Iterable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from triglot.config.options import Config
from triglot.core.errors import RETRY_AFTER_SECONDS, Unavailable
from triglot.core.http import HttpResponse
from triglot.core.operation import Operation
from triglot.core.running import RunningCall
from triglot.core.timer_wheel import TimerWheel
from triglot.protocols.rows import Route
from triglot.telemetry.store import Telemetry
from triglot.transports.request_bytes import RequestBytes
from triglot.transports.rest.answers import fields_of
from triglot.transports.rest.call import HttpCall
from triglot.transports.rest.decoding import HttpDecoder
from triglot.transports.rest.errors import error_body, grpc_only
from triglot.transports.rest.exchange import Clock, Exchange
from triglot.transports.rest.fields import repetition
from triglot.transports.rest.origins import Origins
from triglot.transports.rest.routes import Refused, Router
from triglot.transports.shutdown import SHUTTING_DOWN

if TYPE_CHECKING:
    from triglot.access.control import AccessControl

CLEAN_UP_SECONDS = 1.0
"""Seconds to write and close after the end of the grace period."""
NO_FIELDS: Mapping[str, str] = {}


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
        access: AccessControl | None = None,
        grpc_methods: Container[str] = (),
    ) -> None:
        self._router = Router()
        self._grpc_methods = grpc_methods
        for route in routes:
            is_inference = route.operation is Operation.INFER
            endpoint = telemetry.endpoint(route.protocol, "REST", route.method, inference=is_inference)
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
        self.open: set[HttpCall] = set()
        self._most = config.max_connections or math.inf
        self._ended = asyncio.Event()
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

    async def finish(self, grace: float) -> None:
        """Wait up to `grace` seconds for open calls, then end the rest with 503."""
        await self._all_ended(grace)
        self.grace_is_over = True
        for call in list(self.open):
            call.cancel()
        await self._all_ended(CLEAN_UP_SECONDS)

    async def _all_ended(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while self.open:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            pass  # Some calls have not ended.

    def start(self, http: Exchange, ended: Callable[[Any], object]) -> RunningCall | None:
        """Start the call of a request; `ended` is called when it has ended, maybe before this returns.

        Returns the call, or None if it has ended.
        """
        if http.verb == "OPTIONS" and (preflight := self.origins.preflight(http.headers)) is not None:
            self._answer(http, preflight, ended)
            return None
        if len(http.headers) < len(http.fields) and (problem := repetition(http.fields)):
            body = error_body(f"the request is not valid HTTP: {problem}")
            self._answer(http, HttpResponse(body, HTTPStatus.BAD_REQUEST), ended)
            return None
        try:
            found = self._router.find(http.verb, http.target)
            expected = http.headers.get("expect")
            if expected is not None and not http.is_http10 and expected.lower() != "100-continue":
                raise Refused(HTTPStatus.EXPECTATION_FAILED)
        except Refused as refused:
            self._answer(http, self._grpc_answer(http) or refused.answer, ended)
            return None
        call = HttpCall(self, found, http, ended)
        call.start()
        return None if call.done() else call

    def _grpc_answer(self, http: Exchange) -> HttpResponse | None:
        """Returns the answer to a request at the path of a gRPC method; None for any other path."""
        path = http.target.partition("?")[0]
        if path not in self._grpc_methods:
            return None
        body = error_body(grpc_only(path, http.verb, http.headers.get("content-type", "")))
        if http.verb == "POST":
            return HttpResponse(body, HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        return HttpResponse(body, HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": "POST"})

    def _answer(self, http: Exchange, response: HttpResponse, ended: Callable[[Any], object]) -> None:
        """Answer a request that is not a call."""
        fields = fields_of(response, NO_FIELDS, self.origins.allow(http.headers))
        http.respond(response.status, fields, response.body)
        ended(None)

    def admit(self) -> None:
        """Raises `Unavailable` when no further call is accepted."""
        if self._stopping:
            raise Unavailable(SHUTTING_DOWN)
        if len(self.open) >= self._most:
            text = f"{self._most} requests are in flight, the most that max_connections allows"
            raise Unavailable(text, retry_after=RETRY_AFTER_SECONDS)

    def discard(self, call: HttpCall) -> None:
        """Remove a call that has ended."""
        self.open.discard(call)
        if self._stopping and not self.open:
            self._ended.set()
