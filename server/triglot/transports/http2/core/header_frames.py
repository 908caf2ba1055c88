"""HEADERS and CONTINUATION frames: they begin requests, or end them as trailers (RFC 9113, 6.2, 6.10 and 8)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Generic, TypeVar

from triglot.transports.http2.core import frames
from triglot.transports.http2.core.events import Event, RequestEnded, RequestReceived
from triglot.transports.http2.core.fields import Field, MalformedRequest
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.hpack import BlockParts, Decoder, HpackError
from triglot.transports.http2.core.streams import H2Error, Streams

T = TypeVar("T")
Decoded = tuple[tuple[Field, ...], Sequence[Field]]
"""The fields of a block, as `Decoder.decode` returns them."""

MAX_PREFIX_BYTES = 6
"""Bytes before the block in a HEADERS frame: the length of the padding, and a priority."""


class HeaderFrames(Generic[T]):
    """The handler of these frames. All methods may raise `H2Error`."""

    def __init__(self, streams: Streams, read: Callable[[tuple[Field, ...], Sequence[Field]], T]) -> None:
        self.expects = 0
        """The stream whose CONTINUATION must be the next frame; 0: none."""
        self.left = 0
        """Bytes of a large frame that have not arrived."""
        self._streams = streams
        self._read = read
        self._decoder = Decoder()
        self._parts = BlockParts(self._decoder)
        """The block of the current frames, unless it is in one frame that has arrived as a whole."""
        self._size = self._padding = self._continuations = 0
        self._end_stream = self._end_headers = False

    def frame(self, kind: int, flags: int, number: int, payload: memoryview, events: list[Event[T]]) -> None:
        """Handle a frame that has arrived as a whole."""
        start, end = self._bounds(kind, flags, number, payload, len(payload))
        if kind == frames.HEADERS and flags & frames.END_HEADERS:
            try:
                decoded = self._decoder.decode(bytes(payload[start:end]))
            except HpackError as error:
                raise _broken(error) from None
            self._received(number, decoded, bool(flags & frames.END_STREAM), events)
            return
        self._begin(kind, flags, number)
        self._add(payload[start:end])
        self._end_frame(events)

    def begin_large(self, kind: int, flags: int, number: int, length: int, prefix: memoryview) -> int:
        """Begin a frame that is read as it arrives; returns how many bytes of `prefix` have been read.

        `prefix`: its first bytes, `MAX_PREFIX_BYTES` at least.
        """
        start, end = self._bounds(kind, flags, number, prefix, length)
        self._begin(kind, flags, number)
        self.left, self._padding = length - start, length - end
        return start

    def more(self, payload: memoryview, events: list[Event[T]]) -> None:
        """Handle what has arrived of such a frame."""
        self.left -= len(payload)
        self._add(payload[: max(0, len(payload) + min(0, self.left - self._padding))])
        if not self.left:
            self._end_frame(events)

    @staticmethod
    def _bounds(kind: int, flags: int, number: int, payload: memoryview, length: int) -> tuple[int, int]:
        """Returns where the block begins and ends in a frame's payload of `length` bytes."""
        if kind == frames.CONTINUATION:
            return 0, length
        if not number & 1:
            raise H2Error(ErrorCode.PROTOCOL_ERROR, f"HEADERS on stream {number}")
        start, end = 0, length
        if flags & frames.PADDED:
            padding = payload[0] if length else 0
            if padding + 1 > length:
                raise H2Error(ErrorCode.PROTOCOL_ERROR, "padding longer than the frame")
            start, end = 1, length - padding
        if flags & frames.HAS_PRIORITY:
            if end - start < 5:
                raise H2Error(ErrorCode.FRAME_SIZE_ERROR, "a priority of fewer than five bytes")
            start += 5
        return start, end

    def _begin(self, kind: int, flags: int, number: int) -> None:
        if kind == frames.HEADERS:
            self.expects, self._end_stream = number, bool(flags & frames.END_STREAM)
            self._parts = BlockParts(self._decoder)
            self._size = self._continuations = 0
        else:
            if not self.expects:
                raise H2Error(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
            self._continuations += 1
        self._end_headers = bool(flags & frames.END_HEADERS)

    def _add(self, part: memoryview) -> None:
        limits = self._streams.limits
        self._size += len(part)
        if self._size > limits.max_header_block or self._continuations > limits.max_continuations:
            raise H2Error(ErrorCode.ENHANCE_YOUR_CALM, "header block too large")
        try:
            self._parts.add(part)
        except HpackError as error:
            raise _broken(error) from None

    def _end_frame(self, events: list[Event[T]]) -> None:
        if not self._end_headers:
            return
        number, self.expects = self.expects, 0
        try:
            fields = self._parts.end()
        except HpackError as error:
            raise _broken(error) from None
        self._parts = BlockParts(self._decoder)
        self._received(number, ((), fields), self._end_stream, events)

    def request(self, block: bytes) -> T | None:
        """Decode a request's complete header block; None: not a valid request. Raises `H2Error`."""
        try:
            return self._read(*self._decoder.decode(block))
        except MalformedRequest:
            return None
        except HpackError as error:
            raise _broken(error) from None

    def _received(self, number: int, decoded: Decoded, ended: bool, events: list[Event[T]]) -> None:
        streams = self._streams
        if number in streams.open:
            self._trailers(number, chain(*decoded), ended, events)
            return
        if number <= streams.last:
            if not streams.was_reset(number):
                raise H2Error(ErrorCode.STREAM_CLOSED, f"HEADERS on stream {number}, which is closed")
            streams.charge_earned("HEADERS on streams that were reset")
            return
        value: T | None = None
        with suppress(MalformedRequest):
            value = self._read(*decoded)
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

    def _trailers(self, number: int, fields: Iterable[Field], ended: bool, events: list[Event[T]]) -> None:
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
    return H2Error(ErrorCode.COMPRESSION_ERROR, f"invalid header block: {error}")
