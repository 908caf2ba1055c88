"""The frames of requests: HEADERS with their CONTINUATIONs, and DATA (RFC 9113, 6.1, 6.2 and 6.10).

What HEADERS say of a gRPC call is in its `RpcHead` (gRPC over HTTP/2: Requests). DATA frames are the only ones
that are handled before they are complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from typing import Any, Final, NamedTuple

from triglot.transports.http2.core import frames
from triglot.transports.http2.core.events import (
    ConnectionEnded,
    DataPlaced,
    DataReceived,
    Drained,
    GoAwayReceived,
    PingAcknowledged,
    RequestEnded,
    StreamReset,
)
from triglot.transports.http2.core.fields import (
    CREDENTIAL,
    FIRST_REGULAR,
    MALFORMED,
    METADATA,
    TRACEPARENT,
    TRACESTATE,
    Field,
    MalformedRequest,
)
from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.hpack import BlockParts, Decoder, HpackError
from triglot.transports.http2.core.limits import MAX_HEADER_BYTES
from triglot.transports.http2.core.streams import H2Error, Stream, Streams

# --- heads of requests ---

Metadata = Sequence[tuple[str, str | bytes]]

CALL_BYTES: Final = 16 * 1024
"""Approximate memory of an open call besides its fields: 2 to 15 KiB; streams and REST calls take the most."""
FIELDS_FACTOR: Final = 10
"""Memory of fields, as a multiple of their size as HTTP/2 counts it."""
MAX_CACHED: Final = 200
MAX_CACHED_FIELDS: Final = 16
"""Limits on the cached starts of blocks, each of which is in one table of 4 KiB, and on their fields."""
_DEFAULTS: Final[Sequence[Any]] = (None, None, None, None, None, False, None, "identity", "", None)
"""The meaning of an absent field, by kind."""


class RpcHead:
    """The parsed header fields of a request.

    `timeout` in seconds, None without one. `encoding`: the compression of its messages; `accepts`: that
    accepted for responses. `length`: the content-length, if given. `traceparent` and `tracestate` are
    unchecked, "" if absent. `credentials`: names and values of the fields that access control asks for.
    `status`: the HTTP status that answers a request that is not a gRPC call, else 0. `problem`: what is wrong
    with a gRPC call, else ""; `too_large`: its fields are too large, and not kept. `call_bytes`: approximate
    memory of the call.
    """

    __slots__ = (
        "accepts",
        "call_bytes",
        "credentials",
        "encoding",
        "fields",
        "length",
        "path",
        "problem",
        "status",
        "timeout",
        "too_large",
        "traceparent",
        "tracestate",
    )

    def __init__(
        self,
        fields: Sequence[Field],
        path: str,
        timeout: float | None,
        encoding: str,
        accepts: str,
        length: int | None,
        traceparent: str,
        tracestate: str,
        credentials: tuple[tuple[str, str], ...],
        status: int,
        problem: str,
        too_large: bool,
        call_bytes: int,
    ) -> None:
        self.fields = fields
        self.path = path
        self.timeout = timeout
        self.encoding = encoding
        self.accepts = accepts
        self.length = length
        self.traceparent = traceparent
        self.tracestate = tracestate
        self.credentials = credentials
        self.status = status
        self.problem = problem
        self.too_large = too_large
        self.call_bytes = call_bytes

    def read_metadata(self) -> Metadata:
        """Return the fields that are not HTTP/2's or gRPC's own, as gRPC metadata."""
        if self.problem:
            return ()
        return [pair for field in self.fields if field.kind >= METADATA for pair in field.metadata()]


class _Parsed(NamedTuple):
    """What the first fields of a request say."""

    fields: tuple[Field, ...] = ()
    meanings: Sequence[Any] = _DEFAULTS
    traceparent: str = ""
    tracestate: str = ""
    credentials: tuple[tuple[str, str], ...] = ()
    problem: str = ""
    size: int = 0
    is_regular: bool = False
    """Whether a pseudo-header may no longer follow."""


_NOTHING: Final = _Parsed()


def read_head(start: tuple[Field, ...], rest: Sequence[Field] = ()) -> RpcHead:
    """Return the head of a request with these fields, given as `Decoder.decode` returns them.

    Most blocks begin with the same entries of the table: what these say is cached. Raise `MalformedRequest` for
    fields that HTTP/2 does not allow (RFC 9113, 8).
    """
    if len(start) > MAX_CACHED_FIELDS:
        return _head(_parse((*start, *rest)))
    return _head(_parse(rest, _cached_start(start))) if rest else _cached_head(start)


def _head(parsed: _Parsed) -> RpcHead:
    fields, meanings, traceparent, tracestate, credentials, problem, size, _ = parsed
    is_post, scheme, path, _, _, is_grpc, timeout, encoding, accepts, length = meanings
    if is_post is None or not scheme or not path:
        raise MalformedRequest("a pseudo-header is missing")
    status = 405 if not is_post else 415 if not is_grpc else 0
    too_large = size > MAX_HEADER_BYTES and not status
    if too_large:
        problem = f"received metadata size exceeds the limit ({size} vs. {MAX_HEADER_BYTES})"
        fields, size = (), 0
    return RpcHead(
        fields,
        path,
        timeout,
        encoding,
        accepts,
        length,
        traceparent,
        tracestate,
        credentials,
        status,
        problem,
        too_large,
        CALL_BYTES + FIELDS_FACTOR * size,
    )


def _parse(fields: Sequence[Field], before: _Parsed = _NOTHING) -> _Parsed:
    """Return what the fields say, after those `before`. Raise as `read_head`."""
    meanings = list(before.meanings)
    _, _, traceparent, tracestate, credentials, problem, size, is_regular = before
    for field in fields:
        size += field.size
        kind = field.kind
        if kind >= FIRST_REGULAR:
            is_regular = True
            if kind == MALFORMED:
                raise MalformedRequest(f"field {field.name.value!r}")
            problem = problem or field.problem
        elif is_regular or meanings[kind] is not None:
            raise MalformedRequest(f"pseudo-header {field.name.value!r}")
        if kind < METADATA:
            meanings[kind] = field.meaning
        elif kind == TRACEPARENT:
            traceparent = field.meaning
        elif kind == TRACESTATE:
            tracestate = f"{tracestate},{field.meaning}" if tracestate else field.meaning
        elif kind == CREDENTIAL:
            credentials = (*credentials, (field.name.text, field.meaning))
    parsed = (*before.fields, *fields)
    return _Parsed(parsed, meanings, traceparent, tracestate, credentials, problem, size, is_regular)


@lru_cache(maxsize=MAX_CACHED)
def _cached_start(fields: tuple[Field, ...]) -> _Parsed:
    return _parse(fields)


@lru_cache(maxsize=MAX_CACHED)
def _cached_head(fields: tuple[Field, ...]) -> RpcHead:
    return _head(_cached_start(fields))


# --- events ---


class RequestReceived:
    """A request's headers.

    `end_stream`: the request has no body.
    """

    __slots__ = (
        "end_stream",
        "headers",
        "stream",
    )

    def __init__(self, stream: int, headers: RpcHead, end_stream: bool) -> None:
        self.stream = stream
        self.headers = headers
        self.end_stream = end_stream


class CompleteRequest:
    """A request with its complete body, as most requests are."""

    __slots__ = (
        "body",
        "headers",
        "stream",
    )

    def __init__(self, stream: int, headers: RpcHead, body: bytes) -> None:
        self.stream = stream
        self.headers = headers
        self.body = body


Event = (
    RequestReceived
    | CompleteRequest
    | DataReceived
    | DataPlaced
    | RequestEnded
    | StreamReset
    | Drained
    | PingAcknowledged
    | GoAwayReceived
    | ConnectionEnded
)


# --- frames ---

DIRECT_BYTES: Final = 64 * 1024
"""With this much of a DATA frame still to arrive, another read costs less than a copy from the buffer."""

Decoded = tuple[tuple[Field, ...], Sequence[Field]]
"""The fields of a block, as `Decoder.decode` returns them."""

MAX_PREFIX_BYTES: Final = 6
"""Bytes before the block in a HEADERS frame: the length of the padding, and a priority."""


class HeaderFrames:
    """The handler of these frames. All methods may raise `H2Error`."""

    def __init__(self, streams: Streams) -> None:
        self.expects = 0
        """The stream whose CONTINUATION must be the next frame; 0: none."""
        self.left = 0
        """Bytes of a large frame that have not arrived."""
        self._streams = streams
        self._decoder = Decoder()
        self._parts = BlockParts(self._decoder)
        """The block of the current frames, unless it is in one frame that has arrived as a whole."""
        self._size = self._padding = self._continuations = 0
        self._end_stream = self._end_headers = False

    def frame(self, kind: int, flags: int, number: int, payload: memoryview, events: list[Event]) -> None:
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

    def more(self, payload: memoryview, events: list[Event]) -> None:
        """Handle what has arrived of such a frame."""
        self.left -= len(payload)
        self._add(payload[: max(0, len(payload) + min(0, self.left - self._padding))])
        if not self.left:
            self._end_frame(events)

    @staticmethod
    def _bounds(kind: int, flags: int, number: int, payload: memoryview, length: int) -> tuple[int, int]:
        """Return where the block begins and ends in a frame's payload of `length` bytes."""
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

    def _end_frame(self, events: list[Event]) -> None:
        if not self._end_headers:
            return
        number, self.expects = self.expects, 0
        try:
            fields = self._parts.end()
        except HpackError as error:
            raise _broken(error) from None
        self._parts = BlockParts(self._decoder)
        self._received(number, ((), fields), self._end_stream, events)

    def request(self, block: bytes) -> RpcHead | None:
        """Decode a request's complete header block; None: not a valid request. Raise `H2Error`."""
        try:
            return read_head(*self._decoder.decode(block))
        except MalformedRequest:
            return None
        except HpackError as error:
            raise _broken(error) from None

    def _received(self, number: int, decoded: Decoded, end_stream: bool, events: list[Event]) -> None:
        streams = self._streams
        if number in streams.open:
            self._trailers(number, chain(*decoded), end_stream, events)
            return
        if number <= streams.last:
            if not streams.was_reset(number):
                raise H2Error(ErrorCode.STREAM_CLOSED, f"HEADERS on stream {number}, which is closed")
            streams.charge_earned("HEADERS on streams that were reset")
            return
        head: RpcHead | None = None
        with suppress(MalformedRequest):
            head = read_head(*decoded)
        may_begin = streams.may_begin(number)
        streams.last = number
        if number > streams.refuse_after:
            streams.charge("streams after GOAWAY")
        elif head is None:
            streams.reset_invalid(number, ErrorCode.PROTOCOL_ERROR, events)
        elif not may_begin:
            streams.refuse(number)
        else:
            streams.begin(number, end_stream=end_stream)
            events.append(RequestReceived(number, head, end_stream))

    def _trailers(self, number: int, fields: Iterable[Field], end_stream: bool, events: list[Event]) -> None:
        malformed = not end_stream or any(field.name.value[:1] == b":" for field in fields)
        stream = self._streams.open[number]
        if stream.end_stream:
            self._streams.reset_invalid(number, ErrorCode.STREAM_CLOSED, events)
        elif malformed:
            self._streams.reset_invalid(number, ErrorCode.PROTOCOL_ERROR, events)
        else:
            self._streams.end(stream)
            events.append(RequestEnded(number))


