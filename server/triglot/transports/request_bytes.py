"""Memory of request bodies that the server has received but not decoded yet, over all transports.

Decoded requests are counted by the model that runs them (`scheduling.admission`).
"""

from __future__ import annotations

import threading
from typing import Self

from triglot.core.errors import RETRY_AFTER_SECONDS, Cancelled, QueueFull


class RequestBytes:
    """Total of all requests in bytes, and its limit; 0: unlimited. Thread-safe, except for `add`."""

    __slots__ = ("_limit", "_lock", "_on_loop", "reserved")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._on_loop = 0
        self.reserved = 0
        """Bytes of `Reservation`s, which threads may change too; guarded by the lock."""

    @property
    def held(self) -> int:
        """Bytes of all requests."""
        return self._on_loop + self.reserved

    def add(self, count: int) -> None:
        """Add `count` bytes, which may be negative. On the event loop."""
        self._on_loop += count

    def check(self) -> None:
        """Raise `QueueFull` when requests hold more than the limit."""
        if 0 < self._limit < self.held:
            reached = f"request buffer limit of {self._limit} bytes reached"
            raise QueueFull(
                f"{reached}; see the server's option max_total_queue_bytes", retry_after=RETRY_AFTER_SECONDS
            )

    def reserve(self, free: int) -> Reservation:
        """Return an empty reservation for one request; up to `free` bytes of it are never rejected."""
        return Reservation(self, self._lock, free)


class Reservation:
    """The bytes that one request holds, until its `with` block ends."""

    __slots__ = ("_free", "_lock", "_over", "_size", "_total")

    def __init__(self, total: RequestBytes, lock: threading.Lock, free: int) -> None:
        self._total = total
        self._lock = lock
        self._free = free
        self._size = 0
        self._over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over = True
            self._total.reserved -= self._size

    def grow(self, count: int) -> None:
        """Hold `count` more bytes. Raise `QueueFull`, and `Cancelled` once the `with` block has ended."""
        with self._lock:
            if self._over:  # The request has ended, and a thread still works on it.
                raise Cancelled("the request has ended")
            self._size += count
            self._total.reserved += count
        if self._size > self._free:
            self._total.check()

    def shrink(self, count: int) -> None:
        """Hold `count` bytes less."""
        with self._lock:
            self._size -= count
            self._total.reserved -= count
