"""Writes several pieces to a connection at once."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

_IS_WRITELINES_SAFE = sys.version_info >= (3, 14, 8)


def write_pieces(transport: asyncio.WriteTransport, pieces: Sequence[bytes | memoryview]) -> None:
    """Write the pieces, in order; nothing is written once the transport is closing.

    asyncio's own `writelines`, new in CPython 3.12, began with faults of which the last is fixed in 3.14.8: it did
    not pause the protocol (gh-127655, CVE-2024-12254), raised `TypeError` on a closing transport (gh-136234), and
    could hang (gh-155888). Before that, the pieces are joined, as in 3.11.
    """
    # uvloop's transports are no subclass of asyncio's.
    if _IS_WRITELINES_SAFE or not isinstance(transport, asyncio.Transport):
        transport.writelines(pieces)
    else:
        transport.write(b"".join(pieces))
