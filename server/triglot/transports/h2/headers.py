"""Header blocks that are received: decoded once, and remembered while they mean the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import hpack

T = TypeVar("T")
Fields = list[tuple[bytes, bytes]]

LONGEST_REMEMBERED = 1024
MOST_REMEMBERED_BYTES = 128 * 1024
"""Of all that one connection's remembered blocks decode to, as HTTP/2 counts it (RFC 9113, 6.5.2)."""
FIELD_BYTES = 32
"""What HTTP/2 counts for each field beside its name and its value."""
_RESIZE = 0x20
"""A block that begins so changes the table's size (RFC 7541, 6.3)."""


class MalformedRequest(Exception):
    """The fields are no request: the stream ends with PROTOCOL_ERROR, others go on."""


class HeaderBlocks(Generic[T]):
    """Decodes the blocks of one connection, in their order; `read` makes of the fields what the user wants.

    A block means the same as long as nothing enters the dynamic table or leaves it: what clients send call after
    call, indices into the table alone, is looked up. Raises `hpack.HPACKError`, after which no further block
    can be decoded, and what `read` raises.
    """

    def __init__(self, read: Callable[[Fields], T], most_bytes: int) -> None:
        self._read = read
        self._decoder = hpack.Decoder(most_bytes)
        self._remembered: dict[bytes, T] = {}
        self._remembered_bytes = 0
        self.known: Callable[[bytes], T | None] = self._remembered.get
        """What a block means that was decoded before and still means the same; None: it is to be decoded."""

    def decode(self, block: bytes, *, trailers: bool = False) -> T | None:
        """What `read` makes of a block's fields; None of `trailers`."""
        known = self._remembered.get(block)
        if known is not None and not trailers:
            return known
        table = self._decoder.header_table.dynamic_entries
        count, newest = len(table), table[0] if table else None
        fields = self._decoder.decode(block, raw=True)
        if len(table) != count or (count and table[0] is not newest):
            self._forget()
        if trailers:
            _check_trailers(fields)
            return None
        value = self._read([(bytes(name), bytes(text)) for name, text in fields])
        # The block itself may have changed the table, or its size: decoding it again would do more than this.
        same = len(table) == count and (not count or table[0] is newest) and block[0] & 0xE0 != _RESIZE
        if same and len(block) <= LONGEST_REMEMBERED:
            size = header_list_size(fields)
            if self._remembered_bytes + size > MOST_REMEMBERED_BYTES:
                self._forget()
            self._remembered[block] = value
            self._remembered_bytes += size
        return value

    def _forget(self) -> None:
        self._remembered.clear()
        self._remembered_bytes = 0


def header_list_size(fields: Iterable[tuple[bytes, bytes]]) -> int:
    """Bytes of a block's fields, as SETTINGS_MAX_HEADER_LIST_SIZE counts them (RFC 9113, 6.5.2)."""
    return sum([FIELD_BYTES + len(name) + len(value) for name, value in fields])


def _check_trailers(fields: Iterable[tuple[bytes, bytes]]) -> None:
    for name, _ in fields:
        if name[:1] == b":":
            raise MalformedRequest("a pseudo-header in trailers")
