"""Decodes received header blocks, and caches the results while they stay valid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from triglot.transports.http2.core.fields import Field, header_list_size
from triglot.transports.http2.core.hpack import Decoder

T = TypeVar("T")

MAX_CACHED_BLOCK = 1024
MAX_CACHED_BYTES = 32 * 1024
"""Limit on the fields of one connection's cached blocks, in bytes as HTTP/2 counts them (RFC 9113, 6.5.2)."""


class MalformedRequest(Exception):
    """The fields are not a valid request: the stream ends with PROTOCOL_ERROR, others continue."""


class HeaderBlocks(Generic[T]):
    """Decodes the header blocks of one connection, in order; `read` converts a request's fields.

    A block has the same meaning as long as the dynamic table does not change: the blocks that clients repeat
    call after call, which consist of indices into the table, are looked up.
    """

    def __init__(self, read: Callable[[Sequence[Field]], T], max_bytes: int) -> None:
        self._read = read
        self._decoder = Decoder(max_bytes)
        self._cached: dict[bytes, T] = {}
        self._cached_bytes = 0

    def decode(self, block: bytes) -> T:
        """Returns the result of `read` for a block's fields.

        Raises `HpackError`, after which no further block can be decoded, and what `read` raises.
        """
        known = self._cached.get(block)
        if known is not None:
            return known
        fields = self._decode(block)
        value = self._read(fields)
        # A block that changes the table has an effect besides its result, so it is not cached.
        if self._is_same and len(block) <= MAX_CACHED_BLOCK:
            self._cached_bytes += header_list_size(fields)
            if self._cached_bytes > MAX_CACHED_BYTES:
                self._clear_cache()
                self._cached_bytes = header_list_size(fields)
            self._cached[block] = value
        return value

    def check_trailers(self, block: bytes) -> None:
        """Decode trailers, whose fields are ignored. Raises as `decode`, and `MalformedRequest`."""
        if any(field.name.value[:1] == b":" for field in self._decode(block)):
            raise MalformedRequest("a pseudo-header in trailers")

    def _decode(self, block: bytes) -> list[Field]:
        changes = self._decoder.changes
        fields = self._decoder.decode(block)
        self._is_same = changes == self._decoder.changes
        if not self._is_same and self._cached:
            self._clear_cache()
        return fields

    def _clear_cache(self) -> None:
        self._cached.clear()
        self._cached_bytes = 0
