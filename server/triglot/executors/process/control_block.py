"""Memory shared by the server and a process: numbers, each read and written atomically, without any frame."""

from __future__ import annotations

import mmap
import os
from typing import Protocol

import numpy as np

from triglot.executors.process.arena import mapped, shared_memory

SIZE = 4 * mmap.PAGESIZE
_BEATS, _CHECKED, _READY = 0, 1, 2
_LOG_SWITCHES, _TO_CHECK, _CANCELLED = 8, 9, 10
# A cache line apart: the process writes the first three, and the server the others.
_CALLS = SIZE // 8 - _CANCELLED
"""Slots for cancelled calls; calls whose numbers are equal modulo this number share one."""


class Control(Protocol):
    """The state that server and process exchange apart from calls; see `ControlBlock`."""

    clock_offset: float
    """In the process: seconds by which its `time.monotonic` is ahead of the server's."""

    @property
    def beats(self) -> int: ...

    def beat(self) -> None: ...

    @property
    def log_switches(self) -> int: ...

    @log_switches.setter
    def log_switches(self, switches: int) -> None: ...

    def begin_check(self) -> int: ...

    @property
    def to_check(self) -> int: ...

    def end_check(self, number: int, ready: bool) -> None: ...

    def checked(self, number: int) -> bool | None: ...

    def is_cancelled(self, call: int) -> bool: ...

    def cancel(self, call: int) -> None: ...


class ControlBlock:
    """The process's heartbeats, the switches of its log, the readiness of its model, and its cancelled calls.

    Both sides have one over the same memory, whose file `descriptor` they may close.
    """

    clock_offset = 0.0

    def __init__(self, descriptor: int) -> None:
        self._numbers = np.frombuffer(mapped(descriptor, SIZE, writable=True), np.uint64)

    @classmethod
    def make(cls) -> tuple[ControlBlock, int]:
        """Returns a new one, and its file descriptor. Raises `OSError`."""
        descriptor = shared_memory(SIZE)
        try:
            return cls(descriptor), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def beats(self) -> int:
        """Number of heartbeats; grows while the process's interpreter runs."""
        return int(self._numbers[_BEATS])

    def beat(self) -> None:
        """In the process: count a heartbeat."""
        self._numbers[_BEATS] += np.uint64(1)

    @property
    def log_switches(self) -> int:
        """Enabled levels of the log, as `switches` in logs.py; 0 until they are set."""
        return int(self._numbers[_LOG_SWITCHES])

    @log_switches.setter
    def log_switches(self, switches: int) -> None:
        self._numbers[_LOG_SWITCHES] = switches

    def begin_check(self) -> int:
        """In the server: start a readiness check of the model; returns its number."""
        self._numbers[_TO_CHECK] += np.uint64(1)
        return self.to_check

    @property
    def to_check(self) -> int:
        """Number of the last check that was started."""
        return int(self._numbers[_TO_CHECK])

    def end_check(self, number: int, ready: bool) -> None:
        """In the process: set the result of a check."""
        self._numbers[_READY] = ready
        self._numbers[_CHECKED] = number

    def checked(self, number: int) -> bool | None:
        """Returns the result of this check; None before it has ended."""
        return bool(self._numbers[_READY]) if int(self._numbers[_CHECKED]) == number else None

    def is_cancelled(self, call: int) -> bool:
        """In the process: returns whether the server has cancelled this call."""
        return int(self._numbers[_CANCELLED + call % _CALLS]) == call

    def cancel(self, call: int) -> None:
        """In the server: mark this call as cancelled."""
        self._numbers[_CANCELLED + call % _CALLS] = call
