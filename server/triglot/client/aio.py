"""The asyncio client."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc
import grpc.aio

from triglot.client.balancer import Endpoint
from triglot.client.calls import (
    CHANNEL,
    HEALTH,
    HEALTH_SECONDS,
    CallOptions,
    Options,
    Outcome,
    Sending,
    Settings,
    from_environment,
    is_absent,
    is_silent,
    no_answer,
    outputs_of,
    serving_error,
)
from triglot.client.wire import Inputs, Outputs, health_request, is_serving, kserve_stream_outputs
from triglot.core.errors import ServingError

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
        return outputs_of(self._settings.protocol.outputs, await self._response(sending))

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
                    outcomes.put_nowait(await self._connections[step].call(sending))
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
        return self._stream(self._settings.stream_method(), self._settings.sending(model, inputs, options))

    async def _stream(self, method: str, sending: Sending) -> AsyncGenerator[Outputs, None]:
        self._watch()
        endpoint = self._settings.begin(sending)
        connection = self._connections[endpoint]
        failed: ServingError | None = None
        start = connection.channel.stream_stream(method)
        call = start(iter([sending.message]), timeout=sending.left(), metadata=sending.metadata)
        try:
            async for answer in call:
                yield outputs_of(kserve_stream_outputs, answer)
        except (grpc.RpcError, asyncio.CancelledError) as error:
            failed = connection.failure(error)
            raise failed from None
        finally:
            call.cancel()
            self._settings.end(endpoint, failed)

    async def is_ready(self, model: str = "") -> bool:
        """As `Client.is_ready`."""
        for connection in self._connections.values():
            try:
                answer = await connection.health(HEALTH_SECONDS, model)
            except grpc.RpcError as error:
                failed = serving_error(error)
                if not is_absent(failed):
                    raise failed from None
            else:
                if is_serving(answer):
                    return True
        return False

    async def check(self) -> None:
        """As `Client.check`."""
        balancer, seconds = self._settings.balancer, self._settings.retries.check_after
        for endpoint in balancer.to_check(time.monotonic()):
            try:
                await self._connections[endpoint].health(seconds)
            except grpc.RpcError as error:
                answered = not is_silent(serving_error(error))
            else:
                answered = True
            balancer.checked(endpoint, time.monotonic(), answered=answered)
            if not answered and endpoint.in_flight:
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
        self._infer = self.channel.unary_unary(settings.protocol.infer)
        self.given_up = False
        """Whether it was closed as the server did not answer."""

    async def call(self, sending: Sending) -> Outcome:
        """Send a call, and wait for its outcome."""
        try:
            response: bytes = await self._infer(sending.message, timeout=sending.left(), metadata=sending.metadata)
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
        task = asyncio.current_task()
        cancelled = task is not None and task.cancelling()
        if self.given_up and not cancelled:  # gRPC cancels the calls of a channel that is closed.
            return no_answer(self._endpoint)
        if isinstance(error, grpc.RpcError):
            return serving_error(error)
        raise error

    async def health(self, seconds: float, model: str = "") -> bytes:
        """Return the server's answer on its health. Raise gRPC's error."""
        method = self.channel.unary_unary(HEALTH)
        answer: bytes = await method(health_request(model), timeout=seconds, metadata=self._settings.metadata())
        return answer


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
