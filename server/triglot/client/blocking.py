"""The blocking client."""

from __future__ import annotations

import queue
import time
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc

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


class Client:
    """Calls models over gRPC: numpy arrays in, numpy arrays out. Threads may share it.

    `servers`: an address such as `127.0.0.1:8001` or `unix:/run/triglot.sock`, or several, which then share the
    calls. `options`: see `Options`.

    A call raises the `ServingError` that the server answered with, such as `triglot.NotFound`.
    """

    def __init__(self, servers: str | Sequence[str], **options: Unpack[Options]) -> None:
        self._settings = Settings(servers, **options)
        self._balancer = self._settings.balancer
        credentials = self._settings.credentials
        self._channels = {
            endpoint: grpc.insecure_channel(endpoint.address, CHANNEL)
            if credentials is None
            else grpc.secure_channel(endpoint.address, credentials, CHANNEL)
            for endpoint in self._balancer.endpoints
        }
        method = self._settings.protocol.infer
        self._infer = {endpoint: channel.unary_unary(method) for endpoint, channel in self._channels.items()}

    @classmethod
    def from_env(cls, **options: Unpack[Options]) -> Self:
        """Return a client of the servers that TRIGLOT_CLIENT_SERVERS names; see `calls.from_environment`."""
        servers, found = from_environment()
        return cls(servers, **(found | options))

    def infer(self, model: str, inputs: Inputs, **options: Unpack[CallOptions]) -> Outputs:
        """Call a model and return its outputs. `options`: see `Query`.

        Raise `ServingError`, and `TypeError` for what the protocol cannot express.
        """
        sending = self._settings.sending(model, inputs, options)
        while True:
            try:
                return outputs_of(self._settings.protocol.outputs, self._attempt(sending))
            except ServingError as error:
                wait = self._settings.wait_after(error, sending)
            time.sleep(wait)

    def stream(self, model: str, inputs: Inputs, **options: Unpack[CallOptions]) -> Generator[Outputs, None, None]:
        """Call a model that answers several times, and yield the outputs of each response. KServe V2.

        Arguments and errors are those of `infer`; an error of one response has no code. A stream is not tried
        again. It ends on the server, too, when the iterator is closed.
        """
        return self._stream(self._settings.stream_method(), self._settings.sending(model, inputs, options))

    def _stream(self, method: str, sending: Sending) -> Generator[Outputs, None, None]:
        endpoint = self._settings.begin(sending)
        failed: ServingError | None = None
        start = self._channels[endpoint].stream_stream(method)
        call = start(iter([sending.message]), timeout=sending.left(), metadata=sending.metadata)
        try:
            for answer in call:
                yield outputs_of(kserve_stream_outputs, answer)
        except grpc.RpcError as error:
            failed = serving_error(error)
            raise failed from None
        finally:
            call.cancel()
            self._settings.end(endpoint, failed)

    def is_ready(self, model: str = "") -> bool:
        """Whether a server, or a model on one of the servers, answers calls: by gRPC's health protocol."""
        request, metadata = health_request(model), self._settings.metadata()
        for channel in self._channels.values():
            try:
                answer = channel.unary_unary(HEALTH)(request, timeout=HEALTH_SECONDS, metadata=metadata)
            except grpc.RpcError as error:
                failed = serving_error(error)
                if not is_absent(failed):
                    raise failed from None
            else:
                if is_serving(answer):
                    return True
        return False

    def close(self) -> None:
        """Close the connections."""
        for channel in self._channels.values():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _attempt(self, sending: Sending) -> bytes:
        """Return the response of one server, or of the first of two that answers."""
        endpoint = self._settings.begin(sending)
        if self._settings.hedges(sending):
            return self._hedged(endpoint, sending)
        failed: ServingError | None = None
        try:
            answer: bytes = self._infer[endpoint](
                sending.message, timeout=sending.left(), metadata=sending.metadata
            )
        except grpc.RpcError as error:
            failed = serving_error(error)
            raise failed from None
        finally:
            self._settings.end(endpoint, failed)
        return answer

    def _hedged(self, first: Endpoint, sending: Sending) -> bytes:
        answered: queue.SimpleQueue[grpc.Future[bytes]] = queue.SimpleQueue()
        calls: dict[grpc.Future[bytes], Endpoint] = {}

        def start(endpoint: Endpoint) -> None:
            call = self._infer[endpoint].future(sending.message, timeout=sending.left(), metadata=sending.metadata)
            calls[call] = endpoint
            call.add_done_callback(answered.put)

        start(first)
        wait = self._settings.retries.hedge_after
        failed: ServingError | None = None
        try:
            while calls:
                try:
                    call = answered.get(timeout=wait)
                except queue.Empty:
                    wait = None  # Every call ends by its deadline.
                    if self._balancer.spend():
                        start(self._settings.begin(sending))
                    continue
                wait, endpoint = None, calls.pop(call)
                try:
                    answer: bytes = call.result()
                except grpc.RpcError as error:
                    failed = serving_error(error)
                    self._settings.end(endpoint, failed)
                    if failed.code not in RETRIED:
                        break
                else:
                    self._settings.end(endpoint, None)
                    return answer
            assert failed is not None
            raise failed
        finally:
            for call, endpoint in calls.items():
                call.cancel()
                self._balancer.cancel(endpoint, time.monotonic(), slow=endpoint is first)
