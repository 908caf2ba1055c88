"""What the other side of a socket has not taken."""

from __future__ import annotations

import asyncio
import sys


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
