"""One gRPC call on an HTTP/2 connection."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from time import monotonic
from typing import Any, Final

from triglot.core.call import Call
from triglot.core.compiling import mypyc_attr
from triglot.core.errors import Code, ServingError
from triglot.core.operation import EVERYTHING, GRPC, Authorizer, ClientLimits, Permission
from triglot.core.roles import RunningCall
from triglot.core.tensor import Scattered
from triglot.core.trace_context import NO_CONTEXT
from triglot.protocols.rows import Kind
from triglot.transports.grpc_calls import (
    READ_SECONDS,
    GrpcCall,
    GrpcRow,
    SlowReader,
    Trailing,
    retry_metadata,
    truncated,
)
from triglot.transports.http2.body import Body, decompress_off_loop
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.receiving import RpcHead
from triglot.transports.http2.core.sending import (
    JOIN_BYTES,
    OK_TRAILERS,
    Sender,
    response_head,
    trailers,
    trailers_only,
)
from triglot.transports.http2.messages import (
    PREFIX,
    PREFIX_BYTES,
    CompressedMessage,
    Message,
)
from triglot.transports.http2.roles import Connected
from triglot.transports.off_loop import guarded, pass_on
from triglot.transports.row_call import LAST_MESSAGE_SECONDS, SHUTTING_DOWN

log = logging.getLogger(__name__)

MAX_IN_A_ROW: Final = 16
"""Responses of a stream in a row, after which other tasks get a turn."""
LARGE_BYTES: Final = JOIN_BYTES // 2
"""A streamed response of this size shares no DATA frame with others."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Rpc(GrpcCall):
    """One gRPC call. On the event loop; owned by its connection until it ends.

    `row` and its kind are None for an unknown path.
    """

    __slots__ = (
        "_begun",
        "_expires",
        "_limits",
        "_written",
        "body",
        "deadline",
        "head",
        "kind",
        "number",
        "over",
        "permission",
        "protocol",
        "response_head",
        "row",
        "task",
    )

    def __init__(self, protocol: Connected, number: int, head: RpcHead, row: GrpcRow | None) -> None:
        super().__init__()
        self.protocol = protocol
        self.number = number
        self.head = head
        self.row = row
        self.kind = None if row is None else row.kind
        self.body: Body | None = None
        """Receives the request's body, unless that arrived as a whole."""
        self.task: RunningCall | None = None
        """The task that runs the steps before or after the row."""
        self.over = False
        """True once nothing more is sent."""
        self.response_head = response_head()
        """Header block before the first response."""
        self.permission: Permission = EVERYTHING
        """What the client may do."""
        self._limits: ClientLimits | None = None
        """Limits of the client that count this call, if any."""
        self._begun = False
        self._written = 0
        self.deadline: float | None = None
        """Deadline set by the client, in seconds of `time.monotonic`; None without one."""
        self._expires = 0
        if head.timeout is not None:
            self.deadline = monotonic() + head.timeout

    # --- the messages of a stream ---

    def write(self, message: bytes | Scattered, /, *, compressed: bool = False) -> bool:
        """See `GrpcCall`."""
        if self.over:
            return False
        out = self._begin_response()
        head = PREFIX.pack(compressed, len(message))
        if not isinstance(message, bytes):
            out.data(self.number, (head, *message.pieces))
        elif len(message) < JOIN_BYTES:
            out.data(self.number, (head + message,))  # A copy is faster than another piece.
        else:
            out.data(self.number, (head, message))
        self.protocol.schedule_write()
        self._written += 1
        if out.is_blocked(self.number):
            self._watch_reader()
            return False
        if self._written % MAX_IN_A_ROW:
            return True
        self.protocol.loop.call_soon(self.resume)
        return False

    def send_all(self, responses: deque[bytes], /) -> bool:
        """See `Sink`. Sends small messages of a bidirectional stream several in one DATA frame."""
        while responses and not self.over:
            if len(responses[0]) >= LARGE_BYTES:
                if not self.write(responses.popleft()):
                    return False
                continue
            pieces: list[bytes] = []
            size = 0
            while responses and size + len(responses[0]) < JOIN_BYTES:
                message = responses.popleft()
                size += PREFIX_BYTES + len(message)
                pieces += PREFIX.pack(False, len(message)), message
            out = self._begin_response()
            out.data(self.number, (b"".join(pieces),))
            self.protocol.schedule_write()
            if out.is_blocked(self.number):
                return False
        return not self.over

    def _begin_response(self) -> Sender:
        out = self.protocol.connection.out
        if not self._begun:
            self._begun = True
            out.headers(self.number, self.response_head)
        return out

    def drained(self) -> None:
        """Ask for more messages: all of their data has been sent."""
        self.resume()

    def end_stream(self, trailing: Trailing = (), /) -> None:
        """See `GrpcCall`."""
        self.finish(0, "", trailing)

    # --- the handler ---

    def admit(self, access: Authorizer) -> ServingError | None:
        """Check permission and limits by the request's headers; returns the error of a rejected call."""
        row = self.row
        assert row is not None
        names, certificate_names = access.fields[GRPC], self.protocol.certificate_names
        fields = [credential for credential in self.head.credentials if credential[0] in names]
        try:
            self.permission = permission = access.permission(row.method.operation, GRPC, fields, certificate_names)
            if permission.limits is not None:
                self._limits = permission.enter()
        except ServingError as error:
            row.count_refusal(self._call(), error)
            return error
        return None

    def watch_deadline(self) -> None:
        """Set a timer that ends the call shortly after its deadline, unless its row does so itself."""
        if self.deadline is None or self._expires:
            return
        if self.done() or not self.ends_at_deadline:
            self._expires = self.protocol.server.timers.add(self, self.deadline + LAST_MESSAGE_SECONDS)

    def start(self, message: bytes | memoryview) -> None:
        """Run a call with one request; it may have ended when this returns."""
        self.task = None
        assert self.row is not None
        self.start_row(self.row, message, self._call(), self.protocol.defer)

    def _call(self) -> Call:
        """Return the `Call` that user code sees."""
        call = Call(self.deadline, self.head.read_metadata, self.protocol.remote)
        call.permission = self.permission
        head = self.head
        call.context = (head.traceparent, head.tracestate) if head.traceparent else NO_CONTEXT
        return call

    def start_message(self, message: Message) -> None:
        """As `start`, for a message that may be compressed."""
        if not isinstance(message, CompressedMessage):
            self.start(message)
            return
        server = self.protocol.server
        decompressing = message, self.head.encoding, server.max_message_size, server.request_bytes
        self.task = self.run(
            guarded(pass_on, (self.start, decompress_off_loop, *decompressing), self.cancelled, self.failed)
        )

    def receive_body(self) -> None:
        """Start to receive the request's body; a bidirectional call starts now."""
        body = self.body = Body(self)
        self.protocol.connection.receive_into(self.number, body.reader)
        if self.row is None or self.kind is not Kind.BIDI_STREAM:
            return
        conversation = self.converse(self.row, body.stream(), self._call())
        if conversation is not None:
            body.listen(conversation.receive)

    # --- `GrpcCall` ---

    def run(self, work: Coroutine[Any, Any, None], /) -> asyncio.Task[None]:
        """See `GrpcCall`."""
        task = self.protocol.loop.create_task(work)
        self.protocol.server.tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self.protocol.server.tasks.discard(task)
        if task.cancelled():  # Before its first step; otherwise it has ended the call.
            self.cancelled()

    def respond(self, message: bytes | Scattered, trailing: Trailing = (), /, *, compressed: bool = False) -> None:
        """See `GrpcCall`."""
        if self.over:
            return
        self.task = None  # It may refer to this call.
        size = len(message)
        head = PREFIX.pack(compressed, size)
        body = [head, message] if isinstance(message, bytes) else [head, *message.pieces]
        end = trailers(0, "", trailing) if trailing else OK_TRAILERS
        self.protocol.connection.out.respond(self.number, self.response_head, body, PREFIX_BYTES + size, end)
        self._close()

    def refuse(self, code: Code, details: str, trailing: Trailing, /) -> None:
        """See `GrpcCall`."""
        self.task = None
        self.finish(int(code), details, trailing)

    # --- the end of a call ---

    def cancelled(self) -> None:
        """See `GrpcCall`; also called when a task that runs the call was cancelled."""
        self.task = None
        if self.protocol.server.stopping:
            self.finish(int(Code.UNAVAILABLE), SHUTTING_DOWN)
        else:
            self.finish(int(Code.CANCELLED), "the call was cancelled")

    def failed(self, error: Exception) -> None:
        """End the call after an error outside of its handler, which reports its own errors."""
        if isinstance(error, ServingError):
            self.finish(int(error.code), truncated(error.message), retry_metadata(error))
        else:
            log.error("%s: unexpected error", self.head.path, exc_info=error)
            self.finish(int(Code.INTERNAL), "internal error")

    def finish(self, code: int = 0, details: str = "", trailing: Trailing | None = None) -> None:
        """Send the status, after all messages."""
        if self.over:
            return
        metadata = trailing or ()
        out = self.protocol.connection.out
        if self._begun:
            out.trailers(self.number, trailers(code, details, metadata))
        elif code:
            out.headers(self.number, trailers_only(code, details, metadata), end=True)
        else:
            out.headers(self.number, response_head())
            out.trailers(self.number, trailers(code, details, metadata))
        self._close()

    def fail(self, error: ServingError) -> None:
        """End the call because of an error in what was received."""
        self.finish(int(error.code), truncated(error.message), retry_metadata(error))
        self.cancel()

    def _watch_reader(self) -> None:
        """Set a timer for a client that does not read a stream by the server's own deadline."""
        if not self._expires and self.call.deadline is not None:
            self._expires = self.protocol.server.timers.add(self, self.call.deadline + READ_SECONDS)

    def expire(self) -> None:
        """End the call, whose deadline has passed without its handler having ended it."""
        connection = self.protocol.connection
        is_blocked = connection.out.is_blocked(self.number)
        if self.deadline is None:
            if is_blocked and not self.done():
                self._end_with_error(SlowReader(self.call.overdue("while the client read the response").message))
            return
        if is_blocked:
            # The status would wait behind a message that the client does not read.
            connection.reset(self.number, ErrorCode.CANCEL)
            self.release()
            self.protocol.schedule_write()
        else:
            self.finish(int(Code.DEADLINE_EXCEEDED), "Deadline Exceeded")
        self.cancel()

    def _close(self) -> None:
        self.release()
        protocol = self.protocol
        # A client that is still sending is stopped by a reset; a stream that it has ended is closed already.
        if self.number in protocol.connection.streams:
            protocol.connection.reset_when_sent(self.number, ErrorCode.NO_ERROR)
        protocol.schedule_write()

    def release(self) -> None:
        """Note that nothing more can be sent, and release what the call holds."""
        self.over = True
        if self._limits is not None:
            self._limits.leave()
            self._limits = None
        if self._expires:
            self.protocol.server.timers.discard(self, self._expires)
        self.protocol.remove_call(self.number)
        if self.body is not None:
            self.body.drop()
            self.body = None  # It refers to this call.

    def end_grace(self) -> None:
        """Cancel the call at the end of the server's grace period."""
        if self.task is not None:
            if not self.task.cancelling():
                self.task.cancel()
        elif not self.done() and not self.cancelling():
            super().cancel()

    def cancel(self) -> None:
        """Cancel what runs; the connection counts it until it has ended."""
        if (task := self.task) is not None:
            task.cancel()
            self.protocol.track_handler(task)
        elif not self.done():
            super().cancel()
            self.protocol.track_handler(self)
