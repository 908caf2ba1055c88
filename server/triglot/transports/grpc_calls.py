"""gRPC calls over any transport: decode the request, call the row, encode the response, map errors to statuses.

`GrpcCall` runs a unary call; `GrpcCalls.server_stream` and `GrpcCalls.bidi_stream` make the handlers of streaming
calls. The HTTP/2 server (`http2/`) and grpc.aio (`aio/`) both use them.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, cast

from triglot.core.call import Call
from triglot.core.duplex import Duplex
from triglot.core.errors import (
    Code,
    DeadlineExceeded,
    ServingError,
    Unauthenticated,
    Unavailable,
    as_serving_error,
    outcome,
    refusal_of,
    retry_hint,
)
from triglot.core.operation import Operation
from triglot.core.permission import WITHDRAWN, OperationDenied, Permission
from triglot.core.running import Defer
from triglot.core.scattered import Scattered
from triglot.protocols.rows import Kind, Method, Service
from triglot.telemetry.calls import Endpoint
from triglot.telemetry.store import Telemetry
from triglot.transports.iterated import Iterated
from triglot.transports.off_loop import OFF_LOOP_BYTES, run_sized
from triglot.transports.request_bytes import RequestBytes
from triglot.transports.row_call import RowCall
from triglot.transports.shutdown import SHUTTING_DOWN

MAX_DETAILS_BYTES = 4096
"""Bytes of a status message; longer ones exceed what clients accept as metadata."""
CANCEL_AGAIN_SECONDS = 1.0
LAST_MESSAGE_SECONDS = 1.0
"""Seconds after its deadline in which a stream may still send its last message."""
READ_SECONDS = LAST_MESSAGE_SECONDS + 0.1
"""Seconds after the deadline for the client to read it.

A transport that can reset the call has done so earlier.
"""
Trailing = tuple[tuple[str, str], ...]
ServerStream = Callable[[bytes, Any], Awaitable[None]]
BidiStream = Callable[[AsyncIterator[bytes] | Duplex, Any], Awaitable[None]]


class Context(Protocol):
    """A transport's view of one call; the methods are those of grpc.aio's contexts."""

    @property
    def permission(self) -> Permission:
        """What the call's client may do."""

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None without one."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """The request's metadata."""

    def remote(self) -> str:
        """The client's address; "" where it has none."""

    def set_trailing_metadata(self, metadata: Trailing, /) -> None:
        """Set the metadata that is sent with the status."""

    async def write(self, message: bytes, /) -> None:
        """Send one message of a stream; waits while the client does not read."""

    def on_stall(self, close_answers: Callable[[], Awaitable[None]], /) -> None:
        """Register what closes the stream's responses when the client reads none of them for too long."""


Abort = Callable[[Any, Code, str, Trailing], Awaitable[None]]
"""Ends a call with a status; arguments: context, code, message, trailing metadata. Nothing is sent after it."""


@dataclass(frozen=True, slots=True)
class GrpcRow:
    """The handler of a path, with its operation and its metrics. All None: no such path."""

    kind: Kind | None = None
    handler: Any = None
    operation: Operation | None = None
    endpoint: Endpoint | None = None

    def count_refusal(self, call: Call, error: ServingError) -> None:
        """Count a call that its client has no permission for."""
        assert self.endpoint is not None
        assert self.operation is not None
        call.operation = self.operation
        if isinstance(error, OperationDenied):
            call.permission = error.permission
        self.endpoint.begin(call)
        self.endpoint.end(call, error.code, refusal_of(error))


NO_ROW = GrpcRow()


class SlowReader(DeadlineExceeded):
    """The client did not read responses by the deadline, or fast enough; only a status can follow."""


