"""Calls over grpc.aio, whose handlers are coroutines: each awaits what its call has to send."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc
import grpc.aio

from triglot.core.call import Call
from triglot.core.errors import Code, ServingError
from triglot.core.operation import Permission
from triglot.core.running import Requests
from triglot.core.tensor import Scattered
from triglot.transports.aio.unsent import StreamWriter, UnsentAnswers, host_of
from triglot.transports.grpc_calls import (
    READ_SECONDS,
    GrpcCall,
    GrpcRow,
    SlowReader,
    Trailing,
    retry_metadata,
    truncated,
)
from triglot.transports.row_call import SHUTTING_DOWN
from triglot.transports.until_ended import cancel

MAX_UNWRITTEN = 16
MAX_UNWRITTEN_BYTES = 64 * 1024
"""Messages of a stream that wait for the one that is being written."""
Status = tuple[Code, str, Trailing]
_STATUS = {status.value[0]: status for status in grpc.StatusCode}


class AioCall(GrpcCall):
    """A call that can be awaited: `changed` is done once there is a message to send, or the end."""

    __slots__ = ("_bytes", "_loop", "changed", "messages", "status", "trailing")

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self.changed: asyncio.Future[None] = self._loop.create_future()
        self.messages: deque[bytes] = deque()
        """Messages to send."""
        self._bytes = 0
        self.trailing: Trailing = ()
        self.status: Status | None = None
        """The status of a call that has not ended with OK."""

    def run(self, work: Coroutine[Any, Any, None], /) -> asyncio.Task[None]:
        """See `GrpcCall`."""
        return self._loop.create_task(work)

    def respond(self, message: bytes | Scattered, trailing: Trailing = (), /) -> None:
        """See `GrpcCall`."""
        self.messages.append(bytes(message))
        self.end_stream(trailing)

    def write(self, message: bytes | Scattered, /) -> bool:
        """See `GrpcCall`."""
        self.messages.append(bytes(message))
        self._bytes += len(message)
        self._wake()
        return len(self.messages) < MAX_UNWRITTEN and self._bytes < MAX_UNWRITTEN_BYTES

    def end_stream(self, trailing: Trailing = (), /) -> None:
        """See `GrpcCall`."""
        self.trailing = trailing
        self._wake()

    def refuse(self, code: Code, details: str, trailing: Trailing, /) -> None:
        """See `GrpcCall`."""
        self.status = code, details, trailing
        self._wake()

    def cancelled(self) -> None:
        """See `GrpcCall`."""
        if self._row.calls.stopping:
            self.refuse(Code.UNAVAILABLE, SHUTTING_DOWN, ())
        else:
            self.refuse(Code.CANCELLED, "the call was cancelled", ())

    def _wake(self) -> None:
        if not self.changed.done():
            self.changed.set_result(None)

    async def next_message(self) -> bytes | None:
        """Return the next message of a stream, or None once it has ended."""
        if not self.messages:
            self.resume()
        while not self.messages:
            if self.done():
                return None
            self.changed = self._loop.create_future()
            await self.changed
        message = self.messages.popleft()
        self._bytes -= len(message)
        return message

    def fail_stream(self, error: ServingError) -> None:
        """End a stream with an error of its transport."""
        self.messages.clear()
        if self.done():
            self.status = error.code, error.message, ()
        else:
            self._end_with_error(error)


async def answer(row: GrpcRow, data: bytes, context: Any, permission: Permission) -> bytes:
    """Run a unary call; returns the response, or b"" if the call has been ended with a status."""
    running = AioCall()
    running.start_row(row, data, call_of(context, permission), asyncio.get_running_loop().call_soon)
    try:
        await running.changed
    except asyncio.CancelledError:
        await cancel(running)
        raise
    await _end(running, context)
    return running.messages[0] if running.messages else b""


async def answer_stream(
    row: GrpcRow, data: bytes, context: Any, permission: Permission, unsent: UnsentAnswers
) -> None:
    """Run a call with one request and a stream of responses."""
    running = AioCall()
    running.start_row(row, data, call_of(context, permission), asyncio.get_running_loop().call_soon)
    await _send_all(running, context, unsent)


async def converse(row: GrpcRow, context: Any, permission: Permission, unsent: UnsentAnswers) -> None:
    """Run a call with a stream of requests and one of responses."""
    running = AioCall()
    requests = AioRequests(context.read, grpc.aio.EOF)
    conversation = running.converse(row, requests, call_of(context, permission))
    try:
        if conversation is not None:
            requests.listen(conversation.receive)
        await _send_all(running, context, unsent)
    finally:
        await requests.close()


async def _send_all(running: AioCall, context: Any, unsent: UnsentAnswers) -> None:
    """Send the messages of a stream as the client reads them, and its end."""
    writer = StreamWriter(context, unsent, running)
    try:
        while (message := await running.next_message()) is not None:
            try:
                await _write(writer, message, running.call)
            except SlowReader as error:
                running.fail_stream(error)
        await _end(running, context)
    except (asyncio.CancelledError, grpc.aio.InternalError):
        # For the latter nothing can be sent any longer: grpc.aio cancels this task only later.
        await cancel(running)
        raise
    finally:
        writer.end()


async def _write(writer: StreamWriter, message: bytes, call: Call) -> None:
    """Send one message of a stream. Raise `SlowReader` when the client has not read it in time."""
    if call.remaining is None:
        await writer.write(message)
        return
    try:
        async with asyncio.timeout(call.remaining + READ_SECONDS):
            await writer.write(message)
    except TimeoutError:
        raise SlowReader(call.overdue("while the client read the response").message) from None


async def _end(running: AioCall, context: Any) -> None:
    if running.status is not None:
        await abort(context, *running.status)
    elif running.trailing:
        context.set_trailing_metadata(running.trailing)


async def refuse(context: Any, error: ServingError) -> None:
    """End a call with an error's status."""
    await abort(context, error.code, truncated(error.message), retry_metadata(error))


