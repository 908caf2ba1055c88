"""gRPC's length-prefixed messages, and their reader (gRPC over HTTP/2: Length-Prefixed-Message)."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

from triglot.core.errors import Internal, PayloadTooLarge, QueueFull, Unimplemented
from triglot.transports.growing import GrowingBytes
from triglot.transports.http2.core.streams import BodySink
from triglot.transports.inflate import INFLATED_WORK, WINDOW_BITS, Grow, inflate_stream
from triglot.transports.off_loop import run_sized
from triglot.transports.request_bytes import Reservation

IN_PLACE_BYTES = 64 * 1024
"""Messages of this size or larger are received straight into a buffer of their own."""
RESERVED_BYTES = 64 * 1024 * 1024
"""Largest buffer allocated for the length that a message declares; it grows as data arrives."""
PREFIX = struct.Struct(">BL")
"""The prefix of a message: compressed flag, length."""
PREFIX_BYTES = PREFIX.size


class CompressedMessage:
    """A compressed message."""

    __slots__ = ("data",)

    def __init__(self, data: bytes | memoryview) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)


Message = bytes | memoryview | CompressedMessage
Take = Callable[[int, int], tuple[memoryview, memoryview]]


class MessageReader(BodySink):
    """Splits one stream's body into messages; the `BodySink` of large ones.

    `max_size`: largest message in bytes. `take` allocates buffers for large messages, see `BufferPool.take`.
    """

    __slots__ = (
        "_at",
        "_compressed",
        "_head",
        "_kept",
        "_left",
        "_max_size",
        "_message",
        "_small",
        "_take",
        "messages",
    )

    def __init__(self, max_size: int, take: Take) -> None:
        self.messages: list[Message] = []
        """Complete messages in order; the caller that takes them empties the list."""
        self._max_size = max_size
        self._take = take
        self._head = b""
        self._left = 0
        self._compressed = False
        self._small = bytearray()
        self._message: memoryview | None = None
        self._kept = memoryview(b"")
        self._at = 0

    @property
    def is_complete(self) -> bool:
        """Whether the body so far ends with a complete message."""
        return not self._head

    def feed(self, data: memoryview) -> None:
        """Read a part of the body.

        Raise `PayloadTooLarge`, `Internal` for an invalid compressed flag, and `QueueFull` when memory is short.
        """
        size = len(data)
        if self._message is not None and size <= len(self._message) - self._at:
            self._message[self._at : self._at + size] = data
            self.filled(size)
            return
        if not self._head and size >= PREFIX_BYTES:
            compressed, length = PREFIX.unpack_from(data)
            if size == PREFIX_BYTES + length and not compressed and length <= self._max_size:
                self.messages.append(bytes(data[PREFIX_BYTES:]))  # Most bodies are one whole message.
                return
        while data:
            if len(self._head) < PREFIX_BYTES:
                count = PREFIX_BYTES - len(self._head)
                self._head += bytes(data[:count])
                data = data[count:]
                if len(self._head) == PREFIX_BYTES:
                    self._begin()
                continue
            count = min(self._left, len(data))
            if self._message is not None:
                if self._at == len(self._message):
                    self._grow()
                count = min(count, len(self._message) - self._at)
                self._message[self._at : self._at + count] = data[:count]
                self.filled(count)
            else:
                self._small += data[:count]
                self._left -= count
                if not self._left:
                    self._complete(bytes(self._small))
            data = data[count:]

    def _begin(self) -> None:
        compressed, length = PREFIX.unpack(self._head)
        if compressed > 1:
            raise Internal(f"a message's compressed flag is {compressed}, expected 0 or 1")
        if length > self._max_size:
            raise PayloadTooLarge(f"Received message larger than max ({length} vs. {self._max_size})")
        self._compressed, self._left, self._at = bool(compressed), length, 0
        if not length:
            self._complete(b"")
        elif length >= IN_PLACE_BYTES:
            self._message, self._kept = self._memory(min(length, RESERVED_BYTES), length)

    def _grow(self) -> None:
        total = self._at + self._left
        more, kept = self._memory(min(2 * self._at, total), total)
        more[: self._at] = self._kept
        self._message, self._kept = more, kept

    def _memory(self, size: int, total: int) -> tuple[memoryview, memoryview]:
        try:
            return self._take(size, total)
        except MemoryError:
            raise QueueFull(f"not enough memory for a message of {total} bytes") from None

    def room(self) -> memoryview | None:
        """See `BodySink`. None unless a large message is incomplete and its buffer is not full."""
        if self._message is None or self._at == len(self._message):
            return None
        return self._message[self._at :]

    def filled(self, count: int) -> None:
        """See `BodySink`."""
        assert self._message is not None
        self._at += count
        self._left -= count
        if not self._left:
            self._complete(self._kept)

    def _complete(self, message: bytes | memoryview) -> None:
        self._head, self._message, self._kept = b"", None, memoryview(b"")
        self._small.clear()
        self.messages.append(CompressedMessage(message) if self._compressed else message)


async def decompressed(
    message: Message, encoding: str, max_size: int, reserved: Reservation
) -> bytes | memoryview:
    """Return the message, decompressed as `encoding` says; see `inflate`."""
    if not isinstance(message, CompressedMessage):
        return message
    work = INFLATED_WORK * len(message)
    return await run_sized(work, inflate, message.data, encoding, max_size, reserved.grow)


def inflate(message: bytes | memoryview, encoding: str, max_size: int, grow: Grow) -> bytes:
    """Return the decompressed message; never makes more than `max_size` bytes of it.

    Raise `Internal` for damaged data, `PayloadTooLarge`, what `window_bits_of` raises, and what `grow` raises,
    which is called with the size of each part.
    """
    window_bits = window_bits_of(encoding)
    inflated = GrowingBytes()
    try:
        rest, is_complete = inflate_stream(memoryview(message), window_bits, max_size, grow, inflated)
    except zlib.error as error:
        raise Internal(f"a message cannot be decompressed as {encoding}: {error}") from None
    if len(inflated) > max_size:
        raise PayloadTooLarge(f"Received message larger than max ({len(inflated)} vs. {max_size})")
    if rest or not is_complete:
        raise Internal(f"a {encoding} message {'has data after its end' if is_complete else 'is truncated'}")
    return inflated.take()


def window_bits_of(encoding: str) -> int:
    """Return zlib's parameter for grpc-encoding.

    Raise `Internal` for identity, `Unimplemented` for unknown ones.
    """
    if encoding == "identity":
        raise Internal("a message is marked as compressed, but grpc-encoding names no algorithm")
    if encoding not in WINDOW_BITS:
        raise Unimplemented(f"Compression algorithm '{encoding}' is not supported, expected gzip or deflate")
    return WINDOW_BITS[encoding]
