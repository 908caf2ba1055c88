"""A gRPC call from its bytes to its bytes, whichever transport carries it: decode, call, encode, map the error.

One function per kind of call shows a whole call.
"""

from __future__ import annotations

import asyncio
import time
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
)
from triglot.core.operation import Operation
from triglot.core.permission import WITHDRAWN, OperationDenied, Permission
from triglot.core.scattered import Scattered
from triglot.protocols.rows import Kind, Method, Service
from triglot.telemetry.calls import Endpoint, Observation
from triglot.telemetry.store import Telemetry
from triglot.transports.iterated import Iterated
from triglot.transports.off_loop import OFF_LOOP_BYTES, run_sized
from triglot.transports.request_bytes import RequestBytes
from triglot.transports.row_call import RowCall
from triglot.transports.shutdown import SHUTTING_DOWN

MAX_DETAILS_BYTES = 4096
"""Longer status texts overflow what clients accept as metadata."""
END_AGAIN_SECONDS = 1.0
LAST_WORD_SECONDS = 1.0
"""For what a stream still has to say when its deadline is over."""
READ_SECONDS = LAST_WORD_SECONDS + 0.1
"""For a client to read that, likewise; a transport that can reset the call has done so before."""
Trailing = tuple[tuple[str, str], ...]
ServerStream = Callable[[bytes, Any], Awaitable[None]]
BidiStream = Callable[[AsyncIterator[bytes] | Duplex, Any], Awaitable[None]]


class Context(Protocol):
    """What a transport knows of a call, as grpc.aio's contexts do."""

    @property
    def permission(self) -> Permission:
        """What its client may do."""

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """What the client sent beside the request."""

    def remote(self) -> str:
        """The client's address, if it has one."""

    def set_trailing_metadata(self, metadata: Trailing, /) -> None:
        """What is sent with the status."""

    async def write(self, message: bytes, /) -> None:
        """Send one answer of a stream; waits while the client does not read."""

    def on_stall(self, close_answers: Callable[[], Awaitable[None]], /) -> None:
        """Have what makes a stream's answers closed when the client takes none of them for too long."""


Abort = Callable[[Any, Code, str, Trailing], Awaitable[None]]
"""Ends the call of a context with a status; nothing is sent after it."""


@dataclass(frozen=True, slots=True)
class GrpcRow:
    """What handles the calls of a path, what they are for, and what counts them. All None: no such path."""

    kind: Kind | None = None
    handler: Any = None
    operation: Operation | None = None
    endpoint: Endpoint | None = None

    def refused(self, call: Call, error: ServingError) -> None:
        """Count a call that its client may not make."""
        assert self.endpoint is not None
        assert self.operation is not None
        call.operation = self.operation
        if isinstance(error, OperationDenied):
            call.permission = error.permission
        Observation(self.endpoint, call).end(error.code, refusal_of(error))


NO_ROW = GrpcRow()


class SlowReader(DeadlineExceeded):
    """The client does not read its answers: not until the deadline, or not in time; only a status can follow."""


