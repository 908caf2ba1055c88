"""Counters behind limits: the rate of a client's requests, and its open calls, in one process or several workers.

Strategy: a rate is a single instant, at which all requests so far would have been due one after the other; it may
be ahead of now by the length of a burst (GCRA, the virtual scheduling of ATM's traffic control). So workers share
one number instead of a history. Each worker counts open calls in a column of its own, which the supervisor clears
when the worker has ended, however it did.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic_ns
from typing import Protocol

SLOTS = 4096
"""Clients that are counted at a time; one that was idle for the length of a burst needs no slot."""
_KEY, _DUE = struct.Struct("=8s"), struct.Struct("=q")
_HEAD_BYTES = _KEY.size + _DUE.size
_COUNT_BYTES = 2
_FREE = bytes(_KEY.size)


class Tally(Protocol):
    """Counters of one client. Times are in nanoseconds."""

    def take(self, interval: int, burst: int) -> int:
        """Count a request if it is not too early, one being due every `interval`.

        Return how early it is, else 0.
        """

    def enter(self, most: int) -> bool:
        """Count an open call, unless `most` are open; 0: no limit. Return whether it was counted."""

    def leave(self) -> None:
        """Count the end of a call."""


Tallies = Callable[[str], Tally]
"""Makes the `Tally` of a client, by its name."""


def _early(due: int, now: int, interval: int, burst: int) -> int:
    return max(due, now) + interval - now - burst


class LocalTally:
    """`Tally` of a server with one process."""

    __slots__ = ("_due", "_open")

    def __init__(self, _: str = "") -> None:
        self._due = 0
        self._open = 0

    def take(self, interval: int, burst: int) -> int:
        now = monotonic_ns()
        early = _early(self._due, now, interval, burst)
        if early <= 0:
            self._due = max(self._due, now) + interval
        return max(0, early)

    def enter(self, most: int) -> bool:
        if most and self._open >= most:
            return False
        self._open += 1
        return True

    def leave(self) -> None:
        self._open -= 1


def shared_size(workers: int) -> int:
    """Return the size in bytes of the file shared by this number of workers."""
    return SLOTS * (_HEAD_BYTES + _COUNT_BYTES * _columns(workers))


def _columns(workers: int) -> int:
    """Return the number of columns: besides a worker, its successor and its predecessor may be running."""
    return 3 * workers


class SharedTallies:
    """Counters in a file that all workers have open; `run` numbers the starts of workers. See `Tally`."""

    def __init__(self, file: int, workers: int, run: int) -> None:
        self._file = file
        self._memory = mmap.mmap(file, shared_size(workers))
        self._columns = _columns(workers)
        self._column = run % self._columns
        self._stride = _HEAD_BYTES + _COUNT_BYTES * self._columns

    def clear(self) -> None:
        """Drop the open calls of this start's worker, which has ended. May wait for another process."""
        with self._locked():
            for slot in range(0, len(self._memory), self._stride):
                self._write_own(slot, 0)

    def __call__(self, client: str) -> Tally:
        """Return the `Tally` of a client."""
        return _SharedTally(self, hashlib.sha256(client.encode()).digest()[: _KEY.size])

    def take(self, key: bytes, interval: int, burst: int) -> int:
        with self._locked():
            now = monotonic_ns()
            slot = self._slot(key, now)
            (due,) = _DUE.unpack_from(self._memory, slot + _KEY.size)
            early = _early(due, now, interval, burst)
            if early <= 0:
                _DUE.pack_into(self._memory, slot + _KEY.size, max(due, now) + interval)
            return max(0, early)

    def enter(self, key: bytes, most: int) -> bool:
        with self._locked():
            slot = self._slot(key, monotonic_ns())
            if most and sum(self._counts(slot)) >= most:
                return False
            self._write_own(slot, self._counts(slot)[self._column] + 1)
            return True

    def leave(self, key: bytes) -> None:
        with self._locked():
            slot = self._slot(key, monotonic_ns())
            self._write_own(slot, max(0, self._counts(slot)[self._column] - 1))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _slot(self, key: bytes, now: int) -> int:
        """Return the offset of the client's slot: its own, or one that no other client needs now.

        If all are needed, by as many busy clients, it shares one.
        """
        first = int.from_bytes(key[:4], "little") % SLOTS
        unneeded = None
        for step in range(SLOTS):
            slot = (first + step) % SLOTS * self._stride
            found = self._memory[slot : slot + _KEY.size]
            if found == key:
                return slot
            if found == _FREE:
                return self._begin(slot if unneeded is None else unneeded, key)
            if unneeded is None and self._is_unneeded(slot, now):
                unneeded = slot
        return first * self._stride if unneeded is None else self._begin(unneeded, key)

    def _is_unneeded(self, slot: int, now: int) -> bool:
        (due,) = _DUE.unpack_from(self._memory, slot + _KEY.size)
        return due <= now and not any(self._counts(slot))

    def _begin(self, slot: int, key: bytes) -> int:
        self._memory[slot : slot + self._stride] = key + bytes(self._stride - _KEY.size)
        return slot

    def _counts(self, slot: int) -> memoryview:
        return memoryview(self._memory)[slot + _HEAD_BYTES : slot + self._stride].cast("H")

    def _write_own(self, slot: int, count: int) -> None:
        self._counts(slot)[self._column] = min(count, 2**16 - 1)


class _SharedTally:
    """`Tally` of one client in `SharedTallies`."""

    __slots__ = ("_all", "_key")

    def __init__(self, tallies: SharedTallies, key: bytes) -> None:
        self._all = tallies
        self._key = key

    def take(self, interval: int, burst: int) -> int:
        return self._all.take(self._key, interval, burst)

    def enter(self, most: int) -> bool:
        return self._all.enter(self._key, most)

    def leave(self) -> None:
        self._all.leave(self._key)
