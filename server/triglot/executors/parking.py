"""`Parking`, where idle threads wait for work, and `Doorbell`, which wakes a thread or the event loop."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

_ONE = (1).to_bytes(8, sys.byteorder)


class Doorbell:
    """Event that any thread sets, and one thread waits for, or a loop that watches `file`.

    Both sides release the GIL meanwhile, unlike with `threading`'s locks and `call_soon_threadsafe`: a thread that
    is woken on the same core continues at once, instead of having to wait for the GIL.
    """

    __slots__ = ("_rings", "file")

    def __init__(self) -> None:
        self.file = self._rings = -1
        if hasattr(os, "eventfd"):
            self.file = self._rings = os.eventfd(0, os.EFD_CLOEXEC)
        else:
            self.file, self._rings = os.pipe()

    def ring(self) -> None:
        """Wake the waiting side, or have its next `wait` return at once. On any thread."""
        os.write(self._rings, _ONE)

    def wait(self) -> None:
        """Block until it has been rung since the last `wait`."""
        os.read(self.file, len(_ONE))

    def close(self) -> None:
        """Close its file descriptors; it must no longer be in use."""
        files, self.file, self._rings = {self.file, self._rings}, -1, -1
        for file in files - {-1}:
            os.close(file)

    def __del__(self) -> None:
        self.close()


class Parking:
    """Set of threads that `wait` until any thread calls `call`; the thread that parked last is woken first.

    No locks are needed, since `deque` is atomic, and each thread waits for its own `Doorbell`.
    """

    __slots__ = ("_mine", "_parked")

    def __init__(self) -> None:
        self._parked: deque[Doorbell] = deque()
        self._mine = threading.local()

    def __len__(self) -> int:
        return len(self._parked)

    def wait(self, unless: Callable[[], object]) -> None:
        """Block until woken, unless `unless()` is true, which is evaluated once no `call` can be missed."""
        try:
            bell: Doorbell = self._mine.bell
        except AttributeError:
            bell = self._mine.bell = Doorbell()
        self._parked.append(bell)
        if unless():
            # Another thread may have removed this bell meanwhile, to ring it; then that ring has to be awaited.
            try:
                self._parked.remove(bell)
            except ValueError:
                pass
            else:
                return
        bell.wait()

    def call(self, most: int) -> None:
        """Wake up to `most` threads."""
        for _ in range(most):
            try:
                self._parked.pop().ring()
            except IndexError:
                return  # No thread is parked (any longer).

    def call_all(self) -> None:
        """Wake all threads that are parked now."""
        bells: list[Doorbell] = []
        with suppress(IndexError):
            while True:
                bells.append(self._parked.pop())
        for bell in bells:  # Only now: a woken thread that parks again is not to be woken twice.
            bell.ring()
