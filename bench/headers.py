"""Encodes HPACK (RFC 7541) for the load client, as gRPC's C-core does."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

Field = tuple[bytes, bytes]
STATIC_ENTRIES, ENTRY_OVERHEAD, DEFAULT_TABLE = 61, 32, 4096
POST, HTTP = b"\x83", b"\x86"
"""References to fields of the static table: `:method: POST` and `:scheme: http`."""
ADDED, NOT_ADDED = b"\x40", b"\x00"
"""First byte of a literal field with a literal name, which is added to the dynamic table, or is not."""
SHORTER, KEPT_TIMEOUTS = 0.03, 5


@dataclass(frozen=True)
class Metadata:
    """Metadata of a call: header fields besides those of gRPC itself."""

    fields: Sequence[Field] = ()

    @cached_property
    def literals(self) -> bytes:
        """Return the encoded fields as C-core writes metadata: not added to the dynamic table."""
        return b"".join(_literal(NOT_ADDED, field) for field in self.fields)


NO_METADATA = Metadata()


def _literal(first: bytes, field: Field) -> bytes:
    """Return a literal field, without Huffman coding, as C-core does."""
    name, value = field
    return first + _string(name) + _string(value)


def _string(text: bytes) -> bytes:
    return _integer(0, 7, len(text)) + text


def _integer(first: int, bits: int, value: int) -> bytes:
    """Return an integer in the last `bits` of a byte, and in further bytes if it is larger (RFC 7541, 5.1)."""
    most = (1 << bits) - 1
    if value < most:
        return bytes((first | value,))
    value -= most
    written = [first | most]
    while value > 127:
        written.append(value & 127 | 128)
        value >>= 7
    return bytes((*written, value))


@dataclass
class HeaderBlocks:
    """Encodes the header blocks of one connection's calls, which must be sent in the order in which they are made.

    It encodes as C-core does (1.51 and 1.85 write the same): a field that is equal in all calls is added to the
    dynamic table once, and later calls refer to it. So is a timeout, which also represents timeouts up to 3%
    shorter, while it is one of the last five. Metadata are literals each time. With `indexed`, metadata and each
    timeout are added to the table, too, as grpc-go and grpc-java do.
    """

    path: str
    authority: str
    indexed: bool = False
    agent: str = "triglot-bench"
    _limit: int = DEFAULT_TABLE
    _entries: deque[tuple[Field, int]] = field(default_factory=deque)
    """The dynamic table: fields and their sizes in bytes, oldest first."""
    _used: int = 0
    _added: int = 0
    """Number of entries ever added, which is also the number of the newest one."""
    _numbers: dict[Field, int] = field(default_factory=dict)
    """Number of the newest entry of each field."""
    _timeouts: list[tuple[int, int]] = field(default_factory=list)
    """The latest timeouts in milliseconds, with the numbers of their entries."""
    _next_timeout: int = 0
    _update: bytes = b""
    _begin: tuple[int, bytes] = (-1, b"")
    """Cache of the part before the timeout; and the number of entries (`_added`) for which it is valid."""

    def __post_init__(self) -> None:
        self._first = ((b":path", self.path.encode()), (b":authority", self.authority.encode()))
        self._last = (b"user-agent", self.agent.encode())
        self._then = (
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
            (b"grpc-accept-encoding", b"identity, deflate, gzip"),
        )

    def limit_table(self, size: int) -> None:
        """Obey the peer's HEADER_TABLE_SIZE, up to the default size; the next block has the table size update."""
        limit = min(size, DEFAULT_TABLE)
        if limit != self._limit:
            self._limit = limit
            self._evict(0)
            self._update = _integer(0x20, 5, limit)

    def block(self, timeout: int | None = None, metadata: Metadata = NO_METADATA) -> bytes:
        """Return the header block of one call; `timeout` is in milliseconds."""
        update, self._update = self._update, b""
        before = self._added
        if self._begin[0] != before:
            parts = [*map(self._field, self._first), POST, HTTP, *map(self._field, self._then)]
            self._begin = (before if before == self._added else -1, b"".join(parts))
        begin = update + self._begin[1]
        if timeout is not None:
            begin += self._timeout(timeout)
        begin += self._field(self._last)
        if self.indexed:
            return begin + b"".join(map(self._field, metadata.fields))
        return begin + metadata.literals

    def _field(self, field: Field) -> bytes:
        """Return a reference to the field, or a literal that is added to the table."""
        number = self._numbers.get(field)
        return self._add(field) if number is None else self._reference(number)

    def _reference(self, number: int) -> bytes:
        return _integer(0x80, 7, STATIC_ENTRIES + 1 + self._added - number)

    def _add(self, field: Field) -> bytes:
        size = len(field[0]) + len(field[1]) + ENTRY_OVERHEAD
        if size > self._limit:
            return _literal(NOT_ADDED, field)
        self._evict(size)
        self._entries.append((field, size))
        self._used += size
        self._added += 1
        self._numbers[field] = self._added
        return _literal(ADDED, field)

    def _evict(self, size: int) -> None:
        """Remove the oldest entries until an entry of this size fits."""
        while self._used + size > self._limit:
            number = self._added - len(self._entries) + 1
            field, freed = self._entries.popleft()
            self._used -= freed
            if self._numbers[field] == number:
                del self._numbers[field]

    def _timeout(self, milliseconds: int) -> bytes:
        """Return the field `grpc-timeout`; timeouts from one second on are rounded up to 10 ms."""
        rounded = milliseconds if milliseconds < 1000 else -(-milliseconds // 10) * 10
        field = (b"grpc-timeout", b"%dS" % (rounded // 1000) if rounded % 1000 == 0 else b"%dm" % rounded)
        if self.indexed:
            return self._field(field)
        evicted = self._added - len(self._entries)
        for earlier, number in self._timeouts:
            if number > evicted and -SHORTER < rounded / earlier - 1 <= 0:
                return self._reference(number)
        written = self._add(field)
        self._timeouts[self._next_timeout : self._next_timeout + 1] = [(rounded, self._added)]
        self._next_timeout = (self._next_timeout + 1) % KEPT_TIMEOUTS
        return written
