"""Frames without request data: SETTINGS, PING, WINDOW_UPDATE, RST_STREAM, GOAWAY, PRIORITY (RFC 9113, 6)."""

from __future__ import annotations

from typing import Any

from triglot.transports.http2.core import frames
from triglot.transports.http2.core.events import GoneAway, PingAcknowledged
from triglot.transports.http2.core.frames import ErrorCode, Setting
from triglot.transports.http2.core.streams import H2Error, Streams

_DRAIN = b"triglot1"
SMALL_WINDOW_UPDATE = 1024
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
            self._window_update(number, payload, events)
        elif kind == frames.RST_STREAM:
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

    def _window_update(self, number: int, payload: memoryview, events: list[Any]) -> None:
        if len(payload) != 4:
            raise H2Error(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE of an invalid size")
        self._streams.check_not_idle(number, "WINDOW_UPDATE")
        by = frames.word(payload) & frames.LARGEST_WINDOW
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
            self._streams.close_early(number, frames.word(payload), events)
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
        events.append(GoneAway(frames.word(payload[4:]), text))

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
