"""Writes several pieces to a connection at once."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

_IS_WRITELINES_SAFE = sys.version_info >= (3, 14, 10)


def write_pieces(transport: asyncio.WriteTransport, pieces: Sequence[bytes | memoryview]) -> None:
    """Write the pieces, in order; nothing is written once the transport is closing.

    In CPython 3.12.1 and 3.13.0 asyncio's `writelines` raises `TypeError` on a closing transport (gh-136234), and
    never pauses the protocol; in 3.14.10 it does as `write`. Before that, the pieces are joined, as in 3.11.
    """
    # uvloop's transports are no subclass of asyncio's.
    if _IS_WRITELINES_SAFE or not isinstance(transport, asyncio.Transport):
        transport.writelines(pieces)
    else:
        transport.write(b"".join(pieces))
