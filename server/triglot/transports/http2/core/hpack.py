"""HPACK decoder (RFC 7541). The tables hold `Field` objects, each classified once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from triglot.core.compiling import mypyc_attr
from triglot.transports.http2.core.fields import (
    CONTENT_TYPE,
    CREDENTIAL,
    OMITTED,
    Field,
    Name,
    field_of,
    name_of,
    omitted,
)
from triglot.transports.http2.core.limits import MAX_FIELDS, MAX_FIELDS_BYTES

TABLE_BYTES: Final = 4096
"""Largest dynamic table, the default unless our SETTINGS change it (RFC 9113, 6.5.2)."""
MAX_INTEGER_BITS: Final = 28
EOS: Final = 256
MAX_PADDING_BITS: Final = 7
_STATIC_TABLE: Final = """
:authority
:method GET
:method POST
:path /
:path /index.html
:scheme http
:scheme https
:status 200
:status 204
:status 206
:status 304
:status 400
:status 404
:status 500
accept-charset
accept-encoding gzip, deflate
accept-language
accept-ranges
accept
access-control-allow-origin
age
allow
authorization
cache-control
content-disposition
content-encoding
content-language
content-length
content-location
content-range
content-type
cookie
date
etag
expect
expires
from
host
if-match
if-modified-since
if-none-match
if-range
if-unmodified-since
last-modified
link
location
max-forwards
proxy-authenticate
proxy-authorization
range
referer
refresh
retry-after
server
set-cookie
strict-transport-security
transfer-encoding
user-agent
vary
via
www-authenticate
"""
"""The static table (RFC 7541, appendix A)."""
_ENTRIES: Final = [line.encode().partition(b" ") for line in _STATIC_TABLE.split("\n")[1:-1]]
_STATIC: Final = [Field(Name(name), value) for name, _, value in _ENTRIES]
_STATIC_COUNT: Final = len(_STATIC)
MAX_WAITING: Final = 64 * 1024
"""Bytes of a block's last field that are kept until the rest of the field arrives; of a longer one a part is."""
MEASURED: Final = 1024
"""Bytes that are kept of a name or value so long that only its length matters."""
_INDICES: Final = bytes(range(0x81, 0xFF))
"""Indexed fields that take one byte each (6.1)."""
_BEYOND: Final = "an index beyond the tables"
_ENDS_EARLY: Final = "a block that ends too early"


@mypyc_attr(native_class=False)
class HpackError(Exception):
    """The block is not valid HPACK: blocks after it cannot be decoded either."""


class Decoder:
    """Decodes the header blocks of one connection, in order."""

    def __init__(self) -> None:
        self._entries = _STATIC[::-1]
        """Both tables in reverse order, so that an index counts from the end (2.3.3)."""
        self._bytes = 0
        self._room = TABLE_BYTES

    def decode(self, block: bytes) -> tuple[tuple[Field, ...], list[Field]]:
        """Return the fields of a block: first the table entries that it begins with, then the others.

        Clients that repeat fields send them as entries, so most blocks begin alike. Of more fields than any
        request may have, most are only counted: see `reduced`. Raise `HpackError`.
        """
        entries = self._entries
        end = min(len(block) - len(block.lstrip(_INDICES)), MAX_FIELDS)
        try:
            start = tuple([entries[0x80 - byte] for byte in block[:end]])
        except IndexError:
            raise HpackError(_BEYOND) from None
        fields: list[Field] = []
        try:
            self.decode_more(block, end, fields, begun=end > 0)
        except IndexError:
            raise HpackError(_ENDS_EARLY) from None
        return start, fields

    def decode_more(self, block: bytes, at: int, fields: list[Field], *, begun: bool) -> None:
        """Add the fields from `at` on to those before them; `begun`: there was one.

        Raise `HpackError`, and `IndexError` if the last one is incomplete.
        """
        end = len(block)
        while at < end:
            first = block[at]
            if first & 0x80:  # An indexed field (6.1).
                index, at = _integer(block, at, 0x7F)
                field = self.entry(index)
            elif first & 0xE0 == 0x20:
                if begun or fields:
                    raise HpackError("a change of the table's size behind a field")
                size, at = _integer(block, at, 0x1F)
                self._resize(size)
                continue
            else:
                is_added = first & 0x40  # Else without indexing, or never indexed (6.2.2, 6.2.3).
                mask = 0x3F if is_added else 0x0F
                if first & mask:
                    index, at = _integer(block, at, mask)
                    name = self.entry(index).name
                else:
                    text, at = _string(block, at + 1)
                    name = name_of(text)
                value, at = _string(block, at)
                if is_added:
                    field = field_of(name, value)
                    self._add(field)
                else:
                    field = field_of(name, value) if name.kind == CREDENTIAL else Field(name, value)
            fields.append(field)
            if len(fields) > MAX_FIELDS:
                fields[:] = reduced(fields)

    def entry(self, index: int) -> Field:
        """Return an entry of the tables. Raise `HpackError`."""
        if not 0 < index <= len(self._entries):
            raise HpackError(_BEYOND)
        return self._entries[-index]

    def _add(self, field: Field) -> None:
        self._entries.insert(len(self._entries) - _STATIC_COUNT, field)
        self._bytes += field.size
        self._evict()  # A field larger than the table empties it (4.4).

    def add_large(self) -> None:
        """Add a field larger than the table, which empties it (4.4)."""
        del self._entries[: len(self._entries) - _STATIC_COUNT]
        self._bytes = 0

    def _resize(self, size: int) -> None:
        if size > TABLE_BYTES:
            raise HpackError(f"a table of {size} bytes, at most {TABLE_BYTES} are taken")
        self._room = size
        self._evict()

    def _evict(self) -> None:
        while self._bytes > self._room:
            self._bytes -= self._entries.pop(0).size


