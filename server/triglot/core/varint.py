"""Protobuf's variable-length numbers."""

from typing import Final

_OF_ONE_BYTE: Final = [bytes([value]) for value in range(0x80)]


def varint(value: int) -> bytes:
    """Return the varint encoding of a number >= 0."""
    if value < 0x80:
        return _OF_ONE_BYTE[value]
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
