"""What becomes of a thread that touches mapped memory which is gone: SIGBUS.

Strategy: a file that another process makes smaller takes the memory away that is mapped from it, and who touches
that gets SIGBUS, which ends a process. Python's own handlers run too late: when the instruction has ended. So the
C library is given a function that ctypes makes, which runs at once, on the thread that has touched it, whatever
code that runs. Where the address lies in memory that is guarded, the function puts zeros there, the thread goes
on with these, and the memory is known as lost. The function takes the interpreter's lock, so it must not be that
another thread has that one and waits for this one. A SIGBUS of anything else is left to what was there before.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import mmap
import platform
import signal
import sys
from contextlib import suppress
from functools import cache

from triglot.platform.mapping import map_nothing

_MACHINES = ("x86_64", "aarch64")
"""Of which the two structures below are known."""
_SIGINFO = 4
"""SA_SIGINFO: the handler is told where."""
_RESTART = 0x10000000
"""SA_RESTART, as `signal` has it."""
_ADDRESS_GONE = 2
"""BUS_ADRERR."""
_MOST_REPLACED = 16 * 1024 * 1024
"""Bytes for which there are zeros at a time: more may be than a system promises."""


class _Action(ctypes.Structure):
    """`struct sigaction` of Linux' C libraries, and room for more than any of them has."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint64 * 16),
        ("flags", ctypes.c_int),
        ("rest", ctypes.c_uint64 * 16),
    )


class _Info(ctypes.Structure):
    """The beginning of a `siginfo_t`."""

    _fields_ = (
        ("number", ctypes.c_int),
        ("error", ctypes.c_int),
        ("code", ctypes.c_int),
        ("address", ctypes.c_uint64),
    )


class Guarded:
    """`size` bytes from `address` that may go, page by page; `lost` when a part was found gone."""

    __slots__ = ("address", "lost", "size")

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self.size = size
        self.lost = False

    def replace(self, at: int) -> None:
        """Zeros from the page of the address `at` on: what is left before it is still the file's."""
        self.lost = True
        first = at - at % mmap.PAGESIZE
        map_nothing(first, min(self.address + self.size - first, _MOST_REPLACED))


class BusErrors:
    """The process's handler of SIGBUS. Raises `OSError` where it cannot have one. Any thread may use it."""

    def __init__(self) -> None:
        if sys.platform != "linux" or platform.machine() not in _MACHINES or ctypes.sizeof(ctypes.c_void_p) != 8:
            raise OSError(errno.ENOSYS, "SIGBUS cannot be handled on this system")
        self._guarded: dict[int, Guarded] = {}
        self._before = _Action()
        try:
            self._ask = ctypes.CDLL(None, use_errno=True).sigaction
            # Kept as long as this object: the C library has nothing but its address.
            self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.POINTER(_Info), ctypes.c_void_p)(
                self._handle
            )
        except (AttributeError, MemoryError) as error:  # A system may forbid to make functions.
            raise OSError(errno.ENOSYS, f"SIGBUS cannot be handled: {error}") from None
        self._ask.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._number = int(signal.SIGBUS)
        # Whoever asks at the same time is told the same.
        self._now = _Action()
        self._now_at = ctypes.addressof(self._now)
        self._address = ctypes.cast(self._handler, ctypes.c_void_p).value
        ours = _Action(handler=self._address, flags=_SIGINFO | _RESTART)
        if self._ask(self._number, ctypes.byref(ours), ctypes.byref(self._before)) or not self.in_place():
            raise OSError(errno.ENOSYS, "SIGBUS cannot be handled")
        # Without an interpreter there is nobody to handle it.
        atexit.register(self._step_back)

    def in_place(self) -> bool:
        """Whether it is this that handles SIGBUS; others in the process may have taken its place."""
        self._ask(self._number, None, self._now_at)
        return bool(self._now.handler == self._address)

    def guard(self, address: int, size: int) -> Guarded:
        """Who touches what is gone of this memory goes on from now on, until `forget`."""
        guarded = Guarded(address, size)
        self._guarded[address] = guarded
        return guarded

    def forget(self, guarded: Guarded) -> None:
        """It is going to be unmapped."""
        del self._guarded[guarded.address]

    def _handle(self, _: int, info: ctypes._Pointer[_Info], __: int | None) -> None:
        code = info.contents.code
        with suppress(Exception):  # It would come again and again.
            if code == _ADDRESS_GONE and self._replaced(info.contents.address):
                return
        self._step_back()
        # Who touches what is gone does so again, as if this had never been there; what was sent is sent again.
        if code <= 0:
            signal.raise_signal(signal.SIGBUS)

    def _replaced(self, address: int) -> bool:
        for guarded in list(self._guarded.values()):
            if guarded.address <= address < guarded.address + guarded.size:
                guarded.replace(address)
                return True
        return False

    def _step_back(self) -> None:
        if self.in_place():
            self._ask(self._number, ctypes.byref(self._before), None)


@cache
def bus_errors() -> BusErrors:
    """The one of this process, as a process has one handler of a signal. Raises as `BusErrors`."""
    return BusErrors()
