"""One client's connection: asyncio's bytes to the HTTP/2 core, and its events to calls."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from triglot.core.errors import Code, Internal, QueueFull, ServingError, Unimplemented
from triglot.protocols import Kind
from triglot.transports.grpc_calls import fitting
from triglot.transports.h2.connection import Connection
from triglot.transports.h2.events import (
    ConnectionEnded,
    DataPlaced,
    DataReceived,
    Drained,
    Event,
    RequestEnded,
    RequestReceived,
    StreamReset,
)
from triglot.transports.h2.frames import ErrorCode
from triglot.transports.h2.messages import Message
from triglot.transports.h2.requests import RpcHead, http_error, read_head
from triglot.transports.h2.rpc import Rpc, StreamGone
from triglot.transports.h2.watch import Watch
from triglot.transports.shutdown import SHUTTING_DOWN

if TYPE_CHECKING:
    from triglot.transports.h2.server import H2Server

log = logging.getLogger(__name__)

LAST_STREAM_SECONDS = 1.0
"""For the other side to confirm that it knows that the connection ends."""


class H2Protocol(asyncio.BufferedProtocol):
    """Acts on a connection's events, and writes what is to be sent once per turn of the loop."""

    def __init__(self, server: H2Server) -> None:
        self.loop = asyncio.get_running_loop()
        self.connection: Connection[RpcHead] = Connection(read_head, server.limits)
        self.rpcs: dict[int, Rpc] = {}
        self.server = server
        self.lost = self.loop.create_future()
        """Done when the socket is closed."""
        self._watch = Watch(self, server.limits)
        self._transport: asyncio.Transport | None = None
        self._awake = False
        self._draining = False
        self._ending = False
        self._paused = False
        self._unread = 0
        """Bytes that were written while the socket took nothing."""

    # --- asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See the base class."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.server.connections.add(self)
        self._watch.start(transport)
        if self.server.stopping:
            self.drain()
        self._flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        """See the base class."""
        return self.connection.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """See the base class."""
        self._watch.heard()
        self._awake = True  # What is answered at once is written below.
        for event in self.connection.received(nbytes):
            self._act(event)
        self._flush()

    def pause_writing(self) -> None:
        """See the base class."""
        self._paused = True
        self.connection.out.pause()

    def resume_writing(self) -> None:
        """See the base class."""
        self._paused, self._unread = False, 0
        for drained in self.connection.out.resume():
            self._act(drained)
        self.wake()

    def connection_lost(self, error: Exception | None) -> None:
        """See the base class."""
        self._transport = None
        self._watch.stop()
        self.server.connections.discard(self)
        for rpc in list(self.rpcs.values()):
            rpc.gone()
            rpc.cancel()
        self.connection.release()
        self.lost.set_result(None)

    # --- sending ---

    def wake(self) -> None:
        """Something is to be written."""
        if not self._awake:
            self._awake = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._awake = False
        transport = self._transport
        connection = self.connection
        if transport is None:
            return
        if self._draining and connection.said_last and not self.rpcs and not connection.out.waits:
            connection.close()
        out = connection.out.take()
        if self._ending:
            return  # Our last word has been said.
        if self._paused and not self._may_wait(out):
            transport.abort()
        elif len(out) == 1:
            transport.write(out[0])
        elif out:
            transport.writelines(out)
        if connection.over and not transport.is_closing():
            self._ending = True
            self._end(transport)

    def _may_wait(self, out: list[Any]) -> bool:
        self._unread += sum(map(len, out))
        if self._unread <= self.server.limits.max_unread:
            return True
        log.info("a connection ends: its client reads nothing, and has %d bytes of statuses to read", self._unread)
        return False

    def _end(self, transport: asyncio.Transport) -> None:
        if not transport.can_write_eof():
            transport.close()
            return
        # Closed at once, with bytes that nobody read, the socket would take our last word with it.
        try:
            transport.write_eof()
        except OSError:
            transport.abort()  # The other side has left already.
        else:
            self._watch.linger()

    def drain(self) -> None:
        """Take no new calls, and close when the running ones have ended."""
        if not self._draining:
            self._draining = True
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

    def _stop_calls(self) -> None:
        for rpc in list(self.rpcs.values()):
            rpc.gone()
            rpc.cancel()

    # --- events ---

    def _act(self, event: Event[RpcHead]) -> None:
        if isinstance(event, DataReceived):
            if (rpc := self.rpcs.get(event.stream)) is not None:
                self._body(rpc, event.data, 0, event.ended)
        elif isinstance(event, RequestReceived):
            self._begin(event)
        elif isinstance(event, DataPlaced):
            if (rpc := self.rpcs.get(event.stream)) is not None:
                self._body(rpc, None, event.size, event.ended)
        elif isinstance(event, Drained):
            if (rpc := self.rpcs.get(event.stream)) is not None:
                rpc.drained()
        elif isinstance(event, StreamReset):
            if (rpc := self.rpcs.get(event.stream)) is not None:
                rpc.gone()
                rpc.cancel()
        elif isinstance(event, RequestEnded):
            if (rpc := self.rpcs.get(event.stream)) is not None:
                self._ended(rpc)
        elif isinstance(event, ConnectionEnded):
            log.info("a connection ends with %s: %s", event.code.name, event.text)
            self._stop_calls()

    def _begin(self, event: RequestReceived[RpcHead]) -> None:
        head, number = event.headers, event.stream
        if head.status:
            self.connection.out.headers(number, http_error(head.status), end=True)
            self.connection.reset_when_sent(number, ErrorCode.NO_ERROR)
            return
        kind, handle = self.server.rows.get(head.path, (None, None))
        rpc = Rpc(self, number, head, kind, handle)
        self.rpcs[number] = rpc
        self.server.open_calls += 1
        refusal = self._refusal(rpc)
        if refusal is not None:
            rpc.fail(refusal)
            return
        self.connection.receive_into(number, rpc.reader)
        if kind is Kind.BIDI_STREAM:
            self._start(rpc, self._stream(rpc))
        if event.ended:
            self._ended(rpc)

    def _refusal(self, rpc: Rpc) -> ServingError | None:
        """Why a call is not begun."""
        if rpc.handle is None:
            return Unimplemented("Method not found!")
        if rpc.head.problem:
            return Internal(rpc.head.problem)
        if self.server.is_full:
            return QueueFull("Concurrent RPC limit exceeded!")
        unsent = self.connection.out.unsent
        if unsent > self.server.limits.max_unsent:
            return QueueFull(f"the connection has {unsent} bytes of answers that its client has not read")
        return None

    def _body(self, rpc: Rpc, data: memoryview | None, placed: int, ended: bool) -> None:
        try:
            if data is None:
                rpc.came(placed)
            else:
                rpc.feed(data)
        except ServingError as error:
            rpc.fail(error)
        else:
            if ended:
                self._ended(rpc)

    def _ended(self, rpc: Rpc) -> None:
        """The client has sent all: calls that take one request begin."""
        if not rpc.is_whole:
            self.connection.reset(rpc.number, ErrorCode.PROTOCOL_ERROR)
            rpc.gone()
            rpc.cancel()
            return
        if not rpc.reader.between:
            rpc.fail(Internal("the request ends within a message"))
            return
        rpc.all_came()
        if rpc.kind is Kind.BIDI_STREAM:
            return
        message = rpc.take()
        if message is None:
            rpc.fail(Unimplemented("the call takes one request, got none"))
        elif rpc.kind is Kind.UNARY:
            self._start(rpc, self._unary(rpc, message))
        else:
            self._start(rpc, self._stream(rpc, message))

    def _start(self, rpc: Rpc, run: Any) -> None:
        rpc.task = self.loop.create_task(run)
        self.server.tasks.add(rpc.task)
        rpc.task.add_done_callback(self.server.tasks.discard)

    # A cancellation ends here: a task that is cancelled keeps the error, whose frames hold the call, which has
    # the task: a circle that only the garbage collector would open.

    async def _unary(self, rpc: Rpc, message: Message) -> None:
        try:
            data = message if type(message) is bytes else await rpc.unpacked(message)
            del message
            rpc.respond(await rpc.handle(data, rpc))
        except asyncio.CancelledError:
            self._cancelled(rpc)
        except Exception as error:
            self._failed(rpc, error)

    async def _stream(self, rpc: Rpc, message: Message | None = None) -> None:
        try:
            await rpc.handle(rpc.requests() if message is None else await rpc.unpacked(message), rpc)
            rpc.finish()
        except StreamGone:
            return
        except asyncio.CancelledError:
            self._cancelled(rpc)
        except Exception as error:
            self._failed(rpc, error)

    def _cancelled(self, rpc: Rpc) -> None:
        if self.server.stopping:
            rpc.finish(int(Code.UNAVAILABLE), SHUTTING_DOWN)
        else:
            rpc.finish(int(Code.CANCELLED), "the call was cancelled")

    @staticmethod
    def _failed(rpc: Rpc, error: Exception) -> None:
        """An error before the handler, which tells its own ones."""
        if isinstance(error, ServingError):
            rpc.finish(int(error.code), fitting(error.message))
        else:
            log.error("%s: an error that no handler told", rpc.head.path, exc_info=error)
            rpc.finish(int(Code.INTERNAL), "internal error")

    def forget(self, number: int) -> None:
        """The call is over."""
        if self.rpcs.pop(number, None) is not None:
            self.server.open_calls -= 1
