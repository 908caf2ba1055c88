"""The asyncio client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from triglot.client.balancer import RETRIED, Endpoint
from triglot.client.calls import (
    CHANNEL,
    HEALTH,
    HEALTH_SECONDS,
    CallOptions,
    Options,
    Sending,
    Settings,
    from_environment,
    is_absent,
    outputs_of,
    serving_error,
)
from triglot.client.wire import Inputs, Outputs, health_request, is_serving, kserve_stream_outputs
from triglot.core.errors import ServingError


class AsyncClient:
    """`Client` for asyncio: made, used and closed on one event loop."""

    def __init__(self, servers: str | Sequence[str], **options: Unpack[Options]) -> None:
        self._settings = Settings(servers, **options)
        self._balancer = self._settings.balancer
        credentials = self._settings.credentials
        self._channels = {
            endpoint: grpc.aio.insecure_channel(endpoint.address, CHANNEL)
            if credentials is None
            else grpc.aio.secure_channel(endpoint.address, credentials, CHANNEL)
            for endpoint in self._balancer.endpoints
        }
        method = self._settings.protocol.infer
        self._infer = {endpoint: channel.unary_unary(method) for endpoint, channel in self._channels.items()}

    @classmethod
    def from_env(cls, **options: Unpack[Options]) -> Self:
        """Return a client of the servers that TRIGLOT_CLIENT_SERVERS names; see `calls.from_environment`."""
        servers, found = from_environment()
        return cls(servers, **(found | options))

    async def infer(self, model: str, inputs: Inputs, **options: Unpack[CallOptions]) -> Outputs:
        """As `Client.infer`."""
        sending = self._settings.sending(model, inputs, options)
        while True:
            try:
                return outputs_of(self._settings.protocol.outputs, await self._attempt(sending))
            except ServingError as error:
                wait = self._settings.wait_after(error, sending)
            await asyncio.sleep(wait)

    def stream(self, model: str, inputs: Inputs, **options: Unpack[CallOptions]) -> AsyncGenerator[Outputs, None]:
        """As `Client.stream`; close the iterator (`contextlib.aclosing`) to end a stream early."""
        return self._stream(self._settings.stream_method(), self._settings.sending(model, inputs, options))

    async def _stream(self, method: str, sending: Sending) -> AsyncGenerator[Outputs, None]:
        endpoint = self._settings.begin(sending)
        failed: ServingError | None = None
        start = self._channels[endpoint].stream_stream(method)
        call = start(iter([sending.message]), timeout=sending.left(), metadata=sending.metadata)
        try:
            async for answer in call:
                yield outputs_of(kserve_stream_outputs, answer)
        except grpc.RpcError as error:
            failed = serving_error(error)
            raise failed from None
        finally:
            call.cancel()
            self._settings.end(endpoint, failed)

    async def is_ready(self, model: str = "") -> bool:
        """As `Client.is_ready`."""
        request, metadata = health_request(model), self._settings.metadata()
        for channel in self._channels.values():
            try:
                answer = await channel.unary_unary(HEALTH)(request, timeout=HEALTH_SECONDS, metadata=metadata)
            except grpc.RpcError as error:
                failed = serving_error(error)
                if not is_absent(failed):
                    raise failed from None
            else:
                if is_serving(answer):
                    return True
        return False

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels.values():
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _attempt(self, sending: Sending) -> bytes:
        """Return the response of one server, or of the first of two that answers."""
        endpoint = self._settings.begin(sending)
        if self._settings.hedges(sending):
            return await self._hedged(endpoint, sending)
        failed: ServingError | None = None
        try:
            answer: bytes = await self._infer[endpoint](
                sending.message, timeout=sending.left(), metadata=sending.metadata
            )
        except grpc.RpcError as error:
            failed = serving_error(error)
            raise failed from None
        finally:
            self._settings.end(endpoint, failed)
        return answer

    async def _hedged(self, first: Endpoint, sending: Sending) -> bytes:
        calls: dict[asyncio.Task[bytes], Endpoint] = {}

        async def call(endpoint: Endpoint) -> bytes:
            answer: bytes = await self._infer[endpoint](
                sending.message, timeout=sending.left(), metadata=sending.metadata
            )
            return answer

        calls[asyncio.create_task(call(first))] = first
        wait = self._settings.retries.hedge_after
        failed: ServingError | None = None
        try:
            while calls:
                done, _ = await asyncio.wait(calls, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                if not done and self._balancer.spend():
                    second = self._settings.begin(sending)
                    calls[asyncio.create_task(call(second))] = second
                wait = None  # Every call ends by its deadline.
                for task in done:
                    endpoint = calls.pop(task)
                    failed = _error_of(task)
                    self._settings.end(endpoint, failed)
                    if failed is None:
                        return task.result()
                if failed is not None and failed.code not in RETRIED:
                    break
            assert failed is not None
            raise failed
        finally:
            for task, endpoint in calls.items():
                task.cancel()
                self._balancer.cancel(endpoint, time.monotonic(), slow=endpoint is first)
            await asyncio.gather(*calls, return_exceptions=True)


def _error_of(task: asyncio.Task[Any]) -> ServingError | None:
    """Return the error of an attempt that has ended; None if it has a response. Raise what is no error of gRPC."""
    error = task.exception()
    if error is None:
        return None
    if isinstance(error, grpc.RpcError):
        return serving_error(error)
    raise error
