"""The blocking client."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc

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
from triglot.core.errors import ServingError

log = logging.getLogger(__name__)


class Client:
    """Calls models over gRPC: numpy arrays in, numpy arrays out. Threads may share it.

    `servers`: an address such as `127.0.0.1:8001` or `unix:/run/triglot.sock`, or several, which then share the
    calls. `options`: see `Options`.

    A call raises the `ServingError` that the server answered with, such as `triglot.NotFound`.
    """

    def __init__(self, servers: str | Sequence[str], **options: Unpack[Options]) -> None:
        self._settings = Settings(servers, **options)
        endpoints = self._settings.balancer.endpoints
        self._connections = {endpoint: _Connection(endpoint, self._settings) for endpoint in endpoints}
        self._closed = threading.Event()
        if len(endpoints) > 1:
            arguments = (weakref.ref(self), self._closed, self._settings.retries.check_after / 4)
            threading.Thread(target=_watch, args=arguments, name="triglot-client", daemon=True).start()

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
        try:
            response = self._response(sending)
        except ServingError as error:
            if not self._settings.must_register(error, sending):
                raise
            self._register()
            response = self._response(sending)
        return outputs_of(self._settings.protocol.outputs, response, sending.targets)

    def _response(self, sending: Sending) -> bytes:
        """Take the steps of a call's attempts; only calls that may be hedged have a second one meanwhile."""
        hedged = self._settings.hedge_after(sending) is not None
        outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        calls: list[grpc.Future[bytes]] = []
        steps, outcome = self._settings.attempts(sending), None
        try:
            while True:
                step, outcome = steps.send(outcome), None
                if not isinstance(step, Endpoint):
                    with contextlib.suppress(queue.Empty):
                        outcome = outcomes.get(timeout=step)
                elif hedged:
                    calls.append(self._connections[step].start(sending, outcomes))
                else:
                    outcome = self._connections[step].call(sending)
        except StopIteration as done:
            response: bytes = done.value
            return response
        finally:
            steps.close()
            for call in calls:
                call.cancel()

    def stream(self, model: str, inputs: Inputs, **options: Unpack[CallOptions]) -> Generator[Outputs, None, None]:
        """Call a model that answers several times, and yield the outputs of each response. KServe V2.

        Arguments and errors are those of `infer`; an error of one response has no code. A stream is not tried
        again. It ends on the server, too, when the iterator is closed.
        """
        return self._stream(self._settings.streaming(model, inputs, options))

    def _stream(self, sending: Sending) -> Generator[Outputs, None, None]:
        while True:
            with contextlib.closing(self._responses(sending, [sending.message])) as responses:
                try:
                    for response in responses:
                        yield outputs_of(kserve_stream_outputs, response)
                    return
                except ServingError as error:
                    if not self._settings.must_register(error, sending):
                        raise
            self._register()

    def _responses(self, sending: Sending, requests: Iterable[bytes]) -> Generator[bytes, None, None]:
        with self._settings.attempt(sending) as endpoint:
            connection = self._connections[endpoint]
            start = connection.channel.stream_stream(sending.method)
            call = start(iter(requests), timeout=sending.left(), metadata=sending.metadata)
            try:
                yield from call
            except grpc.RpcError as error:
                raise connection.failure(error) from None
            finally:
                call.cancel()

    def call(
        self,
        method: str,
        request: bytes,
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Make a call of any service, with serialized messages, such as V2's ModelMetadata; return its response.

        `method`: its path, `/package.Service/Method`. It is tried again as `infer`, so make calls that may not run
        twice with `Retries(attempts=1)`. Raise `ServingError`.
        """
        return self._response(self._settings.sending_of(method, request, timeout, headers))

    def call_stream(
        self,
        method: str,
        requests: Iterable[bytes],
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Generator[bytes, None, None]:
        """Send all requests of a stream of any service, and yield its responses. See `call` and `stream`."""
        return self._responses(self._settings.sending_of(method, b"", timeout, headers), requests)

    @contextlib.contextmanager
    def shared_memory(self, size: int, *, prefix: str = PREFIX) -> Iterator[SharedMemory]:
        """Share so many bytes with the servers for a block: `with client.shared_memory(size) as memory`.

        Make arrays by `memory.array`. Given as inputs of a call, they are not sent, but read by the server;
        `outputs` may have arrays that it writes to. A call that has failed, by its timeout for example, may still
        read and write them. `prefix`: that of the object's name, which the servers' option `shared_memory_prefix`
        allows.

        Servers must run on this machine. Raise `ServingError` for one that refuses, `TypeError` for TensorFlow
        Serving's protocol, `MemoryError` if there is no room.
        """
        with self._settings.region(size, prefix) as region:
            try:
                self._register()
                yield region
            finally:
                for connection in self._connections.values():
                    with contextlib.suppress(ServingError):
                        connection.ask(UNREGISTER, unregister_request(region))

    def _register(self) -> None:
        """Register all regions with all servers; one that is absent is asked for it by a later call."""
        for endpoint, connection in self._connections.items():
            for region in self._settings.regions():
                try:
                    connection.ask(REGISTER, register_request(region))
                except ServingError as error:
                    if (failed := registration_error(error, endpoint)) is not None:
                        raise failed from None

    def is_ready(self, model: str = "") -> bool:
        """Whether a server, or a model on one of the servers, answers calls: by gRPC's health protocol."""
        for connection in self._connections.values():
            try:
                if is_serving(connection.ask(HEALTH, health_request(model))):
                    return True
            except ServingError as error:
                if not is_absent(error):
                    raise
        return False

    @property
    def sent(self) -> int:
        """How many calls were sent to servers so far; retries and hedges are calls, too."""
        return self._settings.balancer.sent

    def check(self) -> None:
        """Ask the servers for their health that owe answers for long; calls to those without an answer fail."""
        balancer, now = self._settings.balancer, time.monotonic()
        calls = {endpoint: self._connections[endpoint].check() for endpoint in balancer.to_check(now)}
        for endpoint, call in calls.items():
            balancer.checked(endpoint, time.monotonic(), answered=is_answer(call.code()))
        for endpoint in calls:  # Of several, too, that none gets the calls of another.
            if endpoint.silent and endpoint.in_flight:
                silent = self._connections[endpoint]
                self._connections[endpoint] = _Connection(endpoint, self._settings)
                silent.given_up = True
                silent.channel.close()

    def close(self) -> None:
        """Close the connections."""
        self._closed.set()
        for connection in self._connections.values():
            connection.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Connection:
    """A channel to a server."""

    def __init__(self, endpoint: Endpoint, settings: Settings) -> None:
        self._endpoint = endpoint
        self._settings = settings
        self.channel = (
            grpc.insecure_channel(endpoint.address, CHANNEL)
            if settings.credentials is None
            else grpc.secure_channel(endpoint.address, settings.credentials, CHANNEL)
        )
        self._methods: dict[str, grpc.UnaryUnaryMultiCallable] = {}
        self.given_up = False
        """Whether it was closed as the server did not answer."""

    def call(self, sending: Sending) -> Outcome:
        """Send a call, and wait for its outcome."""
        try:
            response: bytes = self._method(sending.method)(
                sending.message, timeout=sending.left(), metadata=sending.metadata
            )
        except (grpc.RpcError, ValueError) as error:
            return Outcome(self._endpoint, self.failure(error))
        return Outcome(self._endpoint, None, response)

    def start(self, sending: Sending, outcomes: queue.SimpleQueue[Outcome]) -> grpc.Future[bytes]:
        """Send a call whose outcome is put among the others."""

        def done(call: grpc.Future[bytes]) -> None:
            outcomes.put(
                Outcome(self._endpoint, None, call.result())
                if call.code() is grpc.StatusCode.OK
                else Outcome(self._endpoint, self.failure(call))
            )

        method = self._method(sending.method)
        call = method.future(sending.message, timeout=sending.left(), metadata=sending.metadata)
        call.add_done_callback(done)
        return call

    def failure(self, error: grpc.RpcError | ValueError) -> ServingError:
        """Return the `ServingError` of a call; raise what is no outcome of one."""
        if self.given_up:
            return no_answer(self._endpoint)
        if isinstance(error, ValueError):  # By which gRPC refuses wrong arguments, and channels that are closed.
            raise error
        return serving_error(error)

    def ask(self, method: str, request: bytes) -> bytes:
        """Return the response to a call that is no inference. Raise `ServingError`."""
        metadata = self._settings.metadata()
        try:
            response: bytes = self._method(method)(request, timeout=CONTROL_SECONDS, metadata=metadata)
        except (grpc.RpcError, ValueError) as error:
            raise self.failure(error) from None
        return response

    def check(self) -> grpc.Future[bytes]:
        """Begin a health check."""
        settings, method = self._settings, self._method(HEALTH)
        seconds, metadata = settings.retries.check_after, settings.metadata()
        return method.future(health_request(""), timeout=seconds, metadata=metadata)

    def _method(self, path: str) -> grpc.UnaryUnaryMultiCallable:
        if (method := self._methods.get(path)) is None:
            method = self._methods[path] = self.channel.unary_unary(path)
        return method


def _watch(client: weakref.ref[Client], closed: threading.Event, seconds: float) -> None:
    """Check servers until the client is closed or forgotten."""
    while not closed.wait(seconds):
        watched = client()
        if watched is None:
            return
        try:
            watched.check()
        except Exception:  # Such as that of a function for tokens.
            if not closed.is_set():
                log.exception("the servers' health cannot be checked")
        del watched
