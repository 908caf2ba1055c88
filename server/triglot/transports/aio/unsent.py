"""Limits responses that grpc's core holds because clients do not read them, per connection and in all.

Strategy: the core neither limits what it holds nor reports how much of a message has been sent. It reports when
a send is complete, so a message counts as a whole until then. A client has `stall` seconds, plus the time for
the waiting bytes at `MIN_RATE`. If a stream takes longer, its responses are closed at the source, but its
send continues: the core accepts no status before it is complete. If nothing moves on a connection, its socket
is shut down, because grpc.aio cannot close a single connection.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from triglot.core.errors import RETRY_AFTER_SECONDS, QueueFull
from triglot.core.roles import Cancellable
from triglot.transports.grpc_calls import SlowReader
from triglot.transports.http2.core.limits import Limits

log = logging.getLogger(__name__)

COPIES = 2
"""Copies of a waiting message: grpc.aio keeps the Python bytes beside the core's."""
MIN_RATE = 64 * 1024
"""Bytes per second below which a client counts as not reading."""
BUFFERED = 64 * 1024
"""Bytes of a stream that the core holds after their sends are complete (`grpc.http2.write_buffer_size`)."""
CHECKS_PER_LIMIT = 4


_FILES = Path("/dev/fd")
Address = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]


def host_of(peer: str) -> str:
    """Return the IP address of a client from grpc's name for it (ipv4:127.0.0.1:80); "" for a Unix socket."""
    family, _, address = unquote(peer).partition(":")
    return address.rpartition(":")[0].strip("[]") if family in ("ipv4", "ipv6") else ""


def hang_up(peer: str, port: int) -> None:
    """Shut down the connection to `port` from a client, given by grpc's name for it: ipv4:127.0.0.1:80.

    Does nothing for clients of a Unix socket, which have no such names.
    """
    family, _, address = unquote(peer).partition(":")
    if family not in ("ipv4", "ipv6"):
        return
    host, _, number = address.rpartition(":")
    wanted = _address(host.strip("[]"), int(number))
    try:
        files = [int(file.name) for file in _FILES.iterdir()]
    except OSError as error:
        log.warning("cannot close the connection of %s: %s", peer, error)
        return
    for descriptor in files:
        with suppress(OSError):  # Closed meanwhile, or not a connection.
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            # A duplicate descriptor, because the core keeps and closes its own.
            with socket.socket(fileno=os.dup(descriptor)) as found:
                if found.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if found.getsockname()[1] == port and _address(*found.getpeername()[:2]) == wanted:
                    found.shutdown(socket.SHUT_RDWR)


def _address(host: str, port: int) -> Address:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address, port


class _Connection:
    __slots__ = ("bytes", "idle_seconds", "peer", "users")

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.users = 0
        """Number of streams and waiting messages."""
        self.bytes = 0
        self.idle_seconds = 0.0
        """Seconds since a send was complete, as of the last check."""


