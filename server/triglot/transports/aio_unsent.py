"""Answers that grpc's core holds because their clients do not read them: counted by connection, bounded, let go.

Strategy: the core neither bounds what it holds nor tells how much of an answer has left. It tells when a send is
complete, so an answer counts as a whole until then. A client is given `stall` seconds, and more for what waits for
it at `LEAST_RATE`; grpc.aio cannot close a connection, so its socket is shut down.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Generator
from contextvars import Context
from functools import partial
from typing import Any

from triglot.core.errors import QueueFull
from triglot.transports.grpc_calls import RETRY_AFTER_SECONDS, SlowReader, Trailing
from triglot.transports.h2.limits import Limits
from triglot.transports.hang_up import hang_up

log = logging.getLogger(__name__)

COPIES = 2
"""Of an answer that waits: grpc.aio keeps Python's bytes beside the core's."""
LEAST_RATE = 64 * 1024
"""Bytes a second that a client takes, or it is taken for one that does not read."""
BUFFERED = 64 * 1024
"""Bytes of a stream that the core holds although their sends are complete, `grpc.http2.write_buffer_size`."""
LOOKS_PER_LIMIT = 4


class _Connection:
    __slots__ = ("bytes", "moved", "peer")

    def __init__(self, peer: str, now: float) -> None:
        self.peer = peer
        self.bytes = 0
        self.moved = now
        """When a send was completed last, or the first of those that wait began."""


class UnsentAnswers:
    """Of all connections. On the loop; `start` begins to look for clients that do not read, `close` ends it."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._connections: dict[str, _Connection] = {}
        self._bytes = 0
        self.waits: dict[_Wait, float] = {}
        """For the writes of streams, and when each ends at the latest."""
        self._timer: asyncio.TimerHandle | None = None
        self.port = 0
        """Where connections come in."""

    @property
    def bytes(self) -> int:
        """Those that wait for their clients."""
        return self._bytes

    def start(self, port: int) -> None:
        """Begin to look for connections on which nothing moves."""
        self._loop = asyncio.get_running_loop()
        self.port = port
        self._look_later()

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def backlog(self, peer: str) -> QueueFull | None:
        """Why no more answers are made for a client that has not read those that it has."""
        connection = self._connections.get(peer)
        if connection is None or (held := COPIES * connection.bytes) <= self._limits.fair_unsent:
            return None
        if held > self._limits.max_unsent:
            text = f"the connection has {connection.bytes} bytes of answers that its client has not read"
        elif COPIES * self._bytes > self._limits.max_unsent_in_all:
            text = f"there are {self._bytes} bytes of answers that clients, this one too, have not read"
        else:
            return None
        return QueueFull(text, retry_after=RETRY_AFTER_SECONDS)

    def add(self, peer: str, size: int) -> None:
        """An answer is handed to the core."""
        connection = self._connections.get(peer)
        if connection is None:
            connection = self._connections[peer] = _Connection(peer, self._loop.time())
        connection.bytes += size
        self._bytes += size

    def remove(self, peer: str, size: int, _: object = None) -> None:
        """It has left, or its call is over."""
        connection = self._connections[peer]
        connection.bytes -= size
        connection.moved = self._loop.time()
        self._bytes -= size
        if not connection.bytes:
            del self._connections[peer]

    def add_last(self, peer: str, size: int) -> None:
        """The answer that the current task's handler returns: it has left when grpc.aio's task is done."""
        task = asyncio.current_task()
        assert task is not None  # Every handler runs in a task of its own.
        self.add(peer, size)
        task.add_done_callback(partial(self.remove, peer, size))

    def patience(self, size: int) -> float:
        """Seconds that a client may take for so many bytes."""
        return self._limits.stall + size / LEAST_RATE

    def _look_later(self) -> None:
        self._timer = self._loop.call_later(self._limits.stall / LOOKS_PER_LIMIT, self._look)

    def _look(self) -> None:
        self._look_later()
        now = self._loop.time()
        for wait, deadline in self.waits.items():
            if now > deadline:
                wait.end()
        for connection in self._connections.values():
            if now - connection.moved > self.patience(connection.bytes):
                log.info(
                    "the connection with %s ends: in %.0f s its client took none of its answers, %d bytes",
                    *(connection.peer, now - connection.moved, connection.bytes),
                )
                hang_up(connection.peer, self.port)


