"""The frames that a connection sends, as flow-control windows allow, and the data that waits for a window.

The header blocks of gRPC's responses are encoded here.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from typing import Any, Final
from urllib.parse import quote

from triglot.transports.http2.core import frames
from triglot.transports.http2.core.events import Drained

Piece = bytes | memoryview
JOIN_BYTES: Final = 16 * 1024
"""Below this size, one copy is faster than another buffer for the socket to gather."""
EARNING_BYTES: Final = 1024
"""A smaller DATA frame earns the client nothing, unless it is the last of the available data."""
DEFAULT_TABLE: Final = 4096
"""Size of an HPACK table in bytes, as long as no SETTINGS change it (RFC 9113, 6.5.2)."""
NO_TABLE: Final = b"\x20"
"""A dynamic table size update to 0 (RFC 7541, 6.3)."""
FRAME_EARNS: Final = 2
"""WINDOW_UPDATEs that a DATA frame accounts for: of its stream and of the connection."""


class _Outgoing:
    """Data that one stream sends."""

    __slots__ = ("blocked_since", "pieces", "sent", "trailers")

    def __init__(self) -> None:
        self.pieces: list[memoryview] = []
        """Data to send.

        Few pieces. A deque would take ten times as much memory, and a client can cause many of them.
        """
        self.trailers: bytes | None = None
        """The header block that ends the stream, once it is known; b"": the data ends it."""
        self.blocked_since: float | None = None
        """When `stalled` first saw that data is waiting."""
        self.sent = 0
        """Bytes sent since then."""


class Sender:
    """The sending half of a connection.

    `done` is called with each stream whose sending side has ended, and `earned` with the number of frames that
    the client may send in reply to DATA.

    Strategy: data that waits for its stream's window stays with the stream until that window is opened. Data
    that waits for the connection's window, or for the socket, is in `_waiting`, so that opening the window
    visits only these streams.
    """

    def __init__(self, done: Callable[[int], None], earned: Callable[[int], None]) -> None:
        self.max_frame = frames.SMALLEST_MAX_FRAME
        self.unsent = 0
        """Bytes that wait for a window or for the socket."""
        self.bytes_sent = 0
        """Bytes of bodies sent so far."""
        self._table = DEFAULT_TABLE
        """Size of the client's HPACK table (SETTINGS_HEADER_TABLE_SIZE), of which header blocks use nothing."""
        self._table_update = b""
        """Begins the next header block."""
        self._done = done
        self._earned = earned
        self._paused = False
        self._window = frames.DEFAULT_WINDOW
        self._initial = frames.DEFAULT_WINDOW
        self._windows: dict[int, int] = {}
        """Remaining window of each open stream; a change of SETTINGS may make it negative."""
        self._outgoing: dict[int, _Outgoing] = {}
        """Streams with data other than one complete small response, which most streams send."""
        self._waiting: dict[int, _Outgoing] = {}
        self._out: list[Any] = []

    @property
    def has_unsent(self) -> bool:
        """Whether data waits for a window or for the socket."""
        return self.unsent > 0

    def stalled(self, now: float, seconds: float, min_sent: int) -> list[int]:
        """Return the streams whose data has waited for a window for `seconds`, with less than `min_sent` sent.

        To be called regularly. While the socket accepts nothing, no stream counts as stalled.
        """
        stalled = []
        for number, stream in self._outgoing.items():
            if not stream.pieces or self._paused:
                stream.blocked_since = None
            elif stream.blocked_since is None or stream.sent >= min_sent:
                stream.blocked_since, stream.sent = now, 0
            elif now - stream.blocked_since >= seconds:
                stalled.append(number)
        return stalled

    def take(self) -> list[Any]:
        """Return the buffers to write to the socket now, in order."""
        out, self._out = self._out, []
        return out

    def set_table(self, size: int) -> None:
        """Change the size of the client's HPACK table (SETTINGS).

        A smaller one has to be acknowledged at the beginning of the next header block (RFC 9113, 4.3.1, and RFC
        7541, 4.2), by a size that may be less.
        """
        if size < self._table:
            self._table_update = NO_TABLE
        self._table = size

    def write(self, frame: bytes) -> None:
        """Send a frame that is not subject to flow control."""
        self._out.append(frame)

    def begin(self, number: int) -> None:
        """Open the sending side of a stream."""
        self._windows[number] = self._initial

    def has(self, number: int) -> bool:
        """Return whether the sending side of the stream is open."""
        return number in self._windows

    def drop(self, number: int) -> None:
        """Close the sending side of the stream, and discard its data."""
        self._windows.pop(number, None)
        stream = self._outgoing.pop(number, None)
        if stream is not None and stream.pieces:
            self._waiting.pop(number, None)
            self.unsent -= sum(map(len, stream.pieces))

    def is_blocked(self, number: int) -> bool:
        """Return whether data of the stream is waiting."""
        stream = self._outgoing.get(number)
        return stream is not None and bool(stream.pieces)

    # --- a stream's response ---

    def headers(self, number: int, block: bytes, *, end: bool = False) -> None:
        """Send a header block; `end`: with END_STREAM."""
        if number not in self._windows:
            return  # The stream was reset, together with the data that is answered here.
        self._out.append(self._headers(number, block, frames.END_STREAM if end else 0))
        if end:
            self._end(number)

    def _headers(self, number: int, block: bytes, flags: int) -> bytes:
        if self._table_update:
            block, self._table_update = self._table_update + block, b""
        limit = frames.SMALLEST_MAX_FRAME  # Valid whatever SETTINGS the client sends later.
        if len(block) <= limit:
            return frames.head(len(block), frames.HEADERS, flags | frames.END_HEADERS, number) + block
        parts = [frames.head(limit, frames.HEADERS, flags, number), block[:limit]]
        for at in range(limit, len(block), limit):
            part = block[at : at + limit]
            last = frames.END_HEADERS if at + limit >= len(block) else 0
            parts += [frames.head(len(part), frames.CONTINUATION, last, number), part]
        return b"".join(parts)

    def data(self, number: int, pieces: Iterable[Piece]) -> bool:
        """Send a part of the body; returns whether all was sent. The pieces must not change until then."""
        if number not in self._windows:
            return True
        stream = self._outgoing.get(number)
        if stream is None:
            stream = self._outgoing[number] = _Outgoing()
        for piece in pieces:
            if len(piece):
                view = memoryview(piece).cast("B")
                stream.pieces.append(view)
                self.unsent += len(view)
        if number not in self._waiting:
            self._send(number, stream)
        return not stream.pieces

    def trailers(self, number: int, block: bytes) -> None:
        """End the response with trailers, after all of its data."""
        self._last(number, block)

    def end(self, number: int) -> None:
        """End a response without trailers, after all of its data."""
        self._last(number, b"")

    def _last(self, number: int, block: bytes) -> None:
        if number not in self._windows:
            return
        stream = self._outgoing.get(number)
        if stream is not None and stream.pieces:
            stream.trailers = block
        else:
            self._end_with(number, block)

    def _end_with(self, number: int, block: bytes) -> None:
        """Send the last frame of a stream; see `_Outgoing.trailers`."""
        if block:
            self._out.append(self._headers(number, block, frames.END_STREAM))
        else:
            self._out.append(frames.head(0, frames.DATA, frames.END_STREAM, number))
        self._end(number)

    def respond(self, number: int, headers: bytes, body: list[Any], size: int, trailers: bytes) -> None:
        """Send a complete response with `size` bytes of body, in one buffer if the windows allow."""
        room = self._windows.get(number)
        if room is None:
            return
        if (
            size > room
            or size > self._window
            or size > JOIN_BYTES
            or self._paused
            or self._table_update
            or len(headers) + len(trailers) > JOIN_BYTES
        ):
            self.headers(number, headers)
            self.data(number, [b"".join(body)] if size <= JOIN_BYTES else body)
            self.trailers(number, trailers)
            return
        self._window -= size
        self.bytes_sent += size
        pack = frames.HEAD.pack
        self._out.append(
            b"".join(
                [
                    pack(len(headers) << 8 | frames.HEADERS, frames.END_HEADERS, number),
                    headers,
                    pack(size << 8 | frames.DATA, 0, number),
                    *body,
                    pack(len(trailers) << 8 | frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, number),
                    trailers,
                ]
            )
        )
        self._end(number)

    def _end(self, number: int) -> None:
        self.drop(number)
        self._done(number)

    # --- windows ---

    def window_opened(self, number: int, by: int) -> list[Drained] | None:
        """Open the window of a stream or, with 0, of the connection; returns the streams whose data was all sent.

        None: the window exceeds the largest size allowed.
        """
        if number == 0:
            self._window += by
            return self.flush() if self._window <= frames.LARGEST_WINDOW else None
        window = self._windows.get(number)
        if window is None:
            return []
        self._windows[number] = window = window + by
        if window > frames.LARGEST_WINDOW:
            return None
        stream = self._outgoing.get(number)
        if stream is None or not stream.pieces or window <= 0 or number in self._waiting:
            return []
        return [Drained(number)] if self._send(number, stream) else []

    def set_initial_window(self, initial: int) -> bool:
        """Change the initial window of all streams (SETTINGS).

        Return False if a window exceeds the largest size allowed.
        """
        more, self._initial = initial - self._initial, initial
        for number, window in self._windows.items():
            self._windows[number] = window + more  # Only values change: the iteration goes on.
            if window + more > frames.LARGEST_WINDOW:
                return False
        for number, stream in self._outgoing.items():
            if stream.pieces and self._windows[number] > 0:
                self._waiting.setdefault(number, stream)
        return True

    def pause(self) -> None:
        """Send no more bodies: the socket's buffer is full."""
        self._paused = True

    def resume(self) -> list[Drained]:
        """Send again: the socket accepts data. Return the streams whose data was all sent."""
        self._paused = False
        return self.flush()

    def flush(self) -> list[Drained]:
        """Send what the windows allow, one stream after the other; returns the streams whose data was all sent."""
        drained = []
        for number, stream in list(self._waiting.items()):
            if self._window <= 0 or self._paused:
                break
            del self._waiting[number]  # `_send` appends it again if data remains.
            if self._send(number, stream):
                drained.append(Drained(number))
        return drained

    def _send(self, number: int, stream: _Outgoing) -> bool:
        """Send as much as the windows allow; returns whether nothing is left."""
        pieces = stream.pieces
        while pieces:
            window = self._windows[number]
            room = 0 if self._paused else min(self._window, window, self.max_frame)
            if room <= 0:
                if window > 0:
                    self._waiting[number] = stream
                return False
            if len(pieces[0]) > room == self.max_frame:
                self._send_frames(number, stream)
            else:
                self._send_frame(number, stream, room)
        if stream.trailers is not None:
            self._end_with(number, stream.trailers)
        return True

    def _send_frames(self, number: int, stream: _Outgoing) -> None:
        """Send a large piece in frames of the largest size, as many as the windows allow: at least one."""
        pieces, size = stream.pieces, self.max_frame
        piece = pieces[0]
        count = min(self._window, self._windows[number], len(piece)) // size
        head = frames.head(size, frames.DATA, 0, number)
        for at in range(0, count * size, size):
            self._out += head, piece[at : at + size]
        if count * size == len(piece):
            pieces.pop(0)
        else:
            pieces[0] = piece[count * size :]
        self._count_sent(number, stream, count * size)
        self._earned(count * FRAME_EARNS)

    def _count_sent(self, number: int, stream: _Outgoing, size: int) -> None:
        self._window -= size
        self._windows[number] -= size
        self.unsent -= size
        self.bytes_sent += size
        stream.sent += size

    def _send_frame(self, number: int, stream: _Outgoing, room: int) -> None:
        pieces = stream.pieces
        taken: list[Piece] = []
        size = 0
        while pieces and size < room:
            piece = pieces[0]
            if len(piece) > room - size:
                taken.append(piece[: room - size])
                pieces[0] = piece[room - size :]
                size = room
            else:
                taken.append(pieces.pop(0))
                size += len(piece)
        self._count_sent(number, stream, size)
        if size >= EARNING_BYTES or not pieces:
            self._earned(FRAME_EARNS)
        head = frames.head(size, frames.DATA, 0, number)
        if size < JOIN_BYTES:
            self._out.append(b"".join([head, *taken]))
        else:
            self._out += [head, *taken]


