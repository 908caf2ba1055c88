"""Shared memory that both sides read and write without a frame: numbers, each in one step."""

from __future__ import annotations

import mmap
import os
from typing import Protocol

import numpy as np

from triglot.executors.process.arena import mapped, shared_memory

SIZE = 4 * mmap.PAGESIZE
_BEATS, _CHECKED, _READY = 0, 1, 2
_LOG_SWITCHES, _TO_CHECK, _CANCELLED = 8, 9, 10
# Apart by the length of a cache line: the process writes the first three, and the server the others.
_CALLS = SIZE // 8 - _CANCELLED
"""Calls that have a place of their own, of those that run at the same time; others share one."""


class Control(Protocol):
    """What both sides say at any time, apart from calls; see `ControlBlock`."""

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
    """How often the process's heart has beaten, what it is to log, whether its model says that it is ready, and
    which of its calls are cancelled."""

    clock_offset = 0.0

    def __init__(self, descriptor: int) -> None:
        self._numbers = np.frombuffer(mapped(descriptor, SIZE, writable=True), np.uint64)

    @classmethod
    def make(cls) -> tuple[ControlBlock, int]:
        """A new one, and its file descriptor. Raises `OSError`."""
        descriptor = shared_memory(SIZE)
        try:
            return cls(descriptor), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def beats(self) -> int:
        """Grows as long as the process's interpreter runs."""
        return int(self._numbers[_BEATS])

    def beat(self) -> None:
        """In the process: one more."""
        self._numbers[_BEATS] += np.uint64(1)

    @property
    def log_switches(self) -> int:
        """What is to be logged, as `switches` in logs.py; 0 where nobody has said."""
        return int(self._numbers[_LOG_SWITCHES])

    @log_switches.setter
    def log_switches(self, switches: int) -> None:
        self._numbers[_LOG_SWITCHES] = switches

    def begin_check(self) -> int:
        """In the server: have the model asked whether it is ready. The check's number."""
        self._numbers[_TO_CHECK] += np.uint64(1)
        return self.to_check

    @property
    def to_check(self) -> int:
        """The number of the last check that was begun."""
        return int(self._numbers[_TO_CHECK])

    def end_check(self, number: int, ready: bool) -> None:
        """In the process: what came of it."""
        self._numbers[_READY] = ready
        self._numbers[_CHECKED] = number

    def checked(self, number: int) -> bool | None:
        """What came of this check; None before it has ended."""
        return bool(self._numbers[_READY]) if int(self._numbers[_CHECKED]) == number else None

    def is_cancelled(self, call: int) -> bool:
        """In the process: whether somebody has said so."""
        return int(self._numbers[_CANCELLED + call % _CALLS]) == call

    def cancel(self, call: int) -> None:
        """In the server: nobody waits for this call any more."""
        self._numbers[_CANCELLED + call % _CALLS] = call
