"""One gRPC call on a connection: what its handler knows as its context."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from time import monotonic
from typing import Any

from triglot.access.control import GRPC
from triglot.core.call import Call
from triglot.core.errors import Code, ServingError
from triglot.core.permission import EVERYTHING, ClientLimits, Permission
from triglot.core.running import Running
from triglot.core.scattered import Scattered
from triglot.core.trace_context import NO_CONTEXT
from triglot.protocols.rows import Kind
from triglot.transports.grpc_calls import LAST_WORD_SECONDS, GrpcRow, Trailing, fitting, hints
from triglot.transports.http2.body import MOST_UNREAD_BYTES, Body, StreamGone
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.requests import OK_TRAILERS, RpcHead, answer_head, only_trailers, trailers
from triglot.transports.http2.core.sending import JOIN_BYTES
from triglot.transports.http2.messages import PREFIX, PREFIX_BYTES, Message, Packed, prefix, unpacked
from triglot.transports.http2.roles import Connected
from triglot.transports.row_call import RowCall
from triglot.transports.shutdown import SHUTTING_DOWN

log = logging.getLogger(__name__)

LONGEST_RUN = 16
"""So many answers in a row leave before others have their turn."""
LARGE_BYTES = JOIN_BYTES // 2
"""Such an answer of a stream shares no frame."""


class Rpc:
    """A call, its answers and its end. On the loop.

    `kind` and `handler` are its row's, None where there is none. Of a call with one answer it is the `Reply`.
    """

    __slots__ = (
        "_begun",
        "_expires",
        "_limits",
        "_trailing",
        "_writing",
        "_written",
        "body",
        "deadline",
        "defer",
        "handler",
        "head",
        "kind",
        "number",
        "over",
        "permission",
        "protocol",
        "task",
    )

    answer_head = answer_head()
    """What is said before an answer."""

    def __init__(self, protocol: Connected, number: int, head: RpcHead, kind: Kind | None, handler: Any) -> None:
        self.protocol = protocol
        self.number = number
        self.head = head
        self.kind = kind
        self.handler = handler
        self.body: Body | None = None
        """What takes the body, where it does not come as a whole."""
        self.task: Running | None = None
        """What runs it."""
        self.over = False
        """Whether nothing more is sent."""
        self.permission: Permission = EVERYTHING
        """What the client may do."""
        self._limits: ClientLimits | None = None
        """That count it."""
        self._begun = False
        self._trailing: Trailing = ()
        self._written = 0
        self._writing: asyncio.Future[None] | None = None
        self.deadline: float | None = None
        """The client's, by `time.monotonic`."""
        self._expires = 0
        if head.timeout is not None:
            self.deadline = monotonic() + head.timeout
        self.defer = protocol.defer
        """See `Reply`."""

    # --- the context ---

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - monotonic())

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """What the client sent beside the request."""
        return self.head.metadata

    def remote(self) -> str:
        """The client's address, if it has one."""
        return self.protocol.remote

    def set_trailing_metadata(self, metadata: Trailing, /) -> None:
        """What is sent with the status."""
        self._trailing = metadata

    def on_stall(self, close_answers: Callable[[], Awaitable[None]], /) -> None:
        """Nothing: the connection resets such a stream."""

    async def write(self, message: bytes | Scattered, /, *, packed: bool = False) -> None:
        """Send one answer of a stream; waits while the client does not read. Raises `StreamGone`."""
        if self.over:
            raise StreamGone
        out = self.protocol.connection.out
        if not self._begun:
            self._begun = True
            out.headers(self.number, self.answer_head)
        head = prefix(len(message), packed)
        if not isinstance(message, bytes):
            out.data(self.number, (head, *message.pieces))
        elif len(message) < JOIN_BYTES:
            out.data(self.number, (head + message,))  # A copy is quicker than another piece.
        else:
            out.data(self.number, (head, message))
        self.protocol.wake()
        self._written += 1
        if not self._written % LONGEST_RUN:
            await asyncio.sleep(0)
        while self._is_held_up():
            self._writing = self.protocol.loop.create_future()
            await self._writing
        if self.over:
            raise StreamGone

    def offer(self, answers: deque[bytes]) -> None:
        """Send small answers of a stream that can leave at once, as many as fit into a frame together.

        Large ones are to be written: each of them may wait.
        """
        out = self.protocol.connection.out
        while answers and len(answers[0]) < LARGE_BYTES and not self.over and not out.unfinished(self.number):
            if not self._begun:
                self._begun = True
                out.headers(self.number, self.answer_head)
            pieces: list[bytes] = []
            size = 0
            while answers and size + len(answers[0]) < JOIN_BYTES:
                answer = answers.popleft()
                size += PREFIX_BYTES + len(answer)
                pieces += prefix(len(answer)), answer
            out.data(self.number, (b"".join(pieces),))
            self.protocol.wake()

    def _is_held_up(self) -> bool:
        return not self.over and self.protocol.connection.out.unfinished(self.number)

    def drained(self) -> None:
        """All that was to be sent has left."""
        if self._writing is not None and not self._writing.done():
            self._writing.set_result(None)

    # --- its handler ---

    def admit(self, row: GrpcRow) -> ServingError | None:
        """Why the client may not make this call; None where it may, as far as its head tells."""
        access = self.protocol.server.access
        if access is None or row.operation is None:
            return None
        names, fields = access.fields[GRPC], []
        for one in self.head.fields:  # A comprehension would be one more call, of each call.
            if (name := one.name.text) in names:
                fields.append((name, one.text or one.value.decode("latin-1")))  # noqa: PERF401
        try:
            permission = access.permission(row.operation, GRPC, fields, self.protocol.certificate_names)
            self.permission = permission
            if permission.limits is not None:
                self._limits = permission.enter()
        except ServingError as error:
            call = self._call()
            call.permission = self.permission
            row.refused(call, error)
            return error
        return None

    def watch_deadline(self) -> None:
        """End it at its deadline: whoever runs it says earlier what was late, or does not know."""
        if self.deadline is None or self._expires:
            return
        if not (isinstance(self.task, RowCall) and self.task.ends_itself):
            self._expires = self.protocol.server.timers.add(self, self.deadline + LAST_WORD_SECONDS)

    def start(self, message: bytes | memoryview) -> None:
        """Run the handler of a call with one request and one answer; it may have ended when this returns."""
        circumstances = self._call()
        circumstances.permission = self.permission
        call = self.handler.start(message, circumstances, self)
        if not call.done():
            self.task = call

    def _call(self) -> Call:
        """What user code may know of it."""
        call = Call(self.deadline, self.invocation_metadata, self.protocol.remote)
        head = self.head
        call.context = (head.traceparent, head.tracestate) if head.traceparent else NO_CONTEXT
        return call

    def start_unary(self, message: Message) -> None:
        """As `start`, where the message may be compressed."""
        if not isinstance(message, Packed):
            self.start(message)
            return
        self.task = self.run(self._unpack_and_start(message))

    async def _unpack_and_start(self, message: Packed) -> None:
        # A cancellation ends here: a task that is cancelled keeps the error, whose frames hold the call, which has
        # the task: a circle that only the garbage collector would open.
        try:
            self.start(await self._unpacked(message))
        except asyncio.CancelledError:
            self.cancelled()
        except Exception as error:
            self.failed(error)

    def start_stream(self, requests: Any) -> None:
        """Run the handler of a call with many answers. `requests`: the one message, or an iterator over all."""
        tasks = self.protocol.server.tasks
        task = self.task = self.protocol.loop.create_task(self._stream(requests))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _stream(self, requests: Any) -> None:
        try:
            if self.kind is Kind.SERVER_STREAM:
                requests = await self._unpacked(requests)
            await self.handler(requests, self)
            self.finish()
        except StreamGone:
            return
        except asyncio.CancelledError:
            self.cancelled()
        except Exception as error:
            self.failed(error)

    async def _unpacked(self, message: Message) -> bytes | memoryview:
        """The message as the client meant it. Raises `ServingError`."""
        server = self.protocol.server
        with server.request_bytes.reserve(MOST_UNREAD_BYTES) as reserved:
            return await unpacked(message, self.head.encoding, server.most_bytes, reserved)

    # --- answered once ---

    def run(self, work: Coroutine[Any, Any, None], /) -> asyncio.Task[None]:
        """See `Reply`."""
        task = self.protocol.loop.create_task(work)
        self.protocol.server.tasks.add(task)
        task.add_done_callback(self._has_run)
        return task

    def _has_run(self, task: asyncio.Task[None]) -> None:
        self.protocol.server.tasks.discard(task)
        if task.cancelled():  # Before it had begun: else it would have said how the call ends.
            self.cancelled()

    def respond(self, message: bytes | Scattered, trailing: Trailing = (), /, *, packed: bool = False) -> None:
        """See `Reply`."""
        if self.over:
            return
        # What has answered it may hold it, by the metadata that its call could have asked for.
        self.task = None
        size = len(message)
        head = PREFIX.pack(packed, size)
        body = [head, message] if isinstance(message, bytes) else [head, *message.pieces]
        end = trailers(0, "", trailing) if trailing else OK_TRAILERS
        self.protocol.connection.out.respond(self.number, self.answer_head, body, PREFIX_BYTES + size, end)
        self._close()

    def refuse(self, code: Code, details: str, trailing: Trailing, /) -> None:
        """See `Reply`."""
        self.task = None
        self.finish(int(code), details, trailing)

    def left(self) -> None:
        """See `Reply`."""
        self.task = None
        self.cancelled()

    # --- ends ---

    def cancelled(self) -> None:
        """What answers it was cancelled."""
        if self.protocol.server.stopping:
            self.finish(int(Code.UNAVAILABLE), SHUTTING_DOWN)
        else:
            self.finish(int(Code.CANCELLED), "the call was cancelled")

    def failed(self, error: Exception) -> None:
        """An error before the handler, which tells its own ones."""
        if isinstance(error, ServingError):
            self.finish(int(error.code), fitting(error.message), hints(error))
        else:
            log.error("%s: unexpected error", self.head.path, exc_info=error)
            self.finish(int(Code.INTERNAL), "internal error")

    def finish(self, code: int = 0, details: str = "", trailing: Trailing | None = None) -> None:
        """The status, after all answers."""
        if self.over:
            return
        metadata = self._trailing if trailing is None else trailing
        out = self.protocol.connection.out
        if self._begun:
            out.trailers(self.number, trailers(code, details, metadata))
        elif code:
            out.headers(self.number, only_trailers(code, details, metadata), end=True)
        else:
            out.headers(self.number, answer_head())
            out.trailers(self.number, trailers(code, details, metadata))
        self._close()

    def fail(self, error: ServingError) -> None:
        """The call ends because of what was received."""
        self.finish(int(error.code), fitting(error.message), hints(error))
        self.cancel()

    def expire(self) -> None:
        """The deadline has passed, and nobody has said so."""
        connection = self.protocol.connection
        if connection.out.unfinished(self.number):
            # A status would wait behind an answer that the client does not read.
            connection.reset(self.number, ErrorCode.CANCEL)
            self.gone()
            self.protocol.wake()
        else:
            self.finish(int(Code.DEADLINE_EXCEEDED), "Deadline Exceeded")
        self.cancel()

    def _close(self) -> None:
        self.gone()
        protocol = self.protocol
        # A client that goes on sending is told that nobody listens; one that has sent all is forgotten already.
        if self.number in protocol.connection.streams:
            protocol.connection.reset_when_sent(self.number, ErrorCode.NO_ERROR)
        protocol.wake()

    def gone(self) -> None:
        """Nothing more can be sent."""
        self.over = True
        if self._limits is not None:
            self._limits.leave()
            self._limits = None
        if self._expires:
            self.protocol.server.timers.discard(self, self._expires)
        self.protocol.forget(self.number)
        if self.body is not None:
            self.body.drop()
            self.body = None  # It refers to this.
        if self._writing is not None:
            self.drained()

    def end_grace(self) -> None:
        """The server has no more time for it."""
        if self.task is not None and not self.task.cancelling():
            self.task.cancel()

    def cancel(self) -> None:
        """Stop the handler, which counts on the connection until it has ended."""
        task = self.task
        if task is None:
            return
        task.cancel()
        self.protocol.runs_on(task)
