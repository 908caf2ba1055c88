"""The HTTP/2 core without a socket, and requests for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from h2_peers import data, frame

from triglot.transports.h2 import frames
from triglot.transports.h2.connection import Connection
from triglot.transports.h2.events import DataReceived, DataRun, RequestReceived, WholeRequest
from triglot.transports.h2.limits import Limits
from triglot.transports.h2.requests import RpcHead, read_head

END_BOTH = frames.END_HEADERS | frames.END_STREAM
# One byte for each of the first two; a literal path.
BLOCK = b"\x83\x86\x04\x04/a/b\x00\x0ccontent-type\x10application/grpc"
OPEN = frame(frames.HEADERS, frames.END_HEADERS, 1, BLOCK)
CLOSED = frame(frames.HEADERS, END_BOTH, 1, BLOCK)


def connection(**limits: Any) -> Connection[RpcHead]:
    """The core, to be fed by hand."""
    return Connection(read_head, Limits(**limits))


def singly(events: Iterable[Any]) -> Iterator[Any]:
    """The events, those that stand for several as these."""
    for event in events:
        if isinstance(event, DataRun):
            yield from [DataReceived(event.stream, part, ended=False) for part in event.parts]
        else:
            yield event


def answered(one: Connection[RpcHead]) -> None:
    """Every request is."""
    for number in list(one.streams):
        one.out.headers(number, b"\x88", end=True)


def request(stream: int, body: bytes) -> bytes:
    """All of a request, as most of them come."""
    return frame(frames.HEADERS, frames.END_HEADERS, stream, BLOCK) + data(stream, body)


def act(one: Connection[RpcHead], events: list[Any]) -> list[Any]:
    """What an owner does that answers at once, and what it saw: parts of a body put together."""
    seen: list[Any] = []
    for event in singly(events):
        if isinstance(event, WholeRequest):
            seen += [
                RequestReceived(event.stream, event.headers, ended=False),
                [event.stream, event.body, True],
            ]
        elif isinstance(event, DataReceived):
            one.consumed(event.stream, len(event.data))
            if seen and isinstance(seen[-1], list) and seen[-1][0] == event.stream:
                seen[-1][1] += bytes(event.data)
                seen[-1][2] |= event.ended
            else:
                seen.append([event.stream, bytes(event.data), event.ended])
        else:
            seen.append(event)
    return seen