class UnsentAnswers:
    """Unsent bytes of all connections.

    On the event loop; from `start` to `close` it looks for clients that do not read.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._connections: dict[str, _Connection] = {}
        self._last: dict[asyncio.Task[Any], tuple[_Connection, int]] = {}
        """What the core holds of calls whose handlers have returned, by task."""
        self.streams: set[StreamWriter] = set()
        """Streams whose writes are checked."""
        self._timer: asyncio.TimerHandle | None = None
        self.bytes = 0
        """Unsent bytes of all clients."""
        self.port = 0
        """The server's port."""

    def start(self, port: int) -> None:
        """Start the periodic check."""
        self.port = port
        self._schedule()

    def close(self) -> None:
        """Stop the periodic check."""
        if self._timer is not None:
            self._timer.cancel()

    def backlog(self, peer: str) -> QueueFull | None:
        """Return why calls are rejected for a client that has not read its responses, or None."""
        connection = self._connections.get(peer)
        return None if connection is None else self.backlog_of(connection)

    def backlog_of(self, connection: _Connection) -> QueueFull | None:
        """As `backlog`, for a connection."""
        held = COPIES * connection.bytes
        if held <= self._limits.fair_unsent:
            return None
        if held > self._limits.max_unsent:
            text = f"the client has not read {connection.bytes} bytes of responses on this connection"
        elif COPIES * self.bytes > self._limits.max_unsent_in_all:
            text = f"clients, including this one, have not read {self.bytes} bytes of responses"
        else:
            return None
        return QueueFull(text, retry_after=RETRY_AFTER_SECONDS)

    def use(self, peer: str) -> _Connection:
        """Return the connection of a client, which is kept until all users call `leave`."""
        connection = self._connections.get(peer)
        if connection is None:
            connection = self._connections[peer] = _Connection(peer)
        connection.users += 1
        return connection

    def leave(self, connection: _Connection) -> None:
        """Undo `use`."""
        connection.users -= 1
        if not connection.users:
            del self._connections[connection.peer]

    def add(self, connection: _Connection, size: int) -> None:
        """Note that a message has been passed to the core."""
        connection.bytes += size
        self.bytes += size

    def remove(self, connection: _Connection, size: int) -> None:
        """Note that a message has been sent, or that its call has ended."""
        connection.idle_seconds = 0.0
        connection.bytes -= size
        self.bytes -= size

    def add_last(self, peer: str, size: int) -> None:
        """Note the response that the current task's handler returns.

        It counts until `done` is called for the task.
        """
        task = asyncio.current_task()
        assert task is not None  # Every handler runs in a task of its own.
        connection = self.use(peer)
        self.add(connection, size)
        self._last[task] = connection, size

    def done(self, task: asyncio.Task[Any]) -> None:
        """Note that grpc.aio's task of a call has ended."""
        if (last := self._last.pop(task, None)) is not None:
            connection, size = last
            self.remove(connection, size)
            self.leave(connection)

    def seconds_for(self, size: int) -> float:
        """Return the seconds that a client may take to read so many bytes."""
        return self._limits.stall + size / MIN_RATE

    def _schedule(self) -> None:
        seconds = self._limits.stall / CHECKS_PER_LIMIT
        self._timer = asyncio.get_running_loop().call_later(seconds, self._check, seconds)

    def _check(self, seconds: float) -> None:
        self._schedule()
        for stream in self.streams:
            if stream.held:
                stream.idle_seconds += seconds
                if stream.idle_seconds > self.seconds_for(stream.held):
                    stream.stall()
        for connection in self._connections.values():
            if connection.bytes:
                connection.idle_seconds += seconds
                if connection.idle_seconds > self.seconds_for(connection.bytes):
                    log.info(
                        "closing the connection of %s: in %.0f s it read none of its %d bytes of responses",
                        *(connection.peer, connection.idle_seconds, connection.bytes),
                    )
                    hang_up(connection.peer, self.port)


class StreamWriter:
    """Writes the messages of a streaming call; counts those that are unsent, and limits the time of each send."""

    __slots__ = ("_call", "_connection", "_context", "_sent", "_stalled", "_unsent", "held", "idle_seconds")

    def __init__(self, context: Any, unsent: UnsentAnswers, call: Cancellable) -> None:
        self._call = call
        self._context = context
        self._unsent = unsent
        self._connection = unsent.use(context.peer())
        self._sent = 0
        self._stalled = False
        self.held = 0
        """Bytes of the message that is being sent."""
        self.idle_seconds = 0.0
        """Seconds for which it has been waiting, as of the last check."""
        unsent.streams.add(self)

    async def write(self, message: bytes) -> None:
        """Send one message. Raise `SlowReader` if the client did not read it, or those before it, in time."""
        unsent, connection, size = self._unsent, self._connection, len(message)
        if connection.bytes and (refused := unsent.backlog_of(connection)) is not None:
            raise SlowReader(refused.message, code=refused.code, retry_after=refused.retry_after)
        unsent.add(connection, size)
        self.held = size
        await self._context.write(message)
        self.held = 0
        self.idle_seconds = 0.0
        self._sent += size
        unsent.remove(connection, size)
        if self._stalled:
            seconds = unsent.seconds_for(size)
            raise SlowReader(f"the client read nothing of a response of {size} bytes for {seconds:.0f} s")

    def stall(self) -> None:
        """Cancel the call, whose client does not read; the core continues to send."""
        if not self._stalled:
            self._stalled = True
            self._call.cancel()

    def end(self) -> None:
        """Note that nothing more is written; what the core holds counts until the call has ended."""
        unsent, connection = self._unsent, self._connection
        unsent.streams.discard(self)
        unsent.remove(connection, self.held)
        if last := self.held + min(self._sent, BUFFERED):
            unsent.add_last(connection.peer, last)
        unsent.leave(connection)
