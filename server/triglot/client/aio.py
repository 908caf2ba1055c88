"""The asyncio client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc
import grpc.aio

from triglot.client.balancer import Endpoint
from triglot.client.calls import (
    CHANNEL,
    CONTROL_SECONDS,
    HEALTH,
    REGISTER,
    UNREGISTER,
    CallOptions,
    Options,
    Outcome,
    Sending,
    Settings,
    from_environment,
    is_absent,
    is_answer,
    no_answer,
    outputs_of,
    registration_error,
    serving_error,
)
from triglot.client.shared_memory import PREFIX, SharedMemory
from triglot.client.wire import (
    Inputs,
    Outputs,
    health_request,
    is_serving,
    kserve_stream_outputs,
    register_request,
    unregister_request,
)
from triglot.core.errors import Cancelled, ServingError

log = logging.getLogger(__name__)


class AsyncClient:
    """`Client` for asyncio: made, used and closed on one event loop."""

    def __init__(self, servers: str | Sequence[str], **options: Unpack[Options]) -> None:
        self._settings = Settings(servers, **options)
        endpoints = self._settings.balancer.endpoints
        self._connections = {endpoint: _Connection(endpoint, self._settings) for endpoint in endpoints}
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    def from_env(cls, **options: Unpack[Options]) -> Self:
        """Return a client of the servers that TRIGLOT_CLIENT_SERVERS names; see `calls.from_environment`."""
        servers, found = from_environment()
        return cls(servers, **(found | options))

    async def infer(self, model: str, inputs: Inputs, **options: Unpack[CallOptions]) -> Outputs:
        """As `Client.infer`."""
        sending = self._settings.sending(model, inputs, options)
        try:
            response = await self._response(sending)
        except ServingError as error:
            if not self._settings.must_register(error, sending):
                raise
            await self._register()
            response = await self._response(sending)
        return outputs_of(self._settings.protocol.outputs, response, sending.targets)

    async def _response(self, sending: Sending) -> bytes:
        """As `Client._response`."""
        self._watch()
        hedged = self._settings.hedge_after(sending) is not None
        outcomes: asyncio.Queue[Outcome | Exception] = asyncio.Queue()
        tasks: list[asyncio.Task[None]] = []
        steps, outcome = self._settings.attempts(sending), None
        try:
            while True:
                step, outcome = steps.send(outcome), None
                if not isinstance(step, Endpoint):
                    outcome = await _next(outcomes, step)
                elif hedged:
                    tasks.append(asyncio.create_task(self._connections[step].start(sending, outcomes)))
                else:
                    outcome = await self._connections[step].call(sending)
        except StopIteration as done:
            response: bytes = done.value
            return response
        finally:
            steps.close()
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.gather(*tasks, return_exceptions=True)

    def stream(self, model: str, inputs: Inputs, **options: Unpack[CallOptions]) -> AsyncGenerator[Outputs, None]:
        """As `Client.stream`; close the iterator (`contextlib.aclosing`) to end a stream early."""
        return self._stream(self._settings.streaming(model, inputs, options))

    async def _stream(self, sending: Sending) -> AsyncGenerator[Outputs, None]:
        while True:
            async with contextlib.aclosing(self._responses(sending, [sending.message])) as responses:
                try:
                    async for response in responses:
                        yield outputs_of(kserve_stream_outputs, response)
                    return
                except ServingError as error:
                    if not self._settings.must_register(error, sending):
                        raise
            await self._register()

    async def _responses(self, sending: Sending, requests: Iterable[bytes]) -> AsyncGenerator[bytes, None]:
        self._watch()
        with self._settings.attempt(sending) as endpoint:
            connection = self._connections[endpoint]
            start = connection.channel.stream_stream(sending.method)
            call = start(iter(requests), timeout=sending.left(), metadata=sending.metadata)
            try:
                async for response in call:
                    yield response
            except (grpc.RpcError, asyncio.CancelledError) as error:
                raise connection.failure(error) from None
            finally:
                call.cancel()

    async def call(
        self,
        method: str,
        request: bytes,
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """As `Client.call`."""
        return await self._response(self._settings.sending_of(method, request, timeout, headers))

    def call_stream(
        self,
        method: str,
        requests: Iterable[bytes],
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """As `Client.call_stream`."""
        return self._responses(self._settings.sending_of(method, b"", timeout, headers), requests)

    @contextlib.asynccontextmanager
    async def shared_memory(self, size: int, *, prefix: str = PREFIX) -> AsyncIterator[SharedMemory]:
        """As `Client.shared_memory`, with `async with`."""
        with self._settings.region(size, prefix) as region:
            try:
                await self._register()
                yield region
            finally:
                for connection in self._connections.values():
                    with contextlib.suppress(ServingError):
                        await connection.ask(UNREGISTER, unregister_request(region))

    async def _register(self) -> None:
        """Register all regions with all servers; one that is absent is asked for it by a later call."""
        for endpoint, connection in self._connections.items():
            for region in self._settings.regions():
                try:
                    await connection.ask(REGISTER, register_request(region))
                except ServingError as error:
                    if (failed := registration_error(error, endpoint)) is not None:
                        raise failed from None

    async def is_ready(self, model: str = "") -> bool:
        """As `Client.is_ready`."""
        for connection in self._connections.values():
            try:
                if is_serving(await connection.ask(HEALTH, health_request(model))):
                    return True
            except ServingError as error:
                if not is_absent(error):
                    raise
        return False

    @property
    def sent(self) -> int:
        """How many calls were sent to servers so far; retries and hedges are calls, too."""
        return self._settings.balancer.sent

    async def check(self) -> None:
        """As `Client.check`."""
        balancer, now = self._settings.balancer, time.monotonic()
        calls = {endpoint: self._connections[endpoint].check() for endpoint in balancer.to_check(now)}
        for endpoint, call in calls.items():
            balancer.checked(endpoint, time.monotonic(), answered=is_answer(await call.code()))
        for endpoint in calls:  # Of several, too, that none gets the calls of another.
            if endpoint.silent and endpoint.in_flight:
                silent = self._connections[endpoint]
                self._connections[endpoint] = _Connection(endpoint, self._settings)
                silent.given_up = True
                await silent.channel.close()

    def _watch(self) -> None:
        if self._watching is None and len(self._connections) > 1:
            self._watching = asyncio.create_task(_watch(weakref.ref(self), self._settings.retries.check_after / 4))

    async def close(self) -> None:
        """Close the connections."""
        if self._watching is not None:
            self._watching.cancel()
        for connection in self._connections.values():
            await connection.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class _Connection:
    """A channel to a server."""

    def __init__(self, endpoint: Endpoint, settings: Settings) -> None:
        self._endpoint = endpoint
        self._settings = settings
        self.channel = (
            grpc.aio.insecure_channel(endpoint.address, CHANNEL)
            if settings.credentials is None
            else grpc.aio.secure_channel(endpoint.address, settings.credentials, CHANNEL)
        )
        self._methods: dict[str, grpc.aio.UnaryUnaryMultiCallable] = {}
        self.given_up = False
        """Whether it was closed as the server did not answer."""

    async def call(self, sending: Sending) -> Outcome:
        """Send a call, and wait for its outcome."""
        try:
            response: bytes = await self._method(sending.method)(
                sending.message, timeout=sending.left(), metadata=sending.metadata
            )
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.CancelledError) as error:
            return Outcome(self._endpoint, self.failure(error))
        return Outcome(self._endpoint, None, response)

    async def start(self, sending: Sending, outcomes: asyncio.Queue[Outcome | Exception]) -> None:
        """Send a call whose outcome is put among the others."""
        try:
            outcomes.put_nowait(await self.call(sending))
        except Exception as error:
            outcomes.put_nowait(error)

    def failure(self, error: BaseException) -> ServingError:
        """Return the `ServingError` of a call; raise what is no outcome of one."""
        cancelled = isinstance(error, asyncio.CancelledError)
        if cancelled and (task := asyncio.current_task()) and task.cancelling():
            raise error
        if self.given_up:
            return no_answer(self._endpoint)
        if cancelled:  # gRPC cancels the calls of a channel that is closed.
            return Cancelled("the client was closed")
        if isinstance(error, grpc.RpcError):
            return serving_error(error)
        raise error

    async def ask(self, method: str, request: bytes) -> bytes:
        """Return the response to a call that is no inference. Raise `ServingError`."""
        metadata = self._settings.metadata()
        try:
            response: bytes = await self._method(method)(request, timeout=CONTROL_SECONDS, metadata=metadata)
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.CancelledError) as error:
            raise self.failure(error) from None
        return response

    def check(self) -> grpc.aio.UnaryUnaryCall:
        """Begin a health check."""
        settings, method = self._settings, self._method(HEALTH)
        seconds, metadata = settings.retries.check_after, settings.metadata()
        return method(health_request(""), timeout=seconds, metadata=metadata)

    def _method(self, path: str) -> grpc.aio.UnaryUnaryMultiCallable:
        if (method := self._methods.get(path)) is None:
            method = self._methods[path] = self.channel.unary_unary(path)
        return method


async def _next(outcomes: asyncio.Queue[Outcome | Exception], seconds: float | None) -> Outcome | None:
    """Return the next outcome; None after so many seconds. Raise what is no outcome of a call."""
    if outcomes.empty():
        try:
            async with asyncio.timeout(seconds):
                found = await outcomes.get()
        except TimeoutError:
            return None
    else:
        found = outcomes.get_nowait()
    if isinstance(found, Exception):
        raise found
    return found


async def _watch(client: weakref.ref[AsyncClient], seconds: float) -> None:
    """Check servers until the client is closed or forgotten."""
    while True:
        await asyncio.sleep(seconds)
        watched = client()
        if watched is None:
            return
        try:
            await watched.check()
        except Exception:  # Such as that of a function for tokens.
            log.exception("the servers' health cannot be checked")
        del watched
