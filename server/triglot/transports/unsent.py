"""Data for a socket: several pieces written at once, what is unsent, and a timer for clients that do not read."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import sys
import termios
from collections.abc import Sequence

log = logging.getLogger(__name__)

STALL_SECONDS = 120.0
"""Seconds after which a REST connection is aborted if its client reads nothing; the same as for HTTP/2."""


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


def buffered(transport: asyncio.Transport) -> int:
    """Return the bytes that the peer has not received; over TLS a number that only says whether there are any."""
    size = transport.get_write_buffer_size()
    if transport.can_write_eof():
        return size
    # The TLS transport does not count what it has passed to the socket's own transport. The system knows what the
    # peer has not acknowledged: while that transport holds data, there is some of it, except for moments.
    try:
        sent = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):
        return 0  # The socket is closed.
    return size + int.from_bytes(sent, sys.byteorder)


class StallTimer:
    """Aborts a connection whose client reads nothing for `STALL_SECONDS`, from `start` until `stop`."""

    __slots__ = ("_timer", "_unsent")

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._unsent = 0

    def start(self, transport: asyncio.Transport) -> None:
        """Start the timer: data waits to be sent."""
        self.stop()
        self._unsent = buffered(transport)
        self._timer = asyncio.get_running_loop().call_later(STALL_SECONDS, self._check, transport)

    def stop(self) -> None:
        """Stop the timer: no data waits, or the connection is closed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, transport: asyncio.Transport) -> None:
        if buffered(transport) != self._unsent:
            self.start(transport)
            return
        log.info("closing a connection: its client read no response data for %.0f s", STALL_SECONDS)
        transport.abort()