class StreamContext:
    """The context of a stream's call, whose answers are counted, and each of them sent in time."""

    __slots__ = (
        "_buffered",
        "_context",
        "_held",
        "_loop",
        "_peer",
        "_sent",
        "_unsent",
        "_write",
        "invocation_metadata",
        "set_trailing_metadata",
        "time_remaining",
    )

    def __init__(self, context: Any, unsent: UnsentAnswers) -> None:
        self._context = context
        self._unsent = unsent
        self._peer: str = context.peer()
        self._loop = asyncio.get_running_loop()
        self._held = self._buffered = 0
        self._write: Any = None
        self._sent: asyncio.Future[Any] | None = None
        self.invocation_metadata = context.invocation_metadata
        self.set_trailing_metadata = context.set_trailing_metadata
        self.time_remaining = context.time_remaining

    async def write(self, message: bytes) -> None:
        """Send one answer. Raises `SlowReader` when the client does not take it, nor those before it."""
        unsent, peer, size = self._unsent, self._peer, len(message)
        if (refused := unsent.backlog(peer)) is not None:
            raise SlowReader(refused.message, code=refused.code, retry_after=refused.retry_after)
        unsent.add(peer, size)
        self._held += size
        self._write = self._context.write(message)
        patience = unsent.patience(size)
        if not await self._written_in(patience):
            raise SlowReader(f"the client took nothing of an answer of {size} bytes for {patience:.0f} s")
        self._held -= size
        self._buffered = min(self._buffered + size, BUFFERED)
        unsent.remove(peer, size)

    async def abort(self, code: Any, details: str, trailing: Trailing) -> None:
        """End the call with a status, when the client has taken what was written before."""
        if self._write is not None:
            await self._written_in(math.inf)
        self.end()
        await self._context.abort(code, details, trailing)

    async def _written_in(self, seconds: float) -> bool:
        """Wait for the write that has begun; False: it takes longer, and goes on.

        The core takes no status before a write is complete, so none is cancelled.
        """
        while True:
            if self._sent is None or self._sent.done():
                try:
                    self._sent = self._write.send(None)
                except StopIteration:
                    self._write = self._sent = None
                    return True
                self._sent._asyncio_future_blocking = False
            wait = _Wait(self._sent)
            waits = self._unsent.waits
            waits[wait] = self._loop.time() + seconds
            try:
                await wait
            finally:
                del waits[wait]
            if not self._sent.done():
                return False

    def end(self) -> None:
        """No more is written; what the core holds counts until the call is over."""
        if self._write is not None:
            self._write.close()
            if self._sent is not None and not self._sent.cancel() and not self._sent.cancelled():
                self._sent.exception()  # Nobody awaits it.
            self._write = self._sent = None
        rest, self._held = self._held, 0
        if rest:
            self._unsent.remove(self._peer, rest)
        last, self._buffered = rest + self._buffered, 0
        if last:
            self._unsent.add_last(self._peer, last)


class _Wait:
    """What a task awaits in place of a future, which goes on when the wait is ended or cancelled.

    As `asyncio.shield`, but without another turn of the loop, which costs a third of a write.
    """

    __slots__ = ("_asyncio_future_blocking", "_context", "_future", "_wakeup")

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self._asyncio_future_blocking = False
        self._future = future
        self._wakeup: Callable[[Any], object] | None = None
        self._context: Context | None = None

    def __await__(self) -> Generator[Any, None, None]:
        self._asyncio_future_blocking = True
        yield self

    def end(self) -> None:
        """Have the task go on."""
        self.get_loop().call_soon(self._done, None, context=self._context)

    # What asyncio's tasks ask of a future.

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._future.get_loop()

    def add_done_callback(self, wakeup: Callable[[Any], object], *, context: Context | None = None) -> None:
        self._wakeup, self._context = wakeup, context
        self._future.add_done_callback(self._done, context=context)

    def cancel(self, msg: Any = None) -> bool:
        self.end()
        return False  # The task raises `CancelledError` by itself.

    def result(self) -> None:
        return None

    def _done(self, _: object) -> None:
        wakeup, self._wakeup = self._wakeup, None
        if wakeup is not None:
            wakeup(self)
