"""Threads that wait until there is something to do, and how they, and the event loop, are woken."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

_ONE = (1).to_bytes(8, sys.byteorder)


class Doorbell:
    """Rung by anybody, awaited by one thread, or by a loop that watches the file.

    Neither who rings nor who waits holds the interpreter's lock meanwhile, as they do with `threading`'s locks and
    `call_soon_threadsafe`: who is woken on the same core goes on at once, rather than wait for that lock in turn.
    """

    __slots__ = ("_rings", "file")

    def __init__(self) -> None:
        self.file = self._rings = -1
        if hasattr(os, "eventfd"):
            self.file = self._rings = os.eventfd(0, os.EFD_CLOEXEC)
        else:
            self.file, self._rings = os.pipe()

    def ring(self) -> None:
        """Have who waits go on, now or when it comes to wait."""
        os.write(self._rings, _ONE)

    def wait(self) -> None:
        """Block until it has been rung since the last time."""
        os.read(self.file, len(_ONE))

    def close(self) -> None:
        """Nobody rings or waits any more."""
        files, self.file, self._rings = {self.file, self._rings}, -1, -1
        for file in files - {-1}:
            os.close(file)

    def __del__(self) -> None:
        self.close()


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
        bells: list[Doorbell] = []
        with suppress(IndexError):
            while True:
                bells.append(self._parked.pop())
        for bell in bells:  # Not before: who comes back is not meant again.
            bell.ring()
