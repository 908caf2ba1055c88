"""One gRPC call on a connection: what its handler knows as its context."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from time import monotonic
from typing import Any

from triglot.core.errors import Code, ServingError
from triglot.core.running import Running
from triglot.core.scattered import Scattered
from triglot.protocols.rows import Kind
from triglot.transports.call_task import CallTask
from triglot.transports.grpc_calls import LAST_WORD_SECONDS, Trailing, fitting, hints
from triglot.transports.http2.body import Body, StreamGone
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.requests import RpcHead, answer_head, only_trailers, trailers
from triglot.transports.http2.core.sending import JOIN_BYTES
from triglot.transports.http2.messages import PREFIX_BYTES, prefix
from triglot.transports.http2.roles import Connected
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
        "_trailing",
        "_writing",
        "_written",
        "body",
        "deadline",
        "handler",
        "head",
        "kind",
        "number",
        "over",
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
        self._begun = False
        self._trailing: Trailing = ()
        self._written = 0
        self._writing: asyncio.Future[None] | None = None
        self.deadline: float | None = None
        """The client's, by `time.monotonic`."""
        self._expires = 0
        if head.timeout is not None:
            self.deadline = deadline = monotonic() + head.timeout
            # The handler knows the deadline, and says what was late; this is for one that does not.
            self._expires = protocol.server.timers.add(self, deadline + LAST_WORD_SECONDS)

    # --- the context ---

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - monotonic())

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """What the client sent beside the request."""
        return self.head.metadata

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

    # --- answered once ---

    @property
    def defer(self) -> Callable[[Callable[[], None]], object]:
        """See `Reply`."""
        return self.protocol.burst.defer

    def run(self, work: Coroutine[Any, Any, None], /) -> CallTask:
        """See `Reply`."""
        tasks = self.protocol.server.tasks
        task = CallTask(work, self.protocol.loop, tasks.discard)
        tasks.add(task)
        task.start()
        return task

    def respond(self, message: bytes | Scattered, trailing: Trailing = (), /, *, packed: bool = False) -> None:
        """See `Reply`."""
        if self.over:
            return
        # What has answered it may hold it, by the metadata that its call could have asked for.
        self.task = None
        head = prefix(len(message), packed)
        size = PREFIX_BYTES + len(message)
        out = self.protocol.connection.out
        body = [head, message] if isinstance(message, bytes) else [head, *message.pieces]
        out.respond(self.number, self.answer_head, body, size, trailers(0, "", trailing))
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
            log.error("%s: an error that no handler told", self.head.path, exc_info=error)
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
        # A client that goes on sending is told that nobody listens; one that has sent all is forgotten already.
        self.protocol.connection.reset_when_sent(self.number, ErrorCode.NO_ERROR)
        self.protocol.wake()

    def gone(self) -> None:
        """Nothing more can be sent."""
        self.over = True
        if self._expires:
            self.protocol.server.timers.discard(self, self._expires)
        self.protocol.forget(self.number)
        if self.body is not None:
            self.body.drop()
            self.body = None  # It refers to this.
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