class Calls:
    """The handlers of rows. `gone` is what the transport raises when nothing can be sent any more.

    `stop` ends streams, which would go on for ever; other calls are the transport's to wait for. `scatters`: the
    transport sends `Scattered` answers, too. `request_bytes` counts large requests until they are decoded.
    """

    def __init__(
        self, abort: Abort, gone: type[Exception], request_bytes: RequestBytes, *, scatters: bool = False
    ) -> None:
        self._request_bytes = request_bytes
        self._scatters = scatters
        self._abort = abort
        self._gone = gone
        self._streams: set[_OpenStream] = set()
        self.stopping = False

    def rows(self, services: Iterable[Service], telemetry: Telemetry) -> dict[str, GrpcRow]:
        """Those of the services, by their paths."""
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
        """End streams with UNAVAILABLE, until the transport has `stopped`."""
        self.stopping = True
        while self._streams and not stopped.done():
            for stream in self._streams:
                stream.end()
            # Again if it must be: code of a user's may swallow a cancellation.
            await asyncio.wait([stopped, *(stream.task for stream in self._streams)], timeout=END_AGAIN_SECONDS)
        await stopped

    def unary(self, method: Method, endpoint: Endpoint) -> UnaryHandler:
        """One request, one answer."""
        return UnaryHandler(self, method, endpoint)

    def encoder(self, method: Method) -> Callable[[Any], bytes]:
        # A transport that scatters is ready for both kinds.
        scatter = cast("Callable[[Any], bytes] | None", method.scatter) if self._scatters else None
        return scatter or method.encode

    async def decode_large(self, method: Method, data: bytes) -> Any:
        """The request of more than `OFF_LOOP_BYTES`, counted meanwhile. Raises what `decode` does, too."""
        with self._request_bytes.reserve(OFF_LOOP_BYTES) as reserved:
            reserved.grow(len(data))
            return await run_sized(method.decode_size(data), method.decode, data)

    def server_stream(self, method: Method, endpoint: Endpoint) -> ServerStream:
        """One request, any number of answers."""
        open_stream = _call_of(method)

        async def handle(data: bytes, context: Context) -> None:
            call = call_of(context, context.permission, context.remote())
            call.operation = method.operation
            call.size = len(data)
            observed = Observation(endpoint, call, call.size)

            async def run() -> Any:
                large = len(data) > OFF_LOOP_BYTES
                request = await self.decode_large(method, data) if large else method.decode(data)
                observed.decoded()
                return open_stream(request, call)

            await self._send(method, run, context, call, observed)

        return handle

    def bidi_stream(self, method: Method, _: Endpoint) -> BidiStream:
        """Any number of requests and of answers."""
        open_stream = _call_of(method)

        async def handle(requests: AsyncIterator[bytes] | Duplex, context: Context) -> None:
            call = call_of(context, context.permission, context.remote())
            call.operation = method.operation
            decoded: AsyncIterator[Any] | Duplex
            if method.decode is bytes:
                decoded = requests if isinstance(requests, Duplex) else Iterated(requests)
            else:
                decoded = (method.decode(data) async for data in requests)

            async def run() -> Any:
                return open_stream(decoded, call)

            # Requests are what counts here, not calls, and who answers them counts them.
            await self._send(method, run, context, call, None)

        return handle

    async def _send(
        self,
        method: Method,
        run: Callable[[], Awaitable[Any]],
        context: Context,
        call: Call,
        observed: Observation | None,
    ) -> None:
        """Send the answers of a stream, until the server stops or its client may not have it any more."""
        task = asyncio.current_task()
        assert task is not None  # Every handler runs in a task of its own.
        encode, size_of = self.encoder(method), method.answer_size
        stream = _OpenStream(task)
        self._streams.add(stream)
        call.permission.follow(stream.end)
        code, refusal = Code.OK, ""
        try:
            if self._is_over(call):
                raise self._reason(call)
            async with aclosing(await run()) as answers:
                context.on_stall(answers.aclose)
                async for answer in answers:
                    if size_of(answer) > OFF_LOOP_BYTES:
                        encoded = await asyncio.to_thread(encode, answer)
                    else:
                        encoded = encode(answer)
                    if observed is not None:
                        observed.sent(len(encoded))
                    stream.sending = True
                    await _write(context, encoded, call)
                    stream.sending = False
                    if self._is_over(call):
                        raise self._reason(call)
        except asyncio.CancelledError:
            code = Code.CANCELLED
            if not self._is_over(call):
                raise
            task.uncancel()
            stream.sending = True
            reason = self._reason(call)
            code, refusal = reason.code, refusal_of(reason)
            await self.end(context, reason)
        except self._gone:
            code = (
                Code.CANCELLED
            )  # Nothing can be sent any more: the transport knows why, and cancels us only later.
            raise
        except Exception as error:
            code, refusal = outcome(error), refusal_of(error)
            stream.sending = True
            await self._fail_stream(method, error, context, observed)
        finally:
            self._streams.discard(stream)
            call.permission.unfollow(stream.end)
            if observed is not None:
                observed.end(code, refusal)

    def _is_over(self, call: Call) -> bool:
        """Whether a stream ends before its end."""
        return self.stopping or call.permission.withdrawn

    def _reason(self, call: Call) -> ServingError:
        return Unauthenticated(WITHDRAWN) if call.permission.withdrawn else Unavailable(SHUTTING_DOWN)

    # Errors are handled in functions of their own: a frame that an error came through must not hold it, or what
    # the frame holds, the request among it, is left to the garbage collector.

    async def _fail_stream(
        self, method: Method, error: Exception, context: Context, observed: Observation | None
    ) -> None:
        """The stream ends with an error: its last answer, or a status."""
        failure = as_serving_error(error, method.name)
        if (encoded := method.encode_error(failure)) is None or isinstance(error, SlowReader):
            await self.end(context, failure, method.details)
            return
        if observed is not None:
            observed.sent(len(encoded))
        context.set_trailing_metadata(hints(failure))
        await context.write(encoded)

    async def refuse(self, context: Context, code: Code, details: str, trailing: Trailing) -> None:
        """End the call with a status."""
        await self._abort(context, code, details, trailing)

    async def end(self, context: Context, error: ServingError, details: Callable[[str], str] = str) -> None:
        """End the call with a status, the only thing to be sent: gRPC's own retries are for such calls."""
        await self._abort(context, error.code, fitting(details(error.message)), hints(error))


class Reply(Protocol):
    """Where the one answer of a call goes. One of `respond`, `refuse` and `left` is called, once."""

    @property
    def defer(self) -> Callable[[Callable[[], None]], object]:
        """Runs a function when everything that came together with the request has begun."""

    def run(self, work: Coroutine[Any, Any, None], /) -> asyncio.Task[None]:
        """Run what ends the call."""

    def respond(self, message: bytes | Scattered, trailing: Trailing = (), /) -> None:
        """Send the answer."""

    def refuse(self, code: Code, details: str, trailing: Trailing, /) -> None:
        """End the call with a status, the only thing to be sent: gRPC's own retries are for such calls."""

    def left(self) -> None:
        """The call was cancelled."""


