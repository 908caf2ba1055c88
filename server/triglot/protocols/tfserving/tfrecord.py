"""TFRecord files: records between checksums of CRC32C (tfs 6.6). Pure functions.

Strategy: the register of a CRC is linear, so the rows of a large record are worked through side by side, each from
zero, and then joined: the register before a row, moved on by a row of zeros, and the row's own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from triglot.core.tensor import Array

ROW = 512
"""Bytes that are worked through one after the other."""
SIDE_BY_SIDE_FROM = 64 * ROW
_HEADER, _CHECKSUM = struct.Struct("<QI"), struct.Struct("<I")
_CASTAGNOLI = 0x82F63B78
_MASK_DELTA = 0xA282EAD8


class DamagedRecords(ValueError):
    """The bytes are not in TFRecord format."""


def _table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (_CASTAGNOLI if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()
_TABLE_ARRAY = np.array(_TABLE, np.uint32)


def _moved_on(registers: Array, columns: Array) -> Array:
    """Registers (uint32) after a column's bytes each, one column after the other."""
    for column in columns:
        registers = registers >> 8 ^ _TABLE_ARRAY[(registers ^ column) & 0xFF]
    return registers


@lru_cache(maxsize=1)
def _after_zeros() -> list[list[int]]:
    """What a row of zeros makes of each byte of a register, by the byte's place and value."""
    places = np.arange(4, dtype=np.uint32)[:, None] * 8
    bytes_in_place = np.arange(256, dtype=np.uint32) << places
    zeros = np.zeros((ROW, 1, 1), np.uint8)
    after: list[list[int]] = _moved_on(bytes_in_place, zeros).tolist()
    return after


def masked_crc32c(data: bytes) -> int:
    """The checksum of TFRecord: CRC32C, rotated and shifted so that checksums of checksums are none."""
    in_rows = len(data) // ROW * ROW if len(data) >= SIDE_BY_SIDE_FROM else 0
    start = len(data) - in_rows
    value = 0xFFFFFFFF
    for byte in data[:start]:
        value = value >> 8 ^ _TABLE[(value ^ byte) & 0xFF]
    if in_rows:
        rows = np.frombuffer(data, np.uint8, offset=start).reshape(-1, ROW)
        low, second, third, high = _after_zeros()
        for own in _moved_on(np.zeros(len(rows), np.uint32), rows.T).tolist():
            zeros = low[value & 0xFF] ^ second[value >> 8 & 0xFF] ^ third[value >> 16 & 0xFF] ^ high[value >> 24]
            value = zeros ^ own
    value ^= 0xFFFFFFFF
    return ((value >> 15 | value << 17) + _MASK_DELTA) & 0xFFFFFFFF


def read_records(data: bytes) -> Iterator[bytes]:
    """The records of a TFRecord file. Raises `DamagedRecords`."""
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
