"""DATA: the one frame that may be acted on before all of it is there (RFC 9113, 6.1)."""

from __future__ import annotations

from typing import Any

from triglot.transports.h2 import frames
from triglot.transports.h2.events import DataReceived, DataRun
from triglot.transports.h2.frames import ErrorCode
from triglot.transports.h2.streams import Broken, Stream, Streams


class DataFrame:
    """The frame that is being received."""

    __slots__ = ("_streams", "busy", "ends", "left", "padding", "stream")

    def __init__(self, streams: Streams) -> None:
        self.stream: Stream | None = None
        """None: nobody wants what it holds."""
        self.left = self.padding = 0
        """Bytes that have not come."""
        self.ends = False
        """Whether it is the last of its stream."""
        self.busy = False
        """Whether there is one."""
        self._streams = streams

    def begin(self, number: int, length: int, flags: int, padding: int, events: list[Any]) -> None:
        """Its head, and the length of its padding, have come. Raises `Broken` when the connection cannot go on."""
        streams = self._streams
        if not number & 1 or number > streams.last:
            raise Broken(ErrorCode.PROTOCOL_ERROR, f"DATA on stream {number}, which is idle")
        if length > streams.window.left:
            raise Broken(ErrorCode.FLOW_CONTROL_ERROR, "more data than the connection's window")
        streams.window.left -= length
        stream = self._taken(number, length, events)
        if flags & frames.PADDED:
            if not length:
                raise Broken(ErrorCode.FRAME_SIZE_ERROR, "a padded frame without the padding's length")
            length -= 1
            if padding > length:
                raise Broken(ErrorCode.PROTOCOL_ERROR, "more padding than the frame is long")
            length -= padding
            streams.passed(padding + 1)
            streams.consumed(stream, padding + 1)
        self.ends = bool(flags & frames.END_STREAM)
        if not length and not self.ends:
            streams.nuisance("empty DATA frames")
        elif not length and stream is None:
            streams.reaction("empty DATA frames on streams that are over")
        self.stream = stream
        self.left, self.padding = length, padding
        self.busy = True

    def run(self, number: int, start: int, length: int, buffer: memoryview, events: list[Any]) -> int:
        """Where the next frame begins, after all whole frames in a row that are nothing but data of one stream.

        0 where there is none, or one that is to be looked at more closely. `start`: of the first one's payload.
        """
        streams = self._streams
        stream = streams.open.get(number)
        if stream is None or stream.ended or (stream.sink is not None and stream.sink.room() is not None):
            return 0
        end, after, total = len(buffer), 0, 0
        most = min(streams.window.left, stream.window.left)
        parts = []
        while 0 < length <= streams.limits.max_frame and start + length <= end and total + length <= most:
            after = start + length
            parts.append(buffer[start:after])
            total += length
            start = after + frames.HEAD_BYTES
            if start > end:
                break
            word, flags, other = frames.HEAD.unpack_from(buffer, after)
            if flags or other != number or word & 0xFF != frames.DATA:
                break
            length = word >> 8
        if not after:
            return 0
        streams.window.left -= total
        stream.window.left -= total
        streams.passed(total)
        events.append(DataReceived(number, parts[0], ended=False) if len(parts) == 1 else DataRun(number, parts))
        return after

    def _taken(self, number: int, length: int, events: list[Any]) -> Stream | None:
        """The stream that it is for, with its room for this; None: it is to be ignored."""
        streams = self._streams
        stream = streams.open.get(number)
        if stream is None:
            if number <= streams.refuse_after and not streams.was_reset(number):
                streams.late(number)
        elif stream.ended or length > stream.window.left:
            code = ErrorCode.STREAM_CLOSED if stream.ended else ErrorCode.FLOW_CONTROL_ERROR
            streams.wrong(number, code, events)
            stream = None
        else:
            stream.window.left -= length
        return stream
