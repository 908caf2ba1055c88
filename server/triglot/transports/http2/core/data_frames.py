"""DATA frames, the only ones that are handled before they are complete (RFC 9113, 6.1)."""

from __future__ import annotations

from typing import Any

from triglot.transports.http2.core import frames
from triglot.transports.http2.core.events import DataPlaced, DataReceived
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.streams import H2Error, Stream, Streams

DIRECT_BYTES = 64 * 1024
"""With this much of a DATA frame still to arrive, another read costs less than a copy from the buffer."""


class DataFrame:
    """The DATA frame being received, and the events of those before it.

    Strategy: a stream's data is copied into its `Sink` at once if that has room, and otherwise stays in the
    buffer. All data of a stream that arrives together is in one event, until `clear` is called.
    """

    __slots__ = (
        "_placed",
        "_received",
        "_streams",
        "active",
        "arrived",
        "end_stream",
        "left",
        "padding",
        "small",
        "stream",
    )

    def __init__(self, streams: Streams) -> None:
        self.stream: Stream | None = None
        """None: the data is discarded."""
        self.left = self.padding = 0
        """Bytes that have not arrived."""
        self.end_stream = False
        """Whether the frame has END_STREAM."""
        self.active = False
        """Whether a frame is being received."""
        self.arrived = 0
        """Bytes that have arrived together, of all streams."""
        self.small = 0
        """Those in frames too small to be received straight into a sink."""
        self._streams = streams
        self._placed: dict[int, DataPlaced] = {}
        self._received: dict[int, DataReceived] = {}

    def clear(self) -> None:
        """Start new events: the data that follows arrives in another read."""
        self.arrived = self.small = 0
        self._placed.clear()
        self._received.clear()

    def begin(self, number: int, length: int, flags: int, padding: int, events: list[Any]) -> None:
        """Begin a frame whose header and padding length have arrived. Raises `H2Error`."""
        streams = self._streams
        if not number & 1 or number > streams.last:
            raise H2Error(ErrorCode.PROTOCOL_ERROR, f"DATA on stream {number}, which is idle")
        if length > streams.window.left:
            raise H2Error(ErrorCode.FLOW_CONTROL_ERROR, "more data than the connection's flow-control window")
        streams.window.left -= length
        stream = self._charge_window(number, length, events)
        if flags & frames.PADDED:
            if not length:
                raise H2Error(ErrorCode.FRAME_SIZE_ERROR, "a padded frame without the padding's length")
            length -= 1
            if padding > length:
                raise H2Error(ErrorCode.PROTOCOL_ERROR, "padding longer than the frame")
            length -= padding
            streams.bytes_received(padding + 1)
            streams.consumed(stream, padding + 1)
        self.end_stream = bool(flags & frames.END_STREAM)
        if not length and not self.end_stream:
            streams.charge("empty DATA frames")
        elif not length and stream is None:
            streams.charge_earned("empty DATA frames on closed streams")
        self.stream = stream
        self.left, self.padding = length, padding
        self.active = True

    def run(self, number: int, start: int, length: int, buffer: memoryview, events: list[Any]) -> int:
        """Read all complete frames in a row with data of one stream only; returns where the next frame begins.

        0: there is none, or it needs the general path. `start`: where the first frame's payload begins.
        """
        streams = self._streams
        stream = streams.open.get(number)
        if stream is None or stream.ended:
            return 0
        end, after, total = len(buffer), 0, 0
        limit = min(streams.window.left, stream.window.left)
        parts = []
        while 0 < length <= streams.limits.max_frame and start + length <= end and total + length <= limit:
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
        if total < len(parts) * DIRECT_BYTES:
            self.small += total
        self.add(stream, parts, total, events)
        return after

    def add(self, stream: Stream, parts: list[memoryview], size: int, events: list[Any]) -> None:
        """Handle `size` bytes of a body, in these parts."""
        self.arrived += size
        number = stream.id
        received = self._received.get(number)
        if received is not None:
            received.parts += parts
            return
        room = None if stream.sink is None else stream.sink.room()
        if room is not None and stream.sink is not None:
            count = min(size, len(room))
            parts = _copy(parts, room)
            stream.sink.filled(count)
            self.placed(number, count, events)
            if not parts:
                return
        received = self._received[number] = DataReceived(number, parts, ended=False)
        events.append(received)

    def placed(self, number: int, size: int, events: list[Any]) -> None:
        """Note that `size` bytes of a body are in its sink."""
        placed = self._placed.get(number)
        if placed is None:
            placed = self._placed[number] = DataPlaced(number, size, ended=False)
            events.append(placed)
        else:
            placed.size += size

    def end_body(self, stream: Stream, events: list[Any]) -> None:
        """Note that a body is complete."""
        self._streams.end(stream)
        number = stream.id
        event = self._received.get(number) or self._placed.get(number)
        if event is None:
            event = DataReceived(number, [], ended=True)
            events.append(event)
        event.ended = True

    def _charge_window(self, number: int, length: int, events: list[Any]) -> Stream | None:
        """Returns the frame's stream, and charges its window; None: the frame is to be ignored."""
        streams = self._streams
        stream = streams.open.get(number)
        if stream is None:
            if number <= streams.refuse_after and not streams.was_reset(number):
                streams.reset_closed(number)
        elif stream.ended or length > stream.window.left:
            code = ErrorCode.STREAM_CLOSED if stream.ended else ErrorCode.FLOW_CONTROL_ERROR
            streams.reset_invalid(number, code, events)
            stream = None
        else:
            stream.window.left -= length
        return stream


def _copy(parts: list[memoryview], room: memoryview) -> list[memoryview]:
    """Fill the room; returns the parts that did not fit."""
    at, limit = 0, len(room)
    for number, part in enumerate(parts):
        after = at + len(part)
        if after > limit:
            room[at:] = part[: limit - at]
            return [part[limit - at :], *parts[number + 1 :]]
        room[at:after] = part
        at = after
    return []
