"""The events that `Connection` makes of received bytes."""

from __future__ import annotations

from dataclasses import dataclass

from triglot.transports.http2.core.frames import ErrorCode


@dataclass(slots=True)
class DataReceived:
    """Parts of a request's body: views that are valid until the next bytes are received.

    They count against the stream's window until `Connection.consumed` is called.
    """

    stream: int
    parts: list[memoryview]
    end_stream: bool


@dataclass(slots=True)
class DataPlaced:
    """`size` bytes of a body have been received into the stream's `BodySink`."""

    stream: int
    size: int
    end_stream: bool


@dataclass(slots=True)
class RequestEnded:
    """A body has ended with trailers, which are ignored."""

    stream: int


@dataclass(slots=True)
class StreamReset:
    """The client has reset a stream, or it was reset because of an error of the client (`by_us`)."""

    stream: int
    code: int
    by_us: bool = False


@dataclass(slots=True)
class Drained:
    """All data that was to be sent on a stream has been sent; more may follow."""

    stream: int


@dataclass(slots=True)
class PingAcknowledged:
    """The reply to our PING."""

    data: bytes


@dataclass(slots=True)
class GoAwayReceived:
    """The client has sent GOAWAY: it opens no more streams; open ones continue."""

    code: int
    text: str


@dataclass(slots=True)
class ConnectionEnded:
    """The client has violated the protocol: nothing more is read."""

    code: ErrorCode
    text: str
