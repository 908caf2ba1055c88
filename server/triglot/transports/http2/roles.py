"""Interfaces of the parts of a connection to each other: server, connection, open call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from triglot.core.errors import ServingError
from triglot.core.running import RunningCall
from triglot.core.timer_wheel import TimerWheel
from triglot.protocols.rows import Kind
from triglot.transports.grpc_calls import GrpcRow
from triglot.transports.http2.buffers import BufferPool
from triglot.transports.http2.busy_poll import BusyPoll
from triglot.transports.http2.core.connection import Connection
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.limits import Limits
from triglot.transports.http2.core.requests import RpcHead
from triglot.transports.request_bytes import RequestBytes
from triglot.transports.rest.server import HttpServer

if TYPE_CHECKING:
    from triglot.access.control import AccessControl


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
    busy_poll: BusyPoll
    stopping: bool
    connections: set[Any]
    sniffers: set[Any]
    tasks: set[Any]
    compression: str
    make_rpc: Any
    rest: HttpServer | None
    access: AccessControl | None

    @property
    def rows(self) -> Mapping[str, GrpcRow]:
        """The gRPC rows by path."""

    @property
    def unsent(self) -> int:
        """Bytes of responses that clients have not received."""


class OpenCall(Protocol):
    """A call, as its connection and its body see it; see `Rpc`."""

    @property
    def protocol(self) -> Connected:
        """The call's connection."""

    @property
    def number(self) -> int:
        """The number of its stream."""

    @property
    def kind(self) -> Kind | None:
        """The kind of its row."""

    @property
    def head(self) -> RpcHead:
        """The parsed header fields."""

    @property
    def over(self) -> bool:
        """True once nothing more is sent."""


class Connected(Protocol):
    """A connection, as its calls see it; see `H2Protocol`."""

    loop: asyncio.AbstractEventLoop
    connection: Connection[RpcHead]
    server: Serving
    remote: str
    draining: bool
    reading_paused: bool

    def certificate_names(self) -> Sequence[str]:
        """Returns the names in the client's certificate."""

    def schedule_write(self) -> None:
        """Schedule a write."""

    def defer(self, work: Callable[[], None]) -> None:
        """Run `work` after all events of a burst have been handled."""

    def add_call(self, call: Any) -> None:
        """Register an open call."""

    def request_ended(self, call: Any) -> None:
        """Note that the client has ended its request."""

    def remove_call(self, number: int) -> None:
        """Remove a call that has ended."""

    def track_handler(self, task: RunningCall) -> None:
        """Count a call that has ended, until its task has ended too."""

    def reset(self, number: int, code: ErrorCode) -> None:
        """Reset a stream, and cancel its call."""

    def backlog(self) -> ServingError | None:
        """Returns why new calls are rejected, or None."""

    def drain(self) -> None:
        """Take no new calls, and close the connection once the running ones have ended."""

    def close(self, code: ErrorCode = ..., text: str = "") -> None:
        """End the connection and all of its calls."""

    def abort(self) -> None:
        """Close the socket; unsent data is lost."""
