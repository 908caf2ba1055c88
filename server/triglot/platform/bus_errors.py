"""Handles SIGBUS, which a thread receives when it accesses mapped memory that no longer exists.

When another process truncates a file, memory mapped from it is gone, and an access raises SIGBUS, which kills the
process. Python's own signal handlers run too late: after the instruction. So this passes the C library a function
made by ctypes, which runs immediately, on the thread that accessed the memory. If the address is in guarded
memory, the function maps zeros there, the thread continues with these, and the memory is marked as lost. The
function acquires the interpreter's lock, so no other thread may hold that while it waits for this one. Any other
SIGBUS is left to the previous handler.
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
"""Machines for which the layouts of the structures below are known."""
_SIGINFO = 4
"""SA_SIGINFO: the handler receives the address."""
_RESTART = 0x10000000
"""SA_RESTART, as `signal` sets it."""
_BUS_ADRERR = 2
"""BUS_ADRERR."""
_MAX_REPLACED = 16 * 1024 * 1024
"""Limit on the bytes replaced by zeros at once: the system may refuse more."""


class _Action(ctypes.Structure):
    """`struct sigaction` of Linux' C libraries, larger than in any of them."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint64 * 16),
        ("flags", ctypes.c_int),
        ("rest", ctypes.c_uint64 * 16),
    )


class _Info(ctypes.Structure):
    """The first fields of a `siginfo_t`."""

    _fields_ = (
        ("number", ctypes.c_int),
        ("error", ctypes.c_int),
        ("code", ctypes.c_int),
        ("address", ctypes.c_uint64),
    )


class Guarded:
    """`size` bytes from `address`, whose pages may disappear; `lost` once an access has found one missing."""

    __slots__ = ("address", "lost", "size")

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self.size = size
        self.lost = False

    def replace(self, at: int) -> None:
        """Map zeros from the page of address `at`; pages before it still belong to the file."""
        self.lost = True
        first = at - at % mmap.PAGESIZE
        map_nothing(first, min(self.address + self.size - first, _MAX_REPLACED))


class BusErrors:
    """The process's SIGBUS handler. Thread-safe. Raise `OSError` if it cannot be installed."""

    def __init__(self) -> None:
        if sys.platform != "linux" or platform.machine() not in _MACHINES or ctypes.sizeof(ctypes.c_void_p) != 8:
            raise OSError(errno.ENOSYS, "SIGBUS cannot be handled on this system")
        self._guarded: dict[int, Guarded] = {}
        self._before = _Action()
        try:
            self._sigaction = ctypes.CDLL(None, use_errno=True).sigaction
            # Must live as long as this object: the C library only has its address.
            self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.POINTER(_Info), ctypes.c_void_p)(
                self._handle
            )
        except (AttributeError, MemoryError) as error:  # A system may forbid executable memory.
            raise OSError(errno.ENOSYS, f"SIGBUS cannot be handled: {error}") from None
        self._sigaction.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._number = int(signal.SIGBUS)
        # Concurrent calls of `in_place` write the same value here.
        self._current = _Action()
        self._current_address = ctypes.addressof(self._current)
        self._address = ctypes.cast(self._handler, ctypes.c_void_p).value
        ours = _Action(handler=self._address, flags=_SIGINFO | _RESTART)
        if self._sigaction(self._number, ctypes.byref(ours), ctypes.byref(self._before)) or not self.in_place():
            raise OSError(errno.ENOSYS, "SIGBUS cannot be handled")
        # The handler cannot run without an interpreter.
        atexit.register(self._restore)

    def in_place(self) -> bool:
        """Whether this handler is installed; other code in the process may have replaced it."""
        self._sigaction(self._number, None, self._current_address)
        return bool(self._current.handler == self._address)

    def guard(self, address: int, size: int) -> Guarded:
        """Guard this memory against SIGBUS until `forget`."""
        guarded = Guarded(address, size)
        self._guarded[address] = guarded
        return guarded

    def forget(self, guarded: Guarded) -> None:
        """Stop guarding memory that is about to be unmapped."""
        del self._guarded[guarded.address]

    def _handle(self, _: int, info: ctypes._Pointer[_Info], __: int | None) -> None:
        code = info.contents.code
        with suppress(Exception):  # An exception would make the access repeat forever.
            if code == _BUS_ADRERR and self._replace(info.contents.address):
                return
        self._restore()
        # A faulting access repeats and reaches the previous handler; a signal that was sent is raised again.
        if code <= 0:
            signal.raise_signal(signal.SIGBUS)

    def _replace(self, address: int) -> bool:
        for guarded in list(self._guarded.values()):
            if guarded.address <= address < guarded.address + guarded.size:
                guarded.replace(address)
                return True
        return False

    def _restore(self) -> None:
        if self.in_place():
            self._sigaction(self._number, ctypes.byref(self._before), None)


@cache
def bus_errors() -> BusErrors:
    """Return the handler of this process, as a signal has one handler per process. Raise as `BusErrors` does."""
    return BusErrors()
