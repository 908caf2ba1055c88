"""Record files with a common name prefix, limited in size and number of records; the latest files are kept.

The file is opened for each write, so that one that was moved away gets no more records. A new file must not exist
yet, so that no two processes write to the same one.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections import Counter
from pathlib import Path

SUFFIX = ".tfrecord"
MAX_RECORDS = 1000
"""Limit on the records of a file; TensorFlow Serving and this server read so many to warm a version up."""


class RecordCounts:
    """Number of records by model and outcome: `written` or `dropped`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, model: str, outcome: str) -> None:
        """Count one record."""
        with self._lock:
            self._counts[model, outcome] += 1

    def items(self) -> list[tuple[tuple[str, str], int]]:
        """Return the counts by model and outcome."""
        with self._lock:
            return list(self._counts.items())


class RecordFiles:
    """Files named `PREFIX-00001.tfrecord` and so on, of at most `most_bytes` each unless one record is larger.

    The latest `most_files` are kept, 0: all. Used on one thread.
    """

    def __init__(self, prefix: str, most_bytes: int, most_files: int) -> None:
        self._folder, name = Path(prefix).parent, Path(prefix).name
        self._name = name
        self._pattern = re.compile(rf"{re.escape(name)}-(\d{{5,}}){re.escape(SUFFIX)}")
        self._most_bytes = most_bytes
        self._most_files = most_files
        self._path: Path | None = None
        self._records = 0

    def append(self, record: bytes) -> None:
        """Write the whole record, or nothing of it. Raise `OSError`."""
        file = self._open(len(record))
        try:
            size = os.fstat(file).st_size
            if os.write(file, record) != len(record):
                os.ftruncate(file, size)
                raise OSError(errno.ENOSPC, "the disk is full")
        finally:
            os.close(file)
        self._records += 1

    def _open(self, size: int) -> int:
        """Open the file that `size` bytes are appended to."""
        if self._path is not None and self._records < MAX_RECORDS:
            try:
                file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            except FileNotFoundError:
                pass
            else:
                file_bytes = os.fstat(file).st_size
                if not file_bytes or file_bytes + size <= self._most_bytes:
                    return file
                os.close(file)
        return self._begin()

    def _begin(self) -> int:
        """Create the next file and delete the oldest ones."""
        numbers = sorted(
            int(match[1]) for path in self._folder.iterdir() if (match := self._pattern.fullmatch(path.name))
        )
        number = numbers[-1] + 1 if numbers else 1
        while True:
            path = self._path_of(number)
            try:
                file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
            except FileExistsError:  # Another process just created it.
                number += 1
            else:
                break
        self._path, self._records = path, 0
        if self._most_files:
            for old in numbers[: max(0, len(numbers) + 1 - self._most_files)]:
                self._path_of(old).unlink(missing_ok=True)
        return file

    def _path_of(self, number: int) -> Path:
        return self._folder / f"{self._name}-{number:05}{SUFFIX}"
