"""The files of traces: each is one JSON array, whole after each write. A thread of its own writes them."""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

MAX_WAITING = 4096
"""Traces that wait for a slow disk; what comes then is lost."""
END = b"\n]\n"
PATIENCE_SECONDS = 10.0

Records = Iterable[dict[str, Any]]


class TraceFile:
    """`path`, or with a number `path.NUMBER`. Used on one thread, which never waits for the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._numbers = 0
        self._sizes: dict[Path, int] = {}
        self._failing = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        """Raises `OSError` when there is no folder for it."""
        if not self.path.parent.is_dir() or self.path.is_dir():
            raise OSError(f"trace_file: expected a file path in an existing folder, got {self.path}")

    def next_number(self) -> int:
        """The number of the next file of its own."""
        self._numbers += 1
        return self._numbers - 1

    def write(self, number: int | None, count: int, records: Callable[[], Records], *, last: bool) -> None:
        """Have the records of so many traces, one at least, appended; returns at once. `last`: none follow."""
        with self._lock:
            full = self._waiting + count > MAX_WAITING
            self._waiting += 0 if full else count
        if full:
            self._lost("the disk is too slow")
            return
        if self._thread is None:
            # A daemon: a disk that hangs must not keep a stopped server alive.
            self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
            self._thread.start()
        path = self.path if number is None else self.path.with_name(f"{self.path.name}.{number}")

        def append() -> None:
            try:
                self._append(path, records(), last=last)
            finally:
                with self._lock:
                    self._waiting -= count

        self._work.put(append)

    def close(self) -> None:
        """Wait until everything is written, as long as it takes a disk that does not hang."""
        if self._thread is None:
            return
        self._work.put(None)
        self._thread.join(PATIENCE_SECONDS)
        if self._thread.is_alive():
            self._lost("the disk is too slow")
        self._thread = None

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:
                self._lost(error)
            else:
                self._failing = False

    def _lost(self, why: object) -> None:
        if not self._failing:
            log.warning("traces are lost: cannot write %s: %s", self.path, why)
        self._failing = True

    def _append(self, path: Path, records: Records, *, last: bool) -> None:
        text = ",\n".join(json.dumps(record, separators=(",", ":")) for record in records).encode()
        size = self._sizes.get(path)
        if size is None or not path.is_file() or path.stat().st_size != size:
            _begin(path, b"[\n" + text + END)
            size = len(END)
        else:
            _extend(path, size - len(END), b",\n" + text + END)
        self._sizes[path] = size + len(text) + 2
        if last:
            del self._sizes[path]


def _begin(path: Path, text: bytes) -> None:
    """Who waits for the file finds it whole."""
    new = path.with_name(path.name + ".new")
    try:
        new.write_bytes(text)
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise


def _extend(path: Path, at: int, text: bytes) -> None:
    """Write the text there, or leave the file as it was."""
    with path.open("r+b", buffering=0) as file:
        try:
            file.seek(at)
            if file.write(text) != len(text):
                raise OSError("the disk is full")
        except OSError:
            file.truncate(at)
            file.seek(at)
            file.write(END)
            raise
