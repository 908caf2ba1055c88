"""Interfaces of the parts of a connection to each other: server, connection, open call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from triglot.core.call import TimerWheel
from triglot.core.errors import ServingError
from triglot.core.operation import Authorizer
from triglot.core.roles import RunningCall
from triglot.protocols.rows import Kind
from triglot.transports.grpc_calls import GrpcRow
from triglot.transports.http2.buffers import BufferPool
from triglot.transports.http2.core.connection import Connection
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.limits import Limits
from triglot.transports.http2.core.receiving import RpcHead
from triglot.transports.http2.messages import Message, MessageReader
from triglot.transports.listening import IdleConnection
from triglot.transports.request_bytes import RequestBytes
from triglot.transports.rest.server import HttpServer

MakeRpc: TypeAlias = "Callable[[Connected, int, RpcHead, GrpcRow | None], OpenCall]"


class Serving(Protocol):
    """The server, as its connections see it; see `H2Server`."""

    limits: Limits
    max_message_size: int
    request_bytes: RequestBytes
    buffers: BufferPool
    read_buffer: memoryview
    timers: TimerWheel
    open_calls: int
    open_bytes: int
    max_calls: int
    stopping: bool
    connections: set[Connected]
    sniffers: set[Undecided]
    tasks: set[asyncio.Task[None]]
    compression: str
    make_rpc: MakeRpc
    rest: HttpServer | None
    access: Authorizer | None

    @property
    def rows(self) -> Mapping[str, GrpcRow]:
        """The gRPC rows by path."""

    @property
    def unsent(self) -> int:
        """Bytes of responses that clients have not received."""


class OpenCall(RunningCall, Protocol):
    """A call, as its connection and its body see it; see `Rpc`."""

    @property
    def body(self) -> RequestBody | None:
        """Receives the request's body, unless that arrived as a whole."""

    @property
    def protocol(self) -> Connected:
        """The call's connection."""

    @property
    def number(self) -> int:
        """The number of its stream."""

    @property
    def row(self) -> GrpcRow | None:
        """Its row; None for an unknown path."""

    @property
    def kind(self) -> Kind | None:
        """The kind of its row."""

    @property
    def head(self) -> RpcHead:
        """The parsed header fields."""

    @property
    def over(self) -> bool:
        """True once nothing more is sent."""

    def admit(self, access: Authorizer) -> ServingError | None:
        """Check permission and limits by the request's headers; returns the error of a rejected call."""

    def receive_body(self) -> None:
        """Start to receive the request's body; a bidirectional call starts now."""

    def watch_deadline(self) -> None:
        """Set a timer that ends the call shortly after its deadline, unless its row does so itself."""

    def start(self, message: bytes | memoryview) -> None:
        """Run a call with one request; it may have ended when this returns."""

    def start_message(self, message: Message) -> None:
        """As `start`, for a message that may be compressed."""

    def drained(self) -> None:
        """Note that all data of the call has been sent."""

    def fail(self, error: ServingError) -> None:
        """End the call because of an error in what was received."""

    def release(self) -> None:
        """Note that nothing more can be sent, and release what the call holds."""

    def end_grace(self) -> None:
        """Cancel the call at the end of the server's grace period."""


class RequestBody(Protocol):
    """The body of a call, as its connection sees it; see `Body`."""

    reader: MessageReader

    @property
    def is_complete(self) -> bool:
        """Whether the body has the length that its content-length declared."""

    def feed(self, parts: Sequence[memoryview]) -> None:
        """Read parts of the body. Raise `ServingError`."""

    def received(self, count: int) -> None:
        """Note that `count` bytes of the body are in the reader. Raise `ServingError`."""

    def mark_ended(self) -> None:
        """Note that the client has ended its request."""

    def take(self) -> Message | None:
        """Return the next request, or None."""


class Connected(IdleConnection, Protocol):
    """A connection, as its calls see it; see `H2Protocol`."""

    loop: asyncio.AbstractEventLoop
    connection: Connection
    closed: asyncio.Future[None]
    remote: str
    draining: bool
    reading_paused: bool

    @property
    def server(self) -> Serving:
        """The server, with what all of its connections share."""

    def certificate_names(self) -> Sequence[str]:
        """Return the names in the client's certificate."""

    def schedule_write(self) -> None:
        """Schedule a write."""

    def defer(self, work: Callable[[], None]) -> None:
        """Run `work` after all events of a burst have been handled."""

    def add_call(self, call: OpenCall) -> None:
        """Register an open call."""

    def request_ended(self, call: OpenCall) -> None:
        """Note that the client has ended its request."""

    def remove_call(self, number: int) -> None:
        """Remove a call that has ended."""

    def track_handler(self, task: RunningCall) -> None:
        """Count a call that has ended, until its task has ended too."""

    def reset(self, number: int, code: ErrorCode) -> None:
        """Reset a stream, and cancel its call."""

    def backlog(self) -> ServingError | None:
        """Return why new calls are rejected, or None."""

    def drain(self) -> None:
        """Take no new calls, and close the connection once the running ones have ended."""

    def close(self, code: ErrorCode = ..., text: str = "") -> None:
        """End the connection and all of its calls."""

    def abort(self) -> None:
        """Close the socket; unsent data is lost."""

    def cancel_calls(self) -> None:
        """Cancel the open calls at the end of the server's grace period."""

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a call."""

    @property
    def unsent(self) -> int:
        """Bytes of responses that the client has not received."""


class Undecided(IdleConnection, Protocol):
    """A connection whose protocol is not known yet; see `ProtocolSniffer`."""

    closed: asyncio.Future[None]

    def shorten_wait(self) -> None:
        """Shorten the wait for the first bytes, because the server stops."""

    def abort(self) -> None:
        """Close the socket."""
