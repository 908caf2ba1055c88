"""HPACK decoder (RFC 7541). The tables hold `Field` objects, each classified once."""

from __future__ import annotations

from functools import lru_cache

from triglot.transports.http2.core.fields import CREDENTIAL, FIELD_BYTES, Field, Name, field_of, name_of
from triglot.transports.http2.core.limits import MAX_FIELDS_BYTES

TABLE_BYTES = 4096
"""Largest dynamic table, the default unless our SETTINGS change it (RFC 9113, 6.5.2)."""
MAX_INTEGER_BITS = 28
EOS = 256
MAX_PADDING_BITS = 7
_STATIC_TABLE = """
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
_ENTRIES = [line.encode().partition(b" ") for line in _STATIC_TABLE.split("\n")[1:-1]]
_STATIC = [Field(Name(name), value) for name, _, value in _ENTRIES]
_STATIC_COUNT = len(_STATIC)
MAX_FIELDS = MAX_FIELDS_BYTES // FIELD_BYTES
"""More fields are larger than allowed, whatever they are; an index to one takes one byte."""
TOO_LARGE = f"more than {MAX_FIELDS_BYTES} bytes of fields"
_INDICES = bytes(range(0x81, 0xFF))
"""Indexed fields that take one byte each (6.1)."""
_BEYOND = "an index beyond the tables"


class HpackError(Exception):
    """The block is not valid HPACK: blocks after it cannot be decoded either."""


class FieldsTooLarge(HpackError):
    """The fields of a block are larger than allowed."""


class Decoder:
    """Decodes the header blocks of one connection, in order."""

    def __init__(self) -> None:
        self._entries = _STATIC[::-1]
        """Both tables in reverse order, so that an index counts from the end (2.3.3)."""
        self._bytes = 0
        self._room = TABLE_BYTES

    def decode(self, block: bytes) -> tuple[tuple[Field, ...], list[Field]]:
        """Returns the fields of a block: first the table entries that it begins with, then the others.

        Clients that repeat fields send them as entries, so most blocks begin alike. Raises `HpackError`.
        """
        entries = self._entries
        end = len(block) - len(block.lstrip(_INDICES))
        if end > MAX_FIELDS:
            raise FieldsTooLarge(TOO_LARGE)
        try:
            start = tuple([entries[0x80 - byte] for byte in block[:end]])
        except IndexError:
            raise HpackError(_BEYOND) from None
        try:
            return start, self._decode(block, end)
        except IndexError:
            raise HpackError("a block that ends too early") from None

    def _decode(self, block: bytes, at: int) -> list[Field]:
        """Returns the fields from `at` on."""
        fields: list[Field] = []
        start, end = at, len(block)
        while at < end:
            first = block[at]
            if first & 0x80:  # An indexed field (6.1).
                index, at = _integer(block, at, 0x7F)
                field = self._entry(index)
            elif first & 0xE0 == 0x20:
                if start or fields:
                    raise HpackError("a change of the table's size behind a field")
                size, at = _integer(block, at, 0x1F)
                self._resize(size)
                continue
            else:
                is_added = first & 0x40  # Else without indexing, or never indexed (6.2.2, 6.2.3).
                mask = 0x3F if is_added else 0x0F
                if first & mask:
                    index, at = _integer(block, at, mask)
                    name = self._entry(index).name
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
                raise FieldsTooLarge(TOO_LARGE)
        return fields

    def _entry(self, index: int) -> Field:
        if not 0 < index <= len(self._entries):
            raise HpackError(_BEYOND)
        return self._entries[-index]

    def _add(self, field: Field) -> None:
        self._entries.insert(len(self._entries) - _STATIC_COUNT, field)
        self._bytes += field.size
        self._evict()  # A field larger than the table empties it (4.4).

    def _resize(self, size: int) -> None:
        if size > TABLE_BYTES:
            raise HpackError(f"a table of {size} bytes, at most {TABLE_BYTES} are taken")
        self._room = size
        self._evict()

    def _evict(self) -> None:
        while self._bytes > self._room:
            self._bytes -= self._entries.pop(0).size


def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """Returns an integer whose prefix has the bits of `mask`, and where it ends (5.1)."""
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
    """Returns a string literal, and where it ends (5.2)."""
    first = block[at]
    is_coded = first & 0x80
    length, at = (first & 0x7F, at + 1) if first & 0x7F != 0x7F else _integer(block, at, 0x7F)
    end = at + length
    if end > len(block):
        raise IndexError
    text = block[at:end]
    return (decode_huffman(text) if is_coded else text), end


# --- Huffman decoding: byte by byte, from one inner node of the code's tree to the next ---

_CODE_LENGTHS = bytes.fromhex(
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
    """Returns the inner nodes, root first: where a 0 and a 1 lead, to a node or, as -1 - symbol, to a symbol."""
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


_TREE = _tree()


def _ends() -> frozenset[int]:
    """Returns the nodes at which a string may end: after a symbol, or in padding, a prefix of EOS (5.2)."""
    ends = [0]
    for _ in range(MAX_PADDING_BITS):
        ends.append(_TREE[ends[-1]][1])
    return frozenset(ends)


_ENDS = _ends()


@lru_cache(maxsize=8192)
def _step(node: int, byte: int) -> tuple[int, bytes]:
    """Returns the node that a byte leads to, and the symbols it completes."""
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
    """Returns a decoded Huffman string. Raises `HpackError`."""
    node = 0
    parts = []
    for byte in text:
        node, symbols = _step(node, byte)
        parts.append(symbols)
    if node not in _ENDS:
        raise HpackError("a string that ends within a symbol")
    return b"".join(parts)
