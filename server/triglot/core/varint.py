"""Protobuf's variable-length numbers."""


def varint(value: int) -> bytes:
    """Return the varint encoding of a number >= 0."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
