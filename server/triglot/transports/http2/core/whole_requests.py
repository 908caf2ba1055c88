"""Requests as most are: a header block in one frame, and all of the body behind it (RFC 9113, 8.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from triglot.transports.http2.core import frames
from triglot.transports.http2.core.events import RequestReceived, WholeRequest
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.streams import Streams

T = TypeVar("T")

MOST_BYTES = 64 * 1024
"""Of a body; a larger one is received to where it stays."""


class WholeRequests(Generic[T]):
    """Makes one event of each; `read` says what a header block means, or None where that is no request.

    Bodies follow their own headers, or those of all requests that were made together. `clear` is called before
    other bytes are read: what has begun with the last ones has been told by then.
    """

    def __init__(self, streams: Streams, read: Callable[[bytes], T | None]) -> None:
        self._streams = streams
        self._read = read
        self._begun: dict[int, int] = {}
        """Requests without a body so far, and where in the list of events they are told."""
        self.clear = self._begun.clear

    def head(self, view: memoryview, start: int, length: int, end: int, number: int, events: list[Any]) -> int:
        """Where what comes next begins, after a header block and, if it is there, all of the body.

        The bytes that have come end at `end`. 0: the block is to be read as any other.
        """
        data_head = start + length
        streams = self._streams
        if end < data_head or not streams.may_begin(number):
            return 0
        value = self._read(bytes(view[start:data_head]))
        if value is None:
            streams.last = number
            streams.wrong(number, ErrorCode.PROTOCOL_ERROR, events)
            return data_head
        data = data_head + frames.HEAD_BYTES
        if end >= data:
            word, flags, data_number = frames.HEAD.unpack_from(view, data_head)
            size: int = word >> 8
            whole = (
                data + size <= end
                and word & 0xFF == frames.DATA
                and size <= min(MOST_BYTES, streams.limits.max_frame)
            )
            own = flags == frames.END_STREAM and data_number == number
            if whole and own and streams.begin_whole(number, size):
                events.append(WholeRequest(number, value, bytes(view[data : data + size])))
                return data + size
        streams.begin(number, ended=False)
        self._begun[number] = len(events)
        events.append(RequestReceived(number, value, ended=False))
        return data_head

    def body(self, view: memoryview, start: int, length: int, flags: int, number: int, events: list[Any]) -> int:
        """Where what comes next begins, after a DATA frame that is all of a body; 0: it is one like any other.

        To be asked about every DATA frame: the first of several is no whole body, and the last is none either.
        """
        at = self._begun.pop(number, None)
        whole = at is not None and flags == frames.END_STREAM and start + length <= len(view)
        if not whole or length > MOST_BYTES or not self._streams.end_whole(number, length):
            return 0
        assert at is not None
        events[at] = WholeRequest(number, events[at].headers, bytes(view[start : start + length]))
        return start + length
