"""Reads files of joblib and pickle without restoring the objects in them."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path

_DECOMPRESS: dict[bytes, Callable[[bytes], bytes]] = {
    b"\x78": zlib.decompress,
    b"\x1f\x8b": gzip.decompress,
    b"BZh": bz2.decompress,
    b"\xfd7zXZ": lzma.decompress,
    b"\x5d\x00": lzma.decompress,
}
"""By the first bytes of a file: what `joblib.dump(..., compress=...)` writes."""


def content_of(file: Path) -> bytes:
    """Return the pickle in a file, decompressed; a damaged file as it is."""
    content = file.read_bytes()
    for start, decompress in _DECOMPRESS.items():
        if content.startswith(start):
            try:
                return decompress(content)
            except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError):
                break
    return content