class GrpcCalls:
    """Makes the handlers of rows for one transport, and tracks its open streams. On the event loop.

    `abort` ends a call with a status. `disconnected` is the exception that the transport raises when the client
    cannot be reached. `scatters`: the transport can send `Scattered` responses. `request_bytes` bounds the memory
    of large requests until they are decoded.

    `stop` ends streams, which might never end otherwise; the transport waits for unary calls.
    """

    def __init__(
        self, abort: Abort, disconnected: type[Exception], request_bytes: RequestBytes, *, scatters: bool = False
    ) -> None:
        self._request_bytes = request_bytes
        self._scatters = scatters
        self._abort = abort
        self._disconnected = disconnected
        self._streams: set[_OpenStream] = set()
        self.stopping = False

    def rows(self, services: Iterable[Service], telemetry: Telemetry) -> dict[str, GrpcRow]:
        """Returns the row of each method, by path: `/package.Service/Method`."""
        makers: dict[Kind, Callable[[Method, Endpoint], Any]] = {
            Kind.UNARY: self.unary,
            Kind.SERVER_STREAM: self.server_stream,
            Kind.BIDI_STREAM: self.bidi_stream,
        }
        return {
            f"/{service.name}/{method.name}": GrpcRow(
                method.kind,
                makers[method.kind](method, endpoint := endpoint_of(telemetry, service, method)),
                method.operation,
                endpoint,
            )
            for service in services
            for method in service.methods
        }

    async def stop(self, stopped: asyncio.Future[Any]) -> None:
        """End all streams with UNAVAILABLE; returns when `stopped`, the transport's own shutdown, is done."""
        self.stopping = True
        while self._streams and not stopped.done():
            for stream in self._streams:
                stream.end()
            # Cancelled repeatedly: user code may swallow a cancellation.
            await asyncio.wait([stopped, *(stream.task for stream in self._streams)], timeout=CANCEL_AGAIN_SECONDS)
        await stopped

    def unary(self, method: Method, endpoint: Endpoint) -> UnaryHandler:
        """Returns the handler of a method with one request and one response."""
        return UnaryHandler(self, method, endpoint, self.encoder(method))

    def encoder(self, method: Method) -> Callable[[Any], bytes]:
        # A transport that sends `Scattered` also sends bytes.
        scatter = cast("Callable[[Any], bytes] | None", method.scatter) if self._scatters else None
        return scatter or method.encode

    async def decode_large(self, method: Method, data: bytes) -> Any:
        """Decode a request of more than `OFF_LOOP_BYTES`, whose bytes are reserved meanwhile.

        Raises `QueueFull` at the limit of buffered bytes, and what `Method.decode` raises.
        """
        with self._request_bytes.reserve(OFF_LOOP_BYTES) as reserved:
            reserved.grow(len(data))
            return await run_sized(method.decode_size(data), method.decode, data)

    def server_stream(self, method: Method, endpoint: Endpoint) -> ServerStream:
        """Returns the handler of a method with one request and a stream of responses."""
        open_stream = _row_call(method)

        async def handle(data: bytes, context: Context) -> None:
            call = make_call(context, context.permission, context.remote())
            call.operation = method.operation
            call.size = len(data)
            endpoint.begin(call, call.size)

            async def run() -> Any:
                large = len(data) > OFF_LOOP_BYTES
                request = await self.decode_large(method, data) if large else method.decode(data)
                call.decoded()
                return open_stream(request, call)

            await self._send(method, run, context, call, endpoint)

        return handle

    def bidi_stream(self, method: Method, _: Endpoint) -> BidiStream:
        """Returns the handler of a method with a stream of requests and a stream of responses."""
        open_stream = _row_call(method)

        async def handle(requests: AsyncIterator[bytes] | Duplex, context: Context) -> None:
            call = make_call(context, context.permission, context.remote())
            call.operation = method.operation
            decoded: AsyncIterator[Any] | Duplex
            if method.decode is bytes:
                decoded = requests if isinstance(requests, Duplex) else Iterated(requests)
            else:
                decoded = (method.decode(data) async for data in requests)

            async def run() -> Any:
                return open_stream(decoded, call)

            # Metrics count each request of such a stream; the service that answers it counts it.
            await self._send(method, run, context, call, None)

        return handle

    async def _send(
        self,
        method: Method,
        run: Callable[[], Awaitable[Any]],
        context: Context,
        call: Call,
        endpoint: Endpoint | None,
    ) -> None:
        """Send the responses of a stream.

        It ends early when the server stops or the client's permission is withdrawn.
        """
        task = asyncio.current_task()
        assert task is not None  # Every handler runs in a task of its own.
        encode, size_of = self.encoder(method), method.answer_size
        stream = _OpenStream(task)
        self._streams.add(stream)
        call.permission.follow(stream.end)
        code, refusal = Code.OK, ""
        try:
            if self._must_end(call):
                raise self._end_reason(call)
            async with aclosing(await run()) as answers:
                context.on_stall(answers.aclose)
                async for answer in answers:
                    if size_of(answer) > OFF_LOOP_BYTES:
                        encoded = await asyncio.to_thread(encode, answer)
                    else:
                        encoded = encode(answer)
                    call.sent(len(encoded))
                    stream.sending = True
                    await _write(context, encoded, call)
                    stream.sending = False
                    if self._must_end(call):
                        raise self._end_reason(call)
        except asyncio.CancelledError:
            code = Code.CANCELLED
            if not self._must_end(call):
                raise
            task.uncancel()
            stream.sending = True
            reason = self._end_reason(call)
            code, refusal = reason.code, refusal_of(reason)
            await self.end(context, reason)
        except self._disconnected:
            # Nothing can be sent any longer: the transport knows why, and cancels this task only later.
            code = Code.CANCELLED
            raise
        except Exception as error:
            code, refusal = outcome(error), refusal_of(error)
            stream.sending = True
            await self._fail_stream(method, error, context, call)
        finally:
            self._streams.discard(stream)
            call.permission.unfollow(stream.end)
            if endpoint is not None:
                endpoint.end(call, code, refusal)

    def _must_end(self, call: Call) -> bool:
        """Returns whether streams have to end early: the server stops, or the client's permission is withdrawn."""
        return self.stopping or call.permission.withdrawn

    def _end_reason(self, call: Call) -> ServingError:
        return Unauthenticated(WITHDRAWN) if call.permission.withdrawn else Unavailable(SHUTTING_DOWN)

    # Errors are handled in functions of their own: a traceback refers to the frames the error passed through. If
    # one of these frames referred to the error, the cycle, with the request in it, would live until garbage
    # collection.

    async def _fail_stream(self, method: Method, error: Exception, context: Context, call: Call) -> None:
        """End the stream with an error: a last message where the protocol has one for errors, else a status."""
        failure = as_serving_error(error, method.name)
        if (encoded := method.encode_error(failure)) is None or isinstance(error, SlowReader):
            await self.end(context, failure, method.details)
            return
        call.sent(len(encoded))
        context.set_trailing_metadata(retry_metadata(failure))
        await context.write(encoded)

    async def refuse(self, context: Context, code: Code, details: str, trailing: Trailing) -> None:
        """End the call with a status."""
        await self._abort(context, code, details, trailing)

    async def end(self, context: Context, error: ServingError, details: Callable[[str], str] = str) -> None:
        """End the call with an error's status and no message: gRPC's retry policies apply only to such calls."""
        await self._abort(context, error.code, truncated(details(error.message)), retry_metadata(error))


