"""What the parts of a connection know of each other: the server, the connection, and an open call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from triglot.access.control import AccessControl
from triglot.core.errors import ServingError
from triglot.core.running import Running
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


class Serving(Protocol):
    """The server: what its connections share. See `H2Server`."""

    limits: Limits
    most_bytes: int
    request_bytes: RequestBytes
    buffers: BufferPool
    read_buffer: memoryview
    timers: TimerWheel
    open_calls: int
    open_bytes: int
    most_calls: int
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
        """By their paths."""

    @property
    def unsent(self) -> int:
        """Bytes of answers that wait for their clients."""


class OpenCall(Protocol):
    """A call, as its connection and its body know it. See `Rpc`."""

    @property
    def protocol(self) -> Connected:
        """Its connection."""

    @property
    def number(self) -> int:
        """Of its stream."""

    @property
    def kind(self) -> Kind | None:
        """Of its row."""

    @property
    def head(self) -> RpcHead:
        """What its fields say."""

    @property
    def over(self) -> bool:
        """Whether nothing more is sent."""

    def offer(self, answers: deque[bytes]) -> None:
        """Send small answers of a stream that can leave at once."""


class Connected(Protocol):
    """A connection, as its calls know it. See `H2Protocol`."""

    loop: asyncio.AbstractEventLoop
    connection: Connection[RpcHead]
    server: Serving
    remote: str
    draining: bool
    reading_paused: bool

    def certificate_names(self) -> Sequence[str]:
        """Those of the client's certificate."""

    def wake(self) -> None:
        """Something is to be written."""

    def defer(self, work: Callable[[], None]) -> None:
        """Do it once all that was received together has been acted on."""

    def begun(self, call: Any) -> None:
        """The call is open from now on."""

    def ended(self, call: Any) -> None:
        """The client has sent all."""

    def forget(self, number: int) -> None:
        """The call is over."""

    def runs_on(self, task: Running) -> None:
        """A call is over, and what runs it was cancelled."""

    def reset(self, number: int, code: ErrorCode) -> None:
        """End a stream before its time, and its call."""

    def backlog(self) -> ServingError | None:
        """Why no more calls are begun."""

    def drain(self) -> None:
        """Take no new calls, and close when the running ones have ended."""

    def close(self, code: ErrorCode = ..., text: str = "") -> None:
        """End the connection, with all that still runs."""

    def abort(self) -> None:
        """Close the socket, whatever is on its way."""
