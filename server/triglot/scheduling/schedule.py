"""A schedule: what waits for a model's executors, and in which order and company it is given to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from triglot.core.readings import Reading
from triglot.core.running import Defer
from triglot.executors.work import Work


class Schedule(Protocol):
    """Belongs to the event loop. What was discarded is never started."""

    def __len__(self) -> int:
        """Requests that wait."""

    def put(self, work: Work, defer: Defer | None = None) -> None:
        """Have it executed. Raises `QueueFull`, `InvalidArgument` for what it cannot be, and `Unavailable`, also
        once closed.

        `defer`: who puts several in a row may say when that is over, in place of the loop's next turn.
        """

    def discard(self, work: Work) -> bool:
        """Nobody waits for it any more: take it out, or end it. False when it has begun."""

    def resized(self) -> None:
        """The executors run more or fewer at the same time than before."""

    def close(self) -> None:
        """Have what waits executed, and then close the executors; nothing is put any more."""

    def readings(self) -> Iterator[Reading]:
        """What it counts."""


class Timer(Protocol):
    """What `Later` gives."""

    def cancel(self) -> None:
        """Forget it."""


Later = Callable[[float, Callable[[], None]], Timer]
"""Runs a function on the loop in so many seconds: its `call_later`."""