# --- header blocks of responses (gRPC over HTTP/2: Responses) ---

CODINGS: Final = ("identity", "deflate", "gzip")
_PRINTABLE: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


def _literal(name: bytes, value: bytes) -> bytes:
    """Return a literal field without indexing, whose encoding does not depend on the dynamic table."""
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def _length(count: int) -> bytes:
    """Return an HPACK integer with a prefix of seven bits (RFC 7541, 5.1)."""
    if count < 127:
        return bytes((count,))
    rest, encoded = count - 127, bytearray((127,))
    while rest >= 128:
        encoded.append(rest & 127 | 128)
        rest >>= 7
    encoded.append(rest)
    return bytes(encoded)


_STATUS_200: Final = b"\x88"
"""`:status: 200`, an index into HPACK's static table."""
_CODINGS: Final = _literal(b"grpc-accept-encoding", ",".join(CODINGS).encode())
_HEAD: Final = _STATUS_200 + _literal(b"content-type", b"application/grpc") + _CODINGS
OK_TRAILERS: Final = _literal(b"grpc-status", b"0")


def response_head() -> bytes:
    """Return the header block that precedes a response's messages."""
    return _HEAD


def compressed_head(coding: str) -> bytes:
    """As `response_head`, for messages compressed with `coding`."""
    return _HEAD + _literal(b"grpc-encoding", coding.encode())


def trailers(code: int, message: str = "", metadata: Iterable[tuple[str, str | bytes]] = ()) -> bytes:
    """Return the header block that ends a response."""
    if not code and not metadata:
        return OK_TRAILERS
    block = _literal(b"grpc-status", str(code).encode())
    if message:
        block += _literal(b"grpc-message", quote(message, safe=_PRINTABLE).encode())
    for name, value in metadata:
        text = base64.b64encode(value).rstrip(b"=") if isinstance(value, bytes) else value.encode("latin-1")
        block += _literal(name.encode("latin-1"), text)
    return block


def trailers_only(code: int, message: str, metadata: Iterable[tuple[str, str | bytes]] = ()) -> bytes:
    """Return the header block of a Trailers-Only response: an error before any message."""
    return _HEAD + trailers(code, message, metadata)


def block_of(status: int, fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the header block of any response; names in lower case."""
    return _literal(b":status", str(status).encode()) + b"".join(_literal(*field) for field in fields)