def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """Return an integer whose prefix has the bits of `mask`, and where it ends (5.1)."""
    value = block[at] & mask
    at += 1
    if value < mask:
        return value, at
    shift = 0
    while True:
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > MAX_INTEGER_BITS:
            raise HpackError("an integer that is too large")


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    """Return a string literal, and where it ends (5.2)."""
    first = block[at]
    is_coded = first & 0x80
    length, at = (first & 0x7F, at + 1) if first & 0x7F != 0x7F else _integer(block, at, 0x7F)
    end = at + length
    if end > len(block):
        raise IndexError
    text = block[at:end]
    return (decode_huffman(text) if is_coded else text), end


# --- blocks in parts ---


class BlockParts:
    """Decodes a block that arrives in parts, and holds little of it, however large it is.

    It keeps the beginning of the last field, and as many fields as a request may have. A name or value of more
    than `MAX_WAITING` bytes is skipped as it arrives, as by gRPC's C core (hpack_parser.cc,
    `ShouldSkipParsingString`): no request may have it, and it is larger than the table.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.fields: list[Field] = []
        self._decoder = decoder
        self._rest = b""
        self._long: _LongField | None = None

    def add(self, part: bytes | memoryview) -> None:
        """Decode the next part. Raise `HpackError`."""
        rest = self._rest + part
        while True:
            long = self._long
            if long is not None:
                rest = self._skip(long, rest)
                if not long.is_complete:
                    break
            end = _complete(rest)
            self._decoder.decode_more(rest[:end], 0, self.fields, begun=False)
            rest = rest[end:]
            if len(rest) <= MAX_WAITING:
                break
            self._long = _LongField(self._decoder, rest)
        self._rest = rest
        if sum([field.size for field in self.fields]) > MAX_FIELDS_BYTES:
            self.fields = reduced(self.fields)

    def _skip(self, long: _LongField, part: bytes) -> bytes:
        """Skip what has arrived of the field; returns the bytes that are not read yet."""
        rest = long.skip(part)
        if long.is_complete:
            self._long = None
            self.fields.append(long.field())
            if long.is_added:
                self._decoder.add_large()
        return rest

    def end(self) -> list[Field]:
        """Return the fields of the block. Raise `HpackError`."""
        if self._rest or self._long is not None:
            raise HpackError(_ENDS_EARLY)
        return self.fields


class _LongField:
    """A literal field with a name or value that is skipped. `begin`: bytes of it, not all."""

    def __init__(self, decoder: Decoder, begin: bytes) -> None:
        self.is_added = bool(begin[0] & 0x40)
        self.is_complete = False
        mask = 0x3F if self.is_added else 0x0F
        if begin[0] & mask:
            index, self._left = _integer(begin, 0, mask)
            self._name, self._size = decoder.entry(index).name, 0
        else:
            text, self._size, self._left = _measured(begin, 1)
            self._name = name_of(text)
        self._value: bytes | None = None

    def skip(self, part: bytes) -> bytes:
        """Skip what has arrived; returns the bytes that are not read yet."""
        rest = part[self._left :]
        self._left = max(0, self._left - len(part))
        if self._left or (not rest and self._value is None):
            return b""
        if self._value is not None:
            self.is_complete = True
            return rest
        try:
            self._value, length, self._left = _measured(rest, 0)
        except IndexError:
            return rest  # The rest of its length follows.
        self._size += length
        return self.skip(rest)

    def field(self) -> Field:
        """Return the field, with the beginning of its value, and its whole size."""
        assert self._value is not None
        field = Field(self._name, self._value.rstrip(b" \t"))
        field.size = self._name.size + self._size
        return field


def reduced(fields: Iterable[Field]) -> list[Field]:
    """Return the fields that say what kind of request it is, and one that stands for all others.

    For more fields than any request may have: all that matters is how large they are.
    """
    kept: dict[int, Field] = {}
    count = size = 0
    for field in fields:
        if field.kind <= CONTENT_TYPE and field.kind not in kept:
            kept[field.kind] = field
        else:
            count += field.meaning if field.kind == OMITTED else 1
            size += field.size
    return [*kept.values(), omitted(count, size)]


def _complete(block: bytes) -> int:
    """Return where the last complete field of a block ends."""
    at = 0
    try:
        while (end := _field_end(block, at)) <= len(block):
            at = end
    except IndexError:
        pass
    return at


def _field_end(block: bytes, at: int) -> int:
    """Return where a field ends, maybe beyond the block. Raise `IndexError` if its lengths are incomplete."""
    first = block[at]
    if first & 0x80:
        return _integer(block, at, 0x7F)[1]
    if first & 0xE0 == 0x20:
        return _integer(block, at, 0x1F)[1]
    mask = 0x3F if first & 0x40 else 0x0F
    value = _integer(block, at, mask)[1] if first & mask else _string_end(block, at + 1)
    return _string_end(block, value)


def _string_end(block: bytes, at: int) -> int:
    length, at = _integer(block, at, 0x7F)
    return at + length


def _measured(block: bytes, at: int) -> tuple[bytes, int, int]:
    """Return the beginning of a string literal, its size as it is coded, and where it ends."""
    first = block[at]
    length, at = _integer(block, at, 0x7F)
    text = block[at : at + min(length, MEASURED)]
    return (_huffman(text)[0] if first & 0x80 else text), length, at + length


# --- Huffman decoding: byte by byte, from one inner node of the code's tree to the next ---

_CODE_LENGTHS: Final = bytes.fromhex(
    "0d171c1c1c1c1c1c1c181e1c1c1e1c1c1c1c1c1c1c1c1e1c1c1c1c1c1c1c1c1c"
    "060a0a0c0d06080b0a0a080b080606060505050606060606060607080f060c0a"
    "0d06070707070707070707070707070707070707070707070807080d130d0e06"
    "0f05060506050606060507070606060506070605050607070707070f0b0e0d1c"
    "1416141416161617161717171717181718181617181717171715161716171718"
    "1615141616171715171616181516171715151615171617171416161617161617"
    "1a1a1413161716191a1a1a1b1b1a181913151a1b1b1a1b1815151a1a1c1b1b1b"
    "14181415161515171616191918181a171a1b1a1a1b1b1b1b1b1c1b1b1b1b1b1a"
    "1e"
)
"""Bits of each symbol's code (RFC 7541, appendix B); the codes follow from them, because they are canonical."""


