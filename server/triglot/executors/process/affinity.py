"""Assignment of processes to threads, for models with sequences: each thread calls a process of its own."""

from __future__ import annotations

import itertools
import threading
from collections import Counter


class ThreadAffinity:
    """Assigns each thread the number of its process, and detects that this process was replaced since.

    The processes of a model are numbered; a process that replaces a lost one has the same number.
    """

    def __init__(self) -> None:
        self._threads = threading.local()
        self._numbers = itertools.count()
        self._losses: Counter[int] = Counter()

    def take(self, number: int, losses: int) -> None:
        """Assign this number to the calling thread, whose next calls are for the process after `losses` losses."""
        self._threads.number = number
        self._threads.losses = losses

    def number(self, count: int) -> int:
        """Returns the calling thread's number; a thread without one is assigned the next, below `count`."""
        number: int | None = getattr(self._threads, "number", None)
        if number is None:
            number = self._threads.number = next(self._numbers) % max(1, count)
        return number

    def lose(self, number: int) -> None:
        """Count a loss of the process with this number. On any thread."""
        self._losses[number] += 1

    def losses(self, number: int) -> int:
        """Returns how often the process with this number was lost."""
        return self._losses[number]

    @property
    def is_stale(self) -> bool:
        """Whether the calling thread's process was lost since the thread took its number."""
        losses = getattr(self._threads, "losses", None)
        return losses is not None and losses != self._losses[self._threads.number]
