"""What leaves a connection: frames, as far as the other side's windows allow, and what waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from triglot.transports.http2.core import frames
from triglot.transports.http2.core.events import Drained

Piece = bytes | memoryview
JOIN_BYTES = 16 * 1024
"""Below this, one copy is quicker than another buffer for the socket to gather."""
WORTH_BYTES = 1024
"""A smaller frame earns the other side nothing, unless it is the last of what was there."""
FRAME_EARNS = 2
"""Room is made again in two windows."""


class _Outgoing:
    """What leaves on one stream."""

    __slots__ = ("left", "pieces", "sent", "trailers", "waits_since")

    def __init__(self, left: int) -> None:
        self.left = left
        """Of the stream's window; a change of settings may make it negative."""
        self.pieces: list[memoryview] = []
        """Few: a deque takes ten times as much memory, which a client can have many of."""
        self.trailers: bytes | None = None
        """The frame that ends the stream, once it is known."""
        self.waits_since: float | None = None
        """When `stalled` first saw that something waits."""
        self.sent = 0
        """Bytes that have left since then."""


class Sender:
    """The sending half of a connection.

    `done` is told of each stream on which nothing is to be sent any more, and `earned` how many frames a DATA
    frame may be answered with.

    Strategy: what its own stream's window keeps lies with the stream, until that window is opened. What the
    connection's window or a full socket keeps waits in a row, so that opening it looks at what can leave only.
    """

    def __init__(self, done: Callable[[int], None], earned: Callable[[int], None]) -> None:
        self.max_frame = frames.SMALLEST_MAX_FRAME
        self.unsent = 0
        """Bytes that wait for a window or for the socket."""
        self.moved = 0
        """Bytes of bodies that have left."""
        self._done = done
        self._earned = earned
        self._paused = False
        self._left = frames.DEFAULT_WINDOW
        self._initial = frames.DEFAULT_WINDOW
        self._streams: dict[int, _Outgoing | None] = {}
        """None: nothing of its answer has left, and no room was made; most never need more."""
        self._waiting: dict[int, _Outgoing] = {}
        self._out: list[Any] = []

    @property
    def waits(self) -> bool:
        """Whether something waits for a window or for the socket."""
        return self.unsent > 0

    def stalled(self, now: float, seconds: float, least: int) -> list[int]:
        """The streams on which something has waited for a window, and less than `least` bytes left, for so long.

        To be asked regularly. While the socket takes nothing, no stream is to blame.
        """
        stalled = []
        for number, stream in self._streams.items():
            if stream is None:
                continue
            if not stream.pieces or self._paused:
                stream.waits_since = None
            elif stream.waits_since is None or stream.sent >= least:
                stream.waits_since, stream.sent = now, 0
            elif now - stream.waits_since >= seconds:
                stalled.append(number)
        return stalled

    def take(self) -> list[Any]:
        """What is to be written to the socket now, buffers in their order."""
        out, self._out = self._out, []
        return out

    def write(self, frame: bytes) -> None:
        """A frame that no window is for."""
        self._out.append(frame)

    def begin(self, number: int) -> None:
        """A stream on which an answer is to be sent."""
        self._streams[number] = None

    def _stream(self, number: int) -> _Outgoing:
        stream = self._streams[number]
        if stream is None:
            stream = self._streams[number] = _Outgoing(self._initial)
        return stream

    def has(self, number: int) -> bool:
        """Whether more is to be sent on the stream."""
        return number in self._streams

    def drop(self, number: int) -> None:
        """Nothing more is to be sent on the stream."""
        stream = self._streams.pop(number, None)
        self._waiting.pop(number, None)
        if stream is not None and stream.pieces:
            self.unsent -= sum(map(len, stream.pieces))

    def unfinished(self, number: int) -> bool:
        """Whether a part of the body waits."""
        stream = self._streams.get(number)
        return stream is not None and bool(stream.pieces)

    # --- a stream's answer ---

    def headers(self, number: int, block: bytes, *, end: bool = False) -> None:
        """A header block; `end`: it is all that is said."""
        if number not in self._streams:
            return  # The stream was reset; that came together with what is answered.
        self._out.append(self._headers(number, block, frames.END_STREAM if end else 0))
        if end:
            self._end(number)

    def _headers(self, number: int, block: bytes, flags: int) -> bytes:
        most = frames.SMALLEST_MAX_FRAME  # The other side takes it, whatever it says later.
        if len(block) <= most:
            return frames.head(len(block), frames.HEADERS, flags | frames.END_HEADERS, number) + block
        parts = [frames.head(most, frames.HEADERS, flags, number), block[:most]]
        for at in range(most, len(block), most):
            part = block[at : at + most]
            last = frames.END_HEADERS if at + most >= len(block) else 0
            parts += [frames.head(len(part), frames.CONTINUATION, last, number), part]
        return b"".join(parts)

    def data(self, number: int, pieces: Iterable[Piece]) -> bool:
        """A part of the body; whether all of it has left. The pieces must stay as they are until then."""
        if number not in self._streams:
            return True
        stream = self._stream(number)
        for piece in pieces:
            if len(piece):
                view = memoryview(piece).cast("B")
                stream.pieces.append(view)
                self.unsent += len(view)
        if number not in self._waiting:
            self._send(number, stream)
        return not stream.pieces

    def trailers(self, number: int, block: bytes) -> None:
        """The end of the answer, after all of its data."""
        self._last(number, self._headers(number, block, frames.END_STREAM))

    def end(self, number: int) -> None:
        """The end of an answer without trailers, after all of its data."""
        self._last(number, frames.head(0, frames.DATA, frames.END_STREAM, number))

    def _last(self, number: int, frame: bytes) -> None:
        if number not in self._streams:
            return
        stream = self._streams[number]
        if stream is not None and stream.pieces:
            stream.trailers = frame
        else:
            self._out.append(frame)
            self._end(number)

    def respond(self, number: int, headers: bytes, body: list[Any], size: int, trailers: bytes) -> None:
        """A whole answer of `size` bytes in pieces, in one go where the windows allow."""
        if number not in self._streams:
            return
        stream = self._streams[number]
        room = self._initial if stream is None else stream.left
        if (
            size > room
            or size > self._left
            or size > JOIN_BYTES
            or self._paused
            or len(headers) + len(trailers) > JOIN_BYTES
        ):
            self.headers(number, headers)
            self.data(number, [b"".join(body)] if size <= JOIN_BYTES else body)
            self.trailers(number, trailers)
            return
        self._left -= size
        self.moved += size
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
        if stream is None:
            del self._streams[number]
            self._done(number)
        else:
            self._end(number)

    def _end(self, number: int) -> None:
        self.drop(number)
        self._done(number)

    # --- windows ---

    def opened(self, number: int, by: int) -> list[Drained] | None:
        """More room, on a stream or, with 0, for all of them: who has sent all; None: more than there can be."""
        if number == 0:
            self._left += by
            return self.flush() if self._left <= frames.LARGEST_WINDOW else None
        if number not in self._streams:
            return []
        stream = self._stream(number)
        stream.left += by
        if stream.left > frames.LARGEST_WINDOW:
            return None
        if stream.pieces and stream.left > 0 and number not in self._waiting and self._send(number, stream):
            return [Drained(number)]
        return []

    def resize(self, initial: int) -> bool:
        """The room that every stream begins with is another now; False: more than there can be."""
        more, self._initial = initial - self._initial, initial
        for number, stream in self._streams.items():
            if stream is None:
                continue
            stream.left += more
            if stream.left > frames.LARGEST_WINDOW:
                return False
            if stream.pieces and stream.left > 0:
                self._waiting.setdefault(number, stream)
        return True

    def pause(self) -> None:
        """The socket takes no more bodies."""
        self._paused = True

    def resume(self) -> list[Drained]:
        """The socket takes more; who has sent all."""
        self._paused = False
        return self.flush()

    def flush(self) -> list[Drained]:
        """Send what the windows allow now, of one stream after the other; which of them have sent all."""
        drained = []
        for number, stream in list(self._waiting.items()):
            if self._left <= 0 or self._paused:
                break
            del self._waiting[number]  # What cannot leave goes to the end of the row.
            if self._send(number, stream):
                drained.append(Drained(number))
        return drained

    def _send(self, number: int, stream: _Outgoing) -> bool:
        """As much as the windows allow; whether nothing is left."""
        pieces = stream.pieces
        while pieces:
            room = 0 if self._paused else min(self._left, stream.left, self.max_frame)
            if room <= 0:
                if stream.left > 0:
                    self._waiting[number] = stream
                return False
            if len(pieces[0]) > room == self.max_frame:
                self._send_frames(number, stream)
            else:
                self._send_frame(number, stream, room)
        if stream.trailers is not None:
            self._out.append(stream.trailers)
            self._end(number)
        return True

    def _send_frames(self, number: int, stream: _Outgoing) -> None:
        """Of a large piece, as many frames of the largest size as the windows allow; there is room for one."""
        pieces, size = stream.pieces, self.max_frame
        piece = pieces[0]
        count = min(self._left, stream.left, len(piece)) // size
        head = frames.head(size, frames.DATA, 0, number)
        for at in range(0, count * size, size):
            self._out += head, piece[at : at + size]
        if count * size == len(piece):
            pieces.pop(0)
        else:
            pieces[0] = piece[count * size :]
        self._leaves(stream, count * size)
        self._earned(count * FRAME_EARNS)

    def _leaves(self, stream: _Outgoing, size: int) -> None:
        self._left -= size
        self.unsent -= size
        self.moved += size
        stream.left -= size
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
        self._leaves(stream, size)
        if size >= WORTH_BYTES or not pieces:
            self._earned(FRAME_EARNS)
        head = frames.head(size, frames.DATA, 0, number)
        if size < JOIN_BYTES:
            self._out.append(b"".join([head, *taken]))
        else:
            self._out += [head, *taken]
