"""One client's connection: asyncio's bytes to the HTTP/2 core, and its events to calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

from triglot.core.errors import (
    RETRY_AFTER_SECONDS,
    Internal,
    PayloadTooLarge,
    QueueFull,
    ServingError,
    Unimplemented,
)
from triglot.core.running import Running
from triglot.protocols.rows import Kind
from triglot.transports.certificates import names_of
from triglot.transports.grpc_calls import NO_ROW
from triglot.transports.http2.body import Body
from triglot.transports.http2.connection_timers import ConnectionTimers
from triglot.transports.http2.core.connection import Connection
from triglot.transports.http2.core.events import (
    ConnectionEnded,
    DataPlaced,
    DataReceived,
    Drained,
    Event,
    RequestEnded,
    RequestReceived,
    StreamReset,
    WholeRequest,
)
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.requests import RpcHead, read_head
from triglot.transports.http2.messages import PREFIX, PREFIX_BYTES
from triglot.transports.http2.rest import begin_rest
from triglot.transports.http2.roles import Serving
from triglot.transports.http2.rpc import Rpc

log = logging.getLogger(__name__)

MOST_TOGETHER = 32
"""Answers that leave at once: their client reads these while the next ones are made."""
MOST_MOVED_BYTES = 16 * 1024 * 1024
"""Of answers that wait for the end of a burst to be written."""
REFUSED_STREAM_SECONDS = 0.05
"""For a client that is refused a stream to send what it was about to: grpc.aio tells its caller INTERNAL, and not
the status, when that comes while it writes."""
MOST_REFUSED_STREAMS = 64
"""Of a connection that wait for that: they are not counted as open, and have headers."""
LAST_STREAM_SECONDS = 1.0
"""For the other side to confirm that it knows that the connection ends."""


class H2Protocol(asyncio.BufferedProtocol):
    """Acts on a connection's events, and writes what is to be sent once per turn of the loop."""

    def __init__(self, server: Serving) -> None:
        self.loop = asyncio.get_running_loop()
        self.connection: Connection[RpcHead] = Connection(read_head, server.limits, buffer=server.read_buffer)
        self.rpcs: dict[int, Rpc] = {}
        self._refused: dict[int, tuple[Rpc, ServingError]] = {}
        """Streams that are not begun, until their status is sent."""
        self.server = server
        self.lost = self.loop.create_future()
        """Done when the socket is closed."""
        self._timers = ConnectionTimers(self, server.limits)
        self._transport: asyncio.Transport | None = None
        self.remote = ""
        """The client's address, if it has one."""
        self._certificate_names: Sequence[str] | None = None
        """Once somebody has asked."""
        self._awake = False
        self._unwritten = 0
        """How often something was to be written since that was done."""
        self._moved = 0
        """Bytes of bodies that had left by then."""
        self._in_burst = False
        """Whether all that was received together is being acted on."""
        self._deferred: list[Callable[[], None]] = []
        self.draining = False
        """Whether its end has been announced."""
        self._ending = False
        self._paused = False
        self._unread = bytearray()
        """What is to be written once the socket takes something."""
        self.reading_paused = False
        """Whether nothing is read, as too much of what is to be written waits."""
        self.open_bytes = 0
        """Memory that its open calls take, about."""

    # --- asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See the base class."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class.
        peer = transport.get_extra_info("peername")
        self.remote = str(peer[0] if isinstance(peer, list | tuple) else peer or "")
        self.server.connections.add(self)
        self._timers.start(self._transport)
        if self.server.stopping:
            self.drain()
        self._flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        """See the base class."""
        return self.connection.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """See the base class."""
        self._timers.last_received = self.loop.time()
        self._in_burst = True
        try:
            for event in self.connection.received(nbytes):
                if type(event) is WholeRequest:
                    self._begin_whole(event)
                else:
                    self._act(event)
            while self._deferred:
                self._deferred.pop(0)()
        finally:
            self._in_burst = False
        self._flush()

    def defer(self, work: Callable[[], None]) -> None:
        """Do it once all that was received together has been acted on; where that is so, soon."""
        if not self._in_burst:
            self.loop.call_soon(work)
        elif work not in self._deferred:
            self._deferred.append(work)

    def pause_writing(self) -> None:
        """See the base class."""
        self._paused = True
        self.connection.out.pause()

    def resume_writing(self) -> None:
        """See the base class."""
        self._paused = False
        if self.reading_paused and self._transport is not None:
            self.reading_paused = False
            self._transport.resume_reading()
        for drained in self.connection.out.resume():
            self._act(drained)
        self.wake()

    def connection_lost(self, error: Exception | None) -> None:
        """See the base class."""
        self._transport = None
        self._timers.stop()
        self.server.connections.discard(self)
        self._stop_calls()
        self.connection.release()
        self.lost.set_result(None)

    # --- sending ---

    def wake(self) -> None:
        """Something is to be written: when all that was received has been acted on, or soon."""
        if self._in_burst:
            # Large answers are written at once: whoever asks next is told when the socket takes no more.
            if self.connection.out.moved - self._moved > MOST_MOVED_BYTES and not self.draining:
                self._flush()
            return
        self._unwritten += 1
        if (self._unwritten == MOST_TOGETHER or not self.rpcs) and not self.draining:
            self._flush()  # Nobody else has anything to say, or enough has been said.
        elif not self._awake:
            self._awake = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._awake = False
        self._unwritten = 0
        transport = self._transport
        connection = self.connection
        self._moved = connection.out.moved
        if transport is None:
            return
        open_calls = self.rpcs or self._refused
        if self.draining and connection.said_last and not open_calls and not connection.out.waits:
            connection.close()
        out = connection.out.take()
        if self._ending:
            return  # Our last word has been said.
        if self._paused and not connection.over:
            self._keep(out, transport)
        elif self._unread:
            transport.writelines([bytes(self._unread), *out])
            self._unread.clear()
        elif len(out) == 1:
            transport.write(out[0])
        elif out:
            transport.writelines(out)
        if not self.server.open_calls:
            self.server.busy_poll.rest()
        if connection.over and not transport.is_closing():
            self._ending = True
            self._end(transport)

    def _keep(self, out: list[Any], transport: asyncio.Transport) -> None:
        """The socket takes nothing now: frames wait here, together, as the transport would keep each by itself."""
        for frame in out:
            self._unread += frame
        if len(self._unread) > self.server.limits.max_unread and not self.reading_paused:
            self.reading_paused = True
            transport.pause_reading()

    def _end(self, transport: asyncio.Transport) -> None:
        # Closed at once, with bytes that nobody read, the socket would take our last word with it.
        if not transport.can_write_eof():
            self._timers.linger()  # TLS has no end in one direction: the other side knows from our last word.
            return
        try:
            transport.write_eof()
        except OSError:
            transport.abort()  # The other side has left already.
        else:
            self._timers.linger()

    def drain(self) -> None:
        """Take no new calls, and close when the running ones have ended."""
        if not self.draining:
            self.draining = True
            self.connection.drain()
            self.loop.call_later(LAST_STREAM_SECONDS, self._say_last)
            self.wake()

    def _say_last(self) -> None:
        self.connection.say_last()
        self.wake()

    def close(self, code: ErrorCode = ErrorCode.NO_ERROR, text: str = "") -> None:
        """End the connection, with all that still runs."""
        self.connection.close(code, text)
        self._stop_calls()
        self._flush()

    def abort(self) -> None:
        """Close the socket, whatever is on its way."""
        if self._transport is not None:
            self._transport.abort()

    def cancel_calls(self) -> None:
        """Cancel what runs the open calls."""
        for rpc in list(self.rpcs.values()):
            rpc.end_grace()

    def _stop_calls(self) -> None:
        self._refused.clear()
        for rpc in list(self.rpcs.values()):
            rpc.gone()
            rpc.cancel()

    # --- events ---

    def _act(self, event: Event[RpcHead]) -> None:
        if isinstance(event, DataReceived):
            if (rpc := self.rpcs.get(event.stream)) is not None:
                self._data(rpc, event.parts, 0, event.ended)
            elif event.ended:
                self._refuse(event.stream)
        elif isinstance(event, RequestReceived):
            self._begin(event)
        elif isinstance(event, DataPlaced):
            if (rpc := self.rpcs.get(event.stream)) is not None:
                self._data(rpc, (), event.size, event.ended)
        elif isinstance(event, Drained):
            if (rpc := self.rpcs.get(event.stream)) is not None:
                rpc.drained()
        elif isinstance(event, StreamReset):
            self._was_reset(event.stream)
        elif isinstance(event, RequestEnded):
            if (rpc := self.rpcs.get(event.stream)) is not None:
                self.ended(rpc)
            self._refuse(event.stream)
        elif isinstance(event, ConnectionEnded):
            log.info("closing a connection with %s: %s", event.code.name, event.text)
            self._stop_calls()

    def _was_reset(self, number: int) -> None:
        self._refused.pop(number, None)
        if (rpc := self.rpcs.get(number)) is not None:
            rpc.gone()
            rpc.cancel()

    def _begin(self, event: RequestReceived[RpcHead]) -> None:
        head, number = event.headers, event.stream
        if number not in self.connection.streams:
            return  # It was reset by what came together with it: nobody wants an answer.
        if head.status:
            begin_rest(self, event, self._transport)
            return
        row = self.server.rows.get(head.path, NO_ROW)
        rpc = self.server.make_rpc(self, number, head, row.kind, row.handler)
        refusal = self._refusal(rpc) or rpc.admit(row)
        may_still_write = row.kind in (None, Kind.BIDI_STREAM) and not event.ended
        if refusal is not None and may_still_write and len(self._refused) < MOST_REFUSED_STREAMS:
            self._refused[number] = rpc, refusal
            self.loop.call_later(REFUSED_STREAM_SECONDS, self._refuse, number)
            return
        self.begun(rpc)
        rpc.watch_deadline()
        if refusal is not None:
            rpc.fail(refusal)
            return
        body = rpc.body = Body(rpc)
        self.connection.receive_into(number, body.reader)
        if row.kind is Kind.BIDI_STREAM:
            rpc.start_stream(body.requests())
        if event.ended:
            self.ended(rpc)

    def _refuse(self, number: int) -> None:
        """Send the status of a stream that was refused, unless that is done or the client has left."""
        refused = self._refused.pop(number, None)
        if refused is not None:
            rpc, error = refused
            rpc.fail(error)

    def _refusal(self, rpc: Rpc) -> ServingError | None:
        """Why a call is not begun."""
        if rpc.handler is None:
            return Unimplemented("Method not found!")
        if rpc.head.problem:
            return (PayloadTooLarge if rpc.head.too_large else Internal)(rpc.head.problem)
        if self.server.open_calls >= self.server.most_calls:
            return QueueFull("Concurrent RPC limit exceeded!", retry_after=RETRY_AFTER_SECONDS)
        return self.backlog()

    def backlog(self) -> ServingError | None:
        """Why no more calls are begun for a client that has too many open, or has not read its answers."""
        limits = self.server.limits
        if self.open_bytes > limits.fair_open and self.server.open_bytes > limits.max_open_in_all:
            taken, most = self.open_bytes, limits.max_open_in_all
            return QueueFull(f"in-flight calls hold more than {most} bytes, {taken} of them on this connection")
        if self.connection.out.unsent <= limits.fair_unsent:
            return None
        if (unsent := self.unsent) > limits.max_unsent:
            return QueueFull(f"the client has not read {unsent} bytes of responses on this connection")
        if (unsent := self.server.unsent) > limits.max_unsent_in_all:
            return QueueFull(f"clients, including this one, have not read {unsent} bytes of responses")
        return None

    def certificate_names(self) -> Sequence[str]:
        """Those of the client's certificate."""
        if self._certificate_names is None:
            self._certificate_names = () if self._transport is None else names_of(self._transport)
        return self._certificate_names

    @property
    def unsent(self) -> int:
        """Bytes of answers that wait for the client."""
        buffered = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return self.connection.out.unsent + buffered

    def _begin_whole(self, event: WholeRequest[RpcHead]) -> None:
        """A call whose one message is there begins without more ado."""
        if event.stream not in self.connection.streams:
            return  # As in `_begin`.
        head, body = event.headers, event.body
        size = len(body) - PREFIX_BYTES
        row = self.server.rows.get(head.path, NO_ROW)
        server = self.server
        if (
            row.kind is Kind.UNARY
            and not head.status
            and not head.problem
            and (head.length is None or head.length == len(body))
            and size >= 0
            and body.startswith(PREFIX.pack(False, size))
            and size <= server.most_bytes
            and server.open_calls < server.most_calls
            and self.connection.out.unsent <= server.limits.fair_unsent
            and server.open_bytes <= server.limits.max_open_in_all
        ):
            rpc = server.make_rpc(self, event.stream, head, row.kind, row.handler)
            refusal = None if server.access is None else rpc.admit(row)
            self.begun(rpc)
            if refusal is not None:
                rpc.fail(refusal)
                return
            rpc.start(body[PREFIX_BYTES:])
            if not rpc.over:
                rpc.watch_deadline()
        else:
            self._begin(RequestReceived(event.stream, head, ended=False))
            self._act(DataReceived(event.stream, [memoryview(body)], ended=True))

    def _data(self, rpc: Rpc, parts: Sequence[memoryview], placed: int, ended: bool) -> None:
        body = rpc.body
        if body is None:
            return  # The call is over.
        try:
            if placed:
                body.came(placed)
            else:
                body.feed(parts)
        except ServingError as error:
            rpc.fail(error)
        else:
            if ended:
                self.ended(rpc)

    def ended(self, rpc: Rpc) -> None:
        """The client has sent all: calls that take one request begin."""
        body = rpc.body
        if body is None:
            return  # The call is over.
        if not body.is_whole:
            self.reset(rpc.number, ErrorCode.PROTOCOL_ERROR)
            return
        if not body.reader.between:
            rpc.fail(Internal("the request ends within a message"))
            return
        body.all_came()
        if rpc.kind is Kind.BIDI_STREAM:
            return
        message = body.take()
        if message is None:
            rpc.fail(Unimplemented("the method takes one request, got none"))
        elif rpc.kind is Kind.UNARY:
            rpc.start_unary(message)
        else:
            rpc.start_stream(message)

    def reset(self, number: int, code: ErrorCode) -> None:
        """End a stream before its time, and its call."""
        self.connection.reset(number, code)
        self._was_reset(number)
        self.wake()

    def begun(self, rpc: Rpc) -> None:
        """The call is open from now on."""
        server, size = self.server, rpc.head.call_bytes
        self.rpcs[rpc.number] = rpc
        self.open_bytes += size
        server.open_bytes += size
        server.open_calls += 1
        if server.busy_poll.expected:
            server.busy_poll.begun()

    def runs_on(self, task: Running) -> None:
        """A call is over, and what runs it was cancelled; it counts until that has ended."""
        if not task.done():
            self.connection.runs_on()
            task.add_done_callback(self._has_ended)

    def _has_ended(self, _: object) -> None:
        self.connection.has_ended()

    def forget(self, number: int) -> None:
        """The call is over."""
        if (rpc := self.rpcs.pop(number, None)) is not None:
            self.open_bytes -= rpc.head.call_bytes
            self.server.open_bytes -= rpc.head.call_bytes
            self.server.open_calls -= 1
