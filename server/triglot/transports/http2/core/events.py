"""What `Connection` makes of the bytes that it receives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from triglot.transports.http2.core.frames import ErrorCode

T = TypeVar("T")


@dataclass(slots=True)
class RequestReceived(Generic[T]):
    """A stream begins; `headers` as the connection was told to read them. `ended`: there is no body."""

    stream: int
    headers: T
    ended: bool


@dataclass(slots=True)
class WholeRequest(Generic[T]):
    """A stream begins, and all of its body is there: what most requests are. `headers` as of `RequestReceived`."""

    stream: int
    headers: T
    body: bytes


@dataclass(slots=True)
class DataReceived:
    """Parts of a request's body, views that are good until the next bytes are received.

    They take their room in the stream's window until `Connection.consumed` says that they are gone.
    """

    stream: int
    parts: list[memoryview]
    ended: bool


@dataclass(slots=True)
class DataPlaced:
    """So many bytes of a body are in the stream's own `Sink`."""

    stream: int
    size: int
    ended: bool


@dataclass(slots=True)
class RequestEnded:
    """A body ends with trailers, which nobody reads."""

    stream: int


@dataclass(slots=True)
class StreamReset:
    """The other side gives a stream up, or had to be told that it is wrong (`by_us`)."""

    stream: int
    code: int
    by_us: bool = False


@dataclass(slots=True)
class Drained:
    """All that was to be sent on a stream has left the windows; more may come."""

    stream: int


@dataclass(slots=True)
class PingAcknowledged:
    """The answer to our ping."""

    data: bytes


@dataclass(slots=True)
class GoneAway:
    """The other side begins no more streams; those that it has go on."""

    code: int
    text: str


@dataclass(slots=True)
class ConnectionEnded:
    """The other side has broken the rules: nothing is read any more."""

    code: ErrorCode
    text: str


Event = (
    RequestReceived[T]
    | WholeRequest[T]
    | DataReceived
    | DataPlaced
    | RequestEnded
    | StreamReset
    | Drained
    | PingAcknowledged
    | GoneAway
    | ConnectionEnded
)
