"""Frames without request data: SETTINGS, PING, WINDOW_UPDATE, RST_STREAM, GOAWAY, PRIORITY (RFC 9113, 6)."""

from __future__ import annotations

from typing import Any

from triglot.transports.http2.core import frames
from triglot.transports.http2.core.events import GoneAway, PingAcknowledged
from triglot.transports.http2.core.frames import ErrorCode, Setting
from triglot.transports.http2.core.streams import Broken, Streams

_DRAIN = b"triglot1"
SMALL_WINDOW_UPDATE = 1024
"""A smaller WINDOW_UPDATE makes as much work as it saves: it is charged, as one that no data waits for is."""


class Control:
    """The handler of these frames. `read` raises `Broken` for a connection error."""

    def __init__(self, streams: Streams) -> None:
        self.settled = False
        """Whether the client's SETTINGS have arrived."""
        self.said_last = False
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
            self._streams.nuisance("PRIORITY frames")
            if number == 0:
                raise Broken(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
            if len(payload) != 5:
                if number > self._streams.last:
                    raise Broken(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY of an invalid size")  # No stream to reset.
                self._streams.wrong(number, ErrorCode.FRAME_SIZE_ERROR, events)
        elif kind == frames.PUSH_PROMISE:
            raise Broken(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        else:
            self._streams.nuisance("frames of unknown types")

    def _window_update(self, number: int, payload: memoryview, events: list[Any]) -> None:
        if len(payload) != 4:
            raise Broken(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE of an invalid size")
        self._streams.not_idle(number, "WINDOW_UPDATE")
        by = frames.word(payload) & frames.LARGEST_WINDOW
        if by < SMALL_WINDOW_UPDATE or not self._out.waits:
            self._streams.reaction("needless WINDOW_UPDATEs")
        if number and number not in self._streams.open:
            return  # The stream has ended; this frame was in flight.
        drained = self._out.opened(number, by) if by else None
        if drained is not None:
            events += drained
            return
        code = ErrorCode.FLOW_CONTROL_ERROR if by else ErrorCode.PROTOCOL_ERROR
        if not number:
            raise Broken(code, "invalid window size")
        self._streams.wrong(number, code, events)

    def _rst_stream(self, number: int, payload: memoryview, events: list[Any]) -> None:
        if len(payload) != 4:
            raise Broken(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM of an invalid size")
        if not number:
            raise Broken(ErrorCode.PROTOCOL_ERROR, "RST_STREAM on stream 0")
        self._streams.not_idle(number, "RST_STREAM")
        if number in self._streams.open:
            self._streams.was_left(number, frames.word(payload), events)
        else:
            self._streams.reaction("resets of closed streams")

    def _ping(self, flags: int, number: int, payload: memoryview, events: list[Any]) -> None:
        if number:
            raise Broken(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:
            raise Broken(ErrorCode.FRAME_SIZE_ERROR, "PING of an invalid size")
        data = bytes(payload)
        self._streams.reaction("pings")
        if not flags & frames.ACK:
            self._out.write(frames.ping(data, ack=True))
        elif data == _DRAIN and self._draining:
            self.say_last()
        else:
            events.append(PingAcknowledged(data))

    def _settings(self, flags: int, number: int, payload: memoryview, events: list[Any]) -> None:
        if number:
            raise Broken(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & frames.ACK:
            if len(payload):
                raise Broken(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS acknowledgement with a payload")
            if not self.settled:
                raise Broken(ErrorCode.PROTOCOL_ERROR, "expected SETTINGS first")
            self._streams.nuisance("SETTINGS")
            return
        if len(payload) % 6:
            raise Broken(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of an invalid size")
        self._streams.nuisance("SETTINGS")
        values = frames.read_settings(payload)
        if len(values) > self._streams.limits.max_settings:
            raise Broken(ErrorCode.ENHANCE_YOUR_CALM, f"{len(values)} settings in a frame")
        self.settled = True
        for key, value in values:
            self._check(key, value)
        last = dict(values)
        self._out.max_frame = last.get(Setting.MAX_FRAME_SIZE, self._out.max_frame)
        # Only the last value is applied, because each change visits every stream.
        window = last.get(Setting.INITIAL_WINDOW_SIZE)
        if window is not None and not self._out.resize(window):
            raise Broken(ErrorCode.FLOW_CONTROL_ERROR, "invalid window size")
        self._out.write(frames.head(0, frames.SETTINGS, frames.ACK, 0))
        events += self._out.flush()

    @staticmethod
    def _check(key: int, value: int) -> None:
        if key == Setting.INITIAL_WINDOW_SIZE and value > frames.LARGEST_WINDOW:
            raise Broken(ErrorCode.FLOW_CONTROL_ERROR, "invalid window size")
        if key == Setting.MAX_FRAME_SIZE and not frames.SMALLEST_MAX_FRAME <= value <= frames.LARGEST_MAX_FRAME:
            raise Broken(ErrorCode.PROTOCOL_ERROR, "invalid MAX_FRAME_SIZE")
        if key == Setting.ENABLE_PUSH and value > 1:
            raise Broken(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")

    def _goaway(self, number: int, payload: memoryview, events: list[Any]) -> None:
        if number:
            raise Broken(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
        if len(payload) < 8:
            raise Broken(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY of an invalid size")
        self._streams.nuisance("GOAWAYs")
        # The client opens no more streams; open ones continue.
        text = bytes(payload[8:264]).decode(errors="replace")
        events.append(GoneAway(frames.word(payload[4:]), text))

    def drain(self) -> None:
        """Announce that no new streams are wanted; streams that are in flight are still served (RFC 9113, 6.8)."""
        if not self._draining:
            self._draining = True
            self._out.write(frames.goaway(frames.LARGEST_WINDOW, ErrorCode.NO_ERROR))
            self._out.write(frames.ping(_DRAIN))

    def say_last(self) -> None:
        """Announce the last stream, once streams that were in flight have arrived."""
        if not self.said_last:
            self.said_last = True
            self._streams.refuse_after = self._streams.last
            self._out.write(frames.goaway(self._streams.last, ErrorCode.NO_ERROR))
