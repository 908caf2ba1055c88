"""The bounded queue between the event loop and a model's instance threads.

Strategy: work is pulled. `deque` is atomic, so neither side takes a lock to put or take; a thread that finds
the queue empty parks on a lock of its own and is called after the next `put`. Work is either in the deque or
taken, never both, so `discard` can promise that discarded work is not started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from triglot.core.errors import QueueFull, Unavailable
from triglot.core.readings import Reading
from triglot.core.running import Defer
from triglot.executors.parking import Parking

T = TypeVar("T")

RETRY_AFTER_SECONDS = 1.0

Grow = Callable[[int], object]
"""Is told how many more instances would have had something to do."""


class Timer(Protocol):
    """What `Later` gives."""

    def cancel(self) -> None:
        """Forget it."""


Later = Callable[[float, Callable[[], None]], Timer]
"""Runs a function on the loop in so many seconds: its `call_later`."""


def no_growth(_: int) -> None:
    """Of a queue that is closed."""


def queue_full(what: str) -> QueueFull:
    """The error of a request that comes too many; `what` there is already."""
    return QueueFull(f"Exceeds maximum queue size: {what}", retry_after=RETRY_AFTER_SECONDS)


class WorkQueue(Generic[T]):
    """First in, first out; `put` and `discard` belong to the loop, `take` to any number of threads.

    Of `Work`, it is the `Schedule` of models whose requests are executed one by one.

    `defer` runs a function a little later on the loop. Threads are called through it, so that what one turn of
    the loop puts is taken in one go. `grow` is told how many more threads would have had something to do.
    """

    def __init__(self, limit: int, defer: Defer, grow: Grow = no_growth) -> None:
        self.limit = limit
        self._defer = defer
        self._grow = grow
        self._calling = False
        self._waiting: deque[T] = deque()
        self._parked = Parking()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, work: T, defer: Defer | None = None) -> None:
        """Append `work` and have a parked thread called. Raises `QueueFull`, and `Unavailable` once closed.

        `defer`: in place of its own.
        """
        if self._closed:
            raise Unavailable("the model was unloaded")
        if len(self._waiting) >= self.limit:
            raise queue_full(f"{self.limit} requests wait")
        self._waiting.append(work)
        if not self._calling:
            self._calling = True
            (defer or self._defer)(self._call)

    def _call(self) -> None:
        self._calling = False
        waiting, parked = len(self._waiting), len(self._parked)
        self._parked.call(min(waiting, parked))
        if waiting > parked:
            self._grow(waiting - parked)

    def take(self, _: int = 0) -> T | None:
        """The oldest work, waiting for it; None once the queue is closed and empty."""
        while True:
            closed = self._closed  # Nothing is put any more: there is what is there now.
            try:
                return self._waiting.popleft()
            except IndexError:
                if closed:
                    return None
            self._parked.wait(unless=lambda: self._waiting or self._closed)

    def discard(self, work: T) -> bool:
        """Take `work` out again; False when a thread has it already."""
        try:
            self._waiting.remove(work)
        except ValueError:
            return False
        return True

    def close(self) -> None:
        """Let the threads finish what waits, and then end."""
        self._closed = True
        self._grow = no_growth  # Whom it belongs to would live as long as this.
        self._parked.call_all()

    def readings(self) -> Iterator[Reading]:
        """Nothing: how many wait is counted for every schedule."""
        return iter(())
