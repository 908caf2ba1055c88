"""What becomes of a thread that touches mapped memory which is gone: SIGBUS.

Strategy: a file that another process makes smaller takes the memory away that is mapped from it, and who touches
that gets SIGBUS, which ends a process. Python's own handlers run too late: when the instruction has ended. So the
C library is given a function that ctypes makes, which runs at once, on the thread that copies. That is as safe as
a callback of the copy would be: C code makes it, which holds neither Python's lock nor any other. The function
puts other memory there, the copy goes on with it, and whoever asked for the copy learns of it. A SIGBUS of
anything else is left to what was there before.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache

_ACTION_BYTES = 1024
"""No C library's `struct sigaction` is larger."""
_FAILED = ctypes.c_void_p(-1).value
"""SIG_ERR."""


class BusErrors:
    """The process's handler of SIGBUS. Raises `OSError` where it cannot have one. Any thread may use it."""

    def __init__(self) -> None:
        self._mending: dict[int, Callable[[], bool]] = {}
        self._before = ctypes.create_string_buffer(_ACTION_BYTES)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            number = int(signal.SIGBUS)
            self._ask, install = libc.sigaction, libc.signal
            # Kept as long as this object: the C library has nothing but its address.
            self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._handle)
        except (AttributeError, MemoryError) as error:  # A system may forbid to make functions.
            raise OSError(errno.ENOSYS, f"SIGBUS cannot be handled: {error}") from None
        self._ask.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        install.argtypes, install.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        self._number = number
        self._ask(number, None, self._before)
        self._address = ctypes.cast(self._handler, ctypes.c_void_p).value
        if install(number, self._address) == _FAILED or not self.in_place():
            self._ask(number, self._before, None)
            raise OSError(errno.ENOSYS, "SIGBUS cannot be handled")
        # Without an interpreter there is nobody to handle it.
        atexit.register(self._step_back)

    def in_place(self) -> bool:
        """Whether it is this that handles SIGBUS; others in the process may have taken its place."""
        now = (ctypes.c_void_p * (_ACTION_BYTES // ctypes.sizeof(ctypes.c_void_p)))()
        self._ask(self._number, None, now)
        return now[0] == self._address

    @contextmanager
    def mended(self, mend: Callable[[], bool]) -> Iterator[None]:
        """What this thread touches in the block and is not there, `mend` puts there, once; whether it could.

        The block is to call C code that holds no lock. `mend` runs in the midst of it, on the same thread.
        """
        thread = threading.get_ident()
        self._mending[thread] = mend
        try:
            yield
        finally:
            self._mending.pop(thread, None)

    def _handle(self, _: int) -> None:
        thread = threading.get_ident()
        mend = self._mending.get(thread)
        mended = False
        with suppress(Exception):  # It would come again and again.
            mended = mend is not None and mend()
        if mended:
            # A second one was not to be mended so.
            self._mending.pop(thread, None)
        else:
            self._step_back()
            # It waits until this returns; then it is as if this had never been there.
            signal.raise_signal(signal.SIGBUS)

    def _step_back(self) -> None:
        if self.in_place():
            self._ask(self._number, self._before, None)


@cache
def bus_errors() -> BusErrors:
    """The one of this process, as a process has one handler of a signal. Raises as `BusErrors`."""
    return BusErrors()