class UnaryHandler:
    """Of a row with one request and one answer."""

    __slots__ = ("calls", "encode", "endpoint", "method")

    def __init__(self, calls: Calls, method: Method, endpoint: Endpoint) -> None:
        self.calls = calls
        self.method = method
        self.endpoint = endpoint
        self.encode = calls.encoder(method)

    def start(self, data: bytes, circumstances: Call, reply: Reply) -> UnaryCall:
        """Run a call; it may have ended when this returns."""
        call = UnaryCall(self, circumstances, reply, len(data))
        call.start(data)
        return call


class UnaryCall(RowCall):
    """One call, from its bytes to its answer, which a `Reply` takes. On the loop."""

    __slots__ = ("_handler",)

    def __init__(self, handler: UnaryHandler, call: Call, reply: Reply, size: int) -> None:
        call.size = size
        call.operation = handler.method.operation
        self._handler = handler
        observed = Observation(handler.endpoint, call, size)
        super().__init__(handler.method.inference, call, observed, reply, reply.defer)

    def start(self, data: bytes) -> None:
        """Decode the request and run it."""
        method = self._handler.method
        try:
            if len(data) > OFF_LOOP_BYTES and method.decode_size(data) > OFF_LOOP_BYTES:
                self._run(self._decode_and_submit, data)
                return
            self._submit(method.decode(data))
        except Exception as error:
            self._fail(error)

    def _run(self, step: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        running = self._running = self._out.run(self._guarded(step, *arguments))
        running.add_done_callback(self._run_ended)

    async def _decode_and_submit(self, data: bytes) -> None:
        self._submit(await self._handler.calls.decode_large(self._handler.method, data))

    async def _await_row(self, request: Any) -> Any:
        return await _call_of(self._handler.method)(request, self.call)

    def _answer_size(self, answer: Any) -> int:
        return self._handler.method.answer_size(answer)

    def _encode(self, answer: Any) -> bytes | Scattered:
        return self._handler.encode(answer)

    def _send(self, encoded: bytes | Scattered) -> None:
        # Counted before the client hears of it, so that who asks next finds it.
        self._observed.encoded(len(encoded))
        self._observed.end(Code.OK)
        self._stop().respond(encoded)

    def _fail(self, error: Exception) -> None:
        method = self._handler.method
        failure = as_serving_error(error, method.name)
        encoded = method.encode_error(failure)
        self._observed.sent(len(encoded or b""))
        self._observed.end(failure.code, refusal_of(failure))
        if encoded is None:
            self._stop().refuse(failure.code, fitting(method.details(failure.message)), hints(failure))
        else:
            self._stop().respond(encoded, hints(failure))

    def _leave(self) -> None:
        # UNAVAILABLE is what is sent to those that outlive the grace period.
        self._observed.end(Code.UNAVAILABLE if self._handler.calls.stopping else Code.CANCELLED)
        self._stop().left()


class _OpenStream:
    """A streaming call; `sending` while an answer is on its way and the transport, not our code, is awaited."""

    __slots__ = ("sending", "task")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.sending = False

    def end(self) -> None:
        """Cancel our code; a call that is cancelled inside of the transport would be left without a status."""
        if not self.sending:
            self.task.cancel()


def endpoint_of(telemetry: Telemetry, service: Service, method: Method) -> Endpoint:
    """What counts the calls of a row."""
    inference = method.operation is Operation.INFER
    endpoint = telemetry.endpoint(service.protocol, "GRPC", method.name, inference=inference)
    endpoint.rpc = f"{service.name}/{method.name}"
    return endpoint


def _call_of(method: Method) -> Callable[[Any, Call], Any]:
    assert method.call is not None  # Of a row without `inference`.
    return method.call


def call_of(context: Any, permission: Permission, peer: str) -> Call:
    """What user code may know of the call."""
    remaining = context.time_remaining()
    deadline = None if remaining is None else time.monotonic() + remaining
    call = Call(deadline, context.invocation_metadata, peer)
    call.permission = permission
    return call


async def _write(context: Context, encoded: bytes, call: Call) -> None:
    """Send one answer of a stream. Raises `SlowReader`."""
    if call.remaining is None:
        await context.write(encoded)
        return
    try:
        # The model ends at the deadline, and may have a last word.
        async with asyncio.timeout(call.remaining + READ_SECONDS):
            await context.write(encoded)
    except TimeoutError:
        raise SlowReader(call.overdue("while the client read the response").message) from None


def hints(error: ServingError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata: when the client may try again."""
    if error.retry_after is None:
        return ()
    return (("grpc-retry-pushback-ms", str(round(error.retry_after * 1000))),)


def fitting(message: str) -> str:
    """As much of a message as fits: on the wire, everything but printable ASCII takes three bytes."""
    room = MAX_DETAILS_BYTES
    encoded = message.encode()
    if 3 * len(encoded) <= room:
        return message
    for at, byte in enumerate(encoded):
        room -= 1 if 0x20 <= byte < 0x7F and byte != ord("%") else 3
        if room < 0:
            return encoded[:at].decode(errors="ignore")
    return message
