"""The interface of schedules: they hold queued requests, and decide when and with which others each is
executed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from triglot.core.running import Defer
from triglot.core.statistics import Reading
from triglot.executors.work import Work


class Schedule(Protocol):
    """Belongs to the event loop. Work that was discarded is never started."""

    def __len__(self) -> int:
        """Return the number of queued requests."""

    def put(self, work: Work, defer: Defer | None = None) -> None:
        """Queue work to be executed.

        Raise `QueueFull`, `InvalidArgument` for work that the schedule cannot execute, and `Unavailable`, also
        once closed. `defer`: a caller that puts several requests in a row may say when it is done; without it
        they are formed into batches in the event loop's next turn.
        """

    def discard(self, work: Work) -> bool:
        """Remove work whose caller has disconnected, or end it; returns False if it has been started."""

    def resized(self) -> None:
        """Note that the capacity of the executors has changed."""

    def close(self) -> None:
        """Have queued work executed, then close the executors; no more work is put."""

    def readings(self) -> Iterator[Reading]:
        """Yield the schedule's metrics."""


class Timer(Protocol):
    """The handle of a scheduled callback."""

    def cancel(self) -> None:
        """Cancel the callback."""


Later = Callable[[float, Callable[[], None]], Timer]
"""Runs a function on the event loop after a delay in seconds, like `call_later`."""
