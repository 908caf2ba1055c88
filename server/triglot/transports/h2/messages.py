"""gRPC's length-prefixed messages, cut out of a body (gRPC over HTTP/2: Length-Prefixed-Message)."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from triglot.core.errors import Internal, PayloadTooLarge, Unimplemented
from triglot.transports.inflate import INFLATED_WORK, WINDOW_BITS
from triglot.transports.off_loop import run_sized

PREFIX_BYTES = 5
IN_PLACE_BYTES = 64 * 1024
"""From this size on a message is received straight into a buffer of its own."""
RESERVED_BYTES = 64 * 1024 * 1024
"""So much room is taken for a message that says it is large; more, when as much of it has come."""
_PREFIX = struct.Struct(">BL")


class Packed:
    """A compressed message."""

    __slots__ = ("data",)

    def __init__(self, data: bytes | memoryview) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)


Message = bytes | memoryview | Packed


def prefix(size: int) -> bytes:
    """What goes before a message of `size` bytes that is not compressed."""
    return _PREFIX.pack(False, size)


class MessageReader:
    """Cuts one stream's body into messages; a `Sink` for the large ones. `most`: bytes of one message."""

    __slots__ = ("_at", "_head", "_left", "_message", "_most", "_packed", "_small", "messages")

    def __init__(self, most: int) -> None:
        self.messages: list[Message] = []
        """Those that are complete, in their order; whoever takes them empties it."""
        self._most = most
        self._head = b""
        self._left = 0
        self._packed = False
        self._small = bytearray()
        self._message: memoryview | None = None
        self._at = 0

    @property
    def between(self) -> bool:
        """Whether no message has begun that is not complete."""
        return not self._head

    def feed(self, data: memoryview) -> None:
        """A part of the body. Raises `PayloadTooLarge`, and `Internal` for a flag that does not exist."""
        size = len(data)
        if not self._head and size >= PREFIX_BYTES:
            packed, length = _PREFIX.unpack_from(data)
            if size == PREFIX_BYTES + length and not packed and length <= self._most:
                self.messages.append(bytes(data[PREFIX_BYTES:]))  # The one whole message that most bodies are.
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
        packed, length = _PREFIX.unpack(self._head)
        if packed > 1:
            raise Internal(f"a message's compressed flag is {packed}, expected 0 or 1")
        if length > self._most:
            raise PayloadTooLarge(f"Received message larger than max ({length} vs. {self._most})")
        self._packed, self._left, self._at = bool(packed), length, 0
        if not length:
            self._complete(b"")
        elif length >= IN_PLACE_BYTES:
            self._message = _room(min(length, RESERVED_BYTES))

    def room(self) -> memoryview | None:
        """Where the rest of a large message goes, or the next part of it."""
        return None if self._message is None else self._message[self._at :]

    def filled(self, count: int) -> None:
        """So much of it is there."""
        assert self._message is not None
        self._at += count
        self._left -= count
        if not self._left:
            self._complete(self._message.toreadonly())
        elif self._at == len(self._message):
            more = _room(min(2 * self._at, self._at + self._left))
            more[: self._at] = self._message
            self._message = more

    def _complete(self, message: bytes | memoryview) -> None:
        self._head, self._message = b"", None
        self._small.clear()
        self.messages.append(Packed(message) if self._packed else message)


def _room(size: int) -> memoryview:
    # Unlike a bytearray it is not filled with zeros first, so what does not come takes no memory.
    return np.empty(size, np.uint8).data


async def unpacked(message: Message, encoding: str, most: int) -> bytes | memoryview:
    """The message as it was before it was compressed with `encoding`; see `inflate`."""
    if not isinstance(message, Packed):
        return message
    return await run_sized(INFLATED_WORK * len(message), inflate, message.data, encoding, most)


def inflate(message: bytes | memoryview, encoding: str, most: int) -> bytes:
    """The message that was compressed; never more than `most` bytes of it are made.

    Raises `Internal` for damaged data, `Unimplemented` for another coding, `PayloadTooLarge` for too large a one.
    """
    if encoding == "identity":
        raise Internal("a message is marked as compressed, and grpc-encoding names no coding")
    if encoding not in WINDOW_BITS:
        raise Unimplemented(f"Compression algorithm '{encoding}' is not supported, expected gzip or deflate")
    inflater = zlib.decompressobj(WINDOW_BITS[encoding])
    try:
        inflated = inflater.decompress(message, most + 1)
    except zlib.error as error:
        raise Internal(f"a message cannot be decompressed as {encoding}: {error}") from None
    if len(inflated) > most:
        raise PayloadTooLarge(f"Received message larger than max ({len(inflated)} vs. {most})")
    if not inflater.eof or inflater.unused_data:
        raise Internal(f"a message ends too {'late' if inflater.eof else 'early'}, as {encoding}")
    return inflated
