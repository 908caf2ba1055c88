"""gRPC calls over any transport: decode the request, call the row, encode the responses, map errors to statuses.

The HTTP/2 server (`http2/`) and grpc.aio (`aio/`) both have a `GrpcCall`.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from triglot.core.call import Call
from triglot.core.compiling import mypyc_attr
from triglot.core.coroutine_work import CoroutineWork, IteratedRequests, IteratedWork
from triglot.core.errors import (
    Code,
    DeadlineExceeded,
    ModelNotLoaded,
    ServingError,
    Unauthenticated,
    Unavailable,
    as_serving_error,
    refusal_of,
    retry_hint,
)
from triglot.core.model_loading import when_loaded
from triglot.core.operation import WITHDRAWN, Operation, OperationDenied
from triglot.core.running import Conversation, Defer, Requests, Running
from triglot.core.tensor import MessageBytes, Scattered
from triglot.protocols.rows import Kind, Method, Service
from triglot.telemetry.calls import Endpoint
from triglot.telemetry.store import Telemetry
from triglot.transports.off_loop import OFF_LOOP_BYTES, cancel_until, decode_large, pass_on, run_sized
from triglot.transports.request_bytes import RequestBytes
from triglot.transports.row_call import LAST_MESSAGE_SECONDS, SHUTTING_DOWN, RowCall

MAX_DETAILS_BYTES: Final = 4096
"""Bytes of a status message; longer ones exceed what clients accept as metadata."""
CANCEL_AGAIN_SECONDS: Final = 1.0
READ_SECONDS: Final = LAST_MESSAGE_SECONDS + 0.1
"""Seconds after its deadline in which the client may still read it."""
Trailing = tuple[tuple[str, str], ...]


class SlowReader(DeadlineExceeded):
    """The client did not read responses by the deadline, or fast enough; only a status can follow."""


class GrpcCalls:
    """The rows of one transport, and its open streams. On the event loop.

    `scatters`: the transport can send `Scattered` responses. `request_bytes` bounds the memory of large requests
    until they are decoded.

    `stop` ends streams, which might never end otherwise; the transport waits for unary calls.
    """

    def __init__(self, request_bytes: RequestBytes, *, scatters: bool = False) -> None:
        self.request_bytes = request_bytes
        self._scatters = scatters
        self.streams: set[GrpcCall] = set()
        self.stopping = False

    def rows(self, services: Iterable[Service], telemetry: Telemetry) -> dict[str, GrpcRow]:
        """Return the row of each method, by path: `/package.Service/Method`."""
        return {
            f"/{service.name}/{method.name}": self.row(method, endpoint_of(telemetry, service, method))
            for service in services
            for method in service.methods
        }

    def row(self, method: Method, endpoint: Endpoint) -> GrpcRow:
        """Return the row of a method, whose calls `endpoint` counts."""
        # A transport that sends `Scattered` also sends bytes.
        scatter = method.scatter if self._scatters else None
        return GrpcRow(self, method, method.kind, endpoint, scatter or method.encode)

    def stop(self, stopped: asyncio.Future[Any]) -> Coroutine[Any, Any, None]:
        """End all streams with UNAVAILABLE; await until `stopped`, the transport's own shutdown, is done."""
        self.stopping = True
        return cancel_until(stopped, self.streams, CANCEL_AGAIN_SECONDS)


@dataclass(frozen=True, slots=True)
class GrpcRow:
    """The row of a path, as a transport serves it."""

    calls: GrpcCalls
    method: Method
    kind: Kind
    endpoint: Endpoint
    encode: Callable[[Any], bytes | Scattered]

    def count_refusal(self, call: Call, error: ServingError) -> None:
        """Count a call that its client has no permission for."""
        call.operation = self.method.operation
        if isinstance(error, OperationDenied):
            call.permission = error.permission
        self.endpoint.begin(call)
        self.endpoint.end(call, error.code, refusal_of(error))


