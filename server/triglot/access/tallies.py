"""What limits count: the rate of a client's requests, and its open calls, in one process or in several workers.

Strategy: a rate is one instant, by which all requests so far would have been due one after the other; it may be as
far ahead of now as a burst is long (GCRA, the virtual scheduling of ATM's traffic control). So workers share a
number, and not a history. Open calls are counted by each worker in a column of its own: those of a worker that was
killed are forgotten when its column is used again.
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
"""Clients that are counted at a time; one that is silent for as long as a burst needs none."""
_KEY, _DUE = struct.Struct("=8s"), struct.Struct("=q")
_HEAD_BYTES = _KEY.size + _DUE.size
_COUNT_BYTES = 2
_FREE = bytes(_KEY.size)


class Tally(Protocol):
    """Of one client. Times are in nanoseconds."""

    def take(self, interval: int, burst: int) -> int:
        """Count a request, one of which is due every `interval` seconds; else how long it is too early."""

    def enter(self, most: int) -> bool:
        """Count an open call, unless `most` are open; 0: any number."""

    def leave(self) -> None:
        """A call that was counted has ended."""


Tallies = Callable[[str], Tally]
"""Makes that of a client."""


def _early(due: int, now: int, interval: int, burst: int) -> int:
    return max(due, now) + interval - now - burst


class LocalTally:
    """Of a server that is one process."""

    __slots__ = ("_due", "_open")

    def __init__(self, _: str = "") -> None:
        self._due = 0
        self._open = 0

    def take(self, interval: int, burst: int) -> int:
        """See `Tally`."""
        now = monotonic_ns()
        early = _early(self._due, now, interval, burst)
        if early <= 0:
            self._due = max(self._due, now) + interval
        return max(0, early)

    def enter(self, most: int) -> bool:
        """See `Tally`."""
        if most and self._open >= most:
            return False
        self._open += 1
        return True

    def leave(self) -> None:
        """See `Tally`."""
        self._open -= 1


def shared_size(workers: int) -> int:
    """Bytes of a file that so many workers count in."""
    return SLOTS * (_HEAD_BYTES + _COUNT_BYTES * _columns(workers))


def _columns(workers: int) -> int:
    """A worker and its successor run at the same time, and the one before may still be ending."""
    return 3 * workers


class SharedTallies:
    """In the file of descriptor `file`, which all workers have open; `run` counts the starts of workers."""

    def __init__(self, file: int, workers: int, run: int) -> None:
        self._file = file
        self._memory = mmap.mmap(file, shared_size(workers))
        self._columns = _columns(workers)
        self._column = run % self._columns
        self._stride = _HEAD_BYTES + _COUNT_BYTES * self._columns
        with self._locked():
            for slot in range(0, len(self._memory), self._stride):
                self._write_own(slot, 0)

    def __call__(self, client: str) -> Tally:
        """That of a client."""
        return _SharedTally(self, hashlib.sha256(client.encode()).digest()[: _KEY.size])

    def take(self, key: bytes, interval: int, burst: int) -> int:
        """See `Tally`."""
        with self._locked():
            now = monotonic_ns()
            slot = self._slot(key, now)
            (due,) = _DUE.unpack_from(self._memory, slot + _KEY.size)
            early = _early(due, now, interval, burst)
            if early <= 0:
                _DUE.pack_into(self._memory, slot + _KEY.size, max(due, now) + interval)
            return max(0, early)

    def enter(self, key: bytes, most: int) -> bool:
        """See `Tally`."""
        with self._locked():
            slot = self._slot(key, monotonic_ns())
            if most and sum(self._counts(slot)) >= most:
                return False
            self._write_own(slot, self._counts(slot)[self._column] + 1)
            return True

    def leave(self, key: bytes) -> None:
        """See `Tally`."""
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
        """Where the client is counted: its own slot, or one that nobody needs any more.

        Where all are needed, which takes as many busy clients, it shares one.
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
    """See `Tally`."""

    __slots__ = ("_all", "_key")

    def __init__(self, tallies: SharedTallies, key: bytes) -> None:
        self._all = tallies
        self._key = key

    def take(self, interval: int, burst: int) -> int:
        """See `Tally`."""
        return self._all.take(self._key, interval, burst)

    def enter(self, most: int) -> bool:
        """See `Tally`."""
        return self._all.enter(self._key, most)

    def leave(self) -> None:
        """See `Tally`."""
        self._all.leave(self._key)
