"""Header blocks that are received: decoded once, and remembered while they mean the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from triglot.transports.http2.core.fields import Field, header_list_size
from triglot.transports.http2.core.hpack import Decoder

T = TypeVar("T")

LONGEST_REMEMBERED = 1024
MOST_REMEMBERED_BYTES = 32 * 1024
"""Of all that one connection's remembered blocks decode to, as HTTP/2 counts it (RFC 9113, 6.5.2)."""


class MalformedRequest(Exception):
    """The fields are no request: the stream ends with PROTOCOL_ERROR, others go on."""


class HeaderBlocks(Generic[T]):
    """Decodes the blocks of one connection, in their order; `read` makes of the fields what the user wants.

    A block means the same as long as nothing enters the dynamic table or leaves it: what clients send call after
    call, indices into the table alone, is looked up.
    """

    def __init__(self, read: Callable[[Sequence[Field]], T], most_bytes: int) -> None:
        self._read = read
        self._decoder = Decoder(most_bytes)
        self._remembered: dict[bytes, T] = {}
        self._remembered_bytes = 0

    def decode(self, block: bytes) -> T:
        """What `read` makes of a block's fields.

        Raises `HpackError`, after which no further block can be decoded, and what `read` raises.
        """
        known = self._remembered.get(block)
        if known is not None:
            return known
        fields = self._decode(block)
        value = self._read(fields)
        # A block that changes the table does more than to mean this.
        if self._is_same and len(block) <= LONGEST_REMEMBERED:
            self._remembered_bytes += header_list_size(fields)
            if self._remembered_bytes > MOST_REMEMBERED_BYTES:
                self._forget()
                self._remembered_bytes = header_list_size(fields)
            self._remembered[block] = value
        return value

    def check_trailers(self, block: bytes) -> None:
        """Decode a block that nobody reads. Raises as `decode`, and `MalformedRequest`."""
        if any(field.name.value[:1] == b":" for field in self._decode(block)):
            raise MalformedRequest("a pseudo-header in trailers")

    def _decode(self, block: bytes) -> list[Field]:
        changes = self._decoder.changes
        fields = self._decoder.decode(block)
        self._is_same = changes == self._decoder.changes
        if not self._is_same and self._remembered:
            self._forget()
        return fields

    def _forget(self) -> None:
        self._remembered.clear()
        self._remembered_bytes = 0
