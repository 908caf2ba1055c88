"""Which process each thread calls, where each has one of its own, and whether that is still the same one."""

from __future__ import annotations

import itertools
import threading
from collections import Counter


class ThreadAffinity:
    """The calling thread's number, and what it knows of the process with that number."""

    def __init__(self) -> None:
        self._threads = threading.local()
        self._numbers = itertools.count()
        self._losses: Counter[int] = Counter()

    def take(self, number: int, losses: int) -> None:
        """The calling thread has this number, and what it runs next is for the process after so many losses."""
        self._threads.number = number
        self._threads.losses = losses

    def number(self, count: int) -> int:
        """The calling thread's, below `count`; one that has taken none gets the next."""
        number: int | None = getattr(self._threads, "number", None)
        if number is None:
            number = self._threads.number = next(self._numbers) % max(1, count)
        return number

    def lose(self, number: int) -> None:
        """On any thread: the process with this number is lost."""
        self._losses[number] += 1

    def losses(self, number: int) -> int:
        """How often that has been."""
        return self._losses[number]

    @property
    def is_stale(self) -> bool:
        """Whether the calling thread's process was lost once more than it took its number for."""
        losses = getattr(self._threads, "losses", None)
        return losses is not None and losses != self._losses[self._threads.number]
