"""The requests of one gRPC call whose body arrives in parts: those of a stream, or a large one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from triglot.core.errors import ServingError, Unimplemented, without_frames
from triglot.core.running import Requests
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
from triglot.transports.request_bytes import RequestBytes

MAX_UNREAD_BYTES = 1024 * 1024
"""Limit on a stream's requests that wait for its handler; above it, the client's window is not opened."""


SMALL_HELD_BYTES = 16 * 1024
"""Bytes of a stream's requests that are accepted whatever other calls hold.

They may have to wait for the stream's handler.
"""
MESSAGE_BYTES = 64
"""Memory of a waiting message besides its bytes."""


class Body:
    """Receives the requests of one call. On the event loop."""

    __slots__ = (
        "_held",
        "_inbox",
        "_listener",
        "_received",
        "_requests",
        "_rpc",
        "_total",
        "_unopened",
        "_unread",
        "has_ended",
        "reader",
    )

    def __init__(self, rpc: OpenCall) -> None:
        server = rpc.protocol.server
        self.reader = MessageReader(server.max_message_size, server.buffers.take)
        self.has_ended = False
        """Whether the client has ended its request."""
        self._rpc = rpc
        self._total = server.request_bytes
        self._inbox: deque[Message] = deque()
        self._held = self._unread = self._unopened = self._received = 0
        self._listener: Callable[[], None] | None = None
        self._requests: StreamedRequests | None = None

    def feed(self, parts: Sequence[memoryview]) -> None:
        """Read parts of the body. Raise `ServingError`."""
        count = 0
        for part in parts:
            self.reader.feed(part)
            count += len(part)
        self.received(count)

    def received(self, count: int) -> None:
        """Note that `count` bytes of the body are in the reader; open the window unless too many requests wait.

        Raise `QueueFull` when all calls together hold too much, `Unimplemented` for a second request where one
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
            self._rpc.protocol.schedule_write()
            self._unopened = 0

    def take(self) -> Message | None:
        """Return the next request, or None."""
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

    def stream(self) -> StreamedRequests:
        """Return the requests of a bidirectional stream."""
        self._requests = StreamedRequests(self, self._rpc)
        return self._requests

    def listen(self, on_ready: Callable[[], None]) -> None:
        """Call `on_ready` after each burst that brings something for `take`, or the end."""
        self._listener = on_ready
        if self._inbox or self.has_ended:
            on_ready()

    @property
    def all_taken(self) -> bool:
        """Whether the client has ended its request, and all of it has been taken."""
        return self.has_ended and not self._inbox

    def mark_ended(self) -> None:
        """Note that the client has ended its request."""
        self.has_ended = True
        self.wake()

    @property
    def is_complete(self) -> bool:
        """Whether the body has the length that its content-length declared."""
        length = self._rpc.head.length
        return length is None or length == self._received

    def drop(self) -> None:
        """Discard all waiting requests."""
        self._inbox.clear()
        self._total.add(-self._held)
        self._held = self._unread = 0
        self._listener = None  # It refers to the call.
        if self._requests is not None:
            self._requests.close()
            self._requests = None

    def wake(self) -> None:
        """Wake the listener."""
        if self._listener is not None:
            self._rpc.protocol.defer(self._listener)


class StreamedRequests(Requests):
    """The requests of a bidirectional stream. A compressed one is decompressed before the next one is taken."""

    __slots__ = ("_body", "_decompressed", "_error", "_reserved", "_rpc", "_task")

    def __init__(self, body: Body, rpc: OpenCall) -> None:
        self._body = body
        self._rpc = rpc
        self._task: asyncio.Task[None] | None = None
        self._decompressed: bytes | memoryview | None = None
        self._error: ServingError | None = None
        self._reserved = ExitStack()
        """Holds the memory of a decompressed request until the next one is asked for."""

    @property
    def has_ended(self) -> bool:
        return self._body.all_taken and self._task is None and self._decompressed is None and self._error is None

    def take(self) -> bytes | memoryview | None:
        """See `Requests`."""
        if self._task is not None:
            return None
        if self._decompressed is not None:
            request, self._decompressed = self._decompressed, None
            return request
        self._reserved.close()
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # Its traceback refers to this frame.
        message = self._body.take()
        if not isinstance(message, CompressedMessage):
            return message
        window_bits_of(self._rpc.head.encoding)  # Raises if there is none.
        self._task = self._rpc.protocol.loop.create_task(self._decompress(message))
        self._task.add_done_callback(self._decompression_ended)
        return None

    async def _decompress(self, message: CompressedMessage) -> None:
        server = self._rpc.protocol.server
        # It is reserved anew, because it may wait again, and be much larger.
        reserved = self._reserved.enter_context(server.request_bytes.reserve(MAX_UNREAD_BYTES))
        try:
            self._decompressed = await decompressed(
                message, self._rpc.head.encoding, server.max_message_size, reserved
            )
        except asyncio.CancelledError:
            return  # If raised, the task would keep it: a cycle of task, frames and call.
        except ServingError as error:
            self._error = without_frames(error)

    def _decompression_ended(self, _: object) -> None:
        self._task = None
        self._body.wake()

    def close(self) -> None:
        """Discard a request that was not taken."""
        if self._task is not None:
            self._task.cancel()
        self._reserved.close()


async def decompress_off_loop(
    message: Message, encoding: str, max_size: int, request_bytes: RequestBytes
) -> bytes | memoryview:
    """Return the message of a call with one request, decompressed. Raise `ServingError`."""
    with request_bytes.reserve(MAX_UNREAD_BYTES) as reserved:
        return await decompressed(message, encoding, max_size, reserved)
