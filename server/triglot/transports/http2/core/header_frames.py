"""HEADERS and CONTINUATION frames: they begin requests, or end them as trailers (RFC 9113, 6.2, 6.10 and 8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Generic, TypeVar

from triglot.transports.http2.core import frames
from triglot.transports.http2.core.events import Event, RequestEnded, RequestReceived
from triglot.transports.http2.core.fields import Field, MalformedRequest
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.hpack import TOO_LARGE, Decoder, FieldsTooLarge, HpackError
from triglot.transports.http2.core.limits import MAX_FIELDS_BYTES
from triglot.transports.http2.core.streams import H2Error, Streams

T = TypeVar("T")


class HeaderFrames(Generic[T]):
    """The handler of these frames. All methods may raise `H2Error`."""

    def __init__(self, streams: Streams, read: Callable[[tuple[Field, ...], Sequence[Field]], T]) -> None:
        self.expects = 0
        """The stream whose CONTINUATION must be the next frame; 0: none."""
        self._streams = streams
        self._read = read
        self._decoder = Decoder()
        self._block = bytearray()
        self._end_stream = False
        self._continuations = 0

    def headers(self, flags: int, number: int, payload: memoryview, events: list[Event[T]]) -> None:
        """Handle a HEADERS frame."""
        if not number & 1:
            raise H2Error(ErrorCode.PROTOCOL_ERROR, f"HEADERS on stream {number}")
        if flags & frames.PADDED:
            padding = payload[0] if len(payload) else 0
            if padding + 1 > len(payload):
                raise H2Error(ErrorCode.PROTOCOL_ERROR, "padding longer than the frame")
            payload = payload[1 : len(payload) - padding]
        if flags & frames.HAS_PRIORITY:
            if len(payload) < 5:
                raise H2Error(ErrorCode.FRAME_SIZE_ERROR, "a priority of fewer than five bytes")
            payload = payload[5:]
        end_stream = bool(flags & frames.END_STREAM)
        if flags & frames.END_HEADERS:
            self._received(number, bytes(payload), end_stream, events)
        else:
            self.expects, self._end_stream = number, end_stream
            self._block, self._continuations = bytearray(payload), 0

    def continuation(self, flags: int, number: int, payload: memoryview, events: list[Event[T]]) -> None:
        """Handle a CONTINUATION frame."""
        if not self.expects:
            raise H2Error(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        limits = self._streams.limits
        self._continuations += 1
        self._block += payload
        if len(self._block) > limits.max_header_block or self._continuations > limits.max_continuations:
            raise H2Error(ErrorCode.ENHANCE_YOUR_CALM, "header block too large")
        if flags & frames.END_HEADERS:
            self.expects = 0
            self._received(number, bytes(self._block), self._end_stream, events)

    def request(self, block: bytes) -> T | None:
        """Decode a request's complete header block; None: not a valid request. Raises `H2Error`."""
        try:
            return self._read(*self._decoder.decode(block))
        except MalformedRequest:
            return None
        except HpackError as error:
            raise _broken(error) from None

    def _received(self, number: int, block: bytes, ended: bool, events: list[Event[T]]) -> None:
        streams = self._streams
        if number in streams.open:
            self._trailers(number, block, ended, events)
            return
        # Blocks of refused streams are decoded too: they may change the table that later blocks refer to.
        value = self.request(block)
        if number <= streams.last:
            if not streams.was_reset(number):
                raise H2Error(ErrorCode.STREAM_CLOSED, f"HEADERS on stream {number}, which is closed")
            streams.charge_earned("HEADERS on streams that were reset")
            return
        may_begin = streams.may_begin(number)
        streams.last = number
        if number > streams.refuse_after:
            streams.charge("streams after GOAWAY")
        elif value is None:
            streams.reset_invalid(number, ErrorCode.PROTOCOL_ERROR, events)
        elif not may_begin:
            streams.refuse(number)
        else:
            streams.begin(number, ended=ended)
            events.append(RequestReceived(number, value, ended))

    def _trailers(self, number: int, block: bytes, ended: bool, events: list[Event[T]]) -> None:
        try:
            fields = list(chain(*self._decoder.decode(block)))
            if sum([field.size for field in fields]) > MAX_FIELDS_BYTES:
                raise FieldsTooLarge(TOO_LARGE)
        except HpackError as error:
            raise _broken(error) from None
        malformed = not ended or any(field.name.value[:1] == b":" for field in fields)
        stream = self._streams.open[number]
        if stream.ended:
            self._streams.reset_invalid(number, ErrorCode.STREAM_CLOSED, events)
        elif malformed:
            self._streams.reset_invalid(number, ErrorCode.PROTOCOL_ERROR, events)
        else:
            self._streams.end(stream)
            events.append(RequestEnded(number))


def _broken(error: HpackError) -> H2Error:
    if isinstance(error, FieldsTooLarge):
        return H2Error(ErrorCode.ENHANCE_YOUR_CALM, "headers too large")
    return H2Error(ErrorCode.COMPRESSION_ERROR, f"invalid header block: {error}")
