"""The server's side of an HTTP/2 connection, without I/O: bytes in, events and bytes out (RFC 9113).

Strategy: the owner of the socket receives bytes into `get_buffer`, reports their number with `received`, acts
on the events, and writes `out.take()`. Reads are large, and go into a buffer that many connections share: only
an incomplete frame's beginning is kept from one read to the next. The rest of a large DATA frame is received
straight into the stream's `BodySink`, if it has one. A violation of the protocol ends its stream, or the whole
connection: then the last event is `ConnectionEnded`, and the last frame GOAWAY.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from triglot.transports.http2.core import frames
from triglot.transports.http2.core.events import ConnectionEnded, DataReceived, GoAwayReceived, PingAcknowledged
from triglot.transports.http2.core.frames import ErrorCode, Setting
from triglot.transports.http2.core.limits import DEFAULTS, Limits
from triglot.transports.http2.core.receiving import (
    DIRECT_BYTES,
    MAX_PREFIX_BYTES,
    CompleteRequest,
    DataFrame,
    Event,
    HeaderFrames,
    RequestReceived,
)
from triglot.transports.http2.core.streams import BodySink, H2Error, Stream, Streams

MANY_RUNNING: Final = 256
"""With more handlers of reset streams still running, reads are small, to give these time to end."""
FEW_BYTES: Final = 1024
READ_BYTES: Final = 64 * 1024
"""Read from the socket at a time, because requests that arrive together are handled together."""
_HEADERS: Final = (frames.HEADERS, frames.CONTINUATION)
_UNBOUNDED: Final = (frames.DATA, *_HEADERS)
"""Frames that are read as they arrive."""
BULK_BYTES: Final = 512 * 1024
"""The same after a read that was mostly bodies in small DATA frames: fewer turns of the event loop."""


MAX_COMPLETE_BODY: Final = 64 * 1024
"""Larger bodies are received straight into their final buffer."""


_DRAIN: Final = b"triglot1"
SMALL_WINDOW_UPDATE: Final = 1024
"""A smaller WINDOW_UPDATE makes as much work as it saves: it is charged, as one that no data waits for is."""


class Control:
    """The handler of these frames. `read` may raise `H2Error`."""

    def __init__(self, streams: Streams) -> None:
        self.settings_received = False
        """Whether the client's SETTINGS have arrived."""
        self.last_announced = False
        """Whether GOAWAY with the last stream's number has been sent."""
        self._streams = streams
        self._out = streams.out
        self._draining = False

    def read(self, kind: int, flags: int, number: int, payload: memoryview, events: list[Any]) -> None:
        """Handle one frame."""
        if kind == frames.WINDOW_UPDATE:
            raise H2Error(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE of an invalid size")  # `_parse` reads others.
        if kind == frames.RST_STREAM:
            self._rst_stream(number, payload, events)
        elif kind == frames.PING:
            self._ping(flags, number, payload, events)
        elif kind == frames.SETTINGS:
            self._settings(flags, number, payload, events)
        elif kind == frames.GOAWAY:
            self._goaway(number, payload, events)
        elif kind == frames.PRIORITY:
            self._streams.charge("PRIORITY frames")
            if number == 0:
                raise H2Error(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
            if len(payload) != 5:
                if number > self._streams.last:
                    raise H2Error(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY of an invalid size")  # No stream to reset.
                self._streams.reset_invalid(number, ErrorCode.FRAME_SIZE_ERROR, events)
        elif kind == frames.PUSH_PROMISE:
            raise H2Error(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        else:
            self._streams.charge("frames of unknown types")

    def window_update(self, number: int, by: int, events: list[Any]) -> None:
        """Open the window of a stream or, with 0, of the connection. May raise `H2Error`."""
        self._streams.check_not_idle(number, "WINDOW_UPDATE")
        if by < SMALL_WINDOW_UPDATE or not self._out.has_unsent:
            self._streams.charge_earned("needless WINDOW_UPDATEs")
        if number and number not in self._streams.open:
            return  # The stream has ended; this frame was in flight.
        drained = self._out.window_opened(number, by) if by else None
        if drained is not None:
            events += drained
            return
        code = ErrorCode.FLOW_CONTROL_ERROR if by else ErrorCode.PROTOCOL_ERROR
        if not number:
            raise H2Error(code, "invalid window size")
        self._streams.reset_invalid(number, code, events)

    def _rst_stream(self, number: int, payload: memoryview, events: list[Any]) -> None:
        if len(payload) != 4:
            raise H2Error(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM of an invalid size")
        if not number:
            raise H2Error(ErrorCode.PROTOCOL_ERROR, "RST_STREAM on stream 0")
        self._streams.check_not_idle(number, "RST_STREAM")
        if number in self._streams.open:
            self._streams.close_early(number, int.from_bytes(payload), events)
        else:
            self._streams.charge_earned("resets of closed streams")

    def _ping(self, flags: int, number: int, payload: memoryview, events: list[Any]) -> None:
        if number:
            raise H2Error(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:
            raise H2Error(ErrorCode.FRAME_SIZE_ERROR, "PING of an invalid size")
        data = bytes(payload)
        self._streams.charge_earned("pings")
        if not flags & frames.ACK:
            self._out.write(frames.ping(data, ack=True))
        elif data == _DRAIN and self._draining:
            self.announce_last()
        else:
            events.append(PingAcknowledged(data))

    def _settings(self, flags: int, number: int, payload: memoryview, events: list[Any]) -> None:
        if number:
            raise H2Error(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & frames.ACK:
            if len(payload):
                raise H2Error(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS acknowledgement with a payload")
            if not self.settings_received:
                raise H2Error(ErrorCode.PROTOCOL_ERROR, "expected SETTINGS first")
            self._streams.charge("SETTINGS")
            return
        if len(payload) % 6:
            raise H2Error(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of an invalid size")
        self._streams.charge("SETTINGS")
        values = frames.read_settings(payload)
        if len(values) > self._streams.limits.max_settings:
            raise H2Error(ErrorCode.ENHANCE_YOUR_CALM, f"{len(values)} settings in a frame")
        self.settings_received = True
        for key, value in values:
            self._check(key, value)
            if key == Setting.HEADER_TABLE_SIZE:
                self._out.set_table(value)  # Each one, because the smallest counts.
        last = dict(values)
        self._out.max_frame = last.get(Setting.MAX_FRAME_SIZE, self._out.max_frame)
        # Only the last value is applied, because each change visits every stream.
        window = last.get(Setting.INITIAL_WINDOW_SIZE)
        if window is not None and not self._out.set_initial_window(window):
            raise H2Error(ErrorCode.FLOW_CONTROL_ERROR, "invalid window size")
        self._out.write(frames.head(0, frames.SETTINGS, frames.ACK, 0))
        events += self._out.flush()

    @staticmethod
    def _check(key: int, value: int) -> None:
        if key == Setting.INITIAL_WINDOW_SIZE and value > frames.LARGEST_WINDOW:
            raise H2Error(ErrorCode.FLOW_CONTROL_ERROR, "invalid window size")
        if key == Setting.MAX_FRAME_SIZE and not frames.SMALLEST_MAX_FRAME <= value <= frames.LARGEST_MAX_FRAME:
            raise H2Error(ErrorCode.PROTOCOL_ERROR, "invalid MAX_FRAME_SIZE")
        if key == Setting.ENABLE_PUSH and value > 1:
            raise H2Error(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")

    def _goaway(self, number: int, payload: memoryview, events: list[Any]) -> None:
        if number:
            raise H2Error(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
        if len(payload) < 8:
            raise H2Error(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY of an invalid size")
        self._streams.charge("GOAWAYs")
        # The client opens no more streams; open ones continue.
        text = bytes(payload[8:264]).decode(errors="replace")
        events.append(GoAwayReceived(int.from_bytes(payload[4:8]), text))

    def drain(self) -> None:
        """Announce that no new streams are wanted; streams that are in flight are still served (RFC 9113, 6.8)."""
        if not self._draining:
            self._draining = True
            self._out.write(frames.goaway(frames.LARGEST_WINDOW, ErrorCode.NO_ERROR))
            self._out.write(frames.ping(_DRAIN))

    def announce_last(self) -> None:
        """Announce the last stream, once streams that were in flight have arrived."""
        if not self.last_announced:
            self.last_announced = True
            self._streams.refuse_after = self._streams.last
            self._out.write(frames.goaway(self._streams.last, ErrorCode.NO_ERROR))


class CompleteRequests:
    """Makes one event per such request.

    A body follows its own headers, or the headers of all requests that were sent together. `clear` is called
    before further bytes are read: the events of earlier ones have been returned by then.
    """

    def __init__(self, streams: Streams, headers: HeaderFrames) -> None:
        self._streams = streams
        self._headers = headers
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
        request = self._headers.request(bytes(view[start:data_head]))
        if request is None:
            streams.last = number
            streams.reset_invalid(number, ErrorCode.PROTOCOL_ERROR, events)
            return data_head
        data = data_head + frames.HEAD_BYTES
        if end >= data:
            word, flags, data_number = frames.HEAD.unpack_from(view, data_head)
            size: int = word >> 8
            is_complete = (
                data + size <= end
                and word & 0xFF == frames.DATA
                and size <= min(MAX_COMPLETE_BODY, streams.limits.max_frame)
            )
            own = flags == frames.END_STREAM and data_number == number
            if is_complete and own and streams.begin_complete(number, size):
                events.append(CompleteRequest(number, request, bytes(view[data : data + size])))
                return data + size
        streams.begin(number, end_stream=False)
        self._begun[number] = len(events)
        events.append(RequestReceived(number, request, end_stream=False))
        return data_head

    def body(self, view: memoryview, start: int, length: int, flags: int, number: int, events: list[Any]) -> int:
        """Read a DATA frame that is a complete body; returns where the next frame begins, or 0 for other frames.

        To be called for every DATA frame: the first of several is not a complete body, and neither is the last.
        """
        at = self._begun.pop(number, None)
        is_complete = at is not None and flags == frames.END_STREAM and start + length <= len(view)
        if not is_complete or length > MAX_COMPLETE_BODY or not self._streams.end_complete(number, length):
            return 0
        assert at is not None
        events[at] = CompleteRequest(number, events[at].headers, bytes(view[start : start + length]))
        return start + length


def read_buffer() -> memoryview:
    """Return a receive buffer; connections that read one after the other may share it."""
    return memoryview(bytearray(BULK_BYTES))


class Connection:
    """The state of one connection, for a single thread.

    `buffer`: see `read_buffer`; from `get_buffer` until the events have been acted on, no other connection may use
    it.
    """

    def __init__(
        self,
        limits: Limits = DEFAULTS,
        clock: Callable[[], float] = time.monotonic,
        buffer: memoryview | None = None,
    ) -> None:
        self.over = False
        """True once nothing more is read."""
        self._limits = limits
        self._streams = Streams(limits, clock)
        self.streams: Mapping[int, Stream] = self._streams.open
        """Open streams by number."""
        self._headers = HeaderFrames(self._streams)
        self._requests = CompleteRequests(self._streams, self._headers)
        self._control = Control(self._streams)
        self.out = self._streams.out
        self._view = read_buffer() if buffer is None else buffer
        self._rest = b""
        """The beginning of an incomplete frame, or of the preface."""
        self._start = self._end = 0
        """The unread part of the buffer."""
        self._bulk = False
        """Whether the last read was mostly bodies in small frames."""
        self._direct: BodySink | None = None
        self._preface_received = False
        self._data = DataFrame(self._streams)
        self._send_settings()

    @property
    def settings_received(self) -> bool:
        """Whether the client's SETTINGS have arrived."""
        return self._control.settings_received

    @property
    def is_used(self) -> bool:
        """Whether a stream has begun."""
        return self._streams.last > 0

    @property
    def last_announced(self) -> bool:
        """Whether GOAWAY with the last stream's number has been sent."""
        return self._control.last_announced

    def _send_settings(self) -> None:
        limits = self._limits
        self.out.write(
            frames.settings(
                {
                    Setting.MAX_CONCURRENT_STREAMS: limits.max_streams,
                    Setting.INITIAL_WINDOW_SIZE: self._streams.first_window,
                    Setting.MAX_FRAME_SIZE: limits.max_frame,
                    Setting.MAX_HEADER_LIST_SIZE: limits.max_header_list,
                }
            )
        )
        more = limits.connection_window - frames.DEFAULT_WINDOW
        if more > 0:
            self.out.write(frames.window_update(0, more))

    # --- receiving ---

    def get_buffer(self) -> memoryview:
        """Return where the next bytes are to be received."""
        self._direct = None
        stream = self._data.stream
        if self._data.left >= DIRECT_BYTES and stream is not None and stream.sink is not None:
            room = stream.sink.room()
            if room is not None and len(room):
                self._direct = stream.sink
                # With the next frame's header, if more of the message follows: `_placed` moves it to the buffer.
                more = 0 if self._data.padding or self._data.end_stream else frames.HEAD_BYTES
                return room[: self._data.left + more]
        at = len(self._rest)
        if self._streams.reset_running > MANY_RUNNING:
            return self._view[at : at + FEW_BYTES]
        return self._view[at : BULK_BYTES if self._bulk else READ_BYTES]

    def received(self, count: int) -> list[Event]:
        """Return the events of the next `count` bytes, which are in `get_buffer`."""
        events: list[Event] = []
        if self.over:
            return events
        self._requests.clear()
        self._streams.reset_now = 0
        try:
            if self._direct is not None:
                self._placed(count, events)
            else:
                at = len(self._rest)
                self._view[:at] = self._rest
                self._start, self._end = 0, at + count
            if self._start < self._end:
                self._parse(events)
            if self._data.arrived:
                self._streams.bytes_received(self._data.arrived)
            self._bulk = 2 * self._data.small > count
            self._rest = bytes(self._view[self._start : self._end]) if self._start < self._end else b""
        except H2Error as error:
            self.close(error.code, str(error))
            events.append(ConnectionEnded(error.code, str(error)))
        self._data.clear()
        return events

    def feed(self, data: bytes | memoryview) -> list[Event]:
        """Return the events of `data`, as `get_buffer` and `received` would."""
        events: list[Event] = []
        data = memoryview(data)
        while data and not self.over:
            room = self.get_buffer()
            count = min(len(room), len(data))
            room[:count] = data[:count]
            data = data[count:]
            for event in self.received(count):
                if isinstance(event, DataReceived):  # The buffer is reused at once.
                    event.parts = [memoryview(bytes(part)) for part in event.parts]
                events.append(event)
        return events

    def _placed(self, count: int, events: list[Event]) -> None:
        data, sink = self._data, self._direct
        stream = data.stream
        self._direct = None
        assert stream is not None
        assert sink is not None
        self._start = self._end = 0
        if count > data.left:
            room = sink.room()
            assert room is not None
            self._end = count - data.left
            self._view[: self._end] = room[data.left : count]
            count = data.left
        sink.filled(count)
        data.left -= count
        data.arrived = count
        data.active = bool(data.left or data.padding)
        if stream.id in self._streams.open:
            data.placed(stream.id, count, events)
            self._check_end(stream, events)

    def _parse(self, events: list[Event]) -> None:
        if not self._preface_received and not self._read_preface():
            return
        view = self._view
        while True:
            start, end = self._start, self._end
            if self._data.active or self._headers.left:
                if start == end:
                    return
                self._read_rest(events)
                continue
            if end - start < frames.HEAD_BYTES:
                return
            word, flags, number = frames.HEAD.unpack_from(view, start)
            length, kind = word >> 8, word & 0xFF
            number &= frames.LARGEST_WINDOW
            self._check(kind, number, length)
            if kind == frames.HEADERS and flags == frames.END_HEADERS:
                after = self._requests.head(view, start + frames.HEAD_BYTES, length, end, number, events)
                if after:
                    self._start = after
                    continue
            start += frames.HEAD_BYTES
            if kind == frames.WINDOW_UPDATE and length == 4 and end - start >= 4:
                self._start = start + 4
                by: int = frames.WORD.unpack_from(view, start)[0] & frames.LARGEST_WINDOW
                self._control.window_update(number, by, events)
            elif kind == frames.DATA:
                if not self._read_data_frame(number, flags, start, length, events):
                    return
            elif not self._read_frame(kind, flags, number, start, length, events):
                return

    def _read_frame(
        self, kind: int, flags: int, number: int, start: int, length: int, events: list[Event]
    ) -> bool:
        """Read a frame that is not DATA, its payload from `start` on; returns whether enough of it is there."""
        large = length > self._limits.max_control_frame
        end = start + (MAX_PREFIX_BYTES if large else length)
        if self._end < end:
            return False
        payload = self._view[start:end]
        self._start = end
        if large:
            self._start = start + self._headers.begin_large(kind, flags, number, length, payload)
        elif kind in _HEADERS:
            self._headers.frame(kind, flags, number, payload, events)
        else:
            self._control.read(kind, flags, number, payload, events)
        return True

    def _read_rest(self, events: list[Event]) -> None:
        """Read what the buffer has of the current frame: DATA, or large HEADERS or CONTINUATION."""
        if self._data.active:
            self._read_data(events)
            return
        start = self._start
        self._start = min(self._end, start + self._headers.left)
        self._headers.more(self._view[start : self._start], events)

    def _read_data_frame(self, number: int, flags: int, start: int, length: int, events: list[Event]) -> bool:
        """Read a complete DATA frame, maybe with more like it, or else begin it.

        Return False if more bytes are needed for that.
        """
        view = self._view[: self._end]
        after = self._requests.body(view, start, length, flags, number, events)
        if not after and not flags:
            after = self._data.run(number, start, length, view, events)
        if after:
            self._start = after
            return True
        if flags & frames.PADDED and length and start == self._end:
            return False  # The length of the padding is needed first.
        self._start = start
        self._begin_data(number, length, flags, events)
        if not self._data.left and not self._data.padding:
            self._read_data(events)
        return True

    def _check(self, kind: int, number: int, length: int) -> None:
        """Raise `H2Error` if such a frame is not allowed now."""
        if length > self._limits.max_frame:
            raise H2Error(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
        if length > self._limits.max_control_frame and kind not in _UNBOUNDED:
            raise H2Error(ErrorCode.ENHANCE_YOUR_CALM, f"a frame of {length} bytes without data or fields")
        expects = self._headers.expects
        if expects and (kind != frames.CONTINUATION or number != expects):
            raise H2Error(ErrorCode.PROTOCOL_ERROR, "expected CONTINUATION")
        if kind != frames.SETTINGS and not self._control.settings_received:
            raise H2Error(ErrorCode.PROTOCOL_ERROR, "expected SETTINGS first")

    def _read_preface(self) -> bool:
        count = min(self._end - self._start, len(frames.PREFACE))
        if self._view[self._start : self._start + count] != frames.PREFACE[:count]:
            raise H2Error(ErrorCode.PROTOCOL_ERROR, "no HTTP/2 preface")
        self._preface_received = count == len(frames.PREFACE)
        if self._preface_received:
            self._start += count
        return self._preface_received

    # --- data ---

    def _begin_data(self, number: int, length: int, flags: int, events: list[Event]) -> None:
        """Begin a DATA frame; the length of its padding, if it has one, is at the start of the buffer."""
        padding = 0
        if flags & frames.PADDED and length:
            padding = self._view[self._start]
            self._start += 1
        self._data.begin(number, length, flags, padding, events)

    def _read_data(self, events: list[Event]) -> None:
        """Read what the buffer has of the current DATA frame."""
        data = self._data
        stream = data.stream
        if stream is not None and stream.id not in self._streams.open:
            stream = data.stream = None  # It has been reset.
        count = min(self._end - self._start, data.left)
        after = self._start + count
        data.left -= count
        if stream is None:
            data.arrived += count
        else:
            if count:
                data.add(stream, [self._view[self._start : after]], count, events)
            self._check_end(stream, events)
        if not data.left:
            count = min(self._end - after, data.padding)
            after += count
            data.padding -= count
        self._start = after
        data.active = bool(data.left or data.padding)

    def _check_end(self, stream: Stream, events: list[Event]) -> None:
        """End the body if this frame has END_STREAM and all of its data has arrived, padding or not."""
        if self._data.end_stream and not self._data.left and not stream.end_stream:
            self._data.end_body(stream, events)

    # --- called by the owner ---

    def receive_into(self, number: int, sink: BodySink) -> None:
        """Receive a stream's data into `sink`."""
        stream = self._streams.open.get(number)
        if stream is not None:
            stream.sink = sink

    def consumed(self, number: int, count: int) -> None:
        """Note that `count` bytes of a body have been consumed, and open the stream's window for as many.

        It is opened further for what its `BodySink` has room for: a large message should not wait for its window.
        """
        stream = self._streams.open.get(number)
        self._streams.consumed(stream, count)
        if stream is None or stream.end_stream or stream.sink is None or (room := stream.sink.room()) is None:
            return
        in_flight = stream.window.left + (self._data.left if stream is self._data.stream else 0)
        if len(room) > in_flight:
            stream.window.allow_ahead(len(room) - in_flight)
            self.out.write(frames.window_update(number, len(room) - in_flight))

    def track_handler(self) -> None:
        """Note that a call has ended but its handler still runs; it counts until `untrack_handler`."""
        self._streams.reset_running += 1

    def untrack_handler(self) -> None:
        """Note that such a handler has ended."""
        self._streams.reset_running -= 1

    def reset(self, number: int, code: ErrorCode) -> None:
        """Reset a stream that is still open."""
        self._streams.reset(number, code)

    def reset_when_sent(self, number: int, code: ErrorCode) -> None:
        """Reset a stream once our response has been sent, if the client has not ended its request by then."""
        self._streams.reset_when_sent(number, code)

    def ping(self, data: bytes) -> None:
        """Send a PING with eight bytes of `data`."""
        self.out.write(frames.ping(data))

    def drain(self) -> None:
        """Announce that no new streams are wanted; streams that are in flight are still served (RFC 9113, 6.8)."""
        self._control.drain()

    def announce_last(self) -> None:
        """Accept no new streams, and announce the last one."""
        self._control.announce_last()

    def close(self, code: ErrorCode = ErrorCode.NO_ERROR, text: str = "") -> None:
        """End the connection with GOAWAY; nothing more is read."""
        if not self.over:
            self.over = True
            last = min(self._streams.last, self._streams.refuse_after)  # The client may retry refused streams.
            self.out.write(frames.goaway(last, code, text))

    def release(self) -> None:
        """Release memory; the socket is closed."""
        self.over = True
        self._direct = self._data.stream = None
        self._view = memoryview(b"")
        self._rest = b""