def _broken(error: HpackError) -> H2Error:
    return H2Error(ErrorCode.COMPRESSION_ERROR, f"invalid header block: {error}")


class DataFrame:
    """The DATA frame being received, and the events of those before it.

    Strategy: a stream's data is copied into its `BodySink` at once if that has room, and otherwise stays in the
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
        """Begin a frame whose header and padding length have arrived. Raise `H2Error`."""
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
        if stream is None or stream.end_stream:
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
        received = self._received[number] = DataReceived(number, parts, end_stream=False)
        events.append(received)

    def placed(self, number: int, size: int, events: list[Any]) -> None:
        """Note that `size` bytes of a body are in its sink."""
        placed = self._placed.get(number)
        if placed is None:
            placed = self._placed[number] = DataPlaced(number, size, end_stream=False)
            events.append(placed)
        else:
            placed.size += size

    def end_body(self, stream: Stream, events: list[Any]) -> None:
        """Note that a body is complete."""
        self._streams.end(stream)
        number = stream.id
        event = self._received.get(number) or self._placed.get(number)
        if event is None:
            event = DataReceived(number, [], end_stream=True)
            events.append(event)
        event.end_stream = True

    def _charge_window(self, number: int, length: int, events: list[Any]) -> Stream | None:
        """Return the frame's stream, and charges its window; None: the frame is to be ignored."""
        streams = self._streams
        stream = streams.open.get(number)
        if stream is None:
            if number <= streams.refuse_after and not streams.was_reset(number):
                streams.reset_closed(number)
        elif stream.end_stream or length > stream.window.left:
            code = ErrorCode.STREAM_CLOSED if stream.end_stream else ErrorCode.FLOW_CONTROL_ERROR
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