async def abort(context: Any, code: Code, details: str, trailing: Trailing) -> None:
    """End a call with a status."""
    try:
        await context.abort(_STATUS[code], details, trailing)
    except grpc.aio.AbortError as aborted:
        # The context keeps the error, whose frames refer to the context. grpc.aio raises it again when the handler
        # returns.
        aborted.__traceback__ = aborted.__context__ = None


def call_of(context: Any, permission: Permission) -> Call:
    """Return the `Call` that user code sees."""
    remaining = context.time_remaining()
    deadline = None if remaining is None else time.monotonic() + remaining
    call = Call(deadline, context.invocation_metadata, host_of(context.peer()))
    call.permission = permission
    return call


MAX_REQUESTS = 32
MAX_BYTES = 64 * 1024
"""Limits of what is read ahead; one request may exceed them."""


def _no_listener() -> None:
    pass


class AioRequests(Requests):
    """Reads requests ahead, from `listen` until `close`.

    `read` returns the next request, or `end` after the last one.
    """

    def __init__(self, read: Callable[[], Awaitable[Any]], end: object) -> None:
        self._read = read
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._queue: deque[bytes] = deque()
        self._bytes = 0
        self._error: Exception | None = None
        self._over = False
        self._notify: Callable[[], None] = _no_listener
        self._reading: asyncio.Task[None] | None = None
        self._taken: asyncio.Future[None] | None = None

    @property
    def has_ended(self) -> bool:
        return self._over and not self._queue and self._error is None

    def listen(self, on_ready: Callable[[], None]) -> None:
        """Call `on_ready` when a request has arrived, or the end."""
        self._notify = on_ready
        self._reading = self._loop.create_task(self._read_all())

    async def _read_all(self) -> None:
        read, end, queue = self._read, self._end, self._queue
        try:
            while (request := await read()) is not end:
                queue.append(request)
                self._bytes += len(request)
                self._notify()
                while self._bytes > MAX_BYTES or len(queue) >= MAX_REQUESTS:
                    self._taken = self._loop.create_future()
                    await self._taken
        except Exception as error:
            self._error = error
        self._over = True
        self._notify()

    def take(self) -> bytes | None:
        if self._queue:
            request = self._queue.popleft()
            self._bytes -= len(request)
            if self._taken is not None and not self._taken.done():
                self._taken.set_result(None)
            return request
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # Its traceback refers to this frame.
        return None

    async def close(self) -> None:
        """Read no more."""
        self._notify = _no_listener  # The listener refers to this object.
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