@dataclass(frozen=True, slots=True)
class UnaryHandler:
    """The handler of a row with one request and one response."""

    calls: GrpcCalls
    method: Method
    endpoint: Endpoint
    encode: Callable[[Any], bytes | Scattered]


class GrpcCall(RowCall):
    """A gRPC call, which may be a unary one: from its request's bytes to those of its response. On the event loop.

    A transport implements `run`, and `respond`, `refuse` and `cancelled`, exactly one of which is called, once.
    """

    __slots__ = ("_unary",)
    _unary: UnaryHandler

    @abstractmethod
    def run(self, work: Coroutine[Any, Any, None], /) -> asyncio.Task[None]:
        """Run a coroutine that ends the call."""

    @abstractmethod
    def respond(self, message: bytes | Scattered, trailing: Trailing = (), /) -> None:
        """Send the response."""

    @abstractmethod
    def refuse(self, code: Code, details: str, trailing: Trailing, /) -> None:
        """End the call with a status and no message: gRPC's retry policies apply only to such calls."""

    @abstractmethod
    def cancelled(self) -> None:
        """End a cancelled call."""

    def start_row(self, handler: UnaryHandler, data: bytes, call: Call, defer: Defer) -> None:
        """Decode the request of a unary call and run it; it may have ended when this returns.

        `defer` runs callbacks once all requests that arrived together have been started.
        """
        method, size = handler.method, len(data)
        call.size = size
        call.operation = method.operation
        handler.endpoint.begin(call, size)
        self._unary = handler
        self._begin(method.inference, call, defer)
        try:
            if size > OFF_LOOP_BYTES and method.decode_size(data) > OFF_LOOP_BYTES:
                self._run(self._decode_and_submit, data)
                return
            self._submit(method.decode(data))
        except Exception as error:
            self._fail(error)

    def _run(self, step: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        running = self._running = self.run(self._guarded(step, *arguments))
        running.add_done_callback(self._run_ended)

    async def _decode_and_submit(self, data: bytes) -> None:
        self._submit(await self._unary.calls.decode_large(self._unary.method, data))

    async def _await_row(self, request: Any) -> Any:
        return await _row_call(self._unary.method)(request, self.call)

    def _answer_size(self, answer: Any) -> int:
        return self._unary.method.answer_size(answer)

    def _encode(self, answer: Any) -> bytes | Scattered:
        return self._unary.encode(answer)

    def _send(self, encoded: bytes | Scattered) -> None:
        # Counted before it is sent, so that a client that has its response finds it in the metrics.
        self.call.encoded(len(encoded))
        self._unary.endpoint.end(self.call, Code.OK)
        self._stop()
        self.respond(encoded)

    def _fail(self, error: Exception) -> None:
        method = self._unary.method
        failure = as_serving_error(error, method.name)
        encoded = method.encode_error(failure)
        self.call.sent(len(encoded or b""))
        self._unary.endpoint.end(self.call, failure.code, refusal_of(failure))
        self._stop()
        if encoded is None:
            self.refuse(failure.code, truncated(method.details(failure.message)), retry_metadata(failure))
        else:
            self.respond(encoded, retry_metadata(failure))

    def _must_end(self) -> bool:
        return self._unary.calls.stopping

    def _end_cancelled(self) -> None:
        # The client gets UNAVAILABLE for calls that outlive the grace period.
        code = Code.UNAVAILABLE if self._unary.calls.stopping else Code.CANCELLED
        self._unary.endpoint.end(self.call, code)
        self._stop()
        self.cancelled()


class _OpenStream:
    """A streaming call. `sending` is True while its task awaits the transport, and not our code."""

    __slots__ = ("sending", "task")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.sending = False

    def end(self) -> None:
        """Cancel the call's task, unless the transport is awaited: its cancellation would leave no status."""
        if not self.sending:
            self.task.cancel()


def endpoint_of(telemetry: Telemetry, service: Service, method: Method) -> Endpoint:
    """Returns the metrics of a row."""
    inference = method.operation is Operation.INFER
    rpc = f"{service.name}/{method.name}"
    endpoint = telemetry.endpoint(service.protocol, "GRPC", method.name, inference=inference)
    if endpoint.rpc not in (method.name, rpc):  # Another service of the protocol has a method of this name.
        endpoint = telemetry.endpoint(service.protocol, "GRPC", rpc, inference=inference)
    endpoint.rpc = rpc
    return endpoint


def _row_call(method: Method) -> Callable[[Any, Call], Any]:
    assert method.call is not None  # True for rows without `inference`.
    return method.call


def make_call(context: Any, permission: Permission, peer: str) -> Call:
    """Returns the `Call` that user code sees of a transport's call."""
    remaining = context.time_remaining()
    deadline = None if remaining is None else time.monotonic() + remaining
    call = Call(deadline, context.invocation_metadata, peer)
    call.permission = permission
    return call


async def _write(context: Context, encoded: bytes, call: Call) -> None:
    """Send one message of a stream. Raises `SlowReader` when the client has not read it in time."""
    if call.remaining is None:
        await context.write(encoded)
        return
    try:
        # The model ends at the deadline, and may send a last message after it.
        async with asyncio.timeout(call.remaining + READ_SECONDS):
            await context.write(encoded)
    except TimeoutError:
        raise SlowReader(call.overdue("while the client read the response").message) from None


def retry_metadata(error: ServingError) -> tuple[tuple[str, str], ...]:
    """Returns the trailing metadata of an error: when the client may retry (`grpc-retry-pushback-ms`)."""
    milliseconds = retry_hint(error, 1000)
    return () if milliseconds is None else (("grpc-retry-pushback-ms", str(milliseconds)),)


def truncated(message: str) -> str:
    """Returns as much of a status message as fits; on the wire all but printable ASCII takes three bytes."""
    room = MAX_DETAILS_BYTES
    encoded = message.encode()
    if 3 * len(encoded) <= room:
        return message
    for at, byte in enumerate(encoded):
        room -= 1 if 0x20 <= byte < 0x7F and byte != ord("%") else 3
        if room < 0:
            return encoded[:at].decode(errors="ignore")
    return message
