"""The asyncio protocol of one HTTP/2 connection: feeds the core with bytes, and turns its events into calls.

After a response it may keep the event loop awake for a moment. A sleeping core takes some 50 µs to wake up, more
than a request takes, and the process that wakes it pays for it, too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from triglot.core.errors import (
    RETRY_AFTER_SECONDS,
    Internal,
    PayloadTooLarge,
    QueueFull,
    ServingError,
    Unimplemented,
)
from triglot.core.roles import RunningCall
from triglot.protocols.rows import Kind
from triglot.transports.certificates import names_of
from triglot.transports.http2.connection_timers import ConnectionTimers
from triglot.transports.http2.core.connection import Connection
from triglot.transports.http2.core.events import (
    ConnectionEnded,
    DataPlaced,
    DataReceived,
    Drained,
    RequestEnded,
    StreamReset,
)
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.receiving import CompleteRequest, Event, RequestReceived
from triglot.transports.http2.messages import PREFIX, PREFIX_BYTES
from triglot.transports.http2.rest import begin_rest
from triglot.transports.http2.roles import OpenCall, Serving
from triglot.transports.unsent import write_pieces

log = logging.getLogger(__name__)

MAX_WRITTEN_TOGETHER: Final = 32
"""Responses that are written together: the client reads these while the next ones are made."""
MAX_BURST_BYTES: Final = 16 * 1024 * 1024
"""Bytes of responses after which they are written before the end of a burst."""
REFUSED_STREAM_SECONDS: Final = 0.05
"""Delay before the status of a rejected stream, in which the client may send what it was about to.

If the status arrives while grpc.aio writes, its caller gets INTERNAL in place of the status.
"""
MAX_REFUSED_STREAMS: Final = 64
"""Limit on a connection's streams in that delay: they do not count as open calls, but hold headers."""
LAST_STREAM_SECONDS: Final = 1.0
"""Seconds for the client to acknowledge that the connection is draining."""


class BusyPoll:
    """Polls for `seconds` at most, and only if the last request arrived as soon.

    0: never. Shared by all connections. `now` is the clock.
    """

    __slots__ = ("_loop", "_now", "_polling", "_seconds", "_until", "_was_soon", "expected")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._loop = loop
        self._now = now
        self._seconds = seconds if hasattr(os, "sched_yield") else 0.0
        self.expected = 0.0
        """End of the time in which the next call is expected, by the clock; 0 while calls are open."""
        self._until = 0.0
        self._was_soon = self._polling = False

    def call_begun(self) -> None:
        """Note that a call has arrived while one was `expected`."""
        self._was_soon = self._now() < self.expected
        self.expected = self._until = 0.0

    def idle(self) -> None:
        """Start polling, if enabled: no call is open. Does nothing if no call has begun since the last time."""
        if self.expected or not self._seconds:
            return
        self.expected = self._now() + self._seconds
        if self._was_soon:
            self._until = self.expected
            if not self._polling:
                self._polling = True
                self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        if self._now() < self._until:
            os.sched_yield()  # Let other processes and threads use this core.
            self._loop.call_soon(self._poll)
        else:
            self._polling = False


