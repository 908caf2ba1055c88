"""What the other side of a socket has not taken, and who takes nothing at all."""

from __future__ import annotations

import asyncio
import logging
import sys

log = logging.getLogger(__name__)

STALL_SECONDS = 120.0
"""For which a client of REST may take nothing of what waits for it, as over HTTP/2."""


def buffered(transport: asyncio.Transport) -> int:
    """Bytes that wait for the other side to take them, or of TLS some that tell whether any wait."""
    size = transport.get_write_buffer_size()
    if transport.can_write_eof() or sys.platform == "win32":
        return size
    import fcntl  # noqa: PLC0415 - not for Windows.
    import termios  # noqa: PLC0415 - as above.

    # TLS does not count what it has handed on to the socket's own transport. The system is asked what the other
    # side has not confirmed: while more waits here, there is some of that, but for moments.
    try:
        sent = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):
        return 0  # It is closed.
    return size + int.from_bytes(sent, sys.byteorder)


class StallTimer:
    """Aborts a connection whose client takes nothing for `STALL_SECONDS`, from `start` until `stop`."""

    __slots__ = ("_timer", "_unsent")

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._unsent = 0

    def start(self, transport: asyncio.Transport) -> None:
        """Something waits to be taken."""
        self.stop()
        self._unsent = buffered(transport)
        self._timer = asyncio.get_running_loop().call_later(STALL_SECONDS, self._check, transport)

    def stop(self) -> None:
        """Nothing waits any more, or nobody for it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, transport: asyncio.Transport) -> None:
        if buffered(transport) != self._unsent:
            self.start(transport)
            return
        log.info("closing a connection: its client read no response data for %.0f s", STALL_SECONDS)
        transport.abort()
