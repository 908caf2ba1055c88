"""The requests of one gRPC call whose body comes in parts: a stream's, or a large one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, cast

from triglot.core.duplex import Duplex, Running
from triglot.core.errors import QueueFull, Unimplemented
from triglot.protocols import Kind
from triglot.transports.call_task import CallTask
from triglot.transports.h2.messages import PREFIX_BYTES, Message, MessageReader, Packed, inflate, unpacked

if TYPE_CHECKING:
    from triglot.transports.h2.rpc import Rpc

MOST_UNREAD_BYTES = 1024 * 1024
"""Of requests of one stream that wait for its handler; beyond, the client's window stays closed."""


class StreamGone(Exception):
    """Nobody reads the answers any more."""


class Body:
    """What a client sends on one call, as it comes. On the loop."""

    __slots__ = (
        "_came",
        "_held",
        "_inbox",
        "_listener",
        "_owed",
        "_reading",
        "_rpc",
        "_unread",
        "ended",
        "reader",
    )

    def __init__(self, rpc: Rpc) -> None:
        server = rpc.protocol.server
        self.reader = MessageReader(server.most_bytes, server.buffers.take)
        self.ended = False
        """Whether the client has sent everything."""
        self._rpc = rpc
        self._inbox: deque[Message] = deque()
        self._held = self._unread = self._owed = self._came = 0
        self._reading: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None

    def feed(self, data: memoryview) -> None:
        """A part of the body has come. Raises `ServingError`."""
        self.reader.feed(data)
        self.came(len(data))

    def feed_all(self, parts: Sequence[memoryview]) -> None:
        """As `feed`, of several parts."""
        count = 0
        for part in parts:
            self.reader.feed(part)
            count += len(part)
        self.came(count)

    def came(self, count: int) -> None:
        """So many bytes of the body are in the reader; they may come again when not too many wait.

        Raises `QueueFull` when all calls together hold too many, `Unimplemented` for a request too many.
        """
        server = self._rpc.protocol.server
        self._came += count
        self._held += count
        server.held_bytes += count
        for message in self.reader.messages:
            self._inbox.append(message)
            self._unread += PREFIX_BYTES + len(message)
        self.reader.messages.clear()
        if self._rpc.kind is not Kind.BIDI_STREAM and len(self._inbox) > 1:
            raise Unimplemented("the call takes one request, got several")
        # Small ones that wait already are not the reason, and are not lost for one that comes after them.
        if not self._inbox or self._held - self._unread > MOST_UNREAD_BYTES:
            self._check_room()
        self._owed += count
        self._grant()
        self.wake()

    def _check_room(self) -> None:
        server = self._rpc.protocol.server
        if server.held_bytes > server.most_held_bytes:
            raise QueueFull(f"requests of {server.most_held_bytes} bytes are on their way to the server already")

    def _grant(self) -> None:
        if self._owed and self._unread <= MOST_UNREAD_BYTES:
            self._rpc.protocol.connection.consumed(self._rpc.number, self._owed)
            self._owed = 0

    def take(self) -> Message | None:
        """The next request, if it is there."""
        if not self._inbox:
            return None
        message = self._inbox.popleft()
        size = PREFIX_BYTES + len(message)
        self._unread -= size
        self._held -= size
        self._rpc.protocol.server.held_bytes -= size
        if self._owed:
            self._grant()
        return message

    def requests(self) -> Requests | AsyncIterator[bytes | memoryview]:
        """As `iterate`; those that need not be inflated may be had without waiting."""
        return Requests(self, self._rpc) if self._rpc.head.encoding == "identity" else self.iterate()

    def listen(self, came: Callable[[], None] | None) -> None:
        """Have `came` called after each burst with something for `take`, or the end."""
        self._listener = came
        if came is not None and (self._inbox or self.ended):
            came()

    @property
    def all_taken(self) -> bool:
        """Whether the client has sent everything, and nothing of it waits."""
        return self.ended and not self._inbox

    async def iterate(self) -> AsyncIterator[bytes | memoryview]:
        """The requests of a stream, until the client has sent all, or has left. Raises `ServingError`."""
        server = self._rpc.protocol.server
        while not self._rpc.over:  # Then the handler, which may read in another task, is cancelled, too.
            message = self.take()
            if message is not None:
                self._rpc.protocol.wake()
                data = await unpacked(message, self._rpc.head.encoding, server.most_bytes)
                # It may be much larger than what was taken, and may wait.
                server.held_bytes += (size := len(data))
                try:
                    if size > MOST_UNREAD_BYTES:
                        self._check_room()
                    yield data
                finally:
                    server.held_bytes -= size
            elif self.ended:
                return
            else:
                self._reading = self._rpc.protocol.loop.create_future()
                await self._reading

    def all_came(self) -> None:
        """The client has sent everything."""
        self.ended = True
        self.wake()

    @property
    def is_whole(self) -> bool:
        """Whether as much has come as its head promised."""
        length = self._rpc.head.length
        return length is None or length == self._came

    def drop(self) -> None:
        """Nobody takes what waits."""
        self._inbox.clear()
        self._rpc.protocol.server.held_bytes -= self._held
        self._held = self._unread = 0
        self.wake()

    def wake(self) -> None:
        """Let whoever waits for a request look again."""
        if self._listener is not None:
            self._rpc.protocol.burst.defer(self._listener)
        elif self._reading is not None and not self._reading.done():
            self._reading.set_result(None)


class Requests(Duplex):
    """A stream's requests, none of them compressed, and the way out for its answers."""

    def __init__(self, body: Body, rpc: Rpc) -> None:
        self._body = body
        self._rpc = rpc

    @property
    def ended(self) -> bool:
        """See the base class."""
        return self._body.all_taken

    def __aiter__(self) -> AsyncIterator[bytes]:
        """See the base class."""
        return cast("AsyncIterator[bytes]", self._body.iterate())

    def listen(self, came: Callable[[], None]) -> None:
        """See the base class."""
        self._body.listen(came)

    def take(self) -> bytes | None:
        """See the base class."""
        message = self._body.take()
        if type(message) is Packed:
            inflate(message.data, "identity", 0)
        return cast("bytes | None", message)

    def offer(self, answers: deque[bytes]) -> None:
        """See the base class."""
        self._rpc.offer(answers)

    def begin(
        self, work: Coroutine[Any, Any, None], running: set[Running], ended: Callable[[Any], object]
    ) -> None:
        """See the base class."""
        task = CallTask(work, self._rpc.protocol.loop, ended)
        running.add(task)
        task.start()

    async def close(self) -> None:
        """See the base class."""
        self._body.listen(None)
