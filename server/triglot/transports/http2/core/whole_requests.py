"""The fast path of most requests: a header block in one frame, followed by the complete body (RFC 9113, 8.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from triglot.transports.http2.core import frames
from triglot.transports.http2.core.events import RequestReceived, WholeRequest
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.streams import Streams

T = TypeVar("T")

MAX_WHOLE_BODY = 64 * 1024
"""Larger bodies are received straight into their final buffer."""


class WholeRequests(Generic[T]):
    """Makes one event per such request; `read` decodes a header block, and returns None for an invalid request.

    A body follows its own headers, or the headers of all requests that were sent together. `clear` is called
    before further bytes are read: the events of earlier ones have been returned by then.
    """

    def __init__(self, streams: Streams, read: Callable[[bytes], T | None]) -> None:
        self._streams = streams
        self._read = read
        self._begun: dict[int, int] = {}
        """Requests whose body has not arrived, and the index of their event."""
        self.clear = self._begun.clear

    def head(self, view: memoryview, start: int, length: int, end: int, number: int, events: list[Any]) -> int:
        """Read a header block and, if it has arrived, the complete body; returns where the next frame begins.

        The received bytes end at `end`. 0: the frame needs the general path.
        """
        data_head = start + length
        streams = self._streams
        if end < data_head or not streams.may_begin(number):
            return 0
        value = self._read(bytes(view[start:data_head]))
        if value is None:
            streams.last = number
            streams.reset_invalid(number, ErrorCode.PROTOCOL_ERROR, events)
            return data_head
        data = data_head + frames.HEAD_BYTES
        if end >= data:
            word, flags, data_number = frames.HEAD.unpack_from(view, data_head)
            size: int = word >> 8
            whole = (
                data + size <= end
                and word & 0xFF == frames.DATA
                and size <= min(MAX_WHOLE_BODY, streams.limits.max_frame)
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
        """Read a DATA frame that is a complete body; returns where the next frame begins, or 0 for other frames.

        To be called for every DATA frame: the first of several is not a complete body, and neither is the last.
        """
        at = self._begun.pop(number, None)
        whole = at is not None and flags == frames.END_STREAM and start + length <= len(view)
        if not whole or length > MAX_WHOLE_BODY or not self._streams.end_whole(number, length):
            return 0
        assert at is not None
        events[at] = WholeRequest(number, events[at].headers, bytes(view[start : start + length]))
        return start + length
