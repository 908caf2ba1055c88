"""A queue from which threads take batches themselves, formed by `forming`'s rules. Thread-safe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from triglot.scheduling.forming import Lane, Rules, Run, Waiting, form


class ThreadQueue:
    """The requests that wait for a thread.

    Strategy: each thread that waits in `take` looks for itself whether there is a batch, and until when it can
    wait for a larger one; so none of them leads the others.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._waiting: list[Waiting] = []
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, waiting: Waiting, *, wakes: bool = True) -> None:
        """Queue a request. `wakes`: a thread in `take` has to look for it; False for the calling thread's own."""
        with self._changed:
            self._waiting.append(waiting)
            if wakes:
                self._changed.notify()

    def discard(self, waiting: Waiting) -> None:
        """Remove a request, unless it is in a batch already."""
        with self._changed:
            if not waiting.is_removed:
                self._remove([waiting])

    def take(self, ends: Callable[[], bool]) -> Run | None:
        """Wait for a batch, and return it; None once `ends` is true: `wake` makes the waiting threads look."""
        with self._changed:
            while not ends():
                then = form([Lane(waiting=self._waiting)], time.monotonic(), self._rules).then
                if isinstance(then, Run):
                    self._remove(then.members)
                    return then
                self._changed.wait(None if then is None else max(0.0, then.until - time.monotonic()))
            self._changed.notify()  # This thread may have been woken for a request.
            return None

    def wake(self) -> None:
        """Make the threads in `take` look whether they have to end."""
        with self._changed:
            self._changed.notify_all()

    def _remove(self, taken: Sequence[Waiting]) -> None:
        for waiting in taken:
            waiting.is_removed = True
        self._waiting = [waiting for waiting in self._waiting if not waiting.is_removed]
        if len(taken) > 1:  # Their own threads may wait in `take`.
            self._changed.notify_all()
