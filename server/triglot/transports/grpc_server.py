"""The rows over gRPC, carried by grpc.aio.

Strategy: handlers are registered without (de)serializers, so requests arrive as bytes and every error is ours
to map. One function per kind of call shows a whole call: decode, call, encode, map the error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, cast

import grpc
import grpc.aio

from triglot.config import NO_PORT, Config
from triglot.core.call import Call
from triglot.core.errors import Code, DeadlineExceeded, ServingError, Unavailable, as_serving_error, outcome
from triglot.protocols import Kind, Method, Operation, Service
from triglot.telemetry.observation import Observation
from triglot.telemetry.store import Endpoint, Telemetry
from triglot.transports.off_loop import OFF_LOOP_BYTES, run_sized
from triglot.transports.shutdown import SHUTTING_DOWN

MAX_DETAILS_BYTES = 4096
"""Longer status texts overflow what clients accept as metadata."""
END_AGAIN_SECONDS = 1.0
LAST_WORD_SECONDS = 1.0
"""For what a stream still has to say when its deadline is over."""
_STATUS = {status.value[0]: status for status in grpc.StatusCode}


class SlowReader(DeadlineExceeded):
    """An answer was still on its way at the deadline; only a status can follow it."""


class GrpcServer:
    """Serves rows on one port. `start` binds; `stop` ends streams, then waits for calls."""

    def __init__(self, services: Iterable[Service], config: Config, telemetry: Telemetry) -> None:
        self._addresses = [config.address(config.grpc_port)] if config.grpc_port != NO_PORT else []
        if config.grpc_socket:
            self._addresses.append(f"unix:{config.grpc_socket}")
        self._grace = config.grace
        self._server = grpc.aio.server(
            options=_options(config), maximum_concurrent_rpcs=config.max_connections or None
        )
        self._streams: set[_OpenStream] = set()
        self._stopping = False
        makers = {
            Kind.UNARY: self._unary,
            Kind.SERVER_STREAM: self._server_stream,
            Kind.BIDI_STREAM: self._bidi_stream,
        }
        for service in services:
            handlers = {
                method.name: makers[method.kind](method, _endpoint(telemetry, service, method))
                for method in service.methods
            }
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.name, handlers),))

    async def start(self) -> int:
        """Bind and serve; the port, if there is one. Raises `OSError` when an address cannot be bound."""
        ports = [self._bind(address) for address in self._addresses]
        await self._server.start()
        return ports[0]

    def _bind(self, address: str) -> int:
        try:
            return cast("int", self._server.add_insecure_port(address))
        except RuntimeError as error:
            raise OSError(f"cannot bind gRPC to {address}: {error}") from None

    async def stop(self) -> None:
        """Refuse new calls, end streams with UNAVAILABLE, wait for the rest as long as the grace period."""
        self._stopping = True
        stopped = asyncio.ensure_future(self._server.stop(self._grace))
        while self._streams and not stopped.done():
            for stream in self._streams:
                stream.end()
            # Again if it must be: code of a user's may swallow a cancellation.
            await asyncio.wait([stopped, *(stream.task for stream in self._streams)], timeout=END_AGAIN_SECONDS)
        await stopped

    def _unary(self, method: Method, endpoint: Endpoint) -> grpc.RpcMethodHandler:
        decode, encode, size_of = method.decode, method.encode, method.answer_size
        run = cast("Callable[..., Awaitable[Any]]", method.call)

        async def handle(data: bytes, context: Any) -> bytes:
            call = _call(context)
            call.size = len(data)
            observed = Observation(endpoint, call, call.size)
            try:
                if len(data) > OFF_LOOP_BYTES:
                    request = await run_sized(method.decode_size(data), decode, data)
                else:
                    request = decode(data)
                observed.decoded()
                answer = await run(request, call)
                observed.answered()
                if size_of(answer) > OFF_LOOP_BYTES:
                    encoded = await asyncio.to_thread(encode, answer)
                else:
                    encoded = encode(answer)
                observed.encoded(len(encoded))
            except BaseException as error:
                if not isinstance(error, Exception):
                    # grpc.aio says UNAVAILABLE to those that outlive the grace period.
                    observed.end(Code.UNAVAILABLE if self._stopping else outcome(error))
                    raise
                return await _tell(method, error, context, observed)
            observed.end(Code.OK)
            return encoded

        return grpc.unary_unary_rpc_method_handler(handle)

    def _server_stream(self, method: Method, endpoint: Endpoint) -> grpc.RpcMethodHandler:
        async def handle(data: bytes, context: Any) -> None:
            call = _call(context)
            call.size = len(data)
            observed = Observation(endpoint, call, call.size)

            async def run() -> Any:
                size = method.decode_size(data) if len(data) > OFF_LOOP_BYTES else 0
                request = await run_sized(size, method.decode, data)
                observed.decoded()
                return method.call(request, call)

            await self._send(method, run, context, call, observed)

        return grpc.unary_stream_rpc_method_handler(handle)

    def _bidi_stream(self, method: Method, _: Endpoint) -> grpc.RpcMethodHandler:
        async def handle(requests: AsyncIterator[bytes], context: Any) -> None:
            call = _call(context)
            decoded = (method.decode(data) async for data in requests)

            async def run() -> Any:
                return method.call(decoded, call)

            # Requests are what counts here, not calls, and who answers them counts them.
            await self._send(method, run, context, call, None)

        return grpc.stream_stream_rpc_method_handler(handle)

    async def _send(
        self,
        method: Method,
        run: Callable[[], Awaitable[Any]],
        context: Any,
        call: Call,
        observed: Observation | None,
    ) -> None:
        """Send the answers of a stream; when the server stops, the stream ends with UNAVAILABLE."""
        task = asyncio.current_task()
        assert task is not None  # grpc.aio runs every handler in a task of its own.
        encode, size_of = method.encode, method.answer_size
        stream = _OpenStream(task)
        self._streams.add(stream)
        code = Code.OK
        try:
            if self._stopping:
                raise Unavailable(SHUTTING_DOWN)
            async with aclosing(await run()) as answers:
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
                    if self._stopping:
                        raise Unavailable(SHUTTING_DOWN)
        except asyncio.CancelledError:
            code = Code.CANCELLED
            if not self._stopping:
                raise
            task.uncancel()
            code = Code.UNAVAILABLE
            await _abort(context, Unavailable(SHUTTING_DOWN))
        except grpc.aio.InternalError:
            code = Code.CANCELLED  # Nothing can be sent any more: grpc.aio knows why, and cancels us only later.
            raise
        except Exception as error:
            code = outcome(error)
            await _tell_last(method, error, context, observed)
        finally:
            self._streams.discard(stream)
            if observed is not None:
                observed.end(code)


class _OpenStream:
    """A streaming call; `sending` while an answer is on its way and grpc.aio, not our code, is being awaited."""

    __slots__ = ("sending", "task")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.sending = False

    def end(self) -> None:
        """Cancel our code; a call that is cancelled inside of grpc.aio would be left without a status."""
        if not self.sending:
            self.task.cancel()


def _endpoint(telemetry: Telemetry, service: Service, method: Method) -> Endpoint:
    return telemetry.endpoint(service.protocol, "GRPC", method.name, inference=method.operation is Operation.INFER)


def _options(config: Config) -> list[tuple[str, int]]:
    return [
        # A second server on a used port must be an error, not half of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.max_message_size),
        ("grpc.max_send_message_length", -1),
        # Clients behind load balancers ping every 10 to 30 seconds; gRPC's own default would cut them off.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _call(context: Any) -> Call:
    remaining = context.time_remaining()
    deadline = None if remaining is None else time.monotonic() + remaining
    return Call(deadline, context.invocation_metadata)


# Errors are handled in functions of their own: a frame that an error came through must not hold it, or what the
# frame holds, the request among it, is left to the garbage collector.


async def _tell(method: Method, error: Exception, context: Any, observed: Observation) -> bytes:
    """The answer that tells of an error; without one the call ends here, with a status."""
    failure = as_serving_error(error, method.name)
    told = method.told(failure)
    observed.sent(len(told or b""))
    # Before the client hears of it, so that who asks next finds it counted.
    observed.end(failure.code)
    if told is None:
        await _abort(context, failure, method.details)
        return b""
    context.set_trailing_metadata(_hints(failure))
    return told


async def _write(context: Any, encoded: bytes, call: Call) -> None:
    """Send one answer of a stream. Raises `SlowReader`."""
    if call.remaining is None:
        await context.write(encoded)
        return
    try:
        # The model ends at the deadline, and may have a last word.
        async with asyncio.timeout(call.remaining + LAST_WORD_SECONDS):
            await context.write(encoded)
    except TimeoutError:
        raise SlowReader(call.overdue("while the client was reading").message) from None


async def _tell_last(method: Method, error: Exception, context: Any, observed: Observation | None) -> None:
    """As `_tell`, for a stream, whose last answer it is."""
    failure = as_serving_error(error, method.name)
    if (told := method.told(failure)) is None or isinstance(error, SlowReader):
        await _abort(context, failure, method.details)
        return
    if observed is not None:
        observed.sent(len(told))
    context.set_trailing_metadata(_hints(failure))
    await context.write(told)


async def _abort(context: Any, error: ServingError, details: Callable[[str], str] = str) -> None:
    """End the call with a status, the only thing to be sent: gRPC's own retries are for such calls."""
    try:
        await context.abort(_STATUS[error.code], _details(details(error.message)), _hints(error))
    except grpc.aio.AbortError as aborted:
        # The context has it, and its frames have the context. grpc.aio raises it again when the handler returns.
        aborted.__traceback__ = aborted.__context__ = None


def _hints(error: ServingError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata: when the client may try again."""
    if error.retry_after is None:
        return ()
    return (("grpc-retry-pushback-ms", str(round(error.retry_after * 1000))),)


def _details(message: str) -> str:
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
