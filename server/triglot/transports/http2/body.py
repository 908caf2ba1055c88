"""The requests of one gRPC call whose body arrives in parts: those of a stream, or a large one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import cast

from triglot.core.duplex import Duplex
from triglot.core.errors import Unimplemented
from triglot.protocols.rows import Kind
from triglot.transports.http2.messages import (
    PREFIX_BYTES,
    CompressedMessage,
    Message,
    MessageReader,
    decompressed,
    window_bits_of,
)
from triglot.transports.http2.roles import OpenCall

MAX_UNREAD_BYTES = 1024 * 1024
"""Limit on a stream's requests that wait for its handler; above it, the client's window is not opened."""


SMALL_HELD_BYTES = 16 * 1024
"""Bytes of a stream's requests that are accepted whatever other calls hold.

They may have to wait for the stream's handler.
"""
MESSAGE_BYTES = 64
"""Memory of a waiting message besides its bytes."""


class StreamGone(Exception):
    """The client no longer reads the responses."""


class Body:
    """Receives the requests of one call. On the event loop."""

    __slots__ = (
        "_held",
        "_inbox",
        "_listener",
        "_reading",
        "_received",
        "_rpc",
        "_total",
        "_unopened",
        "_unread",
        "ended",
        "reader",
    )

    def __init__(self, rpc: OpenCall) -> None:
        server = rpc.protocol.server
        self.reader = MessageReader(server.max_message_size, server.buffers.take)
        self.ended = False
        """Whether the client has ended its request."""
        self._rpc = rpc
        self._total = server.request_bytes
        self._inbox: deque[Message] = deque()
        self._held = self._unread = self._unopened = self._received = 0
        self._reading: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None

    def feed(self, parts: Sequence[memoryview]) -> None:
        """Read parts of the body. Raises `ServingError`."""
        count = 0
        for part in parts:
            self.reader.feed(part)
            count += len(part)
        self.received(count)

    def received(self, count: int) -> None:
        """Note that `count` bytes of the body are in the reader; open the window unless too many requests wait.

        Raises `QueueFull` when all calls together hold too much, `Unimplemented` for a second request where one
        is allowed.
        """
        self._received += count
        self._unopened += count
        for message in self.reader.messages:
            self._inbox.append(message)
            self._unread += MESSAGE_BYTES + len(message)
            count += MESSAGE_BYTES - PREFIX_BYTES
        self.reader.messages.clear()
        self._held += count
        self._total.add(count)
        if self._rpc.kind is not Kind.BIDI_STREAM and len(self._inbox) > 1:
            raise Unimplemented("the method takes one request, got several")
        # A few small requests that wait are not the cause, and are not rejected for one that arrives after them.
        if not self._inbox or self._held > SMALL_HELD_BYTES:
            self._total.check()
        self._open_window()
        self.wake()

    def _open_window(self) -> None:
        if self._unopened and self._unread <= MAX_UNREAD_BYTES:
            self._rpc.protocol.connection.consumed(self._rpc.number, self._unopened)
            self._unopened = 0

    def take(self) -> Message | None:
        """Returns the next request, or None."""
        if not self._inbox:
            return None
        message = self._inbox.popleft()
        size = MESSAGE_BYTES + len(message)
        self._unread -= size
        self._held -= size
        self._total.add(-size)
        if self._unopened:
            self._open_window()
        return message

    def requests(self) -> Requests | AsyncIterator[bytes | memoryview]:
        """As `iterate`; requests without compression can also be taken without waiting."""
        return Requests(self, self._rpc) if self._rpc.head.encoding == "identity" else self.iterate()

    def listen(self, on_ready: Callable[[], None] | None) -> None:
        """Call `received` after each burst that brings something for `take`, or the end; None: call nothing."""
        self._listener = on_ready
        if on_ready is not None and (self._inbox or self.ended):
            on_ready()

    @property
    def all_taken(self) -> bool:
        """Whether the client has ended its request, and all of it has been taken."""
        return self.ended and not self._inbox

    async def iterate(self) -> AsyncIterator[bytes | memoryview]:
        """Yield the requests of a stream until the client has ended it or the call is over.

        Raises `ServingError`.
        """
        server = self._rpc.protocol.server
        while not self._rpc.over:  # Once it is, the handler is cancelled, which may read in another task.
            message = self.take()
            if message is not None:
                self._rpc.protocol.schedule_write()
                # It is reserved anew, because it may wait again, and be much larger once decompressed.
                with self._total.reserve(MAX_UNREAD_BYTES) as reserved:
                    if not isinstance(message, CompressedMessage):
                        reserved.grow(len(message))
                    yield await decompressed(message, self._rpc.head.encoding, server.max_message_size, reserved)
            elif self.ended:
                return
            else:
                self._reading = self._rpc.protocol.loop.create_future()
                await self._reading

    def mark_ended(self) -> None:
        """Note that the client has ended its request."""
        self.ended = True
        self.wake()

    @property
    def is_whole(self) -> bool:
        """Whether the body has the length that its content-length declared."""
        length = self._rpc.head.length
        return length is None or length == self._received

    def drop(self) -> None:
        """Discard all waiting requests."""
        self._inbox.clear()
        self._total.add(-self._held)
        self._held = self._unread = 0
        self.wake()

    def wake(self) -> None:
        """Wake the reader or the listener."""
        if self._listener is not None:
            self._rpc.protocol.defer(self._listener)
        elif self._reading is not None and not self._reading.done():
            self._reading.set_result(None)


class Requests(Duplex):
    """The uncompressed requests of a stream, and a way to send small responses, as a `Duplex`."""

    def __init__(self, body: Body, rpc: OpenCall) -> None:
        self._body = body
        self._rpc = rpc

    @property
    def ended(self) -> bool:
        return self._body.all_taken

    def __aiter__(self) -> AsyncIterator[bytes]:
        return cast("AsyncIterator[bytes]", self._body.iterate())

    def listen(self, on_ready: Callable[[], None]) -> None:
        self._body.listen(on_ready)

    def take(self) -> bytes | None:
        message = self._body.take()
        if type(message) is CompressedMessage:
            window_bits_of("identity")  # Raises: the stream's encoding is identity.
        return cast("bytes | None", message)

    def offer(self, answers: deque[bytes]) -> None:
        self._rpc.offer(answers)

    async def close(self) -> None:
        self._body.listen(None)