class H2Protocol(asyncio.BufferedProtocol):
    """Acts on the events of a connection, and writes what is to be sent once per turn of the event loop."""

    def __init__(self, server: Serving, busy_poll: BusyPoll, remote: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.connection = Connection(server.limits, buffer=server.read_buffer)
        self.rpcs: dict[int, OpenCall] = {}
        self._refused: dict[int, tuple[OpenCall, ServingError]] = {}
        """Rejected streams, by number, until their status is sent."""
        self.server = server
        self._busy_poll = busy_poll
        self.closed = self.loop.create_future()
        """Done once the socket is closed."""
        self._timers = ConnectionTimers(self, server.limits)
        self._transport: asyncio.Transport | None = None
        self.remote = remote
        """The client's address; "" where it has none."""
        self._certificate_names: Sequence[str] | None = None
        """Names in the client's certificate, once they were needed."""
        self._write_scheduled = False
        self._unwritten = 0
        """Number of `schedule_write` calls since the last write."""
        self._sent_at_flush = 0
        """The connection's `out.bytes_sent` at the last write."""
        self._in_burst = False
        """True while events of bytes that were received together are being handled."""
        self._deferred: list[Callable[[], None]] = []
        self.draining = False
        """Whether the connection is shutting down, with GOAWAY."""
        self._ending = False
        self._paused = False
        self._buffered = bytearray()
        """Frames that are written once the socket accepts data again."""
        self.reading_paused = False
        """Whether reading is paused because too much of that is waiting."""
        self.open_bytes = 0
        """Approximate memory of the connection's open calls, in bytes."""

    # --- asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass.
        self.server.connections.add(self)
        self._timers.start(self._transport)
        if self.server.stopping:
            self.drain()
        self._flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.connection.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._timers.last_received = self.loop.time()
        self._in_burst = True
        try:
            for event in self.connection.received(nbytes):
                if type(event) is CompleteRequest:
                    self._begin_complete(event)
                else:
                    self._act(event)
            while self._deferred:
                self._deferred.pop(0)()
        finally:
            self._in_burst = False
        self._flush()

    def defer(self, work: Callable[[], None]) -> None:
        """Run `work` after all events of a burst have been handled.

        Outside of a burst, in the next turn of the loop.
        """
        if not self._in_burst:
            self.loop.call_soon(work)
        elif work not in self._deferred:
            self._deferred.append(work)

    def pause_writing(self) -> None:
        self._paused = True
        self.connection.out.pause()

    def resume_writing(self) -> None:
        self._paused = False
        if self.reading_paused and self._transport is not None:
            self.reading_paused = False
            self._transport.resume_reading()
        for drained in self.connection.out.resume():
            self._act(drained)
        self.schedule_write()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._timers.stop()
        self.server.connections.discard(self)
        self._stop_calls()
        self.connection.release()
        self.closed.set_result(None)

    # --- sending ---

    def schedule_write(self) -> None:
        """Schedule a write: at the end of the burst, or soon."""
        if self._in_burst:
            # Large responses are written at once, so that the next one sees whether the socket's buffer is full.
            if self.connection.out.bytes_sent - self._sent_at_flush > MAX_BURST_BYTES and not self.draining:
                self._flush()
            return
        self._unwritten += 1
        if (self._unwritten == MAX_WRITTEN_TOGETHER or not self.rpcs) and not self.draining:
            self._flush()  # No other call is open, or enough has been collected.
        elif not self._write_scheduled:
            self._write_scheduled = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._write_scheduled = False
        self._unwritten = 0
        transport = self._transport
        connection = self.connection
        self._sent_at_flush = connection.out.bytes_sent
        if transport is None:
            return
        open_calls = self.rpcs or self._refused
        if self.draining and connection.last_announced and not open_calls and not connection.out.has_unsent:
            connection.close()
        out = connection.out.take()
        if self._ending:
            return  # The last frame has been written.
        if self._paused and not connection.over:
            self._buffer(out, transport)
        elif self._buffered:
            write_pieces(transport, [bytes(self._buffered), *out])
            self._buffered.clear()
        elif len(out) == 1:
            transport.write(out[0])
        elif out:
            write_pieces(transport, out)
        if not self.server.open_calls:
            self._busy_poll.idle()
        if connection.over and not transport.is_closing():
            self._ending = True
            self._end(transport)

    def _buffer(self, out: list[Any], transport: asyncio.Transport) -> None:
        """Keep frames while the socket's buffer is full, joined: the transport would keep each on its own."""
        for frame in out:
            self._buffered += frame
        if len(self._buffered) > self.server.limits.max_unread and not self.reading_paused:
            self.reading_paused = True
            transport.pause_reading()

    def _end(self, transport: asyncio.Transport) -> None:
        # If the socket were closed at once, with unread bytes in it, the client would not receive our last frames.
        if not transport.can_write_eof():
            self._timers.linger()  # TLS cannot be half-closed: the client knows the end from our last frame.
            return
        try:
            transport.write_eof()
        except OSError:
            transport.abort()  # The client has disconnected.
        else:
            self._timers.linger()

    @property
    def is_idle(self) -> bool:
        """Whether the connection waits for a call."""
        return not (self.rpcs or self._refused or self.draining or self.connection.over)

    @property
    def is_used(self) -> bool:
        """Whether there was a call."""
        return self.connection.is_used

    @property
    def idle_since(self) -> float:
        """When bytes were received last, in the loop's time."""
        return self._timers.last_received

    def close_idle(self) -> None:
        """Close the connection with GOAWAY: no call fails."""
        self.drain()

    def drain(self) -> None:
        """Take no new calls, and close the connection once the running ones have ended."""
        if not self.draining:
            self.draining = True
            self.connection.drain()
            self.loop.call_later(LAST_STREAM_SECONDS, self._announce_last)
            self.schedule_write()

    def _announce_last(self) -> None:
        self.connection.announce_last()
        self.schedule_write()

    def close(self, code: ErrorCode = ErrorCode.NO_ERROR, text: str = "") -> None:
        """End the connection and all of its calls."""
        self.connection.close(code, text)
        self._stop_calls()
        self._flush()

    def abort(self) -> None:
        """Close the socket; unsent data is lost."""
        if self._transport is not None:
            self._transport.abort()

    def cancel_calls(self) -> None:
        """Cancel the tasks of the open calls."""
        for rpc in list(self.rpcs.values()):
            rpc.end_grace()

    def _stop_calls(self) -> None:
        self._refused.clear()
        for rpc in list(self.rpcs.values()):
            rpc.release()
            rpc.cancel()

    # --- events ---

    def _act(self, event: Event) -> None:
        if isinstance(event, DataReceived):
            if (rpc := self.rpcs.get(event.stream)) is not None:
                self._data(rpc, event.parts, 0, event.end_stream)
            elif event.end_stream:
                self._refuse(event.stream)
        elif isinstance(event, RequestReceived):
            self._begin(event)
        elif isinstance(event, DataPlaced):
            if (rpc := self.rpcs.get(event.stream)) is not None:
                self._data(rpc, (), event.size, event.end_stream)
        elif isinstance(event, Drained):
            if (rpc := self.rpcs.get(event.stream)) is not None:
                rpc.drained()
        elif isinstance(event, StreamReset):
            self._was_reset(event.stream)
        elif isinstance(event, RequestEnded):
            if (rpc := self.rpcs.get(event.stream)) is not None:
                self.request_ended(rpc)
            self._refuse(event.stream)
        elif isinstance(event, ConnectionEnded):
            log.info("closing a connection with %s: %s", event.code.name, event.text)
            self._stop_calls()

    def _was_reset(self, number: int) -> None:
        self._refused.pop(number, None)
        if (rpc := self.rpcs.get(number)) is not None:
            rpc.release()
            rpc.cancel()

    def _begin(self, event: RequestReceived) -> None:
        head, number = event.headers, event.stream
        if number not in self.connection.streams:
            return  # Reset by a frame that arrived together with the request: no response is needed.
        if head.status:
            begin_rest(self, event, self._transport)
            return
        server = self.server
        rpc = server.make_rpc(self, number, head, server.rows.get(head.path))
        refusal = self._refusal(rpc) or (None if server.access is None else rpc.admit(server.access))
        may_still_write = rpc.kind in (None, Kind.BIDI_STREAM) and not event.end_stream
        if refusal is not None and may_still_write and len(self._refused) < MAX_REFUSED_STREAMS:
            self._refused[number] = rpc, refusal
            self.loop.call_later(REFUSED_STREAM_SECONDS, self._refuse, number)
            return
        self.add_call(rpc)
        rpc.watch_deadline()
        if refusal is not None:
            rpc.fail(refusal)
            return
        rpc.receive_body()
        if event.end_stream:
            self.request_ended(rpc)

    def _refuse(self, number: int) -> None:
        """Send the status of a rejected stream, unless it was sent or the stream was reset."""
        refused = self._refused.pop(number, None)
        if refused is not None:
            rpc, error = refused
            rpc.fail(error)

    def _refusal(self, rpc: OpenCall) -> ServingError | None:
        """Return why a call is rejected, or None."""
        if rpc.row is None:
            return Unimplemented("Method not found!")
        if rpc.head.problem:
            return (PayloadTooLarge if rpc.head.too_large else Internal)(rpc.head.problem)
        if self.server.open_calls >= self.server.max_calls:
            return QueueFull("Concurrent RPC limit exceeded!", retry_after=RETRY_AFTER_SECONDS)
        return self.backlog()

    def backlog(self) -> ServingError | None:
        """Return why new calls are rejected for clients with too many open calls or unread responses, or None."""
        text = self._backlog()
        return QueueFull(text, retry_after=RETRY_AFTER_SECONDS) if text else None

    def _backlog(self) -> str:
        limits = self.server.limits
        if self.open_bytes > limits.fair_open and self.server.open_bytes > limits.max_open_in_all:
            taken, limit = self.open_bytes, limits.max_open_in_all
            return f"in-flight calls hold more than {limit} bytes, {taken} of them on this connection"
        if self.connection.out.unsent <= limits.fair_unsent:
            return ""
        if (unsent := self.unsent) > limits.max_unsent:
            return f"the client has not read {unsent} bytes of responses on this connection"
        if (unsent := self.server.unsent) > limits.max_unsent_in_all:
            return f"clients, including this one, have not read {unsent} bytes of responses"
        return ""

    def certificate_names(self) -> Sequence[str]:
        """Return the names in the client's certificate."""
        if self._certificate_names is None:
            self._certificate_names = () if self._transport is None else names_of(self._transport)
        return self._certificate_names

    @property
    def unsent(self) -> int:
        """Bytes of responses that the client has not received."""
        buffered = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return self.connection.out.unsent + buffered

    def _begin_complete(self, event: CompleteRequest) -> None:
        """Start a call whose only message has arrived: the fast path."""
        if event.stream not in self.connection.streams:
            return  # See `_begin`.
        head, body = event.headers, event.body
        size = len(body) - PREFIX_BYTES
        server = self.server
        row = server.rows.get(head.path)
        if (
            row is not None
            and row.kind is not Kind.BIDI_STREAM
            and not head.status
            and not head.problem
            and (head.length is None or head.length == len(body))
            and size >= 0
            and body.startswith(PREFIX.pack(False, size))
            and size <= server.max_message_size
            and server.open_calls < server.max_calls
            and self.connection.out.unsent <= server.limits.fair_unsent
            and server.open_bytes <= server.limits.max_open_in_all
        ):
            rpc = server.make_rpc(self, event.stream, head, row)
            refusal = None if server.access is None else rpc.admit(server.access)
            self.add_call(rpc)
            if refusal is not None:
                rpc.fail(refusal)
                return
            rpc.start(body[PREFIX_BYTES:])
            if not rpc.over:
                rpc.watch_deadline()
        else:
            self._begin(RequestReceived(event.stream, head, end_stream=False))
            self._act(DataReceived(event.stream, [memoryview(body)], end_stream=True))

    def _data(self, rpc: OpenCall, parts: Sequence[memoryview], placed: int, end_stream: bool) -> None:
        body = rpc.body
        if body is None:
            return  # The call has ended.
        try:
            if placed:
                body.received(placed)
            else:
                body.feed(parts)
        except ServingError as error:
            rpc.fail(error)
        else:
            if end_stream:
                self.request_ended(rpc)

    def request_ended(self, rpc: OpenCall) -> None:
        """Note that the client has ended its request; unary and server-streaming calls start now."""
        body = rpc.body
        if body is None:
            return  # The call has ended.
        if not body.is_complete:
            self.reset(rpc.number, ErrorCode.PROTOCOL_ERROR)
            return
        if not body.reader.is_complete:
            rpc.fail(Internal("the request ends within a message"))
            return
        body.mark_ended()
        if rpc.kind is Kind.BIDI_STREAM:
            return
        message = body.take()
        if message is None:
            rpc.fail(Unimplemented("the method takes one request, got none"))
        else:
            rpc.start_message(message)

    def reset(self, number: int, code: ErrorCode) -> None:
        """Reset a stream, and cancel its call."""
        self.connection.reset(number, code)
        self._was_reset(number)
        self.schedule_write()

    def add_call(self, rpc: OpenCall) -> None:
        """Register an open call."""
        server, size = self.server, rpc.head.call_bytes
        self.rpcs[rpc.number] = rpc
        self.open_bytes += size
        server.open_bytes += size
        server.open_calls += 1
        if self._busy_poll.expected:
            self._busy_poll.call_begun()

    def track_handler(self, task: RunningCall) -> None:
        """Count a call that has ended and whose task was cancelled, until the task has ended too."""
        if not task.done():
            self.connection.track_handler()
            task.add_done_callback(self._untrack_handler)

    def _untrack_handler(self, _: object) -> None:
        self.connection.untrack_handler()

    def remove_call(self, number: int) -> None:
        """Remove a call that has ended."""
        if (rpc := self.rpcs.pop(number, None)) is not None:
            self.open_bytes -= rpc.head.call_bytes
            self.server.open_bytes -= rpc.head.call_bytes
            self.server.open_calls -= 1