@mypyc_attr(allow_interpreted_subclasses=True)
class GrpcCall(RowCall):
    """A gRPC call: from its requests' bytes to those of its responses. On the event loop.

    A transport implements `run`; `write`, for the messages of a stream; and `respond`, `refuse`, `end_stream` and
    `cancelled`, exactly one of which is called, once, after that.
    """

    __slots__ = ("_row",)
    _row: GrpcRow

    @abstractmethod
    def run(self, work: Coroutine[Any, Any, None], /) -> asyncio.Task[None]:
        """Run a coroutine that ends the call."""

    @abstractmethod
    def respond(self, message: bytes | Scattered, trailing: Trailing = (), /) -> None:
        """Send the only response."""

    @abstractmethod
    def write(self, message: bytes | Scattered, /) -> bool:
        """Send one message of a stream.

        Return whether there is room for another one; if not, `resume` is called when there is.
        """

    @abstractmethod
    def end_stream(self, trailing: Trailing = (), /) -> None:
        """End a stream with status OK, after its messages."""

    @abstractmethod
    def refuse(self, code: Code, details: str, trailing: Trailing, /) -> None:
        """End the call with a status: gRPC's retry policies apply only to calls without a message."""

    @abstractmethod
    def cancelled(self) -> None:
        """End a cancelled call."""

    def start_row(self, row: GrpcRow, data: MessageBytes, call: Call, defer: Defer) -> None:
        """Decode the request of a call with one request, and run it; it may have ended when this returns.

        `defer` runs callbacks once all requests that arrived together have been started.
        """
        method, size = row.method, len(data)
        call.size = size
        call.operation = method.operation
        row.endpoint.begin(call, size)
        self._row = row
        self._begin(method.inference, call, defer)
        try:
            if row.kind is not Kind.UNARY:
                self._begin_stream()
            if size > OFF_LOOP_BYTES and method.decode_size(data) > OFF_LOOP_BYTES:
                decode = decode_large, row.calls.request_bytes, method.decode_size, method.decode, data
                self._run(pass_on, self._submit, when_loaded, call, *decode)
                return
            try:
                request = method.decode(data)
            except ModelNotLoaded:
                self._run(pass_on, self._submit, when_loaded, call, run_sized, 0, method.decode, data)
                return
            self._submit(request)
        except Exception as error:
            self._fail(error)

    def converse(self, row: GrpcRow, requests: Requests, call: Call) -> Conversation | None:
        """Run a bidirectional call; returns what takes its requests, or None if it has ended.

        Metrics count each request of such a stream: the service that answers it counts it.
        """
        method = row.method
        call.operation = method.operation
        self._row = row
        self._begin(None, call)
        conversation: Conversation
        try:
            self._begin_stream()
            if method.converse is not None:
                conversation = method.converse(requests, call, self)
            else:
                assert method.iterate is not None
                decoded = IteratedRequests(requests, method.decode)
                conversation = IteratedWork(partial(method.iterate, decoded, call), self, method.name, decoded)
        except Exception as error:
            self._fail(error)
            return None
        self._started(conversation)
        return None if self._has_ended else conversation

    def _begin_stream(self) -> None:
        """Raise `ServingError` if streams have to end: the server stops, or permission is withdrawn."""
        self.streams = True
        self._row.calls.streams.add(self)
        self.call.permission.streams.add(self.cancel)
        if (reason := self._end_reason) is not None:
            raise reason

    @property
    def _end_reason(self) -> ServingError | None:
        """Why a stream has to end early, or None."""
        if self.call.permission.withdrawn:
            return Unauthenticated(WITHDRAWN)
        return Unavailable(SHUTTING_DOWN) if self._row.calls.stopping else None

    def _stop(self) -> None:
        if self.streams:
            self._row.calls.streams.discard(self)
            self.call.permission.streams.discard(self.cancel)
        super()._stop()

    def _run(self, step: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        running = self._running = self.run(self._guarded(step, *arguments))
        running.add_done_callback(self._run_ended)

    def _start_coroutine(self, request: Any) -> Running:
        method = self._row.method
        if method.iterate is not None:
            return IteratedWork(partial(method.iterate, request, self.call), self, method.name)
        assert method.call is not None
        return CoroutineWork(when_loaded(self.call, method.call, request, self.call), self, method.name)

    def _answer_size(self, answer: Any) -> int:
        return self._row.method.answer_size(answer)

    def _encode(self, answer: Any) -> bytes | Scattered:
        return self._row.encode(answer)

    def _send(self, encoded: bytes | Scattered) -> None:
        # Counted before it is sent, so that a client that has its response finds it in the metrics.
        self.call.encoded(len(encoded))
        self._row.endpoint.end(self.call, Code.OK)
        self._stop()
        self.respond(encoded)

    def _send_next(self, encoded: bytes | Scattered) -> bool:
        return self.write(encoded)

    def _finish(self) -> None:
        self._count(Code.OK)
        self._stop()
        self.end_stream()

    def _count(self, code: Code, refusal: str = "") -> None:
        if self._row.kind is not Kind.BIDI_STREAM:
            self._row.endpoint.end(self.call, code, refusal)

    def _fail(self, error: Exception) -> None:
        method = self._row.method
        failure = as_serving_error(error, method.name)
        encoded = None if isinstance(failure, SlowReader) else method.encode_error(failure)
        self.call.sent(len(encoded or b""))
        self._count(failure.code, refusal_of(failure))
        streams = self.streams
        self._stop()
        if encoded is None:
            self.refuse(failure.code, truncated(method.details(failure.message)), retry_metadata(failure))
        elif streams:
            self.write(encoded)
            self.end_stream(retry_metadata(failure))
        else:
            self.respond(encoded, retry_metadata(failure))

    def _must_end(self) -> bool:
        return self._row.calls.stopping

    def _end_cancelled(self) -> None:
        reason = self._end_reason
        if self.streams and reason is not None:
            self._count(reason.code, refusal_of(reason))
            self._stop()
            self.refuse(reason.code, reason.message, ())
            return
        # The client gets UNAVAILABLE for calls that outlive the grace period.
        self._count(Code.UNAVAILABLE if self._row.calls.stopping else Code.CANCELLED)
        self._stop()
        self.cancelled()


def endpoint_of(telemetry: Telemetry, service: Service, method: Method) -> Endpoint:
    """Return the metrics of a row."""
    inference = method.operation is Operation.INFER
    rpc = f"{service.name}/{method.name}"
    endpoint = telemetry.endpoint(service.protocol, "GRPC", method.name, inference=inference)
    if endpoint.rpc not in (method.name, rpc):  # Another service of the protocol has a method of this name.
        endpoint = telemetry.endpoint(service.protocol, "GRPC", rpc, inference=inference)
    endpoint.rpc = rpc
    return endpoint


def retry_metadata(error: ServingError) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata of an error: when the client may retry (`grpc-retry-pushback-ms`)."""
    milliseconds = retry_hint(error, 1000)
    return () if milliseconds is None else (("grpc-retry-pushback-ms", str(milliseconds)),)


def truncated(message: str) -> str:
    """Return as much of a status message as fits; on the wire all but printable ASCII takes three bytes."""
    room = MAX_DETAILS_BYTES
    encoded = message.encode()
    if 3 * len(encoded) <= room:
        return message
    for at, byte in enumerate(encoded):
        room -= 1 if 0x20 <= byte < 0x7F and byte != ord("%") else 3
        if room < 0:
            return encoded[:at].decode(errors="ignore")
    return message
