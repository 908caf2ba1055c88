"""A timer of some microseconds: those of event loops have milliseconds."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable

_CLOCK_MONOTONIC = 1


class _Times(ctypes.Structure):
    """The itimerspec of timerfd_settime(2)."""

    _fields_ = (
        ("every_seconds", ctypes.c_long),
        ("every_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


class ShortTimer:
    """Calls `ring` on the loop, `microseconds` after each `start`; less than a second.

    Raises `OSError` where the system has none.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, microseconds: int, ring: Callable[[], object]) -> None:
        if sys.platform != "linux":
            raise OSError(f"{sys.platform} has no timerfd")
        # Not CDLL, which would let other threads have the interpreter meanwhile.
        library = ctypes.PyDLL(None)
        # Python has had it since 3.13.
        self._fd = library.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError("timerfd_create failed")
        self._set_time = library.timerfd_settime
        self._times = ctypes.byref(_Times(nanoseconds=microseconds * 1000))
        self._loop = loop
        self._ring = ring
        loop.add_reader(self._fd, self._rung)

    def start(self) -> None:
        """Once; a timer that runs begins anew."""
        self._set_time(self._fd, 0, self._times, None)

    def _rung(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # It was started again, and has not rung since.
        self._ring()

    def close(self) -> None:
        """It rings no more."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