def _tree() -> list[list[int]]:
    """Return the inner nodes, root first: where a 0 and a 1 lead, to a node or, as -1 - symbol, to a symbol."""
    nodes = [[0, 0]]
    code = last_length = 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(_CODE_LENGTHS)):
        code <<= length - last_length
        last_length, node = length, 0
        for bit in range(length - 1, 0, -1):
            branch = code >> bit & 1
            if not nodes[node][branch]:
                nodes[node][branch] = len(nodes)
                nodes.append([0, 0])
            node = nodes[node][branch]
        nodes[node][code & 1] = -1 - symbol
        code += 1
    return nodes


_TREE: Final = _tree()


def _ends() -> frozenset[int]:
    """Return the nodes at which a string may end: after a symbol, or in padding, a prefix of EOS (5.2)."""
    ends = [0]
    for _ in range(MAX_PADDING_BITS):
        ends.append(_TREE[ends[-1]][1])
    return frozenset(ends)


_ENDS: Final = _ends()


@lru_cache(maxsize=8192)
def _step(node: int, byte: int) -> tuple[int, bytes]:
    """Return the node that a byte leads to, and the symbols it completes."""
    symbols = bytearray()
    for bit in range(7, -1, -1):
        node = _TREE[node][byte >> bit & 1]
        if node < 0:
            if node == -1 - EOS:
                raise HpackError("an end-of-string symbol within a string")
            symbols.append(-1 - node)
            node = 0
    return node, bytes(symbols)


def decode_huffman(text: bytes) -> bytes:
    """Return a decoded Huffman string. Raise `HpackError`."""
    decoded, node = _huffman(text)
    if node not in _ENDS:
        raise HpackError("a string that ends within a symbol")
    return decoded


def _huffman(text: bytes) -> tuple[bytes, int]:
    """Return the decoded beginning of a string, and the node at which it ends."""
    node = 0
    parts = []
    for byte in text:
        node, symbols = _step(node, byte)
        parts.append(symbols)
    return b"".join(parts), node
