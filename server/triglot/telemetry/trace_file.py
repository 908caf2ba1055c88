"""Trace files: each is one JSON array, complete after each write."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from triglot.telemetry.file_writer import FileWriter

END = b"\n]\n"

Records = Iterable[dict[str, Any]]


class TraceFile:
    """The trace file `path`, or numbered ones `path.NUMBER`. Used on one thread, which never waits for writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._numbers = 0
        self._sizes: dict[Path, int] = {}
        self._writer = FileWriter("traces", path)

    def check(self) -> None:
        """Raise `OSError` if its folder does not exist."""
        if not self.path.parent.is_dir() or self.path.is_dir():
            raise OSError(f"trace_file: expected a file path in an existing folder, got {self.path}")

    def next_number(self) -> int:
        """Return the number of the next numbered file."""
        self._numbers += 1
        return self._numbers - 1

    def write(self, number: int | None, count: int, records: Callable[[], Records], *, last: bool) -> None:
        """Queue the records of `count` traces for appending; return at once. `last`: the file gets no more."""
        path = self.path if number is None else self.path.with_name(f"{self.path.name}.{number}")
        self._writer.put(lambda: self._append(path, records(), last=last), count)

    def close(self) -> None:
        """Wait until everything is written, see `FileWriter.close`."""
        self._writer.close()

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
    """Create the file atomically: readers never see a part of it."""
    new = path.with_name(path.name + ".new")
    try:
        new.write_bytes(text)
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise


def _extend(path: Path, at: int, text: bytes) -> None:
    """Write the text at this offset; on failure restores the end of the file."""
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
