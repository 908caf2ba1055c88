"""One gRPC call on a connection: what its handler knows as its context."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any

from triglot.core.errors import Code, QueueFull, ServingError, Unimplemented
from triglot.protocols import Kind
from triglot.transports.grpc_calls import LAST_WORD_SECONDS, Trailing, fitting
from triglot.transports.h2.frames import ErrorCode
from triglot.transports.h2.messages import PREFIX_BYTES, Message, MessageReader, prefix, unpacked
from triglot.transports.h2.requests import RpcHead, answer_head, only_trailers, trailers

if TYPE_CHECKING:
    from triglot.transports.h2.protocol import H2Protocol

MOST_UNREAD_BYTES = 1024 * 1024
"""Of requests of one stream that wait for its handler; beyond, the client's window stays closed."""
LONGEST_RUN = 16
"""So many answers in a row leave before others have their turn."""


class StreamGone(Exception):
    """Nobody reads the answers any more."""


class Rpc:
    """A call's messages and its end. On the loop.

    `kind` and `handle` are its row's, None where there is none.
    """

    __slots__ = (
        "_begun",
        "_came",
        "_deadline",
        "_held",
        "_inbox",
        "_owed",
        "_protocol",
        "_reading",
        "_timer",
        "_trailing",
        "_unread",
        "_writing",
        "_written",
        "ended",
        "handle",
        "head",
        "kind",
        "number",
        "over",
        "reader",
        "task",
    )

    def __init__(self, protocol: H2Protocol, number: int, head: RpcHead, kind: Kind | None, handle: Any) -> None:
        self.number = number
        self.head = head
        self.kind = kind
        self.handle = handle
        self.reader = MessageReader(protocol.server.most_bytes)
        self.task: asyncio.Task[None] | None = None
        self.ended = False
        """Whether the client has sent everything."""
        self.over = False
        """Whether nothing more is sent."""
        self._protocol = protocol
        self._begun = False
        self._trailing: Trailing = ()
        self._inbox: deque[Message] = deque()
        self._held = self._unread = self._owed = self._came = self._written = 0
        # Both may wait at a time: a stream's requests are read beside its answers.
        self._reading: asyncio.Future[None] | None = None
        self._writing: asyncio.Future[None] | None = None
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        if head.timeout is not None:
            loop = protocol.loop
            self._deadline = loop.time() + head.timeout
            # The handler knows the deadline, and says what was late; this is for one that does not.
            self._timer = loop.call_at(self._deadline + LAST_WORD_SECONDS, self._expire)

    # --- the context ---

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - self._protocol.loop.time())

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """What the client sent beside the request."""
        return self.head.metadata

    def set_trailing_metadata(self, metadata: Trailing, /) -> None:
        """What is sent with the status."""
        self._trailing = metadata

    async def write(self, message: bytes, /) -> None:
        """Send one answer of a stream; waits while the client does not read. Raises `StreamGone`."""
        if self.over:
            raise StreamGone
        out = self._protocol.connection.out
        if not self._begun:
            self._begun = True
            out.headers(self.number, answer_head())
        out.data(self.number, (prefix(len(message)), message))
        self._protocol.wake()
        self._written += 1
        if not self._written % LONGEST_RUN:
            await asyncio.sleep(0)
        while self._is_held_up():
            self._writing = self._protocol.loop.create_future()
            await self._writing
        if self.over:
            raise StreamGone

    def _is_held_up(self) -> bool:
        return not self.over and self._protocol.connection.out.unfinished(self.number)

    # --- requests ---

    def feed(self, data: memoryview) -> None:
        """A part of the body has come. Raises `ServingError`."""
        self.reader.feed(data)
        self.came(len(data))

    def came(self, count: int) -> None:
        """So many bytes of the body are in the reader; they may come again when not too many wait.

        Raises `QueueFull` when all calls together hold too many, `Unimplemented` for a request too many.
        """
        server = self._protocol.server
        self._came += count
        self._held += count
        server.held_bytes += count
        for message in self.reader.messages:
            self._inbox.append(message)
            self._unread += PREFIX_BYTES + len(message)
        self.reader.messages.clear()
        if self.kind is not Kind.BIDI_STREAM and len(self._inbox) > 1:
            raise Unimplemented("the call takes one request, got several")
        if server.held_bytes > server.most_held_bytes and not self._inbox:
            raise QueueFull(f"requests of {server.most_held_bytes} bytes are on their way to the server already")
        self._owed += count
        self._grant()
        _wake(self._reading)

    def _grant(self) -> None:
        if self._owed and self._unread <= MOST_UNREAD_BYTES:
            self._protocol.connection.consumed(self.number, self._owed)
            self._owed = 0

    def take(self) -> Message | None:
        """The next request, if it is there."""
        if not self._inbox:
            return None
        message = self._inbox.popleft()
        size = PREFIX_BYTES + len(message)
        self._unread -= size
        self._held -= size
        self._protocol.server.held_bytes -= size
        self._grant()
        return message

    async def unpacked(self, message: Message) -> bytes | memoryview:
        """The message as the client meant it. Raises `ServingError`."""
        return await unpacked(message, self.head.encoding, self._protocol.server.most_bytes)

    async def requests(self) -> AsyncIterator[bytes | memoryview]:
        """The requests of a stream, until the client has sent all. Raises `StreamGone`, and `ServingError`."""
        while True:
            if self.over:
                raise StreamGone
            message = self.take()
            if message is not None:
                self._protocol.wake()
                yield await self.unpacked(message)
            elif self.ended:
                return
            else:
                self._reading = self._protocol.loop.create_future()
                await self._reading

    def all_came(self) -> None:
        """The client has sent everything."""
        self.ended = True
        _wake(self._reading)

    @property
    def is_whole(self) -> bool:
        """Whether as much has come as its head promised."""
        return self.head.length is None or self.head.length == self._came

    def drained(self) -> None:
        """All that was to be sent has left."""
        _wake(self._writing)

    # --- ends ---

    def respond(self, message: bytes) -> None:
        """The one answer of a call."""
        if self.over:
            return
        head = prefix(len(message))
        size = PREFIX_BYTES + len(message)
        out = self._protocol.connection.out
        out.respond(self.number, answer_head(), [head, message], size, trailers(0, "", self._trailing))
        self._close()

    def finish(self, code: int = 0, details: str = "", trailing: Trailing | None = None) -> None:
        """The status, after all answers."""
        if self.over:
            return
        metadata = self._trailing if trailing is None else trailing
        out = self._protocol.connection.out
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
        self.finish(int(error.code), fitting(error.message))
        self.cancel()

    def _expire(self) -> None:
        connection = self._protocol.connection
        if connection.out.unfinished(self.number):
            # A status would wait behind an answer that the client does not read.
            connection.reset(self.number, ErrorCode.CANCEL)
            self.gone()
            self._protocol.wake()
        else:
            self.finish(int(Code.DEADLINE_EXCEEDED), "Deadline Exceeded")
        self.cancel()

    def _close(self) -> None:
        self.gone()
        # A client that goes on sending is told that nobody listens; one that has sent all is forgotten already.
        self._protocol.connection.reset_when_sent(self.number, ErrorCode.NO_ERROR)
        self._protocol.wake()

    def gone(self) -> None:
        """Nothing more can be sent."""
        self.over = True
        self._inbox.clear()
        self._protocol.server.held_bytes -= self._held
        self._held = self._unread = 0
        if self._timer is not None:
            self._timer.cancel()
        self._protocol.forget(self.number)
        _wake(self._reading)
        _wake(self._writing)

    def cancel(self) -> None:
        """Stop the handler."""
        if self.task is not None:
            self.task.cancel()


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
