"""Compressed request bodies."""

from __future__ import annotations

import zlib

from triglot.protocols import DamagedBody, InflatedTooLarge

WINDOW_BITS = {"identity": 0, "gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""zlib's parameter for each content coding that is taken; 0: none is needed."""
INFLATED_WORK = 32
"""A compressed byte takes as long as so many bytes of text."""
MAX_GZIP_MEMBERS = 16
"""What follows a member is copied for each of them."""


def inflate(body: bytes, window_bits: int, limit: int) -> bytes:
    """The body inflated. Raises `DamagedBody`, and `InflatedTooLarge` before more than `limit` bytes are made."""
    parts: list[bytes] = []
    size = 0
    while body:
        if len(parts) == MAX_GZIP_MEMBERS:
            raise DamagedBody(f"the compressed request body has more than {MAX_GZIP_MEMBERS} members")
        inflater = zlib.decompressobj(window_bits)
        try:
            part = inflater.decompress(body, limit - size + 1)
        except zlib.error as error:
            raise DamagedBody(f"the compressed request body is damaged: {error}") from None
        size += len(part)
        if size > limit:
            raise InflatedTooLarge(f"the compressed request body holds more than {limit} bytes")
        if not inflater.eof:
            raise DamagedBody("the compressed request body is damaged: it ends too early")
        parts.append(part)
        body = inflater.unused_data  # gzip may come in several members.
        if body and window_bits == WINDOW_BITS["deflate"]:
            raise DamagedBody("the compressed request body is damaged: it goes on after its end")
    return b"".join(parts)
