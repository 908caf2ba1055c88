"""Threads that wait until there is something to do."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from triglot.executors.doorbell import Doorbell


class Parking:
    """Threads `wait`, anybody may `call` them; the one that waits for the shortest time is called first.

    Neither side takes a lock to look or to call, since `deque` is atomic: a thread waits for a bell of its own.
    """

    __slots__ = ("_mine", "_parked")

    def __init__(self) -> None:
        self._parked: deque[Doorbell] = deque()
        self._mine = threading.local()

    def __len__(self) -> int:
        return len(self._parked)

    def wait(self, unless: Callable[[], object]) -> None:
        """Block until called. `unless` is asked once more, now that a call cannot be missed."""
        try:
            bell: Doorbell = self._mine.bell
        except AttributeError:
            bell = self._mine.bell = Doorbell()
        self._parked.append(bell)
        if unless():
            # Whoever brought that about may have called this thread or not.
            try:
                self._parked.remove(bell)
            except ValueError:
                pass
            else:
                return
        bell.wait()

    def call(self, most: int) -> None:
        """Let so many threads go on, or as many as wait."""
        for _ in range(most):
            try:
                self._parked.pop().ring()
            except IndexError:
                return  # It has left by itself just now.

    def call_all(self) -> None:
        """Let everybody go on."""
        self.call(len(self._parked))
