"""TFRecord files: records with CRC32C checksums (tfs 6.6). Pure functions.

Strategy: a CRC is linear, so each byte of a row contributes a table's entry for its position in the row and its
value, whatever the other bytes are; numpy combines those of all rows at once. Then the rows are combined, each
shifted by the rows after it. Leading zeros change nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from triglot.core.tensor import Array

ROW = 512
"""Bytes of a row."""
ROWS_AT_ONCE = 128
"""Rows per numpy call: it holds the GIL meanwhile, and needs some 12 bytes for each byte of the rows."""
_HEADER, _CHECKSUM = struct.Struct("<QI"), struct.Struct("<I")
_CASTAGNOLI = 0x82F63B78
_START = (0x641F6454).to_bytes(4, "little")
"""Prefix that sets the register to all ones, the CRC's initial value."""
_MASK_DELTA = 0xA282EAD8


class DamagedRecords(ValueError):
    """The bytes are not in TFRecord format."""


@lru_cache(maxsize=1)
def _tables() -> Array:
    """Return a byte's contribution to the register, by the number of bytes after it, and its value."""
    register: Array = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        register = register >> 1 ^ (register & 1) * np.uint32(_CASTAGNOLI)
    tables = [register]
    for _ in range(ROW - 1):
        last = tables[-1]
        tables.append(last >> 8 ^ register[last & 0xFF])
    return np.array(tables)


def masked_crc32c(data: bytes) -> int:
    """Return TFRecord's checksum: CRC32C, rotated and offset: a CRC of data that contains CRCs is degenerate."""
    tables = _tables()
    size = len(_START) + len(data)
    width = min(size, ROW)
    rows = np.zeros((-(-size // width), width), np.uint8)
    rows.reshape(-1)[-size:] = np.frombuffer(_START + data, np.uint8)
    behind = np.arange(width - 1, -1, -1)
    # The register before a row acts as if it were added to the row's first four bytes.
    low, second, third, high = tables[[width - 1, width - 2, width - 3, width - 4]].tolist()
    value = 0
    for first in range(0, len(rows), ROWS_AT_ONCE):
        some = np.bitwise_xor.reduce(tables[behind, rows[first : first + ROWS_AT_ONCE]], axis=1)
        for added in some.tolist():
            moved = low[value & 0xFF] ^ second[value >> 8 & 0xFF] ^ third[value >> 16 & 0xFF] ^ high[value >> 24]
            value = moved ^ added
    value ^= 0xFFFFFFFF
    return ((value >> 15 | value << 17) + _MASK_DELTA) & 0xFFFFFFFF


def framed(record: bytes) -> bytes:
    """Return a record as it is framed in a TFRecord file."""
    length = len(record).to_bytes(8, "little")
    checksums = [_CHECKSUM.pack(masked_crc32c(part)) for part in (length, record)]
    return b"".join([length, checksums[0], record, checksums[1]])


def read_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a TFRecord file. Raise `DamagedRecords`."""
    at = 0
    while at < len(data):
        if len(data) - at < _HEADER.size:
            raise DamagedRecords(f"truncated record at {at}")
        length, checksum = _HEADER.unpack_from(data, at)
        if masked_crc32c(data[at : at + 8]) != checksum:
            raise DamagedRecords(f"corrupted record at {at}")
        start = at + _HEADER.size
        at = start + length + _CHECKSUM.size
        if at > len(data):
            raise DamagedRecords(f"truncated record at {start}")
        record = data[start : start + length]
        if masked_crc32c(record) != _CHECKSUM.unpack_from(data, start + length)[0]:
            raise DamagedRecords(f"corrupted record at {start}")
        yield record
