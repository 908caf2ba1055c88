"""The HTTP/2 core without a socket, and requests for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.transports.h2_peers import data, frame
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.connection import Connection
from triglot.transports.http2.core.events import DataReceived
from triglot.transports.http2.core.limits import Limits
from triglot.transports.http2.core.receiving import CompleteRequest, RequestReceived

END_BOTH = frames.END_HEADERS | frames.END_STREAM
# One byte for each of the first two; a literal path.
BLOCK = b"\x83\x86\x04\x04/a/b\x00\x0ccontent-type\x10application/grpc"
OPEN = frame(frames.HEADERS, frames.END_HEADERS, 1, BLOCK)
CLOSED = frame(frames.HEADERS, END_BOTH, 1, BLOCK)


def connection(**limits: Any) -> Connection:
    """The core, to be fed by hand."""
    return Connection(Limits(**limits))


@dataclass
class Part:
    """What was received together of a body."""

    stream: int
    data: bytes
    end_stream: bool


def joined(events: Iterable[Any]) -> Iterator[Any]:
    """The events, with the parts of a body put together."""
    for event in events:
        if isinstance(event, DataReceived):
            yield Part(event.stream, b"".join(event.parts), event.end_stream)
        else:
            yield event


def answered(connection: Connection) -> None:
    """Every request is."""
    for number in list(connection.streams):
        connection.out.headers(number, b"\x88", end=True)


def request(stream: int, body: bytes) -> bytes:
    """All of a request, as most of them come."""
    return frame(frames.HEADERS, frames.END_HEADERS, stream, BLOCK) + data(stream, body)


def act(connection: Connection, events: list[Any]) -> list[Any]:
    """What an owner does that answers at once, and what it saw: one stream after the other, each body as a whole.

    The order of streams is unspecified, and depends on what arrives together.
    """
    seen: list[Any] = []
    bodies: dict[int, Part] = {}
    for event in joined(events):
        if isinstance(event, CompleteRequest):
            seen.append(RequestReceived(event.stream, event.headers, end_stream=False))
            seen.append(Part(event.stream, event.body, end_stream=True))
        elif isinstance(event, Part):
            connection.consumed(event.stream, len(event.data))
            if event.stream in bodies:
                bodies[event.stream].data += event.data
                bodies[event.stream].end_stream |= event.end_stream
            else:
                bodies[event.stream] = event
                seen.append(event)
        else:
            seen.append(event)
    return sorted(seen, key=lambda event: getattr(event, "stream", math.inf))
