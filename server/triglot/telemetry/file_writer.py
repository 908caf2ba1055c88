"""Writes files on a separate thread, so that the event loop never waits for a disk."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

MAX_WAITING = 4096
"""Limit on queued items while the disk is slow; more are dropped."""
TOO_SLOW = "the disk is too slow"
CLOSE_TIMEOUT_SECONDS = 10.0


class FileWriter:
    """Writes `what` to `path` or to a URL, on its own thread. Used on one thread, which never waits for it.

    Items that cannot be written are dropped; this is logged once until a write succeeds again. `max_queued` limits
    the queued items; `too_slow` is the reason when it is reached.
    """

    def __init__(
        self, what: str, path: Path | str, max_queued: int = MAX_WAITING, too_slow: str = TOO_SLOW
    ) -> None:
        self.path = path
        self._too_slow = too_slow
        self._what = what
        self._max_queued = max_queued
        self._failing = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued = 0
        self._thread: threading.Thread | None = None

    def put(self, write: Callable[[], None], count: int = 1) -> bool:
        """Queue `write`, which writes `count` items, without waiting. Return False if the queue is full."""
        with self._lock:
            full = self._queued + count > self._max_queued
            self._queued += 0 if full else count
        if full:
            self.lose(self._too_slow)
            return False
        if self._thread is None:
            # A daemon: a disk that hangs must not keep a stopped server alive.
            self._thread = threading.Thread(target=self._run, name=self._what, daemon=True)
            self._thread.start()

        def work() -> None:
            try:
                write()
            finally:
                with self._lock:
                    self._queued -= count

        self._work.put(work)
        return True

    def close(self) -> None:
        """Wait until everything is written, at most `CLOSE_TIMEOUT_SECONDS`, as a disk may hang."""
        if self._thread is None:
            return
        self._work.put(None)
        self._thread.join(CLOSE_TIMEOUT_SECONDS)
        if self._thread.is_alive():
            self.lose(self._too_slow)
        self._thread = None

    def lose(self, why: object) -> None:
        """Log that items were dropped."""
        if not self._failing:
            log.warning("%s are lost: cannot write %s: %s", self._what, self.path, why)
        self._failing = True

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:
                self.lose(error)
            else:
                self._failing = False
