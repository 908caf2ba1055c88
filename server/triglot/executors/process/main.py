"""Entry point of a model's process."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from contextlib import suppress

from triglot.executors.remote.channel import Channel
from triglot.executors.remote.child import Child
from triglot.executors.remote.session import Session, end_at_once

_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def main() -> None:
    """Entry point of the process, with the arguments SOCKET PARENT NAME.

    SOCKET is a file descriptor, PARENT the server's pid, and NAME shows the model in process listings.
    """
    end, parent = map(int, sys.argv[1:3])
    del sys.argv[1:]  # The model's code may parse the arguments, as unittest does.
    # Ctrl-C in a terminal is for the server, which lets running calls end first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with(parent)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # It goes to the server's log.
    child = Child(Session(Channel(socket.socket(fileno=end))))
    threading.Thread(target=child.beat, args=(parent,), name="heart", daemon=True).start()
    child.run()


def _die_with(parent: int) -> None:
    """Have the system kill this process when the server's thread that started it ends, where the system can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        end_at_once()
