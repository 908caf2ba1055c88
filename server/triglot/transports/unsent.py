"""Unsent data of a socket, and a timer for clients that do not read."""

from __future__ import annotations

import asyncio
import logging
import sys

log = logging.getLogger(__name__)

STALL_SECONDS = 120.0
"""Seconds after which a REST connection is aborted if its client reads nothing; the same as for HTTP/2."""


def buffered(transport: asyncio.Transport) -> int:
    """Returns the bytes that the peer has not received; over TLS a number that only says whether there are any."""
    size = transport.get_write_buffer_size()
    if transport.can_write_eof() or sys.platform == "win32":
        return size
    import fcntl  # noqa: PLC0415 - not for Windows.
    import termios  # noqa: PLC0415 - as above.

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
