"""Writes files on a thread of its own: the event loop never waits for a disk."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

MAX_WAITING = 4096
"""Of what waits for a slow disk; what comes then is lost."""
TOO_SLOW = "the disk is too slow"
PATIENCE_SECONDS = 10.0


class FileWriter:
    """Writes `what` to `path`. Used on one thread, which never waits for the other.

    What cannot be written is lost; the log says so once, until something is written again. `most` may wait.
    """

    def __init__(self, what: str, path: Path, most: int = MAX_WAITING) -> None:
        self.path = path
        self._what = what
        self._most = most
        self._failing = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._thread: threading.Thread | None = None

    def put(self, write: Callable[[], None], count: int = 1) -> bool:
        """Have `write` called, which writes so much; returns at once. False: too much waits, and it is lost."""
        with self._lock:
            full = self._waiting + count > self._most
            self._waiting += 0 if full else count
        if full:
            self.lose(TOO_SLOW)
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
                    self._waiting -= count

        self._work.put(work)
        return True

    def close(self) -> None:
        """Wait until everything is written, as long as it takes a disk that does not hang."""
        if self._thread is None:
            return
        self._work.put(None)
        self._thread.join(PATIENCE_SECONDS)
        if self._thread.is_alive():
            self.lose(TOO_SLOW)
        self._thread = None

    def lose(self, why: object) -> None:
        """Something was not written."""
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
